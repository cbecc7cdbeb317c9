"""Compiled unions of ids against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.parity import assert_same, every_size, increasing, some_ids
from thinwire import kernels

pytestmark = pytest.mark.usefixtures("nothing_compiles_after_warm_up")


@every_size
@pytest.mark.parametrize("num_pieces", [1, 2, 8, 20])
@pytest.mark.parametrize("spread", [1, 10, 10**7])
def test_union_positions(size: int, num_pieces: int, spread: int) -> None:
    """By a bitmap and by a merge; up to 10^12, so beyond 2^31 with few ids."""
    pieces = [some_ids(size // 2, size * spread) for _ in range(num_pieces)]
    assert_same(lambda: kernels.union_positions(pieces, size * spread))


@given(st.lists(increasing, min_size=1, max_size=5), st.sampled_from([5001, 2**33, 2**61]))
def test_union_of_any_ids(pieces: list[Tensor], size: int) -> None:
    assert_same(lambda: kernels.union_positions(pieces, size))
    assert_same(lambda: kernels.union_positions([ids + (size - 5001) for ids in pieces], size))


@given(st.lists(st.lists(st.integers(0, 300), max_size=30), min_size=1, max_size=4), st.sampled_from([301, 2**50]))
def test_union_of_repeated_and_unsorted_ids(lists: list[list[int]], size: int) -> None:
    pieces = [torch.tensor(ids, dtype=torch.int64) for ids in lists]
    assert_same(lambda: kernels.union_positions(pieces, size))
