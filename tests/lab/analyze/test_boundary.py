"""Where a training step ends: the scripts that people write, and what is counted and timed of each of their steps."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from thinwire.lab.analyze.trials import StepClock
from thinwire.lab.planning.ready import WARM_STEPS, OptimizerBoundary, StepWatch, typical

STEPS = WARM_STEPS + 3


class Script:
    """A training of a model whose ``no_sync`` is a switch: a forward takes 1 s, a backward 2 s, an update 0.5 s."""

    def __init__(self, optimizers: int = 1) -> None:
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        self.model[0].register_forward_hook(lambda *_: self.wait(1.0))
        halves = [self.model.parameters()] if optimizers == 1 else [layer.parameters() for layer in self.model]
        self.optimizers = [torch.optim.SGD(half, lr=0.1) for half in halves][:optimizers]
        self.synchronizes, self.now = True, 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def forward(self) -> torch.Tensor:
        return self.model(torch.ones(1, 4)).sum()

    def backward(self, loss: torch.Tensor) -> None:
        self.wait(2.0)
        loss.backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.wait(0.5)


def plain(script: Script) -> None:
    script.backward(script.forward())
    script.step()


def accumulated(script: Script) -> None:
    """As nanoGPT and Accelerate do it."""
    for micro_batch in range(4):
        script.synchronizes = micro_batch == 3
        script.backward(script.forward())
    script.step()


def two_forwards(script: Script) -> None:
    script.backward(script.forward() + script.forward())
    script.step()


def two_backwards(script: Script) -> None:
    for _ in range(2):
        script.backward(script.forward())
    script.step()


def cached(script: Script) -> None:
    """GradCache: first without a graph, then a backward for each of five parts."""
    with torch.no_grad():
        script.forward()
    for _ in range(5):
        script.backward(script.forward())
    script.step()


def closure(script: Script) -> None:
    """As Lightning steps: forward and backward inside of the optimizer's step."""

    def evaluate() -> torch.Tensor:
        loss = script.forward()
        script.backward(loss)
        return loss

    script.optimizers[0].step(evaluate)  # type: ignore[arg-type]


SCRIPTS: dict[str, tuple[Callable[[Script], None], Script, tuple[int, int]]] = {
    "plain": (plain, Script(), (1, 1)),
    "accumulated": (accumulated, Script(), (4, 1)),
    "two forwards": (two_forwards, Script(), (1, 1)),
    "two backwards": (two_backwards, Script(), (2, 2)),
    "GradCache": (cached, Script(), (5, 5)),
    "two optimizers": (accumulated, Script(optimizers=2), (4, 1)),
    "no optimizer": (accumulated, Script(optimizers=0), (4, 1)),
    "closure": (closure, Script(), (1, 1)),
}


@pytest.fixture(params=SCRIPTS.values(), ids=SCRIPTS.keys())
def case(request: pytest.FixtureRequest) -> Any:
    return request.param


def watched(script: Script, monkeypatch: pytest.MonkeyPatch) -> StepWatch:
    monkeypatch.setattr("thinwire.observe.step.time.perf_counter", lambda: script.now)
    named = dict(script.model.named_parameters())
    return StepWatch(script.model, named, lambda: None, synchronizes=lambda: script.synchronizes)


