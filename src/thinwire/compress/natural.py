"""Natural compression: random rounding to powers of two (Horvath et al., MSML'22)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Additive, Memory, Parameter, Payload, State
from thinwire.compress.packing import PartSpec, unpack
from thinwire.compress.randomness import counters, next_seed
from thinwire.errors import CorruptMessageError

_POWERS = 127
_WORDS = {torch.float32: (torch.int32, 23), torch.float64: (torch.int64, 52)}


@dataclass(frozen=True)
class Natural(Additive):
    """See `natural`. ``parts``: signs and numbers of powers of two (uint8 [n]); the exponent below all (int32 [1])."""

    random_seed: int = 0

    @property
    def name(self) -> str:
        return "natural"

    @property
    def memory(self) -> Memory:
        return Memory.UNBIASED

    def init(self, parameter: Parameter) -> State:
        del parameter
        return counters()

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        flat = gradient.view(-1)
        base = _base(flat)
        codes = kernels.round_to_powers(flat, base, next_seed(self.random_seed, parameter, state))
        return Payload((codes, torch.tensor([base], dtype=torch.int32)))

    def accumulate(self, payload: Payload, parameter: Parameter, total: Tensor) -> None:
        _add(payload, 1.0, total)

    def residual(self, gradient: Tensor, payload: Payload, parameter: Parameter) -> None:
        _add(payload, -1.0, gradient)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        return PartSpec(torch.uint8, parameter.numel), PartSpec(torch.int32, 1)

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        codes, base = unpack(data, self.part_specs(parameter))
        if not 0 <= int(base) <= _highest_base(parameter.working_dtype):
            raise CorruptMessageError(
                f"powers of two above the biased exponent {int(base)}, which no finite number has"
            )
        return Payload((codes, base))


def _add(payload: Payload, factor: float, total: Tensor) -> None:
    """Through the 256 numbers that codes stand for."""
    codes, base = payload.parts
    word, mantissa_bits = _WORDS[total.dtype]
    powers = ((torch.arange(_POWERS + 1, dtype=word) + base.to(word)) << mantissa_bits).view(total.dtype)
    powers[0] = 0.0
    table = torch.cat([powers, -powers])
    step = torch.tensor([factor], dtype=total.dtype)
    kernels.add_from_table(codes, table, step, max(1, total.numel()), total.view(-1))


def _base(flat: Tensor) -> int:
    """The biased exponent below the 127 that are sent: the highest of them is one above that of the largest value."""
    if flat.numel() == 0:
        return 0
    word, mantissa_bits = _WORDS[flat.dtype]
    largest = int(kernels.largest_of_blocks(flat, flat.numel()).view(word)[0]) >> mantissa_bits
    return min(max(largest + 1 - _POWERS, 0), _highest_base(flat.dtype))


def _highest_base(dtype: torch.dtype) -> int:
    """With which the highest power is still finite."""
    word, mantissa_bits = _WORDS[dtype]
    return (int(torch.tensor([torch.finfo(dtype).max], dtype=dtype).view(word)[0]) >> mantissa_bits) - _POWERS


def natural(*, seed: int = 0) -> Natural:
    """One of the two powers of two around each value, at random such that the expectation is the value: 8 bits.

    A sign and a power of 127: the 127 up to the first above the largest value. What is smaller than all of them (by 38
    decimal orders, or denormal) becomes the smallest or zero, also right in expectation. The variance is at most an
    eighth of the square of the value, whatever the scale, and rounding takes no multiplication. No memory is needed.

    Values above 2^127 (2^1023 in float64), where the next power would be infinite, become that. So do infinity and nan,
    which `thinwire.attach` never passes on: gradients that are not finite are NaN on all ranks.

    Args:
        seed: of the random choice; it also depends on the parameter, the step and the rank.
    """
    return Natural(seed)
