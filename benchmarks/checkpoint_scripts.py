"""Eleven trainings that keep checkpoints, for `doctor_harmless.py`: torchrun ... checkpoint_scripts.py NAME --steps N.

Each goes on from what it kept, and a step depends on nothing but the parameters and its number. It prints where a rank
began and ended, with a digest of its parameters. `make` is the same as a job of ``thinwire bench train``, of the script
that ``KEPT_AS`` names.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel

from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Disk, MemoryReader, MemoryWriter, Storage
from thinwire.lab.leave import leave

RUN = "the-run"


class Training:
    """A model, its optimizer, and how many steps it has trained; `save` and `load` keep a file a rank by torch."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model.module if isinstance(model, DistributedDataParallel) else model
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
        self.steps = 0
        self.path = Path(f"kept-{dist.get_rank() if dist.is_initialized() else 0}.pt").absolute()

    def state(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "steps": self.steps}

    def save(self) -> None:
        torch.save(self.state(), self.path)

    def load(self) -> None:
        if self.path.exists():
            self.take(torch.load(self.path))

    def take(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.steps = state["steps"]

    def digest(self) -> str:
        flat = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:12]


Kept = Callable[[Training], Iterator[Callable[[], None]]]
SCRIPTS: dict[str, Kept] = {}
ANNOUNCED = ("torch-each-step", "dcp-each-step")
"""Scripts that save in mid-training by themselves, which nothing keeps from them."""


def kept(function: Kept) -> Kept:
    """Note how a script keeps checkpoints: a generator that yields, once loaded, what to call after each step."""
    SCRIPTS[function.__name__.replace("_", "-")] = function
    return function


def ours(training: Training, disk: Disk | None) -> Iterator[Callable[[], None]]:
    policy = CheckpointPolicy(max_overhead=None)
    keeper = Checkpointer(training.model, training.optimizer, policy=policy, storage=Storage(RUN, disk=disk))
    training.steps = keeper.restore() or 0
    yield keeper.step
    if disk is not None:
        keeper.persist_now()
    assert keeper.flush(60.0), "the last version did not get whole in a minute"
    keeper.close()


@kept
def ours_in_memory(training: Training) -> Iterator[Callable[[], None]]:
    yield from ours(training, None)


@kept
def ours_on_disk(training: Training) -> Iterator[Callable[[], None]]:
    yield from ours(training, Disk("disk", "1d"))


@kept
def dcp_in_memory(training: Training) -> Iterator[Callable[[], None]]:
    reader, writer = MemoryReader(RUN), MemoryWriter(RUN)
    with suppress(CheckpointException):  # there is none yet
        dcp.load(training.module.state_dict(), storage_reader=reader)
        training.steps = reader.step or 0
    reader.close()

    def save() -> None:
        if training.steps % 4 == 0:
            dcp.save(training.module.state_dict(), storage_writer=writer, checkpoint_id=training.steps)

    yield save
    writer.close()


def _load_dcp(training: Training) -> None:
    if Path("dcp/.metadata").exists():
        state = training.state()
        dcp.load(state, checkpoint_id="dcp")
        training.take(state)


@kept
def dcp_at_the_end(training: Training) -> Iterator[Callable[[], None]]:
    _load_dcp(training)
    yield lambda: None
    dcp.save(training.state(), checkpoint_id="dcp")


@kept
def dcp_each_step(training: Training) -> Iterator[Callable[[], None]]:
    _load_dcp(training)
    yield lambda: dcp.save(training.state(), checkpoint_id="dcp")


@kept
def torch_at_the_end(training: Training) -> Iterator[Callable[[], None]]:
    training.load()
    yield lambda: None
    training.save()


@kept
def torch_in_finally(training: Training) -> Iterator[Callable[[], None]]:
    training.load()
    try:
        yield lambda: None
    finally:
        training.save()


@kept
def torch_by_except(training: Training) -> Iterator[Callable[[], None]]:
    training.load()
    try:
        yield lambda: None
    except BaseException:
        training.save()
        raise
    training.save()


@kept
def torch_by_atexit(training: Training) -> Iterator[Callable[[], None]]:
    training.load()
    atexit.register(training.save)
    yield lambda: None


@kept
def torch_by_a_signal(training: Training) -> Iterator[Callable[[], None]]:
    """As under a scheduler that warns before it ends a job, or where the user presses Ctrl-C."""
    training.load()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: training.save())
    yield lambda: None
    training.save()


@kept
def torch_each_step(training: Training) -> Iterator[Callable[[], None]]:
    training.load()
    yield training.save


def train(name: str, steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    training = Training(DistributedDataParallel(nn.Linear(16, 16)))
    with contextmanager(SCRIPTS[name])(training) as after_step:
        print(f"BEGAN {training.steps} {training.digest()}", flush=True)
        for step in range(training.steps, steps):
            torch.manual_seed(1000 * step + dist.get_rank())
            training.optimizer.zero_grad()
            training.model(torch.randn(4, 16)).square().mean().backward()
            training.optimizer.step()
            training.steps += 1
            after_step()
    print(f"ENDED {training.steps} {training.digest()}", flush=True)
    dist.destroy_process_group()
    leave(0)  # with the model alive: what frees it may wait for a thread of Gloo for ever (one in some 20, torch 2.13)


def make() -> Any:
    training = Training(nn.Linear(16, 16))
    keeping = contextmanager(SCRIPTS[os.environ["KEPT_AS"]])(training)
    after_step = keeping.__enter__()

    def batch() -> Tensor:
        training.steps += 1
        after_step()
        return torch.randn(4, 16)

    return training.model, batch, lambda model, batch: model(batch).square().mean(), training.optimizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(SCRIPTS))
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options.name, options.steps)