@pytest.mark.few(3)
def test_a_step_is_what_lies_between_two_steps_of_the_optimizer(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train, script, counts = case
    watch = watched(script, monkeypatch)
    began = script.now
    for _ in range(STEPS):
        train(script)
    seconds = (script.now - began) / STEPS
    times = watch.close()
    assert watch.num_steps == STEPS
    assert watch.counts == counts
    assert watch.optimizers == (["SGD"] if script.optimizers else [])
    for moments in times.tolist()[:-1]:  # to the next step
        parameters: tuple[Any, ...] = tuple(watch.names)
        step = typical(moments, parameters)
        backward = counts[1] * sum(step.backward_seconds)
        assert backward == pytest.approx(2.0 * counts[1]), "of synchronized backwards alone"
        assert step.forward_seconds + backward + step.rest_seconds == pytest.approx(seconds)


def test_an_optimizer_that_a_script_has_frozen_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    gc.freeze()
    try:
        watch = watched(script, monkeypatch)
        for _ in range(STEPS):
            two_backwards(script)
        watch.close()
    finally:
        gc.unfreeze()
    assert watch.num_steps == STEPS


def test_the_rest_is_what_accumulated_batches_take(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    watch = watched(script, monkeypatch)
    for _ in range(STEPS):
        accumulated(script)
    step = typical(watch.close()[0].tolist(), tuple(watch.names))  # type: ignore[arg-type]
    assert (step.forward_seconds, step.rest_seconds) == (1.0, 3 * 3.0 + 0.5)


@pytest.fixture
def quiet() -> Iterator[list[OptimizerBoundary]]:
    made: list[OptimizerBoundary] = []
    yield made
    for boundary in made:
        boundary.close()


@pytest.mark.few(3)
def test_the_clock_of_a_trial_ticks_once_a_step(case: Any) -> None:
    train, script, (_, synchronizations) = case
    clock = StepClock(lambda seconds: 0.1, synchronizations=synchronizations)
    clock.watch(script.model)
    clock.boundary._synchronizes = lambda: script.synchronizes  # type: ignore[union-attr]
    script.synchronizes = True
    for _ in range(6):
        train(script)
    script.synchronizes = True
    assert len(clock.moments) == 6, "and the seventh begins with the next forward"


def test_the_clock_of_a_trial_ticks_on_a_rank_that_skips_a_step_by_hand() -> None:
    """A loss that is not finite on one rank: the others, which step, count as many steps and send as many messages."""
    script = Script()
    clock = StepClock(lambda seconds: 0.1)
    clock.watch(script.model)
    for step in range(6):
        script.backward(script.forward())
        if step % 3 != 1:
            script.step()
    assert len(clock.moments) == 6


def test_a_step_that_one_rank_skips_by_hand_is_one_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are local while a script is measured: a norm that is not finite on one rank is that on no other."""
    script, said = Script(), []
    others = iter([True] * 20)

    def vote(ends: bool) -> bool:
        said.append(ends)
        return ends or next(others)

    monkeypatch.setattr("thinwire.observe.step.time.perf_counter", lambda: script.now)
    watch = StepWatch(script.model, dict(script.model.named_parameters()), lambda: None, vote=vote)
    for step in range(STEPS):
        script.backward(script.forward())
        if step % 3 != 1 and step != STEPS - 1:
            script.step()
    watch.close()
    assert said == [step % 3 != 1 and step != STEPS - 1 for step in range(STEPS)], "once a backward, on every rank"
    assert watch.num_steps == STEPS
    assert watch.counts == (1, 1)


def test_what_a_vote_takes_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()

    def vote(ends: bool) -> bool:
        script.wait(100.0)  # for the slowest rank
        return ends

    monkeypatch.setattr("thinwire.observe.step.time.perf_counter", lambda: script.now)
    watch = StepWatch(script.model, dict(script.model.named_parameters()), lambda: None, vote=vote)
    for _ in range(STEPS):
        two_backwards(script)
    step = typical(watch.close()[0].tolist(), tuple(watch.names))  # type: ignore[arg-type]
    assert step.forward_seconds + 2 * sum(step.backward_seconds) + step.rest_seconds == pytest.approx(6.5)


def test_optimizers_of_other_models_end_no_step(quiet: list[OptimizerBoundary]) -> None:
    ours, other = nn.Linear(2, 1), nn.Linear(2, 1)
    boundary = OptimizerBoundary(ours.parameters())
    quiet.append(boundary)
    optimizer, others = torch.optim.Adam(ours.parameters()), torch.optim.SGD(other.parameters())
    begun = []
    for _ in range(3):
        for _ in range(2):
            begun.append(boundary.forward())
            boundary.gradient()
            others.step()
        optimizer.step()
    assert begun == [True, False] * 3
    assert boundary.optimizers == ["Adam"]


def test_an_optimizer_step_without_a_synchronized_backward_ends_no_step(quiet: list[OptimizerBoundary]) -> None:
    """Ranks that train apart for some steps: a step sends once."""
    model = nn.Linear(2, 1)
    synchronizes = iter([False, False, True] * 3)
    boundary = OptimizerBoundary(model.parameters(), lambda: next(synchronizes))
    quiet.append(boundary)
    optimizer = torch.optim.SGD(model.parameters())
    begun = []
    for _ in range(9):
        begun.append(boundary.forward())
        boundary.gradient()
        optimizer.step()
    assert begun == [True, False, False] * 3


def test_a_step_that_a_scaler_skips_ends_a_step_on_every_rank() -> None:
    """Gradients are local while a script is measured, so one rank skips a step that the others make."""
    begun = []
    for values in ([1.0, math.inf, 1.0, math.inf], [1.0, 1.0, 1.0, 1.0]):
        model = nn.Linear(2, 1)
        boundary = OptimizerBoundary(model.parameters())
        optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
        for value in values:
            begun.append(boundary.forward())
            scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
            boundary.gradient()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert boundary.ends()
        assert boundary.optimizers == ["SGD"]
        boundary.close()
    assert begun == [True] * 8
    assert torch.amp.GradScaler.step.__module__.startswith("torch"), "as it was"


def test_an_optimizer_that_never_steps_is_not_waited_for_for_ever(quiet: list[OptimizerBoundary]) -> None:
    model = nn.Linear(2, 1)
    boundary = OptimizerBoundary(model.parameters())
    quiet.append(boundary)
    optimizer = torch.optim.SGD(model.parameters())
    begun = 0
    for _ in range(100):
        begun += boundary.forward()
        boundary.gradient()
    assert begun == 1 + 99 // 32
    assert boundary.optimizers == []
    assert optimizer.param_groups
