"""Numbers of things."""

from __future__ import annotations

import pytest

from thinwire.lab.text import counted


@pytest.mark.parametrize(("number", "expected"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (11, "11 ranks")])
def test_only_one_is_singular(number: int, expected: str) -> None:
    assert counted(number, "rank") == expected
