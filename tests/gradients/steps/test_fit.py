"""A profile of measured steps: costs that made the seconds are found again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gradients.steps.costs import COSTS, step_of
from thinwire.gradients.steps.fit import JobCosts, Measured
from thinwire.observe.step import Load


def test_costs_of_jobs_are_found_again() -> None:
    loads = [Load("", *numbers) for numbers in ((100, 0, 0), (90_000, 0, 0), (0, 6000, 1), (0, 80_000, 1))]
    loads += [Load("", 500, 90_000, 3), Load("", 700, 160_000, 9), Load("", 90_000, 6000, 1)]
    seconds = [COSTS.of_job([load]) + COSTS.of_tensors(load) for load in loads]
    found = JobCosts.fit(loads, seconds)
    for name in vars(COSTS):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=1e-6), name


def test_the_profile_takes_the_slowest_gradient_and_the_job_that_waited_for_nobody() -> None:
    alone = gradients = [Load("c", 0, 40_000, 1), Load("b", 400), Load("a", 0, 80_000, 1)]
    together = [replace(alone[0] + alone[1], name="x"), alone[2]]
    everything = [replace(alone[0] + alone[1] + alone[2], name="y")]
    told = []
    for waits, late in ((0.0, 5e-4), (2e-3, 0.0)):
        steps = [step_of(loads, gradients, waits, late) for loads in (alone, together, everything) for _ in range(3)]
        measured = Measured.of(gradients, steps)
        told.append(measured.numbers)
    profile = measured.profile(told)
    assert profile.names == ("c", "b", "a")
    assert profile.ready_seconds[1:] == pytest.approx([1.5e-3, 2.5e-3, 3.5e-3])
    for members in ((0, 1), (0, 1, 2)):
        load = sum((alone[place] for place in members[1:]), alone[members[0]])
        size = sum(profile.size_bytes[place] for place in members)
        assert profile.communicate(size) == pytest.approx(COSTS.of_job(alone) + COSTS.of_tensors(load))
    assert sum(profile.size_bytes) == pytest.approx(120_400)
    assert measured.in_bytes(profile).size_bytes == (40_000, 400, 80_000)
