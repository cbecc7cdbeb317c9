"""Selection by magnitude: compiled kernels against the reference, and the reference against plain sorting."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.reference import select as reference_select

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)

pytest.importorskip("numba")

JIT = os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
SIZES = (0, 1, 7, 63, 64, 65, 1023, 1025, 50_001 if JIT else 2_001)
SPECIAL = (0.0, -0.0, 1e-45, -1e-40, 1e-38, 1.0, -1.0, 1.0000001, 3e38, math.inf, -math.inf, math.nan)

pytestmark = pytest.mark.usefixtures("nothing_compiles_after_warm_up")

every_size = pytest.mark.parametrize("size", SIZES)
every_kind = pytest.mark.parametrize("kind", ["normal", "heavy", "narrow", "constant", "zero", "few", "special"])


def make(kind: str, size: int, dtype: torch.dtype) -> Tensor:
    values = {
        "normal": lambda: torch.randn(size),
        "heavy": lambda: torch.randn(size) * torch.exp(8 * torch.randn(size)),
        "narrow": lambda: 1 + 1e-4 * torch.rand(size),
        "constant": lambda: torch.full((size,), -2.5),
        "zero": lambda: torch.zeros(size),
        "few": lambda: torch.where(torch.rand(size) < 0.01, torch.randn(size), 0.0),
        "special": lambda: torch.tensor(SPECIAL).repeat(size // len(SPECIAL) + 1)[:size],
    }[kind]()
    return values.to(dtype)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int64)


def assert_same_selection(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(one[0], other[0])
    assert one[0].dtype == other[0].dtype == torch.int64
    assert torch.equal(bits(one[1]), bits(other[1]))
    assert other[1].view(torch.uint8).numel() == other[1].nbytes


@every_kind
@every_dtype
@every_size
def test_twins_select_the_same(size: int, dtype: torch.dtype, kind: str) -> None:
    values = make(kind, size, dtype)
    for threshold in (-1.0, 0.0, 1e-45, 0.5, 1.0, 2.5, math.inf):
        with kernels.using("reference"):
            expected = kernels.select_at_least(values, threshold)
            count = kernels.count_at_least(values, threshold)
        with kernels.using("numba"):
            assert_same_selection(expected, kernels.select_at_least(values, threshold))
            assert kernels.count_at_least(values, threshold) == count == expected[0].numel()
            for wrong in (0, count - 1, count, count + 50, 10 * size):  # an expectation only
                assert_same_selection(expected, kernels.select_at_least(values, threshold, max(0, wrong)))


@every_kind
@every_dtype
@every_size
def test_twins_find_the_same_largest(size: int, dtype: torch.dtype, kind: str) -> None:
    values = make(kind, size, dtype)
    for k in sorted({0, min(1, size), size // 100, size // 3, max(0, size - 1), size}):
        with kernels.using("reference"):
            expected = kernels.top_magnitudes(values, k)
        with kernels.using("numba"):
            assert_same_selection(expected, kernels.top_magnitudes(values, k))
        if k:
            with kernels.using("reference"):
                leading = kernels.leading_magnitudes(values, k)
            assert set(expected[0].tolist()) <= set(leading[0].tolist())
            with kernels.using("numba"):
                assert_same_selection(leading, kernels.leading_magnitudes(values, k))


@pytest.mark.parametrize("kind", ["normal", "heavy", "narrow", "constant", "zero", "few"])
@every_dtype
@every_size
def test_twins_find_the_same_moments(size: int, dtype: torch.dtype, kind: str) -> None:
    values = make(kind, size, dtype)
    for at_least in (0.0, 0.5, 1e30):
        with kernels.using("reference"):
            expected = kernels.magnitude_moments(values, at_least)
        with kernels.using("numba"):
            got = kernels.magnitude_moments(values, at_least)
        assert got.count == expected.count
        assert got.sum == pytest.approx(expected.sum, rel=1e-12)
        assert got.sum_squares == pytest.approx(expected.sum_squares, rel=1e-12)


@pytest.mark.slow
@settings(deadline=None, max_examples=min(100, settings.default.max_examples))
@example([0.0] * 40, 1)
@given(st.lists(st.floats(width=32), min_size=1, max_size=60), st.integers(0, 60))
def test_any_floats(numbers: list[float], k: int) -> None:
    values = torch.tensor(numbers)
    k = min(k, len(numbers))
    with kernels.using("reference"):
        expected = kernels.top_magnitudes(values, k)
    with kernels.using("numba"):
        assert_same_selection(expected, kernels.top_magnitudes(values, k))


@every_dtype
def test_layouts_that_numba_cannot_index(dtype: torch.dtype) -> None:
    """A slice with a stride goes to the reference; a shifted one is read where it lies."""
    values = torch.randn(20_001, dtype=dtype)
    with kernels.using("numba"):
        for view in (values[::3], values[1:]):
            assert_same_selection(
                reference_select.top_magnitudes(view.contiguous(), 100), kernels.top_magnitudes(view, 100)
            )


@pytest.mark.parametrize("mode", ["reference", "numba"])
@pytest.mark.parametrize("k", [-1, 4])
def test_more_than_there_are(mode: str, k: int) -> None:
    with kernels.using(mode), pytest.raises(ValueError, match="largest of 3"):
        kernels.top_magnitudes(torch.ones(3), k)
    with kernels.using(mode), pytest.raises(ValueError, match="largest of 3"):
        kernels.leading_magnitudes(torch.ones(3), k)


def test_what_is_selected_is_a_copy() -> None:
    values = torch.randn(5000)
    before = values.clone()
    for mode in ("reference", "numba"):
        with kernels.using(mode):
            kernels.select_at_least(values, 0.1)[1].zero_()
            kernels.top_magnitudes(values, 10)[1].zero_()
            kernels.top_magnitudes(values, 5000)[1].zero_()
    assert torch.equal(values, before)
