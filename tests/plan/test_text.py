"""Numbers for people: the unit suits, and what is shown is the number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.plan.text import format_bytes, format_seconds

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


def read(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit]


@given(st.floats(1e-4, 1e4))
def test_seconds_are_those_that_are_shown(seconds: float) -> None:
    assert read(format_seconds(seconds)) == pytest.approx(seconds, rel=0.051)


@given(st.integers(0, 10**14))
def test_bytes_are_those_that_are_shown(size_bytes: int) -> None:
    assert read(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.51)
    if size_bytes >= 10**6:
        assert read(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.051)


def test_units_begin_at_one() -> None:
    assert [format_seconds(seconds) for seconds in (1.0, 0.5, 1e-3, 5e-4)] == ["1.00 s", "500.0 ms", "1.0 ms", "500 us"]
    sizes = [format_bytes(size) for size in (1e9, 5e8, 1e6, 5e5, 1e3, 999, 0)]
    assert sizes == ["1.00 GB", "500.0 MB", "1.0 MB", "500 kB", "1 kB", "999 B", "0 B"]
