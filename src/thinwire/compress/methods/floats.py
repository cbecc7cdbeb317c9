"""Floats of 8 or 4 bits with a scale for each block.

- `fp8`: eight bits, the largest value of a block is the largest float.
- `mxfp8`, `mxfp4`: blocks of 32 with powers of two for scales, as the OCP microscaling formats have them.
- `natural`: random rounding to powers of two (Horvath et al., MSML'22).
"""

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Parameter, Payload, State
from thinwire.compress.methods.quantize import Quantizer, check_block, check_steps
from thinwire.compress.packing import PartSpec
from thinwire.errors import CorruptMessageError

_BIAS = {torch.float32: 127, torch.float64: 1023}


@dataclass(frozen=True)
class ShortFloat:
    """A format of floats: a sign, an exponent, and a mantissa.

    Args:
        bits: bits of a float.
        mantissa_bits: bits of the mantissa.
        lowest: exponent of the smallest normal number.
        largest_code: bits of the largest number; larger ones, up to the sign, are infinity and nan.
    """

    bits: int
    mantissa_bits: int
    lowest: int
    largest_code: int

    @cached_property
    def numbers(self) -> Tensor:
        """The number of each code of `kernels.round_to_floats`, float64 [256]; finite where no rank sends the code."""
        codes = torch.arange(128)
        exponents = (codes >> self.mantissa_bits).clamp_(min=1)
        significands = codes - (exponents - 1 << self.mantissa_bits)
        numbers = torch.ldexp(significands.double(), exponents - 1 + self.lowest - self.mantissa_bits)
        return torch.cat([numbers, -numbers])

    @property
    def largest(self) -> float:
        return float(self.numbers[self.largest_code])


FORMATS = {
    "e4m3": ShortFloat(8, 3, -6, 0x7E),
    "e5m2": ShortFloat(8, 2, -14, 0x7B),
    "e2m1": ShortFloat(4, 1, 0, 7),
    "e7m0": ShortFloat(8, 0, 0, 0x7F),
}


