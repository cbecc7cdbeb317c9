"""Rates on the wire."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.lab.bench.checkpoint.traffic import TrafficSample, rates


@given(st.lists(st.tuples(st.integers(0, 50_000), st.floats(0, 1)), min_size=2, max_size=40))
def test_rates_lose_no_byte(steps: list[tuple[int, float]]) -> None:
    """Of what went over the link between the first and the last sample, whatever part of it was checkpoints."""
    link = list(itertools.accumulate(count for count, _ in steps))
    own = list(itertools.accumulate(int(count * share / 1.1) for count, share in steps))
    samples = [TrafficSample(0.01 * i, a, b) for i, (a, b) in enumerate(zip(link, own, strict=True))]
    middles, others, checkpoints = rates(samples, 0.0, samples[-1].at)
    width = samples[-1].at / len(middles)
    total = sum(a + b for a, b in zip(others, checkpoints, strict=True)) * width / 8e-6
    assert total == pytest.approx(link[-1] - link[0], rel=1e-6, abs=1e-3)
    assert min(others) >= 0.0
