"""Steps of a small GPT under HSDP on two emulated hosts of two ranks: stock FSDP2, attached, and compressed.

Run as root: ``python benchmarks/fsdp_hsdp.py [--link 100] [--rounds 6] [--shape 2,2] [--json FILE]``. In each round
every variant makes one step, in turn; bytes are those that the interface of the host sent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link

VOCABULARY, WIDTH, BLOCKS, LENGTH, BATCH = 2000, 256, 4, 32, 4


class Gpt(nn.Module):
    """A decoder of `BLOCKS` blocks with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.words(ids)
        for block in self.blocks:
            found = block(found)
        return self.head(found)


def model_on(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Gpt()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def transmitted() -> int:
    """Bytes that the interface of this host has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split()[9])
    return 0


def work(context: RankContext, shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    variants: dict[str, Callable[[nn.Module], object]] = {
        "stock": lambda model: None,
        "attach": thinwire.attach,
        "power_sgd(4)": lambda model: thinwire.attach(model, dense=thinwire.compress.power_sgd(4)),
        "bf16": lambda model: thinwire.attach(model, dense=thinwire.compress.bf16()),
    }
    runs: dict[str, dict[str, Any]] = {}
    for name, attach in variants.items():
        model = model_on(mesh)
        sync = attach(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        runs[name] = {"model": model, "sync": sync, "optimizer": optimizer, "seconds": [], "bytes": [], "losses": []}
    for number in range(rounds + 3):
        data = torch.Generator().manual_seed(10 * number + context.rank)
        ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=data) % 200
        for run in runs.values():
            dist.barrier()
            before, started = transmitted(), time.perf_counter()
            loss = nn.functional.cross_entropy(run["model"](ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            run["optimizer"].step()
            run["optimizer"].zero_grad()
            dist.barrier()
            if number >= 3:
                run["seconds"].append(time.perf_counter() - started)
                run["bytes"].append(transmitted() - before)
            run["losses"].append(loss.item())
    parameters = sum(parameter.numel() for parameter in runs["stock"]["model"].parameters())
    found: dict[str, Any] = {"parameters": parameters}
    for name, run in runs.items():
        sync = run["sync"]
        rows = [row for row in sync.table() if row["kind"] == "compressed"] if sync is not None else []
        found[name] = {
            "step_seconds": statistics.median(run["seconds"]),
            "step_seconds_all": [round(seconds, 3) for seconds in run["seconds"]],
            "interface_bytes": statistics.median(run["bytes"]),
            "loss_last": run["losses"][-1],
            "table_bytes": sum(int(row["bytes"]) for row in rows),
            "table_predicted_bytes": sum(int(row["predicted_bytes"]) for row in rows),
        }
        if sync is not None:
            sync.detach()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link", type=float, default=100.0, help="Mbit/s of each host")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--shape", default="2,2", help="replicas and shards, or shards alone: 4")
    parser.add_argument("--json", help="write the figures here")
    chosen = parser.parse_args()
    shape = tuple(map(int, chosen.shape.split(",")))
    with EmulatedNetwork(2, Link(chosen.link)) as network:
        rate = network.measure()
        outcomes = run_ranks(
            work, shape, chosen.rounds, world_size=4, ranks_per_host=2, network=network, timeout_seconds=300
        )
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    conditions = {"link_mbit": rate, "shape": shape, "rounds": chosen.rounds, "torch": torch.__version__}
    found = json.dumps({**conditions, "machine": machine, **outcomes[0].value}, indent=1)
    print(found)
    if chosen.json:
        Path(chosen.json).write_text(found + "\n")


if __name__ == "__main__":
    main()
