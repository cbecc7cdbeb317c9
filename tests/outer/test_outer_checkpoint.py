"""Checkpoints in the memory of peers under an outer loop: each rank has its own state, and goes on bitwise with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from holders import SECRET, running_holders
from thinwire.checkpoint import Checkpointer, CheckpointPolicy, Storage
from thinwire.compress import error_feedback, top_k
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.outer import OuterRecipe, diloco, local_sgd

pytestmark = pytest.mark.ranks

RECIPES: list[tuple[OuterRecipe, dict[str, Any]]] = [
    (diloco(every=4, fragments=2, delay=3, mix=0.5), {"dense": error_feedback(top_k(0.1))}),
    (local_sgd(every=3, start_step=5), {}),
]
STEPS = 9


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Of two holders, as on two hosts."""
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    with running_holders(tmp_path, "50MB") as places:
        yield places


class Run:
    """A training whose ranks have other data, drawn from the random state that a checkpoint has too."""

    def __init__(self, context: RankContext, number: int, socket: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 30))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        recipe, options = RECIPES[number]
        self.sync = thinwire.outer.attach(self.model, self.optimizer, recipe, **options)
        parts: dict[str, Any] = {"synchronizer": self.sync, "policy": CheckpointPolicy(max_overhead=None)}
        self.checkpointer = Checkpointer(
            self.model, self.optimizer, **parts, storage=Storage(f"run {number}", holder_socket=socket)
        )
        torch.manual_seed(10 + context.rank)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 8)).square().sub(1).square().mean().backward()
        self.optimizer.step()
        return torch.cat([tensor.detach().double().reshape(-1) for tensor in self.model.state_dict().values()])


def _undisturbed(context: RankContext, sockets: list[str], number: int, last: int) -> list[list[float]]:
    run = Run(context, number, sockets[context.rank])
    found = []
    with run.checkpointer:
        assert run.checkpointer.restore() is None
        for done in range(STEPS):
            found.append(run.step().tolist())
            if done < last:
                run.checkpointer.step()
                assert run.checkpointer.flush(20)
    return found


def _restored(context: RankContext, sockets: list[str], number: int, last: int) -> list[list[float]]:
    run = Run(context, number, sockets[context.rank])
    with run.checkpointer:
        assert run.checkpointer.restore() == last
        return [run.step().tolist() for _ in range(last, STEPS)]


@pytest.mark.parametrize(
    ("number", "last"),
    [(0, 6), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, 3), (1, 3), (1, 6)))],
)
def test_a_restored_run_goes_on_bitwise_in_the_middle_of_a_round(sockets: list[str], number: int, last: int) -> None:
    """After 3 steps means are in flight, after 6 memories too; ranks that differ are not taken for broken ones."""
    whole = run_ranks(_undisturbed, sockets, number, last, world_size=2, timeout_seconds=60)
    again = run_ranks(_restored, sockets, number, last, world_size=2, timeout_seconds=60)
    for before, after in zip(whole, again, strict=True):
        assert after.value == before.value[last:]
    assert whole[0].value[-1] != whole[1].value[-1], "each rank has its own state"


def _differs(context: RankContext, sockets: list[str]) -> None:
    """Alike in the first steps, and not afterwards: post-local SGD, without moments that would differ before."""
    run = Run(context, 1, sockets[context.rank])
    with run.checkpointer:
        run.checkpointer.restore()
        for _ in range(STEPS):
            run.step()
            run.checkpointer.step()
            assert run.checkpointer.flush(20)
        assert run.checkpointer.stats()["checkpoint/diverged_ranks"] == 0
        assert run.checkpointer.stats()["checkpoint/certified_step"] == -1, "nothing was compared"


def test_ranks_that_train_apart_are_not_taken_for_broken(sockets: list[str]) -> None:
    run_ranks(_differs, sockets, world_size=2, timeout_seconds=60)
