"""Ranks that meet in any state: who has ended a step, holds its mean, has made which micro-batches, or is new."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from loopback import LoopbackExchange, run_ranks
from thinwire.errors import MismatchError, ThinwireError
from thinwire.outer.members import Roll
from thinwire.reproducible import Steps
from thinwire.reproducible.digests import digest, of_state
from thinwire.reproducible.steps import ElasticStep
from threaded import LoopbackLane

COUNT = 6
K = 4
STATES = {"making": (K, False), "holds the mean": (K, True), "has ended": (K + 1, False), "new": (0, False)}
"""The number of the step, and whether the rank is prepared for its end."""


def possible(states: tuple[str, ...]) -> bool:
    """Who has ended a step knows that all hold its mean."""
    return set(states) != {"new"} and not {"making", "has ended"} <= set(states)


def model_of(number: int) -> nn.Module:
    """The parameters before the sums of a step."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(number)
        model.bias.fill_(-number)
    return model


MEETINGS = [found for found in itertools.product(STATES, repeat=3) if possible(found)]


@pytest.mark.few(20)
@pytest.mark.parametrize("states", MEETINGS, ids=", ".join)
def test_who_meets_agrees_on_the_step_and_deals_what_is_missing(states: tuple[str, ...]) -> None:
    steps = []
    for rank, state in enumerate(states):
        number, is_prepared = STATES[state]
        one = Steps(model_of(number), COUNT, 20, optimizer=None)
        one._model, one.number, one._is_prepared = one._gradients._model, number, is_prepared
        one._done = {rank, rank + 3} if state in ("making", "holds the mean") else set()
        steps.append(one)
    new = frozenset(rank for rank, state in enumerate(states) if state == "new")
    source = next(rank for rank in range(3) if rank not in new)

    def meet(exchange: LoopbackExchange) -> tuple[str]:
        lane = LoopbackLane(exchange)
        steps[exchange.rank]._enter(lane, Roll(source, new, 0, True))
        return ("",)

    for outcome in run_ranks(3, meet):
        outcome.get()
    # Who has complete means ends the step; all others are in the one that comes.
    targets = {one.number + one._is_complete for one in steps}
    assert len(targets) == 1, targets
    (target,) = targets
    assert target == (K if "making" in states or (new and "has ended" not in states) else K + 1)
    assert not any(one._is_prepared for one in steps)
    kept = [index for one in steps if one.number == target for index in one._done]
    dealt = [index for one in steps for index in one._queue]
    assert sorted([*kept, *dealt]) == list(range(COUNT)), "each once"
    for rank in new:
        assert steps[rank].number == target
        assert not steps[rank]._done
        assert digest(steps[rank]._model) == digest(model_of(target)), "the state of before the step that comes"


def on_two(make: Callable[[int], Steps], job: Callable[[Steps, LoopbackLane], Any]) -> list[Any]:
    """Run a job of two ranks' steps, and return its results or errors."""
    steps = [make(rank) for rank in range(2)]

    def run(exchange: LoopbackExchange) -> Any:
        try:
            return job(steps[exchange.rank], LoopbackLane(exchange))
        except ThinwireError as error:
            return error

    return [outcome.get() for outcome in run_ranks(2, run)]


def training(rank: int, rate: float, **options: Any) -> Steps:
    """A rank that has made its half of the first step."""
    model = model_of(3)
    steps = Steps(model, 2, 9, optimizer=torch.optim.Adam(model.parameters(), rate), **options)
    steps._queue = [rank]
    it = steps._indices()
    next(it)
    model(torch.ones(1, 2)).sum().backward()
    steps._gradients.add()
    steps._done.add(rank)
    return steps


def test_other_learning_rates_are_found_before_they_are_used() -> None:
    """A scheduler that a rank which joined has begun again."""
    for error in on_two(lambda rank: training(rank, 0.1 + 0.1 * rank), lambda steps, lane: steps._sum(lane)):
        assert isinstance(error, MismatchError)
        assert "ranks [1] have other learning rates" in str(error)
        assert "step.number" in str(error)
    for found in on_two(lambda rank: training(rank, 0.1), lambda steps, lane: steps._sum(lane)):
        assert len(found) == 2


def test_other_parameters_are_found_in_a_checked_step() -> None:
    def make(rank: int) -> Steps:
        steps = training(rank, 0.1)
        steps._checked = 0
        with torch.no_grad():
            steps._model.weight[0, 0] += rank
        return steps

    for error in on_two(make, lambda steps, lane: steps._sum(lane)):
        assert "or other parameters, than rank 0" in str(error)


@pytest.mark.parametrize("meetings", [1, 2], ids=["let in", "let in by a generation that failed, and again"])
def test_a_rank_that_was_given_up_ends_its_step_with_zeros(meetings: int) -> None:
    """And takes the state of a peer once more before the next, because its script steps the optimizer in between."""

    def make(rank: int) -> Steps:
        steps = training(rank, 0.1)
        steps.number = 5 - 4 * rank
        if rank == 0:
            steps._model(torch.ones(1, 2)).sum().backward()
            steps._states[0].step()
        return steps

    step_of: dict[int, ElasticStep] = {}

    def meet(steps: Steps, lane: LoopbackLane) -> Steps:
        step_of[lane.rank] = ElasticStep(steps)
        for _ in range(meetings):
            steps._enter(lane, Roll(0, frozenset([1]), 0, True))
        return steps

    there, back = on_two(make, meet)
    assert there._given is None
    assert back._given is not None
    assert back.number == 5
    assert step_of[1].number == 1, "its script saves by this number"
    assert not step_of[1].is_made
    back._meet = lambda error: None
    back._gradients.deliver_zeros()
    assert all(not entry.grad.any() for entry in back._model.parameters())
    back._states[0].step()
    step = next(iter(back))
    assert step.number == 5
    assert digest(back._model) == digest(there._model)
    assert of_state(back._state_dicts()) == of_state(there._state_dicts())
