"""Numbers for people."""

from __future__ import annotations

import pytest

from thinwire.lab.text import counted, figure


@pytest.mark.parametrize(("number", "expected"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (11, "11 ranks")])
def test_only_one_is_singular(number: int, expected: str) -> None:
    assert counted(number, "rank") == expected


@pytest.mark.parametrize(("value", "expected"), [(0.0, "0.00"), (1.234, "1.23"), (None, "-")])
def test_what_is_not_known_is_a_dash(value: float | None, expected: str) -> None:
    assert figure(value, ".2f") == expected
