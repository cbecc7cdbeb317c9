"""Kill ranks of one training under thinwire, torchrun's restart and torchft: how long until the survivors step again?

    pip install torchft
    python benchmarks/reproducible_rivals.py --methods thinwire,torchrun,torchft --ranks 8 --kills 10 [--json FILE]

One rank is killed at a time, and started again when the survivors have stepped; methods take turns. The pause is from
the kill until each survivor has finished one more step, so thinwire's includes the micro-batches that are made again,
torchrun's the restart of all workers from a checkpoint of the last step, and torchft's is followed by steps without the
lost rank's part of the batch. A step takes 0.05 s. torchft needs a quorum of one; its `DistributedDataParallel` ends in
an assertion after a kill (0.2.0 with torch 2.13), so its pure one is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES, STEP_SECONDS, FOREVER = 24, 0.05, 1 << 30


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    return model, torch.optim.AdamW(model.parameters())


def loss(model: nn.Module, count: int = 16) -> Tensor:
    return model(torch.randn(count, 64)).square().mean()


class Progress:
    """The steps that a rank has finished, in a file for each rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.path = directory / f"finished{rank}"
        (directory / f"pid{rank}").write_text(str(os.getpid()))
        self.count = 0

    def step(self) -> None:
        self.count += 1
        new = self.path.with_suffix(".new")
        new.write_text(f"{os.getpid()} {self.count}")
        new.replace(self.path)

    @staticmethod
    def read(directory: Path, rank: int) -> tuple[int, int]:
        """The process and its number of finished steps."""
        path = directory / f"finished{rank}"
        process, count = path.read_text().split() if path.exists() else ("0", "0")
        return int(process), int(count)


