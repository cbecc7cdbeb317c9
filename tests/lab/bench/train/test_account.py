"""Seconds of a step by what they were spent on."""

from __future__ import annotations

from thinwire.lab.bench.train.account import covered_seconds


def test_intervals_in_flight_together_count_once() -> None:
    assert covered_seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0
