"""Sums block by block: equal to the reference wherever a block ends, and for pieces that do not increase."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import kernels

pytest.importorskip("numba")

from thinwire.kernels import dispatch
from thinwire.kernels.cpu import rows as cpu_rows
from thinwire.kernels.cpu import sum as cpu_sum

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check(pieces: list[tuple[torch.Tensor, torch.Tensor]], scale: float) -> None:
    with kernels.using("reference"):
        ids, expected = kernels.sum_rows(pieces, scale)
    got_ids, got = cpu_rows.sum_rows(pieces, scale)
    assert torch.equal(ids, got_ids)
    assert got.dtype == expected.dtype
    assert torch.equal(expected.view(BITS[got.itemsize]), got.view(BITS[got.itemsize]))


@given(
    lists=st.lists(st.lists(st.integers(0, 40), max_size=30), min_size=1, max_size=4),
    increase=st.booleans(),
    width=st.sampled_from([1, 2, 5]),
    dtype=st.sampled_from(DTYPES),
    block_bytes=st.sampled_from([1, 24, 100, 1 << 18]),
    scale=st.sampled_from([1.0, 1 / 3]),
)
def test_a_sum_does_not_depend_on_its_blocks(
    lists: list[list[int]], increase: bool, width: int, dtype: torch.dtype, block_bytes: int, scale: float
) -> None:
    pieces = []
    for ids in lists:
        places = torch.tensor(sorted(ids) if increase else ids, dtype=torch.int64)
        pieces.append((places, torch.randn(len(ids), width).mul_(1000).to(dtype)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_sum, "BLOCK_BYTES", block_bytes)
        check(pieces, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_are_not_finite(dtype: torch.dtype) -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 3e38, 1e-40, 1.0])
    values = special.repeat_interleave(7).to(dtype)[:, None]
    others = special.repeat(7).to(dtype)[:, None]
    check([(torch.arange(49), values), (torch.arange(49), others)], 1.0)


def test_places_that_fall_from_block_to_block_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sum, "BLOCK_BYTES", 16)
    for dtype in DTYPES:
        values = torch.ones(3, 1, dtype=dtype)
        for places, whole in (([0, 50, 99], True), ([0, 99, 50], False), ([99, 98, 0], False)):
            total = cpu_sum.sum_increasing([(torch.tensor(places), values)], 100, 1, dtype, 1.0)
            assert (total is not None) == whole


def test_dtypes_that_numba_does_not_know_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a compiled kernel got what it does not know")

    names = ("mix", "deal", "gather_rows", "sum_rows_at", "pack_bits")
    monkeypatch.setattr(dispatch, "_module", lambda name: SimpleNamespace(**dict.fromkeys(names, refuse)))
    ids, values = torch.arange(4), torch.ones(4, 2, dtype=torch.float16)
    with kernels.using("numba"):
        assert kernels.mix(ids.int(), 0).dtype == torch.int32
        assert len(kernels.deal(ids.int(), 2, 0)) == 2
        assert torch.equal(kernels.gather_rows(values, ids.int()), values)
        assert torch.equal(kernels.sum_rows_at([(ids, values)], 4, 2, torch.float16), values)
        assert kernels.pack_bits(ids.int(), 8).tolist() == [15]
        with pytest.raises(AssertionError, match="does not know"):
            kernels.mix(ids, 0)


def test_pieces_may_be_strided() -> None:
    wide = torch.randn(50, 6)
    check([(torch.arange(100)[::2], wide[:, ::2]), (torch.arange(50), wide[:, 3:])], 0.5)
