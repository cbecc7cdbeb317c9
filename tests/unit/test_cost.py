"""Costs are what is sent (`test_conformance` holds them to the byte); here their closed forms and the bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import schemes
from thinwire.schemes import Scheme
from thinwire.sync import cost
from thinwire.sync.exchange import ring_all_reduce_bytes
from thinwire.wire import Header

HEADER = Header.NUM_BYTES
named = pytest.mark.parametrize("scheme", schemes.NAMED.values(), ids=schemes.NAMED.keys())


@named
def test_one_rank_sends_nothing(scheme: Scheme) -> None:
    assert cost.sent_bytes(scheme, [torch.arange(5)], 10, 4, torch.float32) == [0]
    assert cost.expected_bytes(scheme, 1, 10, 16, 5, 5) == 0
    assert cost.value_lower_bound_bytes([torch.arange(5)], 16) == 0


def test_dense_is_a_ring() -> None:
    """2 (n - 1) / n of the tensor, rounded up, and one header to each peer to agree."""
    ids = [torch.arange(3)] * 4
    assert cost.sent_bytes(schemes.DENSE, ids, 100, 8, torch.float32) == [3 * HEADER + 2 * 3 * 3200 // 4] * 4
    assert cost.sent_bytes(schemes.DENSE, ids[:3], 5, 1, torch.bfloat16) == [2 * HEADER + 14] * 3  # 13.3 bytes
    assert ring_all_reduce_bytes(10, 1) == 0


def test_agsparse_by_hand() -> None:
    """Two and no rows of 3 floats, to two peers: 12 bytes of values and 1 of index a row, padded to 8."""
    ids = [torch.tensor([1, 7]), torch.empty(0, dtype=torch.int64), torch.tensor([2])]
    sent = cost.sent_bytes(schemes.AGSPARSE, ids, 200, 3, torch.float32)
    assert sent == [2 * (HEADER + 32), 2 * HEADER, 2 * (HEADER + 16)]


def test_sparse_ps_by_hand() -> None:
    """Rows 0 to 9 belong to rank 0, 10 to 19 to rank 1. Push: what the other owns; pull: the sum of what one owns."""
    ids = [torch.tensor([1, 15, 16]), torch.tensor([1, 2])]
    push = [HEADER + 2 * 9 + 6, HEADER + 2 * 9 + 6]  # two rows of 8 + 1 bytes, padded to 24
    pull = [HEADER + 2 * 9 + 6, HEADER + 2 * 9 + 6]  # rows 1 and 2; rows 15 and 16
    assert cost.sent_bytes(schemes.SPARSE_PS, ids, 20, 2, torch.float32) == [
        a + b for a, b in zip(push, pull, strict=True)
    ]


@pytest.mark.parametrize("world_size", [2, 4, 8])
@named
def test_expected_is_sent_where_rows_are_dealt_evenly(scheme: Scheme, world_size: int) -> None:
    """Every id of every 8th group of ``world_size``: each owner has one of each group, in push and in pull."""
    groups = torch.arange(0, 4096, 8)
    ids = (groups[:, None] * world_size + torch.arange(world_size)).flatten()
    num_rows = 4096 * world_size
    sent = cost.sent_bytes(scheme, [ids] * world_size, num_rows, 8, torch.float32)
    expected = cost.expected_bytes(scheme, world_size, num_rows, 32, ids.numel(), ids.numel())
    assert sent == [expected] * world_size


@named
@given(st.integers(2, 8), st.integers(1, 200), st.integers(0, 1000), st.floats(0, 1))
def test_nobody_sends_fewer_bytes_than_the_bound(
    scheme: Scheme, world_size: int, num_rows: int, seed: int, share: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = [(torch.rand(num_rows, generator=generator) < share).nonzero().flatten() for _ in range(world_size)]
    sent = cost.sent_bytes(scheme, ids, num_rows, 3, torch.float32)
    assert sum(sent) / world_size >= cost.value_lower_bound_bytes(ids, 12)


def test_the_bound_by_hand() -> None:
    """Row 1 is held by both ranks (each sends it once), row 2 by one (which sends it): 3 rows, 1.5 a rank."""
    assert cost.value_lower_bound_bytes([torch.tensor([1, 2]), torch.tensor([1])], 10) == 15.0
    everywhere = [torch.arange(10)] * 4
    assert cost.value_lower_bound_bytes(everywhere, 8) == 10 * 8 * (4 + 4 - 2) / 4
    empty = [torch.empty(0, dtype=torch.int64)] * 3
    assert cost.value_lower_bound_bytes(empty, 8) == 0


def test_the_bound_is_reached_by_zen_but_for_ids_and_headers() -> None:
    """Full overlap, wide rows: ZEN's bytes are within 3 % of the bound."""
    ids = [torch.arange(0, 40_000, 4)] * 4
    sent = cost.sent_bytes(schemes.ZEN, ids, 40_000, 256, torch.float32)
    assert max(sent) < 1.03 * cost.value_lower_bound_bytes(ids, 1024)
