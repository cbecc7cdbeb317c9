"""A code for floating-point tensors that gives back every bit and is never larger than the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.errors import CorruptMessageError

CHUNK_VALUES = 1 << 15
"""Number of values that are coded together; chunks are independent of each other."""


def encode(values: Tensor) -> Tensor:
    """Return the code of a contiguous tensor, uint8 [k]; ``k == values.nbytes`` means that it is the tensor itself."""
    return values.reshape(-1).view(torch.uint8)


def decode(message: Tensor, out: Tensor) -> None:
    """Fill a contiguous tensor from the code of as many values of its dtype.

    Raises:
        CorruptMessageError: the message is no code of such a tensor.
    """
    if message.numel() != out.nbytes:
        raise CorruptMessageError(f"a code of {message.numel()} bytes for a tensor of {out.nbytes}")
    out.view(-1).view(torch.uint8).copy_(message)


def bits_per_value(values: Tensor) -> float:
    """Return the bits of a value that `encode` would need, from a sample."""
    return 8.0 * values.element_size()
