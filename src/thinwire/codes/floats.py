"""A code for floating-point tensors that gives back every bit and is never larger than the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import CorruptMessageError
from thinwire.kernels import dispatch
from thinwire.kernels.reference.floats import CHUNK_VALUES, LAYOUTS

RAW_BYTES = 1 << 10
"""Tensors of fewer bytes are their own codes: headers would take most of what there is to gain."""

__all__ = ["CHUNK_VALUES", "bits_per_value", "decode", "encode", "is_compiled"]


def is_compiled() -> bool:
    """Return whether compiled kernels code by now: 300 times as fast as what does until then, or without numba."""
    forced = dispatch.mode()
    fast = forced == "numba" or dispatch.is_compiled("encode_floats")
    return forced != "reference" and dispatch.has_numba() and fast


def encode(values: Tensor) -> Tensor:
    """Return the code of a contiguous tensor, uint8 [k]; ``k == values.nbytes`` means that it is the tensor itself.

    Gradients have few different exponents near each other, and trailing zeros in their mantissas where they were
    computed in bfloat16. Chunks of `CHUNK_VALUES` values are coded independently of each other, so the codes of slices
    at their boundaries, one after another, are the code of the whole, unless one of them is a tensor itself. The format
    is in docs/reference/wire-format.md.

    Args:
        values: float16, bfloat16, float32 or float64, of any shape. Of CUDA tensors the device makes the code
            where Triton runs; the host waits for its size.

    Returns:
        uint8 [k] on the device of the values, k <= values.nbytes. It may share the memory of the values.

    Raises:
        ValueError: the tensor is not contiguous or of another dtype.

    Example:
        >>> import torch
        >>> gradient = torch.randn(1 << 16).bfloat16().float()
        >>> message = encode(gradient)
        >>> out = torch.empty_like(gradient)
        >>> decode(message, out)
        >>> torch.equal(gradient, out), message.numel() < gradient.nbytes / 2
        (True, True)
    """
    _check(values)
    if values.nbytes < RAW_BYTES:
        return values.detach().reshape(-1).view(torch.uint8)
    return kernels.encode_floats(values.detach())


def decode(message: Tensor, out: Tensor) -> None:
    """Fill a contiguous tensor from the code of as many values of its dtype.

    Args:
        message: uint8 [k], as `encode` made it.
        out: tensor of the dtype and the number of values that were coded. If this raises, its values are undefined.

    Raises:
        CorruptMessageError: the message is no code of such a tensor.
        ValueError: the tensor is not contiguous or of another dtype.
    """
    _check(out)
    if message.numel() > out.nbytes:
        raise CorruptMessageError(f"a code of {message.numel()} bytes for a tensor of {out.nbytes}")
    if message.numel() == out.nbytes:
        out.detach().view(-1).view(torch.uint8).copy_(message)
        return
    if not kernels.decode_floats(message.to(out.device), out.detach()):
        raise CorruptMessageError(f"{message.numel()} bytes are no code of {out.numel()} values of {out.dtype}")


def bits_per_value(values: Tensor) -> float:
    """Return the bits of a value that `encode` would need, from a sample of some 16 thousand values."""
    _check(values)
    return kernels.estimate_floats(values.detach())


def _check(values: Tensor) -> None:
    if values.dtype not in LAYOUTS or not values.is_contiguous():
        raise ValueError(
            f"expected contiguous values of a float dtype, not {values.dtype} of strides {values.stride()}"
        )
