"""Tensors in memory of numpy.

Results are allocated by numpy, which asks for huge pages: touching 89 MB for the first time costs 11 ms, of memory that
torch allocated 65 ms.
"""

import numpy as np
import torch
from torch import Tensor


def as_tensor(array: np.ndarray) -> Tensor:
    """Return a tensor that shares memory; torch makes empty ones, as numpy's have strides 0, which allow no view."""
    tensor = torch.from_numpy(array)
    return tensor if array.size else torch.empty(array.shape, dtype=tensor.dtype)


def empty_rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized matrix [num_rows, width] of any dtype."""
    memory = as_tensor(np.empty(num_rows * width * dtype.itemsize, dtype=np.uint8))
    return memory.view(dtype).view(num_rows, width)
