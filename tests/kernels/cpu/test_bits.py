"""The ones of machine words, against Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("numba")
from thinwire.kernels.cpu.bits import ROOM, count_ones, list_ones

UNTOUCHED = -7


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
@example([0, 2**64 - 1, 2**63, 1])
def test_ones_are_counted_and_listed_in_order(words: list[int]) -> None:
    ones = [64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    array = np.array(words, dtype=np.uint64).view(np.int64)
    assert count_ones(array) == len(ones)
    positions = np.full(len(ones) + ROOM + 1, UNTOUCHED, dtype=np.int64)
    list_ones(array, positions)
    assert positions[: len(ones)].tolist() == ones
    assert positions[-1] == UNTOUCHED, "no more spare entries are written than there have to be"
