"""Checkpoints by torch.distributed.checkpoint: the newest complete one comes back bit for bit, and two are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.lab.bench.checkpoint.dcp import DcpAsync, DcpSync
from thinwire.lab.bench.checkpoint.methods import Destination


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Training:
    """A layer with momentum, that makes steps."""

    def __init__(self) -> None:
        self.model = nn.Linear(5, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = TrainingState(self.model, self.optimizer)

    def step(self) -> None:
        self.model(torch.randn(4, 5)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> list[list[float]]:
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [tensor.flatten().tolist() for tensor in (*self.model.parameters(), *momenta)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [DcpSync, DcpAsync])
def test_the_newest_complete_checkpoint_comes_back_and_two_are_kept(kind: type[DcpSync], tmp_path: Path) -> None:
    training, destination = Training(), Destination((), str(tmp_path), 0, "run")
    method = kind(training.state, destination, 0)
    assert method.restore() is None, "there is none"
    bits = {}
    for step in range(1, 5):
        training.step()
        assert method.step(step)
        method.finish()
        bits[step] = training.bits()
    folder = tmp_path / f"run-{kind.name}"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000004"]
    other = Training()
    other.step()
    again = kind(other.state, destination, 0)
    assert again.restore() == 4
    assert other.bits() == bits[4]
    (folder / "step-00000004" / ".metadata").unlink()
    assert again.restore() == 3, "without its last file it is none"
    assert other.bits() == bits[3]
    for each in (method, again):
        each.close()