def train_thinwire(directory: Path, rank: int, ranks: int, port: int) -> None:
    from thinwire import reproducible
    from thinwire.outer import Members

    model, optimizer = made()
    progress = Progress(directory, rank)
    members = Members(dist.TCPStore("127.0.0.1", port), rank, ranks)
    steps = reproducible.Steps(model, MICRO_BATCHES, FOREVER, optimizer=optimizer, process_group=members)
    for step in steps:
        for _ in step:
            loss(model, 16 * ranks // MICRO_BATCHES).backward()
            time.sleep(STEP_SECONDS * ranks / MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
        progress.step()


def train_torchrun(directory: Path, rank: int, ranks: int, port: int) -> None:
    del rank, ranks, port
    dist.init_process_group("gloo")
    rank, path = dist.get_rank(), directory / "checkpoint.pt"
    model, optimizer = made()
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    progress = Progress(directory, rank)
    parallel = DistributedDataParallel(model)
    while True:
        loss(parallel).backward()
        time.sleep(STEP_SECONDS)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
        progress.step()


def train_torchft(directory: Path, rank: int, ranks: int, port: int) -> None:
    from torchft import Manager, Optimizer, ProcessGroupGloo  # pyrefly: ignore
    from torchft.ddp import PureDistributedDataParallel as Replicated  # pyrefly: ignore

    del ranks
    model, optimizer = made()
    progress = Progress(directory, rank)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"rank{rank}",
        lighthouse_addr=f"http://127.0.0.1:{port}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
    )
    parallel, managed = Replicated(manager, model), Optimizer(manager, optimizer)
    while True:
        managed.zero_grad()
        loss(parallel).backward()
        time.sleep(STEP_SECONDS)
        before = manager.current_step()
        managed.step()
        if manager.current_step() > before:
            progress.step()


TRAIN: dict[str, Callable[[Path, int, int, int], None]] = {
    "thinwire": train_thinwire,
    "torchrun": train_torchrun,
    "torchft": train_torchft,
}


class Training:
    """Ranks of one method, of which any can be killed."""

    def __init__(self, method: str, ranks: int, directory: Path) -> None:
        self.method, self.ranks, self.directory = method, ranks, directory
        self.server: Any = None
        self.port = 0
        if method == "thinwire":
            self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.port = self.server.port
        elif method == "torchft":
            from torchft.coordination import LighthouseServer  # pyrefly: ignore

            self.server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
            self.port = int(self.server.address().rpartition(":")[2])
        script = [__file__, "--work", str(directory), "--methods", method, "--ranks", str(ranks)]
        script += ["--port", str(self.port)]
        if method == "torchrun":
            runner = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=999"]
            # Restarted workers would read the Gloo addresses of those before them in a store that torch 2.13 shares.
            environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            self.processes = [subprocess.Popen([sys.executable, *runner, *script], env=environment)]
            self.commands: list[list[str]] = []
        else:
            self.commands = [[sys.executable, *script, "--rank", str(rank)] for rank in range(ranks)]
            self.processes = [subprocess.Popen(command) for command in self.commands]

    def wait_for_steps(self, of: list[int], since: dict[int, tuple[int, int]], seconds: float = 90.0) -> None:
        """Wait until these ranks have each finished more than they had; a new process begins to count anew."""
        deadline = time.monotonic() + seconds
        while True:
            now = {rank: Progress.read(self.directory, rank) for rank in of}
            if all(now[rank][1] > (since[rank][1] if now[rank][0] == since[rank][0] else 0) for rank in of):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.method}: no step of all ranks for {seconds:g} s")
            time.sleep(0.005)

    def seen(self) -> dict[int, tuple[int, int]]:
        return {rank: Progress.read(self.directory, rank) for rank in range(self.ranks)}

    def kill(self, rank: int) -> float:
        """Kill a rank, and return the seconds until all others have finished a step that they had not begun before."""
        others = [other for other in range(self.ranks) if other != rank]
        began = time.monotonic()
        os.kill(int((self.directory / f"pid{rank}").read_text()), signal.SIGKILL)
        since = {rank: (process, count + 1) for rank, (process, count) in self.seen().items()}  # one may be under way
        if self.method == "torchrun":
            others = list(range(self.ranks))
            since = {rank: (seen[0], FOREVER) for rank, seen in since.items()}  # all of them are started again
        self.wait_for_steps(others, since)
        pause = time.monotonic() - began
        if self.method != "torchrun":
            self.processes[rank].wait()
            self.processes[rank] = subprocess.Popen(self.commands[rank])
            self.wait_for_steps(list(range(self.ranks)), self.seen())
        return pause

    def close(self) -> None:
        for process in self.processes:
            process.terminate() if self.method == "torchrun" else process.kill()
        for process in self.processes:
            process.wait()


def measure(method: str, ranks: int, kills: int, draw: random.Random) -> list[float]:
    pauses = []
    with tempfile.TemporaryDirectory() as name:
        training = Training(method, ranks, Path(name))
        try:
            training.wait_for_steps(list(range(ranks)), dict.fromkeys(range(ranks), (0, 0)))
            for _ in range(kills):
                time.sleep(draw.uniform(1.0, 2.0))
                pauses.append(training.kill(draw.randrange(ranks)))
                print(f"{method}: {pauses[-1]:.2f} s", flush=True)
        finally:
            training.close()
    return pauses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", default="thinwire,torchrun,torchft")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kills", type=int, default=10, help="of each method, in two turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    for hidden, kind in (("--work", Path), ("--rank", int), ("--port", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    methods = options.methods.split(",")
    if options.work is not None:
        TRAIN[methods[0]](options.work, options.rank, options.ranks, options.port)
    draw, pauses = random.Random(options.seed), {method: list[float]() for method in methods}
    for count in ((options.kills + 1) // 2, options.kills // 2):
        for method in methods:
            pauses[method] += measure(method, options.ranks, count, draw)
    result = {
        method: {"kills": len(of), "median": statistics.median(of), "least": min(of), "most": max(of)}
        for method, of in pauses.items()
    }
    print(json.dumps(result), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
