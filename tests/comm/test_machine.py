"""The measured machine: in any default dtype, with few bytes, and believed only where it can be."""

from __future__ import annotations

import pytest
import torch

from loopback import LoopbackExchange, run_ranks
from thinwire.comm import machine
from thinwire.comm.machine import Machine, measure
from thinwire.sums.cost import Demand

MOST_BYTES = 2_000_000


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_is_measured_whatever_the_default_dtype_is(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        outcomes = run_ranks(2, measure)
        machines = [outcome.get() for outcome in outcomes]
    finally:
        torch.set_default_dtype(torch.float32)
    assert machines[0] == machines[1]
    assert machines[0].is_possible
    assert all(0 < outcome.traffic.sent_bytes <= MOST_BYTES for outcome in outcomes)


def test_a_clock_that_stands_still_is_no_machine() -> None:
    def work(exchange: LoopbackExchange) -> Machine | None:
        return measure(exchange, clock=lambda: 1.0)

    outcomes = run_ranks(3, work)
    assert [(outcome.result, outcome.error) for outcome in outcomes] == [(None, None)] * 3
    assert all(outcome.traffic.sent_bytes <= MOST_BYTES for outcome in outcomes)


def test_what_steps_showed_is_believed_and_not_a_faster_probe() -> None:
    probed = Machine(1e-3, 1e-3, 1e-9, 2e-9, *[1e-8] * 7)
    assert probed.slowed(1e-10) == probed
    slow = probed.slowed(8e-8)
    assert (slow.byte_seconds, slow.reduced_byte_seconds) == (8e-8, 8e-8)


def test_no_counts_are_no_division_by_zero() -> None:
    assert Demand.of([], 10, 4, 4).held == 0.0
    assert Demand.of([3.0], 10, 4, 4).union == 3.0


@pytest.mark.parametrize("world_size", [1, 4, 16])
def test_a_message_costs_the_same_however_many_owners_share_the_rows(
    monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """Each of the three jobs handles one message for each owner, in a second each."""

    def three_jobs(num_ids: int, world_size: int, width: int) -> tuple[float, float, float]:
        assert num_ids >= world_size
        return (float(world_size),) * 3

    monkeypatch.setattr(machine, "_three_jobs", three_jobs)
    part_seconds, *_ = machine.kernel_seconds(world_size)
    assert part_seconds == 3.0
