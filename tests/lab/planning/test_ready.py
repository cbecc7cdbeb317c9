"""Where a training step ends: the scripts that people write, and what is counted and timed of each of their steps."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from loopback import LoopbackExchange, run_ranks
from measured import parameters
from thinwire.lab.analyze.trials import StepClock
from thinwire.lab.planning.ready import WARM_STEPS, DeviceClock, OptimizerBoundary, StepWatch, agree, typical
from thinwire.observe.step import median_of_slowest

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
    assert watch.boundary.optimizers == (["SGD"] if script.optimizers else [])
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


def test_steps_are_timed_without_those_that_warm_up() -> None:
    module, waited = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), []
    watch = StepWatch(module, dict(module.named_parameters()), lambda: waited.append(1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with torch.no_grad():
        module(torch.ones(1, 4))  # is no step
    for _ in range(WARM_STEPS + 5):
        optimizer.zero_grad()
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    times = watch.close()
    assert times.shape == (5, 6)
    assert len(waited) == WARM_STEPS + 5
    forward, ready, end = times[:, 0], times[:, 1:-1], times[:, -1]
    assert (forward > 0).all()
    assert (ready >= forward[:, None]).all()
    assert (end >= ready.amax(1)).all()
    module(torch.ones(1, 4)).sum().backward()  # nobody watches any more
    assert watch.num_steps == WARM_STEPS + 5


def test_moments_of_a_gpu_are_read_when_they_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        moments, has_come = iter((1000.0, 1250.0, 1500.0, 1750.0, 2000.0)), False

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.milliseconds = next(self.moments)

        def elapsed_time(self, later: Any) -> float:
            assert self.has_come
            return later.milliseconds - self.milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(Event, "has_come", True))
    clock = DeviceClock(torch.device("cuda"))
    clock.begin()
    clock.start()
    clock.ready("b")
    clock.ready("a")
    step = clock.finish()
    assert (step.began, step.started, step.ready, step.ended) == (0.0, 0.25, {"b": 0.5, "a": 0.75}, 1.0)
    assert step.moment("unused") == 0.75


def test_the_typical_step_is_in_the_order_of_gradients() -> None:
    """Forward 1 s; gradients after 3, 2 and 2 s, of which the last registered comes first; 4 s in all."""
    step = torch.tensor([1.0, 3.0, 2.0, 2.0, 4.0], dtype=torch.float64)
    ready = typical(
        median_of_slowest([torch.cat([step, 100 * step, step]).tolist()], 5), parameters([(1,), (2,), (3,)])
    )
    assert [parameter.shape for parameter in ready.parameters] == [(3,), (2,), (1,)]
    assert ready.backward_seconds == (1.0, 0.0, 1.0)
    assert (ready.forward_seconds, ready.rest_seconds) == (1.0, 1.0)


def test_ranks_agree_on_the_slowest() -> None:
    def work(exchange: LoopbackExchange) -> Any:
        mine = torch.tensor([[1.0, 2.0 + exchange.rank, 5.0]], dtype=torch.float64)
        return agree(exchange, mine, parameters([(1,)]))

    results = [outcome.get() for outcome in run_ranks(3, work)]
    assert results[0].backward_seconds == (3.0,)
    assert results[0] == results[1] == results[2]


def test_without_steps_there_is_nothing_to_agree_on() -> None:
    def work(exchange: LoopbackExchange) -> Any:
        return agree(exchange, torch.empty(0, 3), parameters([(1,)]))

    with pytest.raises(ValueError, match="no training step was measured"):
        run_ranks(1, work)[0].get()


def test_gradients_are_sampled_while_steps_warm_up() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    watch = StepWatch(module, dict(module.named_parameters()), lambda: None)
    seen = []
    for step in range(WARM_STEPS + 2):
        module.zero_grad()
        module(torch.full((1, 4), float(step + 1))).sum().backward()
        seen.append(
            torch.cat([entry.grad.flatten() for entry in reversed(list(module.parameters())) if entry.grad is not None])
        )
    watch.close()
    assert torch.equal(watch.sample.values[torch.float32], seen[WARM_STEPS - 1])
    assert watch.sample.taken == 4 * WARM_STEPS


def test_gradients_that_are_synchronized_late_are_sampled_when_they_are() -> None:
    """As under DDP with accumulation, where `take` is called in the last of so many passes alone."""
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    named = dict(module.named_parameters())
    watch = StepWatch(module, named, lambda: None, samples=False)
    seen = torch.empty(0)
    for step in range(2 * WARM_STEPS + 2):
        module(torch.full((1, 4), float(step + 1))).sum().backward()
        if step in (WARM_STEPS, 2 * WARM_STEPS):
            grads = {name: entry.grad.clone() for name, entry in named.items() if entry.grad is not None}
            for name, gradient in grads.items():
                watch.take(name, gradient)
            if step == WARM_STEPS:
                seen = torch.cat([gradient.flatten() for gradient in reversed(grads.values())])
    watch.close()
    assert torch.equal(watch.sample.values[torch.float32], seen), "whole, and once"
