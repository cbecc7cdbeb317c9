"""Compiled kernels of rows against the reference, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.parity import JIT, LARGE, assert_same, check_same, every_fill, every_size, some_ids, twins
from thinwire import kernels
from thinwire.rows.sparse import SUPPORTED_DTYPES

pytestmark = pytest.mark.usefixtures("nothing_compiles_after_warm_up")

every_dtype = pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)


def some_rows(num_rows: int, width: int, dtype: torch.dtype, density: float) -> Tensor:
    dense = torch.randn(num_rows, width).to(dtype)
    dense[torch.rand(num_rows) >= density] = 0
    return dense


def layouts(rows: Tensor) -> dict[str, Tensor]:
    """The same matrix as it may lie in memory."""
    num_rows, width = rows.shape
    shifted = torch.empty(rows.numel() + 1, dtype=rows.dtype)[1:].view(num_rows, width).copy_(rows)
    strided = torch.empty(num_rows, width + 3, dtype=rows.dtype)[:, 1 : width + 1].copy_(rows)
    transposed = rows.t().contiguous().t()
    raw = bytearray(rows.numel() * rows.element_size() + 9)
    unaligned = torch.frombuffer(raw, dtype=rows.dtype, offset=1, count=rows.numel()) if rows.numel() else rows
    return {
        "contiguous": rows,
        "odd offset": shifted,
        "strided": strided,
        "transposed": transposed,
        "unaligned": unaligned.view(num_rows, width).copy_(rows),
    }


@every_size
@every_dtype
@every_fill
def test_nonzero_rows(size: int, dtype: torch.dtype, density: float) -> None:
    for width in (1, 2, 3, 8, 19):
        dense = some_rows(size // width, width, dtype, density)
        assert_same(lambda: kernels.nonzero_rows(dense))  # noqa: B023


def test_nonzero_rows_finds_more_than_the_first_rows_promise() -> None:
    """Memory for ids is guessed from the density so far."""
    size = 3 * LARGE
    for start in (0, size // 2, size - 100):
        dense = torch.zeros(size, 1)
        dense[start:] = 1
        assert_same(lambda: kernels.nonzero_rows(dense))  # noqa: B023


@every_dtype
@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_rows_wherever_they_lie(dtype: torch.dtype, width: int) -> None:
    rows = some_rows(700, width, dtype, 0.3)
    ids = some_ids(300, 700)
    for name, dense in layouts(rows).items():
        expected, got = twins(lambda: kernels.nonzero_rows(dense))  # noqa: B023
        assert torch.equal(expected, got), name
        assert torch.equal(expected, rows.float().ne(0).any(1).nonzero().flatten()), name
        assert_same(lambda: kernels.gather_rows(dense, ids))  # noqa: B023
        piece = (ids, dense[: ids.numel()])
        assert_same(lambda: kernels.sum_rows([piece, piece], 0.3))  # noqa: B023
    for name, target in layouts(torch.zeros_like(rows)).items():
        with kernels.using("numba"):
            kernels.scatter_rows(target, ids, rows[: ids.numel()])
        assert torch.equal(target, torch.zeros_like(rows).index_copy_(0, ids, rows[: ids.numel()])), name


@every_size
@every_dtype
@pytest.mark.parametrize("width", [0, 1, 2, 3, 16])
def test_gather_and_scatter(size: int, dtype: torch.dtype, width: int) -> None:
    rows = torch.randn(size, width).to(dtype)
    places = torch.randint(0, max(size, 1), (size // 2,))
    assert_same(lambda: kernels.gather_rows(rows, places))
    payload = torch.zeros(places.numel() * width * dtype.itemsize + 8, dtype=torch.uint8)
    out = payload[: places.numel() * width * dtype.itemsize].view(dtype).view(places.numel(), width)
    assert_same(lambda: kernels.gather_rows(rows, places, out).clone())
    ids = some_ids(size // 2, size)
    assert_same(lambda: kernels.scatter_rows(rows.clone(), ids, rows[: ids.numel()]))


@pytest.mark.parametrize("wrong", [-1, 50])
def test_a_row_that_is_not_there_is_an_error_not_a_crash(wrong: int) -> None:
    rows, ids = torch.zeros(50, 2), torch.tensor([3, wrong])
    calls = [
        lambda: kernels.gather_rows(rows, ids),
        lambda: kernels.scatter_rows(rows, ids, torch.zeros(2, 2)),
        lambda: kernels.sum_rows_at([(ids, torch.zeros(2, 2))], 50, 2, torch.float32),
        lambda: kernels.union_positions([ids], 50),
        lambda: kernels.pack_bits(ids, 50),
        lambda: kernels.elias_fano_encode(ids * 10**6, 50),
        lambda: kernels.group_by_owner(ids, 50),
    ]
    with kernels.using("numba"):
        for call in calls:
            with pytest.raises(IndexError, match=r"not in \[0, 50\)|out of range|below 50"):
                call()


@every_size
@every_dtype
def test_sum_rows(size: int, dtype: torch.dtype) -> None:
    for width, scale in ((1, 1.0), (3, 0.125), (40, 1 / 3)):
        num_rows = max(1, size // width)
        pieces = []
        for exponent in (0, 3, -4, 1):
            ids = some_ids(num_rows // 2, num_rows)
            pieces.append((ids, (torch.randn(ids.numel(), width) * 10.0**exponent).to(dtype)))
        assert_same(lambda: kernels.sum_rows(pieces, scale))  # noqa: B023


@every_dtype
def test_sum_of_more_rows_than_fit_a_cache_block(dtype: torch.dtype) -> None:
    num_rows, width = (60_000, 16) if JIT else (9_000, 600)
    pieces = []
    for _ in range(3):
        ids = some_ids(num_rows // (1 if JIT else 200), num_rows)
        pieces.append((ids, torch.randn(ids.numel(), width).to(dtype)))
    assert_same(lambda: kernels.sum_rows(pieces, 0.5))


@every_dtype
def test_sum_rows_of_repeated_unsorted_ids(dtype: torch.dtype) -> None:
    for largest in (40, 2**40):
        pieces = [(torch.randint(0, largest, (500,)), torch.randn(500, 3).to(dtype)) for _ in range(3)]
        pieces[1] = (pieces[0][0].flip(0), pieces[1][1])
        assert_same(lambda: kernels.sum_rows(pieces))  # noqa: B023


def test_sixteen_bit_sums_round_as_the_reference_does() -> None:
    """Every bfloat16, nan and inf too, added to one that makes ties."""
    values = torch.arange(-(2**15), 2**15, 1 if JIT else 64).to(torch.int16).view(torch.bfloat16)[:, None]
    ids = torch.arange(values.shape[0])
    for other in (1.0, 2.0**-8, -(2.0**-126), float("inf")):
        second = torch.full_like(values, other)
        expected, got = twins(lambda: kernels.sum_rows([(ids, values), (ids, second)])[1])  # noqa: B023
        assert torch.equal(expected.isnan(), got.isnan())
        check_same(expected.nan_to_num(), got.nan_to_num())


def test_sum_of_mixed_dtypes_is_rounded_to_the_first() -> None:
    ids = torch.arange(300)
    for first, second in (
        (torch.float32, torch.float64),
        (torch.float64, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ):
        pieces = [(ids, torch.randn(300, 2, dtype=torch.float64).to(dtype)) for dtype in (first, second)]
        assert_same(lambda: kernels.sum_rows(pieces))  # noqa: B023


def test_sum_rows_at_takes_pieces_one_by_one() -> None:
    """While they arrive: the second one is made when the first one has been added."""
    log = []

    def arriving() -> Any:
        for piece in range(3):
            log.append(piece)
            yield torch.tensor([piece]), torch.ones(1, 2)

    with kernels.using("numba"):
        total = kernels.sum_rows_at(arriving(), 3, 2, torch.float32)
    assert torch.equal(total, torch.ones(3, 2))
    assert log == [0, 1, 2]
