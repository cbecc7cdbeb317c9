"""Compiled owners of ids against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.parity import assert_same, every_size, increasing, some_ids
from thinwire import kernels

pytestmark = pytest.mark.usefixtures("nothing_compiles_after_warm_up")


@pytest.mark.few(14)
@every_size
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64, 1000])
def test_deal(size: int, world_size: int) -> None:
    for seed in (0, 2**50 + 3):
        for ids in (torch.arange(size), some_ids(size // 3, size), some_ids(size // 3, 100 * size)):
            assert_same(lambda: kernels.deal(ids, world_size, seed))  # noqa: B023
            assert_same(lambda: kernels.dealt_ids(world_size - 1, ids, world_size, seed))  # noqa: B023


@given(increasing, st.integers(1, 70), st.integers(0, 2**64 - 1), st.sampled_from([0, 2**31, 2**40, 2**52, 2**61]))
def test_deal_of_any_ids(ids: Tensor, world_size: int, seed: int, first: int) -> None:
    assert_same(lambda: kernels.deal(ids + first, world_size, seed))
    dealt = kernels.deal(ids + first, world_size, seed)
    back = [kernels.dealt_ids(owner, positions, world_size, seed) for owner, (positions, _) in enumerate(dealt)]
    assert torch.equal(torch.cat(back).sort().values, ids + first)


@settings(max_examples=min(50, settings.default.max_examples))
@given(st.integers(1, 300), st.lists(st.integers(2**51, 2**52 + 2**20), min_size=1, max_size=20, unique=True))
def test_deal_divides_exactly_where_floats_end(world_size: int, large: list[int]) -> None:
    near = torch.tensor([id // world_size * world_size + step for id in large for step in (-1, 0, 1)]).unique()
    assert_same(lambda: kernels.deal(near, world_size, 1))


@every_size
def test_hashes(size: int) -> None:
    for ids in (torch.arange(size), torch.randint(0, 2**62, (size,))):
        for seed in (0, 5, 2**63 + 1):
            assert_same(lambda: kernels.mix(ids, seed))  # noqa: B023
            assert_same(lambda: kernels.owner_by_hash(ids, 7, seed))  # noqa: B023


@every_size
def test_group_by_owner(size: int) -> None:
    assert_same(lambda: kernels.group_by_owner(torch.arange(size) * 7919 % 5, 6))
