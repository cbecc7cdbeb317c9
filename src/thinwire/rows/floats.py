"""A code for floating-point tensors that gives back every bit and is never larger than the tensor."""

from importlib.util import find_spec

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import CorruptMessageError, MissingPackageError
from thinwire.kernels import dispatch
from thinwire.kernels.reference.floats import CHUNK_VALUES, LAYOUTS

RAW_BYTES = 1 << 10
"""Tensors of fewer bytes are their own codes: headers would take most of what there is to gain."""

CURE = "pip install '.[cpu]' in a checkout, and do not set THINWIRE_KERNELS=reference"
"""What to do where codes can be neither made nor read."""

__all__ = ["CHUNK_VALUES", "CURE", "bits_per_value", "decode", "encode", "is_compiled", "is_possible", "require"]


def is_possible(imports: bool = True) -> bool:
    """Return whether codes can be made and read here, once kernels are compiled.

    That takes half a second, to import numba; without ``imports`` it is only looked for.
    """
    has_numba = dispatch.has_numba() if imports else find_spec("numba") is not None
    return dispatch.mode() != "reference" and has_numba


def is_compiled() -> bool:
    """Return whether codes are made by now; until then, values are their own codes."""
    both = "encode_floats", "decode_floats"
    return is_possible() and (dispatch.mode() == "numba" or all(map(dispatch.is_compiled, both)))


def require(what: str) -> None:
    """Raise MissingPackageError if codes can be neither made nor read here."""
    if not is_possible():
        raise MissingPackageError(f"{what} takes compiled kernels, which this process cannot run: {CURE}")


def encode(values: Tensor) -> Tensor:
    """Return the code of a contiguous tensor, uint8 [k]; ``k == values.nbytes`` means that it is the tensor itself.

    That it is until kernels are compiled, and where they cannot be.

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
    is_early = dispatch.mode() == "auto" and not (values.is_cuda or is_compiled())
    if values.nbytes < RAW_BYTES or is_early:
        return values.detach().reshape(-1).view(torch.uint8)
    return kernels.encode_floats(values.detach())


def decode(message: Tensor, out: Tensor) -> None:
    """Fill a contiguous tensor from the code of as many values of its dtype.

    It waits until kernels are compiled: those of the machine that sent the code were compiled sooner.

    Args:
        message: uint8 [k], as `encode` made it.
        out: tensor of the dtype and the number of values that were coded. If this raises, its values are undefined.

    Raises:
        CorruptMessageError: the message is no code of such a tensor.
        MissingPackageError: the values are coded, and numba is missing.
        ValueError: the tensor is not contiguous or of another dtype.
    """
    _check(out)
    if message.numel() > out.nbytes:
        raise CorruptMessageError(f"a code of {message.numel()} bytes for a tensor of {out.nbytes}")
    if message.numel() == out.nbytes:
        out.detach().view(-1).view(torch.uint8).copy_(message)
        return
    if not (out.is_cuda or is_compiled()):
        require("a code of floats that arrived or was stored")
        kernels.warm_up()
    values = out.detach() if out.data_ptr() % out.element_size() == 0 else torch.empty_like(out)  # else unaligned
    if not kernels.decode_floats(message.to(out.device) if out.is_cuda else message, values):
        raise CorruptMessageError(f"{message.numel()} bytes are no code of {out.numel()} values of {out.dtype}")
    if values.data_ptr() != out.data_ptr():
        out.detach().copy_(values)


def bits_per_value(values: Tensor) -> float:
    """Return the bits of a value that `encode` would need, from a sample of some 16 thousand values."""
    _check(values)
    return kernels.estimate_floats(values.detach())


def _check(values: Tensor) -> None:
    if values.dtype not in LAYOUTS or not values.is_contiguous():
        raise ValueError(
            f"expected contiguous values of a float dtype, not {values.dtype} of strides {values.stride()}"
        )