@dataclass(frozen=True)
class FloatQuantizer(Quantizer):
    """A compressor that rounds each value, divided by the step of its block, to a short float.

    ``parts``: codes (uint8, as Gloo has no short floats; two in a byte for four bits, the first one below), scales.
    """

    format: str = "e4m3"
    block: int | None = 512
    _: KW_ONLY
    seed: int | None = None

    @property
    def code(self) -> ShortFloat:
        return FORMATS[self.format]

    @property
    def bits(self) -> int:
        return self.code.bits

    @property
    def settings(self) -> str:
        return self.format + ("" if self.seed is None else ", stochastic")

    @abstractmethod
    def scales(self, largest: Tensor) -> Tensor:
        """Return what is sent for the steps of blocks with these largest magnitudes."""

    @abstractmethod
    def steps(self, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the steps of such scales, and what to multiply by to divide by them."""

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        flat, code, block = gradient.view(-1), self.code, self.block_elements(parameter)
        scales = self.scales(kernels.largest_of_blocks(flat, block))
        quotients = _times(flat, self.steps(scales, flat.dtype)[1], block)
        lowest, seed = _BIAS[flat.dtype] + code.lowest, self.draw(parameter, state)
        codes = kernels.round_to_floats(quotients, code.mantissa_bits, lowest, code.largest_code, seed)
        return Payload((codes if code.bits == 8 else _in_pairs(codes), scales))

    def add(self, payload: Payload, parameter: Parameter, total: Tensor, negated: bool = False) -> None:
        """Add decoded values by a table of the numbers of the format: casts of torch cost 10 times as much."""
        codes, scales = payload.parts
        codes = codes if self.bits == 8 else _one_by_one(codes, parameter.numel)
        steps, _ = self.steps(scales, total.dtype)
        block, table = self.block_elements(parameter), self.code.numbers.to(total.dtype)
        kernels.add_from_table(codes, -table if negated else table, steps, block, total.view(-1))

    def check(self, codes: Tensor, scales: Tensor, parameter: Parameter) -> None:
        check_steps(self.steps(scales, parameter.working_dtype)[0], self.code.largest)
        if self.bits == 8 and codes.numel() and int(codes.bitwise_and(0x7F).max()) > self.code.largest_code:
            raise CorruptMessageError(f"{self.format} codes of infinity or nan, which no rank sends")


def _times(values: Tensor, factors: Tensor, block: int) -> Tensor:
    """Return each value [n] times the factor of its block, newly allocated."""
    whole = values.numel() // block * block
    product = torch.empty_like(values)
    blocks = product[:whole].view(-1, block)
    torch.mul(values[:whole].view(-1, block), factors[: blocks.shape[0], None], out=blocks)
    torch.mul(values[whole:], factors[blocks.shape[0] :], out=product[whole:])
    return product


def _in_pairs(codes: Tensor) -> Tensor:
    """Return codes of 4 bits, whose sign is in the highest bit of a byte, two in a byte."""
    short = torch.nn.functional.pad(codes & 7 | codes >> 4 & 8, (0, codes.numel() % 2))
    return short[::2] | short[1::2] << 4


def _one_by_one(pairs: Tensor, count: int) -> Tensor:
    short = torch.stack([pairs & 15, pairs >> 4], 1).view(-1)[:count]
    return short & 7 | (short & 8) << 4


@dataclass(frozen=True)
class FP8(FloatQuantizer):
    """The quantizer to 8-bit floats times ``max|block|`` over the largest float: 8.06 bits a value.

    e4m3 has 4 significant bits (an element is wrong by at most 1/16 of itself, or by 2^-10 steps near zero) and reaches
    448 steps; e5m2 has 3 (1/8; 2^-17 steps) and reaches 57344. Unlike `int8` it keeps small values of a block
    apart from zero. `attach` puts error feedback around it, unless it rounds at random. Scales are steps [blocks], in
    working dtype.

    Args:
        format: e4m3 or e5m2.
        block: number of consecutive values with one step.
        seed: seed of stochastic rounding, whose expectation is the value; None rounds to the nearest.

    Raises:
        ValueError: another format; a block below 1.
    """

    def __post_init__(self) -> None:
        _check_format(self.format, "fp8")
        check_block(self.block, "blocks of fp8")

    @property
    def name(self) -> str:
        return f"fp8({self.settings}, {self.block})"

    def scales(self, largest: Tensor) -> Tensor:
        return largest.div_(self.code.largest).clamp_(min=torch.finfo(largest.dtype).tiny)

    def steps(self, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return scales, scales.reciprocal()


fp8 = FP8


def _check_format(format: str, of: str) -> None:
    if format not in ("e4m3", "e5m2"):
        raise ValueError(f"the formats of {of} are e4m3 and e5m2, not {format!r}")


@dataclass(frozen=True)
class Microscaling(FloatQuantizer):
    """The compressor of `mxfp8`, `mxfp4` and `natural`. Scales: exponents of powers of two, E8M0 (uint8 [blocks])."""

    @property
    def name(self) -> str:
        return f"mxfp{self.bits}({self.settings})" if self.block else "natural"

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        codes, steps = super().part_specs(parameter)
        return codes, PartSpec(torch.uint8, steps.numel)

    def scales(self, largest: Tensor) -> Tensor:
        """Return the exponents of the largest magnitudes, less that of the largest float: section 6.3 of the standard.

        For stochastic rounding the next one where the largest magnitude would be above the largest float. 255, the
        standard's nan, if a magnitude is not finite.
        """
        words = largest.clamp(max=torch.finfo(torch.float32).max).float().view(torch.int32)
        top, fraction = divmod(int(torch.tensor(self.code.largest).view(torch.int32)), 1 << 23)
        exponents = words + (0 if self.seed is None else (1 << 23) - 1 - fraction) >> 23
        exponents = (exponents - (top - 127)).clamp_(0, 127 + 254 - top)  # at most what decodes to finite values
        return exponents.masked_fill_(~largest.isfinite(), 255).to(torch.uint8)

    def steps(self, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return steps and their inverses, exactly, from the bits of float32: the power 0 is denormal, 255 infinite."""
        words = scales.int()
        steps, inverses = words << 23, (254 - words).clamp_(min=0) << 23
        return steps.clamp_(min=1 << 22).view(torch.float32).to(dtype), inverses.view(torch.float32).to(dtype)


BLOCK = 32


def mxfp8(format: Literal["e4m3", "e5m2"] = "e4m3", *, stochastic: bool = False, seed: int = 0) -> Microscaling:
    """Return the quantizer to MXFP8: floats of 8 bits, and a power of two for each 32 of them. 8.25 bits a value.

    (OCP Microscaling Formats v1.0; Rouhani et al., arXiv 2310.10537.) The bits are those of torchao's casts with
    ``ScaleCalculationMode.FLOOR``, and with ``RCEIL`` the scales of stochastic rounding, which then nothing exceeds.
    Sums are float32. Each value of a block but the smallest keeps 4 significant bits (e4m3), whatever the others are.
    Without ``stochastic`` `attach` puts error feedback around it.

    Args:
        format: e4m3 or e5m2, as in `fp8`.
        stochastic: whether to round at random, such that the expectation is the value and no memory is needed.
        seed: seed of stochastic rounding.

    Raises:
        ValueError: another format.

    Example:
        >>> compressor = mxfp8()
        >>> parameter = Parameter("weight", (3,))
        >>> payload = compressor.compress(torch.tensor([1.0, 0.3, -1.1]), parameter, compressor.init(parameter))
        >>> compressor.decompress(payload, parameter)
        tensor([ 1.0000,  0.3125, -1.1250])
    """
    _check_format(format, "mxfp8")
    return Microscaling(format, BLOCK, seed=seed if stochastic else None)


def mxfp4(*, stochastic: bool = False, seed: int = 0) -> Microscaling:
    """Return the quantizer to MXFP4: 0, 1/2, 1, 3/2, 2, 3, 4, 6 times a power of two for each 32. 4.25 bits a value.

    A value is wrong by up to a quarter of itself, and the largest of a block by up to 1/4 where it is above 6 steps, so
    it needs the error feedback that `attach` adds, or ``stochastic``. Arguments as in `mxfp8`.
    """
    return Microscaling("e2m1", BLOCK, seed=seed if stochastic else None)


def natural(*, seed: int = 0) -> Microscaling:
    """Return the quantizer to one of the two powers of two around each value, at random, in 8 bits.

    The expectation is the value, so no memory is needed. A code is a sign and one of 127 powers, up to the first that
    no value is above. Smaller values (by 38 decimal orders, or denormal) become the smallest power or zero, also right
    in expectation. The variance is at most an eighth of the square of the value at any scale. Values above 2^127, whose
    next power would be infinite, become that.

    Args:
        seed: seed of the random choice, which also depends on the parameter, the step and the rank.
    """
    return Microscaling("e7m0", None, seed=seed)
