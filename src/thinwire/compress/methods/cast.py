"""Compression by another floating-point type: sixteen bits that a process group can sum, or eight and a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Additive, Memory, Packed, Parameter, Payload, State, Summable
from thinwire.compress.methods.quantize import check_block, check_steps, steps_spec
from thinwire.compress.packing import PartSpec, unpack
from thinwire.errors import CorruptMessageError

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Cast(Packed, Summable):
    """A compressor that rounds each value to a 16-bit number. ``parts``: the gradient in that dtype [n].

    Values beyond the largest finite number of the dtype become that number, never infinite.
    """

    dtype: torch.dtype

    memory = Memory.OPTIONAL

    @property
    def name(self) -> str:
        return _NAMES[self.dtype]

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        flat = gradient.view(-1)
        largest = torch.finfo(self.dtype).max
        # Reading the gradient once is faster than clamping it.
        if flat.numel() > 0 and float(kernels.largest_of_blocks(flat, flat.numel())[0]) > largest:
            flat = flat.clamp(-largest, largest)
        return Payload((flat.to(self.dtype),))

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        return payload.parts[0].to(parameter.working_dtype).view(parameter.shape)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        return (PartSpec(self.dtype, parameter.numel),)


def fp16() -> Cast:
    """Return the compressor to float16: 11 significant bits, from 6e-8 to 65504, half the bytes of float32.

    Larger values become 65504 (in an all-reduce the sum cannot overflow either, because each part is divided by the
    world size first), smaller ones zero: gradients that are not scaled lose their small values.

    Example:
        >>> compressor = fp16()
        >>> parameter = Parameter("weight", (2,))
        >>> compressor.compress(torch.tensor([1.0, 1e9]), parameter, compressor.init(parameter)).parts[0].tolist()
        [1.0, 65504.0]
    """
    return Cast(torch.float16)


def bf16() -> Cast:
    """Return the compressor to bfloat16: 8 significant bits and the range of float32, half the bytes: the baseline."""
    return Cast(torch.bfloat16)


_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_FIRST_NOT_FINITE = {"e4m3": 0x7F, "e5m2": 0x7C}  # codes without their sign


@dataclass(frozen=True)
class FP8(Additive):
    """The compressor of `fp8`. ``parts``: codes (uint8 [n], as Gloo has no eight-bit floats); steps [blocks]."""

    format: Literal["e4m3", "e5m2"] = "e4m3"
    block: int = 512

    def __post_init__(self) -> None:
        if self.format not in _DTYPES:
            raise ValueError(f"the formats of fp8 are {' and '.join(_DTYPES)}, not {self.format!r}")
        check_block(self.block, "blocks of fp8")

    @property
    def name(self) -> str:
        return f"fp8({self.format}, {self.block})"

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        flat, dtype = gradient.view(-1), _DTYPES[self.format]
        info = torch.finfo(dtype)
        steps = kernels.largest_of_blocks(flat, self.block).div_(info.max).clamp_(min=torch.finfo(flat.dtype).tiny)
        codes = self._times(flat, steps.reciprocal()).to(dtype).view(torch.uint8)
        return Payload((codes, steps))

    def add(self, payload: Payload, parameter: Parameter, total: Tensor, negated: bool = False) -> None:
        """Add decoded values by a table of the 256 numbers of the format: casts of torch cost 10 times as much."""
        codes, steps = payload.parts
        table = torch.arange(256, dtype=torch.uint8).view(_DTYPES[self.format]).to(total.dtype)
        kernels.add_from_table(codes, table, steps.neg() if negated else steps, self.block, total.view(-1))

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        return PartSpec(torch.uint8, parameter.numel), steps_spec(parameter, self.block)

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        codes, steps = unpack(data, self.part_specs(parameter))
        check_steps(steps, torch.finfo(_DTYPES[self.format]).max)
        if codes.numel() and int(codes.bitwise_and(0x7F).max()) >= _FIRST_NOT_FINITE[self.format]:
            raise CorruptMessageError(f"{self.format} codes of infinity or nan, which no rank sends")
        return Payload((codes, steps))

    def _times(self, values: Tensor, factors: Tensor) -> Tensor:
        """Return each value [n] times the factor of its block, newly allocated."""
        whole = values.numel() // self.block * self.block
        product = torch.empty_like(values)
        blocks = product[:whole].view(-1, self.block)
        torch.mul(values[:whole].view(-1, self.block), factors[: blocks.shape[0], None], out=blocks)
        torch.mul(values[whole:], factors[blocks.shape[0] :], out=product[whole:])
        return product


def fp8(format: Literal["e4m3", "e5m2"] = "e4m3", block: int = 512) -> FP8:
    """Return the quantizer to 8-bit floats times ``max|block|`` over the largest float: 8.06 bits a value.

    e4m3 has 4 significant bits (an element is wrong by at most 1/16 of itself, or by 2^-10 steps near zero) and reaches
    448 steps; e5m2 has 3 (1/8; 2^-17 steps) and reaches 57344. Unlike `int8` it keeps small values of a block
    apart from zero. `attach` puts error feedback around it.

    Raises:
        ValueError: another format; a block below 1.
    """
    return FP8(format, block)
