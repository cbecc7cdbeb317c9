"""A training that goes on after the loss of a whole host, from the memory of another one: no disk is involved.

    python examples/survive_host_loss.py --hosts 3 --lose-at 20

Each "host" here is what a host runs: a holder, and a process for its rank. At step 20 host 1 is lost: its holder and
its rank die by ``kill -9``, and with the holder the memory that it kept. The other ranks cannot go on without it, so
they end too, as torchrun would have it. Then host 1 is replaced by an empty one and all ranks start again. Rank 1 gets
its state from the host that kept its replica.
"""

import argparse
import os
import secrets
import signal
import sys
import tempfile
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic, sleep

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.checkpoint import Checkpointer, Storage
from thinwire.checkpoint.holder.start import HolderOptions, start_holder


def train(rank: int, directory: str, start: int, options: argparse.Namespace) -> None:
    """The rank of a host, in one start of the training."""
    torch.set_num_threads(1)
    place = Path(directory)
    dist.init_process_group("gloo", init_method=f"file://{place}/{start}", rank=rank, world_size=options.hosts)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)  # each rank has data of its own

    storage = Storage(run_id="demo", holder_socket=place / f"host{rank}.sock")
    with Checkpointer(model, optimizer, storage=storage) as checkpointer:
        first = checkpointer.restore() or 0
        if rank == 0:
            print(f"starts at step {first}", flush=True)
        for step in range(first, options.steps):
            inputs = torch.randn(128, 64)
            optimizer.zero_grad()
            loss = (model(inputs).flatten() - inputs.sum(1)).square().mean()
            loss.backward()
            optimizer.step()
            checkpointer.step()
            sleep(options.step_seconds)
            stats = checkpointer.stats()
            (place / f"safe.{rank}").write_text(f"{stats['checkpoint/steps'] - stats['checkpoint/at_risk_steps']:.0f}")
            (place / f"reached.{rank}").write_text(f"{step + 1}")
            if rank == 0 and step % 10 == 9:
                print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def start_ranks(directory: str, start: int, options: argparse.Namespace) -> list[BaseProcess]:
    context = get_context("spawn")
    ranks = [context.Process(target=train, args=(rank, directory, start, options)) for rank in range(options.hosts)]
    for process in ranks:
        process.start()
    return ranks


def wait_until_reached(directory: str, step: int, ranks: list[BaseProcess]) -> int:
    """Wait until all ranks have reached the step and a version is safe; return the newest step that is."""
    deadline = monotonic() + 120

    def read(what: str) -> list[int]:
        return [int(_read(Path(directory) / f"{what}.{rank}")) for rank in range(len(ranks))]

    while min(read("reached")) < step or not (safe := max(read("safe"))):
        if monotonic() > deadline or any(process.exitcode is not None for process in ranks):
            sys.exit("the training did not get that far")
        sleep(0.02)
    return safe


def _read(path: Path) -> str:
    return (path.read_text() if path.exists() else "") or "0"


def start_host(directory: str, rank: int) -> int:
    """The holder of a host, with an address of its own; the id of its process."""
    options = HolderOptions(socket=f"{directory}/host{rank}.sock", memory_budget="200MB", drain_seconds=0.0)
    return int(start_holder(options)["pid"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lose-at", type=int, default=20, help="step at which host 1 is lost")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="what else a step takes")
    options = parser.parse_args()

    os.environ["THINWIRE_SECRET"] = secrets.token_hex(32)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no holder is left behind
    with tempfile.TemporaryDirectory() as directory:
        holders = {rank: start_host(directory, rank) for rank in range(options.hosts)}
        ranks: list[BaseProcess] = []
        try:
            ranks = start_ranks(directory, 0, options)
            safe = wait_until_reached(directory, options.lose_at, ranks)
            print(f"host 1 is lost, and the memory of its holder with it; step {safe} is on another host", flush=True)
            os.kill(holders.pop(1), signal.SIGKILL)
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()
            holders[1] = start_host(directory, 1)
            ranks = start_ranks(directory, 1, options)
            for process in ranks:
                process.join()
            sys.exit(any(process.exitcode for process in ranks))
        finally:
            for process in ranks:
                process.kill()
            for holder in holders.values():
                os.kill(holder, signal.SIGKILL)


if __name__ == "__main__":
    main()
