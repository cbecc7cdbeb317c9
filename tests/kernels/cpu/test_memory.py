"""Tensors in numpy's memory: the same memory, and empty ones that can be viewed as torch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thinwire.kernels.cpu.memory import as_tensor, empty_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


def test_memory_is_shared() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    tensor = as_tensor(array)
    array[1, 2] = 77
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 77]]
    tensor[0, 0] = 5
    assert array[0, 0] == 5


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_an_empty_array_is_a_tensor_that_can_be_viewed(shape: tuple[int, ...]) -> None:
    tensor = as_tensor(np.empty(shape, np.float32))
    assert (tensor.shape, tensor.dtype) == (shape, torch.float32)
    assert tensor.stride() == torch.empty(shape).stride()
    assert tensor.view(-1).view(torch.uint8).numel() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(3, 5), (1, 1), (0, 5), (3, 0), (0, 0)])
def test_rows_are_contiguous_and_of_any_dtype(dtype: torch.dtype, num_rows: int, width: int) -> None:
    rows = empty_rows(num_rows, width, dtype)
    assert (rows.shape, rows.dtype) == ((num_rows, width), dtype)
    assert rows.is_contiguous()
    assert rows.untyped_storage().nbytes() == num_rows * width * dtype.itemsize, "no byte too many"
    rows.fill_(3)
    assert bool((rows == 3).all())
