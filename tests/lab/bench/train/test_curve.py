"""Loss curves: smoothed, and when they reach a loss."""

from __future__ import annotations

import math

import pytest

from thinwire.lab.bench.train.curve import LossCurve, evaluation_steps, reached_at, smoothed, window_of
from thinwire.lab.bench.train.rows import against_dense


def test_smoothing_is_as_wide_as_the_end_of_a_run() -> None:
    assert smoothed([3.0, 1.0, 2.0], 2) == [3.0, 2.0, 1.5]
    assert evaluation_steps(300)[-3:] == (280, 290, 300)
    assert window_of(300) == 3
    assert evaluation_steps(4) == (1, 2, 3, 4)
    assert window_of(1) == 1


def test_time_to_a_loss() -> None:
    curve = LossCurve((1, 2, 3, 4), (10.0, 20.0, 30.0, 40.0), (4.0, 3.0, 1.0, 0.5), planned_steps=3)
    assert curve.final_loss == 1.0, "the fourth step is extra"
    assert curve.seconds_to(4.5) == 10.0
    assert curve.seconds_to(2.0) == 25.0
    assert curve.seconds_to(curve.final_loss) == 30.0
    assert curve.seconds_to(0.4) is None
    assert LossCurve((1, 2), (1.0, 2.0), (math.nan, 1.0), 2).seconds_to(1.0) == 2.0


def test_the_dense_run_reaches_its_own_final_loss_at_its_end() -> None:
    losses = tuple(5.0 - 0.1 * i for i in range(30))
    curve = LossCurve(evaluation_steps(300), tuple(range(30)), losses, 300)
    assert curve.seconds_to(curve.final_loss) == 29


@pytest.mark.parametrize(("above", "reached"), [(5e-6, True), (0.0009, True), (0.0011, False)])
def test_a_loss_within_a_thousandth_of_that_of_ddp_counts_as_reached(above: float, reached: bool) -> None:
    """Another seed makes a larger difference: 5e-6 above is not "never"."""
    curve = LossCurve((1, 2, 3), (1.0, 2.0, 3.0), (4.0, 3.0, 2.0 * (1 + above)), planned_steps=3)
    row = against_dense({"final_loss": curve.final_loss}, curve, dense_loss=2.0)
    assert (row["seconds_to_dense_loss"] is not None) is reached
    assert reached_at(-2.0) > -2.0, "also a loss that is a negative number"
