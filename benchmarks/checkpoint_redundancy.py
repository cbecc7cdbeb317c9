"""How often a host keeps the state that its ranks have in common, and how much of it is sent for a version.

    python benchmarks/checkpoint_redundancy.py                  # as Markdown, and to benchmarks/results/
    python benchmarks/checkpoint_redundancy.py --sharding ddp   # without HSDP

4 ranks on 2 hosts, each host with a holder, a version of every step. With DDP all ranks have the same state; with HSDP
the ranks of a host have a part each, and those of the other host the same parts. Ends with status 1 if a host keeps
more than 2.1 times the model's state, or sends more than 1 % of it for a version.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Storage
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import HolderOptions, start_holder, stop_holder
from thinwire.lab.report import environment
from thinwire.lab.testbed.launch import run_ranks
from thinwire.lab.testbed.rank import RankContext

RESULTS = Path(__file__).parent / "results" / "checkpoint-redundancy.json"
SHARDINGS = {"ddp": "DDP, 4 ranks on 2 hosts", "hsdp": "HSDP, 2 x 2 ranks on 2 hosts"}
MOST_KEPT, MOST_SENT = 2.1, 0.01
_RUN, _SECRET, _RANKS_PER_HOST = "redundancy", "a secret of this benchmark alone", 2


@dataclass(frozen=True)
class Row:
    """Bytes of the host that has most; ``sent_bytes`` for a version, payloads and layouts."""

    sharding: str
    state_bytes: int
    versions: int
    kept_bytes: int
    sent_bytes: float

    @property
    def kept(self) -> float:
        return self.kept_bytes / self.state_bytes

    @property
    def sent(self) -> float:
        return self.sent_bytes / self.state_bytes

    def __str__(self) -> str:
        sent = f"{100 * self.sent:.2f} % ({self.sent_bytes / 1e3:.1f} kB)"
        state = f"{self.state_bytes / 1e6:.1f} MB"
        return f"| {SHARDINGS[self.sharding]} | {self.versions} | {state} | {self.kept:.2f} x | {sent} |"


def train(context: RankContext, sockets: list[str], sharding: str, width: int, steps: int) -> tuple[int, int]:
    """Train one rank, each step a version, and return the bytes of its state and the number of versions."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)  # or a holder would be started
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))
    if sharding == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    storage = Storage(_RUN, holder_socket=sockets[context.rank // _RANKS_PER_HOST])
    with Checkpointer(model, optimizer, storage=storage, policy=CheckpointPolicy(max_overhead=None)) as checkpointer:
        checkpointer.restore()
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            for parameter in model.parameters() if sharding == "ddp" else ():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            checkpointer.step()
            checkpointer.flush(60)
            dist.barrier()
        stats = checkpointer.stats()
    return int(stats["checkpoint/bytes"]), int(stats["checkpoint/versions"])


@contextlib.contextmanager
def holders(directory: Path, budget_bytes: int) -> Iterator[list[str]]:
    """Start the holders of two hosts; yields their sockets."""
    sockets = [str(directory / name) for name in ("a", "b")]
    try:
        for socket in sockets:
            start_holder(HolderOptions(socket=socket, memory_budget=str(budget_bytes), drain_seconds=0.0))
        yield sockets
    finally:
        for socket in sockets:
            with contextlib.suppress(Exception), HolderClient.connect(socket, _SECRET.encode()) as client:
                stop_holder(client)


def host_bytes(socket: str) -> tuple[int, float]:
    """Return the bytes of all slots of a host, and of the layouts that it sends for a version."""
    layouts: dict[int, int] = {}
    with HolderClient.connect(socket, _SECRET.encode()) as client:
        for version in client.inventory(_RUN, verify=False):
            if version.role == "own":
                with client.open(version, with_common=False) as reader:
                    layouts[version.shard.owner] = len(reader.layout)
        status = client.holder_status()
    return int(status["used_bytes"]), sum(layouts.values())


def measure(sharding: str, width: int, steps: int) -> Row:
    with tempfile.TemporaryDirectory() as directory, holders(Path(directory), 64 * 8 * width * 12) as sockets:
        results = run_ranks(train, sockets, sharding, width, steps, world_size=4, timeout_seconds=300)
        sizes, versions = [outcome.value[0] for outcome in results], results[0].value[1]
        state_bytes = sum(sizes[:_RANKS_PER_HOST]) if sharding == "hsdp" else sizes[0]
        kept, sent = 0, 0.0
        for socket in sockets:
            with HolderClient.connect(socket, _SECRET.encode()) as client:
                payloads = int(client.holder_status()["bytes_sent"])
            its_kept, layouts = host_bytes(socket)
            kept, sent = max(kept, its_kept), max(sent, payloads / versions + layouts)
        return Row(sharding, state_bytes, versions, kept, sent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sharding", default=",".join(SHARDINGS), help="ddp, hsdp, or both with a comma")
    parser.add_argument("--width", type=int, default=60_000, help="of the model; its state has 120 bytes for each")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ["THINWIRE_SECRET"] = _SECRET
    print("| training | versions | the model's state | kept by a host | sent for a version |\n|---|---|---|---|---|")
    rows = []
    for sharding in options.sharding.split(","):
        rows.append(measure(sharding, options.width, options.steps))
        print(rows[-1], flush=True)
    content = {
        "environment": environment(),
        "rows": [{**asdict(row), "kept": row.kept, "sent": row.sent} for row in rows],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(any(row.kept > MOST_KEPT or row.sent > MOST_SENT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
