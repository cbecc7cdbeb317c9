"""Each recipe of `thinwire.outer` on real ranks, against its reference in numpy: the same parameters to rounding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire
from tests.outer.recipes.outer_references import (
    Params,
    Regression,
    Sgd,
    ShadowRound,
    UpdateCenter,
    bmuf,
    diloco,
    easgd,
    local_sgd,
    model_averaging,
    shadow_sync,
    sparse_loco,
    streaming_diloco,
)
from thinwire import compress
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.outer import OuterRecipe
from thinwire.outer.pace import RoundPace
from thinwire.outer.shadow import ShadowRounds

pytestmark = pytest.mark.ranks

PROBLEM = Regression()
INNER = partial(Sgd, 0.05, 0.9)
OUTER = partial(Sgd, 0.7, 0.9, True)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    inputs, hidden, outputs = PROBLEM.sizes
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in PROBLEM.initial().items()})
    return model, torch.optim.SGD(model.parameters(), 0.05, 0.9)


def train(rank: int, steps: range, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        inputs, targets = map(torch.from_numpy, PROBLEM.data(rank, step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def parameters(model: nn.Module) -> Params:
    return {name: entry.detach().numpy().copy() for name, entry in model.named_parameters()}


def assert_close(found: Params, expected: Params) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-13)


def in_step(context: RankContext, recipe: OuterRecipe, steps: int, options: dict[str, Any]) -> tuple[Params, Any]:
    model, optimizer = made()
    sync: Any = thinwire.outer.attach(model, optimizer, recipe, **options)
    train(context.rank, range(1, steps + 1), model, optimizer)
    found = parameters(model)
    sync.detach()
    return found, sync._rounds.anchors.fragments


NAMES = tuple(PROBLEM.initial())
HALVES = (NAMES[:1], NAMES[1:])  # of similar size
RECIPES: dict[str, tuple[OuterRecipe, int, int, Callable[..., list[Params]]]] = {
    "local SGD": (thinwire.outer.local_sgd(every=8), 2, 35, partial(local_sgd, every=8)),
    "post-local SGD": (
        thinwire.outer.local_sgd(every=5, start_step=12),
        3,
        40,
        partial(local_sgd, every=5, start_step=12),
    ),
    "DiLoCo": (thinwire.outer.diloco(every=7), 4, 40, partial(diloco, outer=OUTER(), every=7)),
    "DiLoCo without momentum": (
        thinwire.outer.diloco(every=6, lr=0.5, momentum=0.0, nesterov=False),
        2,
        30,
        partial(diloco, outer=Sgd(0.5), every=6),
    ),
    "Streaming DiLoCo": (
        thinwire.outer.diloco(every=10, fragments=2, delay=3, mix=0.6),
        2,
        60,
        partial(streaming_diloco, outer=OUTER, every=10, fragments=HALVES, delay=3, alpha=0.4),
    ),
    "Streaming DiLoCo of parameters": (
        thinwire.outer.diloco(every=9, fragments=4, delay=2, mix=1.0),
        3,
        50,
        partial(
            streaming_diloco,
            outer=OUTER,
            every=9,
            fragments=[(name,) for name in NAMES],
            delay=2,
            alpha=0.0,
        ),
    ),
}
LONG = ("local SGD", "DiLoCo without momentum", "Streaming DiLoCo")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one in LONG)) for one in RECIPES])
def test_a_recipe_in_step_with_training(name: str) -> None:
    recipe, ranks, steps, reference = RECIPES[name]
    expected = reference(PROBLEM, ranks, steps, INNER)
    outcomes = run_ranks(in_step, recipe, steps, {}, world_size=ranks)
    for outcome, params in zip(outcomes, expected, strict=True):
        found, fragments = outcome.value
        if recipe.fragments > 1:
            assert list(fragments) == list(reference.keywords["fragments"])  # type: ignore[attr-defined]
        assert_close(found, params)


def test_sparse_loco() -> None:
    recipe = thinwire.outer.diloco(every=5, lr=0.8, momentum=0.0, nesterov=False)
    codec = compress.error_feedback(compress.top_k(0.2), decay=0.9)
    options = {"dense": {"*.weight": codec}}
    k = {"0.weight": 6, "2.weight": 3}
    expected = sparse_loco(PROBLEM, 2, 40, INNER, 5, 0.8, 0.9, k)
    for outcome, params in zip(run_ranks(in_step, recipe, 40, options, world_size=2), expected, strict=True):
        assert_close(outcome.value[0], params)


# --- in the background


class Driven(RoundPace):
    """A pace that tests set: a round begins when the test says so, on each rank by itself."""

    begins: threading.Semaphore

    def wait(self) -> None:
        Driven.begins.acquire()
        if self.is_ending or self.is_dropped:
            Driven.begins.release()


class Gate:
    """Lets a round average only once the test has opened it, and tells the test that the copies are taken."""

    def __init__(self, rounds: ShadowRounds) -> None:
        self.reached, self.opened = threading.Semaphore(0), threading.Semaphore(0)
        self._mean, self._rounds = rounds.averager.mean, rounds
        rounds.averager.mean = self  # type: ignore[method-assign, assignment]

    def __call__(self, *arguments: Any) -> Any:
        self.reached.release()
        self.opened.acquire()
        return self._mean(*arguments)


@dataclass(frozen=True)
class Drive:
    """A training under rounds in the background at given steps."""

    recipe: OuterRecipe
    rounds: Sequence[ShadowRound]
    steps: Sequence[int]


def driven(context: RankContext, drive: Drive) -> tuple[Params, Params]:
    Driven.begins = threading.Semaphore(0)
    RoundPace.wait = Driven.wait  # type: ignore[method-assign]
    model, optimizer = made()
    sync: Any = thinwire.outer.attach(model, optimizer, drive.recipe)
    gate = Gate(sync._rounds)
    made_steps = 0
    ended = threading.Semaphore(0)
    end_round = sync._rounds.pace.end_round
    sync._rounds.pace.end_round = lambda seconds: (end_round(seconds), ended.release())

    def train_until(step: int) -> None:
        nonlocal made_steps
        train(context.rank, range(made_steps + 1, step + 1), model, optimizer)
        made_steps = max(made_steps, step)

    for entry in drive.rounds:
        assert made_steps <= entry.read[context.rank] < entry.mixed[context.rank], "rounds are in order"
        train_until(entry.read[context.rank])
        Driven.begins.release()
        gate.reached.acquire()
        train_until(entry.mixed[context.rank] - 1)
        gate.opened.release()
        ended.acquire()
    train_until(drive.steps[context.rank])
    found = parameters(model)
    with sync.global_parameters():
        center = parameters(model)
    assert parameters(model).keys() == found.keys()
    assert_close(parameters(model), found)
    for _ in range(1000):
        gate.opened.release()
    sync._rounds.pace.hurry(True)
    Driven.begins.release()
    sync.detach()
    return found, center


UNEVEN = (
    ShadowRound((4, 3, 7), (5, 6, 8)),
    ShadowRound((5, 9, 8), (9, 10, 12)),
    ShadowRound((9, 10, 20), (12, 11, 21)),
    ShadowRound((30, 10, 21), (31, 11, 30)),
    ShadowRound((31, 22, 44), (33, 24, 45)),
)
SHADOWS: dict[str, tuple[OuterRecipe, Callable[[], UpdateCenter]]] = {
    "easgd": (thinwire.outer.shadow_sync("easgd", lr=0.4, mix=0.3), partial(easgd, 0.4)),
    "average": (thinwire.outer.shadow_sync("average", mix=0.5), model_averaging),
    "bmuf": (thinwire.outer.shadow_sync("bmuf", lr=0.8, momentum=0.6, mix=0.7), partial(bmuf, 0.6, 0.8)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("algorithm", "ranks"),
    [
        ("easgd", 3),
        ("bmuf", 2),
        *(pytest.param(*chosen, marks=pytest.mark.slow) for chosen in (("average", 3), ("bmuf", 3), ("easgd", 2))),
    ],
)
def test_a_recipe_in_the_background(algorithm: str, ranks: int) -> None:
    recipe, update = SHADOWS[algorithm]
    steps = (40, 31, 50)[:ranks]
    expected, center = shadow_sync(PROBLEM, ranks, steps, INNER, update(), recipe.mix, UNEVEN)
    outcomes = run_ranks(driven, Drive(recipe, UNEVEN, steps), world_size=ranks)
    for outcome, params in zip(outcomes, expected, strict=True):
        found, anchors = outcome.value
        assert_close(found, params)
        assert_close(anchors, center)
