"""What an ideal code of floats would need: the measure that a real one is held against."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.rows.floats import CHUNK_VALUES

_LAYOUTS: dict[torch.dtype, tuple[torch.dtype, int, int]] = {
    torch.float32: (torch.int32, 8, 23),
    torch.float64: (torch.int64, 11, 52),
    torch.bfloat16: (torch.int16, 8, 7),
    torch.float16: (torch.int16, 5, 10),
}
"""For each dtype the integers of its size, the bits of the exponent, and of the mantissa."""


def ideal_bits(values: Tensor, chunk: int = CHUNK_VALUES) -> float:
    """Return the bits of all values under an ideal code of exponents and zero low bits, a model for each chunk.

    A value that is not zero takes 1 bit of sign, the entropy of its exponent, the entropy of the number of its
    trailing zeros given the exponent, and the mantissa bits above the lowest one, which is implied. The two zeros are
    symbols of their own beside the exponents. What a coder spends on its models is not counted.

    Args:
        values: float32, float64, bfloat16 or float16, any shape.
        chunk: number of values that share a model.

    Example:
        >>> ideal_bits(torch.tensor([1.0, -1.0, 1.0, 1.0]))
        4.0
        >>> ideal_bits(torch.zeros(1000))
        0.0
    """
    return sum(_bits_of_chunk(part) for part in values.detach().reshape(-1).split(chunk)) if values.numel() else 0.0


def _bits_of_chunk(values: Tensor) -> float:
    kind, exponent_bits, mantissa_bits = _LAYOUTS[values.dtype]
    bits = values.view(kind).long()
    mantissa = bits & ((1 << mantissa_bits) - 1)
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    lowest = torch.where(mantissa == 0, 1 << mantissa_bits, mantissa & -mantissa)
    zeros = lowest.double().log2().long()  # a power of two below 2**53, so exact
    is_zero = (mantissa == 0) & (exponent == 0)
    exponent = torch.where(is_zero, (1 << exponent_bits) + (bits < 0), exponent)
    verbatim = (~is_zero).sum() + (mantissa_bits - zeros - 1).clamp(min=0).sum()
    return float(verbatim) + _entropy_bits(exponent * (mantissa_bits + 1) + zeros)


def _entropy_bits(symbols: Tensor) -> float:
    """Bits of all symbols under their own frequencies: of exponent and trailing zeros given it, taken together."""
    counts = torch.bincount(symbols).double()
    counts = counts[counts > 0]
    return float(-(counts * (counts / symbols.numel()).log2()).sum()) + 0.0


def mean_bits(tensors: Sequence[Tensor]) -> float:
    """Return the ideal bits of a value of tensors."""
    values = sum(tensor.numel() for tensor in tensors)
    return sum(map(ideal_bits, tensors)) / values if values else 0.0
