"""Rows of a training: steps, losses and bytes of each method."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from thinwire.lab.bench.jobs.named import get_job
from thinwire.lab.bench.train.account import Account
from thinwire.lab.bench.train.rank import JobTraining, RankRecord, StepRecord
from thinwire.lab.bench.train.rows import against_rank_order, bits_per_value, curve_of, row_of


def test_the_first_step_is_told_apart() -> None:
    """It counts as a median step in the clock of the curve, and has a field of its own."""
    seconds = [9.0, 1.0, 3.0]
    records = [
        RankRecord(
            parameters=1000,
            steps=[StepRecord(each - late, late, 0.0, 0.1, None, 0.2, 4000.0 + rank) for each in seconds],
            held_out_losses=[(1, 3.0), (2, 2.0), (3, 1.0)],
        )
        for rank, late in enumerate((0.25, 0.75))
    ]
    training = JobTraining(get_job("lstm"), "top_k", seed=0, steps=3)
    assert curve_of(training, records).seconds == (3.0, 4.0, 7.0)
    made = row_of(training, records, link_mbit=None)
    assert (made["first_step_seconds"], made["step_seconds_median"]) == (9.0, 3.0)
    assert (made["exposed_seconds"], made["encode_seconds"], made["wire_seconds"]) == (0.5, 0.1, None)
    assert (made["bytes_sent_max"], made["bytes_source"], made["bytes_link_max"]) == (4001, "counted", None)


def test_a_step_of_an_outer_loop_is_a_mean_over_rounds() -> None:
    """Of 32 steps 31 have no round: a median would be a step that sends nothing."""
    waits = [2.0, 0.0, 0.0, 0.0, 0.4]
    steps = [StepRecord(1.0, wait, 0.5, 0.0, wait, 0.0, 1000.0 * (wait > 0)) for wait in waits]
    training = JobTraining(get_job("lstm"), "diloco", seed=0, steps=5)
    loop = RankRecord(parameters=1000, steps=steps, held_out_losses=[(5, 1.0)], account=Account(rounds=2.0))
    made, plain = row_of(training, [loop], None), row_of(training, [replace(loop, account=Account())], None)
    assert (made["rounds"], made["exposed_seconds"], made["step_seconds"]) == (2.0, pytest.approx(0.1), 1.6)
    assert (plain["rounds"], plain["exposed_seconds"], plain["step_seconds"]) == (None, 0.0, 1.5)
    assert made["bytes_sent_max"] == plain["bytes_sent_max"] == 400


def test_the_factor_of_a_ring_is_divided_out() -> None:
    for ranks, width in itertools.product((2, 3, 8), (4, 2)):
        sent = [2 * (ranks - 1) * width * 5040 // ranks] * ranks
        assert bits_per_value(sent, 5040) == pytest.approx(16 * width)
    assert bits_per_value([7], 5) is None
    assert bits_per_value([0, 0], 0) is None


def test_rows_are_compared_with_the_sum_in_rank_order() -> None:
    def row(method: str, losses: str, parameters: str) -> dict[str, Any]:
        return {"method": method, "losses_digest": losses, "parameters_digest": parameters}

    rows = [row("ddp", "a", "x"), row("rank_order", "b", "y"), row("lossless", "b", "y"), row("bf16", "b", "z")]
    assert [each["bitwise_rank_order"] for each in against_rank_order(rows)] == [False, True, True, False]
    assert [each["bitwise_rank_order"] for each in against_rank_order(rows[:1])] == [None]
