"""Calls of compiled kernels beside the reference."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels

JIT = os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
LARGE = 100_003 if JIT else 3_001  # as Python, kernels run a thousand times as long
SIZES = (0, 1, 7, 1023, 1024, 1025, LARGE)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
every_size = pytest.mark.parametrize("size", SIZES)
every_fill = pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.6, 1.0])
increasing = st.sets(st.integers(0, 5000), max_size=200).map(lambda ids: torch.tensor(sorted(ids), dtype=torch.int64))


def twins(call: Callable[[], Any]) -> tuple[Any, Any]:
    with kernels.using("reference"):
        expected = call()
    with kernels.using("numba"):
        return expected, call()


def assert_same(call: Callable[[], Any]) -> None:
    check_same(*twins(call))


def check_same(expected: Any, got: Any) -> None:
    """Equal to the last bit, of one dtype and shape, and as good to take views of."""
    assert type(expected) is type(got)
    if isinstance(expected, Tensor):
        assert (expected.dtype, expected.shape) == (got.dtype, got.shape)
        assert got.view(torch.uint8).numel() == got.nbytes, "an empty one can be viewed too"
        bits = BITS[expected.element_size()]
        assert torch.equal(expected.contiguous().view(bits), got.contiguous().view(bits))
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(got)
        for one, other in zip(expected, got, strict=True):
            check_same(one, other)
    else:
        assert expected == got


def some_ids(count: int, size: int) -> Tensor:
    """Sorted unique ids below ``size``, at most ``count``."""
    return torch.randint(0, max(size, 1), (count if size else 0,)).unique()
