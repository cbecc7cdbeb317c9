"""What is decided at the end of a step: one thing at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from thinwire.gradients.steps.steps import Decisions, StepLoop
from thinwire.observe.step import Clock


class Decision:
    """A decision whose trial times steps, or not."""

    def __init__(self, is_timed: bool) -> None:
        self.trial, self.steps = SimpleNamespace(is_timed=is_timed), 0

    def finish_step(self, *_: object) -> None:
        self.steps += 1


def nothing(*_: object) -> Any:
    return ()


@pytest.mark.parametrize("timed", ["plan", "codes", "neither"])
def test_a_plan_and_codes_are_not_compared_in_the_same_steps(timed: str) -> None:
    plan, codes = Decision(timed == "plan"), Decision(timed == "codes")
    waits = {"finish_left": lambda computed: None, "finish": lambda: 0.0, "take_in_flight": nothing}
    plug: Any = SimpleNamespace(**waits, deliver=nothing, book=nothing)
    gradients = SimpleNamespace(choices={}, in_rank_order=True, records={})
    sums: Any = SimpleNamespace(finish_step=nothing, gradients=gradients)
    lane: Any = SimpleNamespace(rank=1, is_closed=False)
    decided: Any = Decisions(plan, codes)
    loop = StepLoop(model := nn.Linear(1, 1), 2, [lane], Clock(), sums, plug, None, decided)
    loop.finish()
    assert model is not None
    assert (plan.steps, codes.steps) == {"plan": (1, 0), "codes": (0, 1), "neither": (1, 1)}[timed]
