"""Memory of numpy as tensors.

Results are allocated by numpy, which asks for huge pages: to touch 89 MB for the first time takes 11 ms, of memory that
torch allocated 65 ms.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def as_tensor(array: np.ndarray) -> Tensor:
    """Shares memory. An empty one is made by torch: of numpy's it has the strides 0, of which no view can be taken."""
    tensor = torch.from_numpy(array)
    return tensor if array.size else torch.empty(array.shape, dtype=tensor.dtype)


def empty_rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """A matrix [num_rows, width] of any dtype."""
    memory = as_tensor(np.empty(num_rows * width * dtype.itemsize, dtype=np.uint8))
    return memory.view(dtype).view(num_rows, width)
