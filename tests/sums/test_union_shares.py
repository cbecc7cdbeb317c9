"""Rows of a union, dealt to ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sums.laws.cases import random_ids
from thinwire.sums import union_shares


@given(st.integers(1, 9), st.integers(0, 2**31), st.sampled_from([0.02, 0.3, 1.0]))
def test_rows_are_dealt_evenly_and_to_ranks_that_hold_them(world_size: int, seed: int, density: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = [random_ids(200, density, generator) for _ in range(world_size)]
    union = torch.cat(ids).unique()
    held = [torch.searchsorted(union, part) for part in ids]
    owned = union_shares.deal(held, union.numel())
    quota = -(-union.numel() // world_size)
    assert torch.equal(torch.cat(owned).sort().values, torch.arange(union.numel()))
    assert all(torch.equal(rows, rows.sort().values) and rows.numel() <= quota for rows in owned)
    strangers = sum(int((~torch.isin(rows, held[rank])).sum()) for rank, rows in enumerate(owned))
    assert not strangers or max(rows.numel() for rows in owned) == quota, "only what is too much for a holder"


def test_rows_that_one_rank_alone_holds_are_dealt_to_it() -> None:
    held = [torch.tensor([0, 3, 4]), torch.tensor([1, 4, 6]), torch.tensor([2, 4, 5])]
    assert [rows.tolist() for rows in union_shares.deal(held, 7)] == [[0, 3, 4], [1, 6], [2, 5]]
    held = [torch.arange(9), torch.tensor([8])]
    assert [rows.tolist() for rows in union_shares.deal(held, 9)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
