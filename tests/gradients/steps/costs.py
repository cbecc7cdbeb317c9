"""Steps that take what is known of the costs of their jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thinwire.gradients.steps.fit import JobCosts
from thinwire.observe.step import JobTimes, Load, StepTimes

COSTS = JobCosts(
    job=1e-3, exact=2e-4, compressed=3e-4, exact_byte=8e-9, compressed_byte=1e-9, compressed_tensor=5e-4
)  # fmt: skip


def step_of(loads: Sequence[Load], gradients: Sequence[Load], waits: float = 0.0, late: float = 0.0) -> StepTimes:
    """A step with gradients every millisecond, whose jobs take what `COSTS` says, and longer if they wait for peers."""
    times = StepTimes(started=10.0)
    times.ready = {gradient.name: 10.0 + late + 1e-3 * place for place, gradient in enumerate(gradients, 1)}
    clock = 10.0
    for load in loads:
        job = _job(times, load)
        job.started, job.ended = clock, clock + waits + COSTS.of_job([load]) + COSTS.of_tensors(load)
        clock = job.ended
    times.ended = clock
    return times


def _job(times: StepTimes, load: Load) -> Any:
    times.jobs.append(JobTimes(load, 10.0))
    return times.jobs[-1]
