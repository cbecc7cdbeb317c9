"""Quantizers: a few bits for each element, and a scale for each block.

- `int8`: eight-bit integers with a scale for each block.
- `qsgd`: random rounding to a few levels of the norm of a bucket (Alistarh et al., NeurIPS'17).
- `terngrad`: -1, 0 or 1 times the largest value (Wen et al., NeurIPS'17).
"""

import math
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Additive, Memory, Parameter, Payload, State, counters, next_seed
from thinwire.compress.packing import PartSpec, unpack
from thinwire.errors import CorruptMessageError


class Blocks(Additive):
    """A compressor to a code of a few bits for each value, and a scale for each block of values.

    ``parts``: the codes, packed (uint8 [ceil(n * bits / 8)]); the scales (working dtype [blocks]).
    """

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a packed code."""

    @property
    @abstractmethod
    def block(self) -> int | None:
        """Number of consecutive values with one scale; None for all values of a parameter."""

    @abstractmethod
    def check(self, codes: Tensor, scales: Tensor, parameter: Parameter) -> None:
        """Raise CorruptMessageError for parts that no rank sends."""

    def block_elements(self, parameter: Parameter) -> int:
        """Return the number of consecutive values with one scale, at least 1."""
        return self.block or max(1, parameter.numel)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        code_bytes = kernels.packed_codes_bytes(parameter.numel, self.bits)
        blocks = -(-parameter.numel // self.block_elements(parameter))
        return PartSpec(torch.uint8, code_bytes), PartSpec(parameter.working_dtype, blocks)

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        codes, scales = unpack(data, self.part_specs(parameter))
        self.check(codes, scales, parameter)
        return Payload((codes, scales))


class Quantizer(Blocks):
    """A compressor that rounds each value to one of a few numbers times the step of its block."""

    @property
    @abstractmethod
    def seed(self) -> int | None:
        """Seed of stochastic rounding, or None to round to the nearest."""

    @property
    def memory(self) -> Memory:
        return Memory.NEEDED if self.seed is None else Memory.UNBIASED

    def init(self, parameter: Parameter) -> State:
        return {} if self.seed is None else counters()

    def draw(self, parameter: Parameter, state: State) -> int | None:
        """Return the seed of this step."""
        return None if self.seed is None else next_seed(self.seed, parameter, state)


class BlockQuantizer(Quantizer):
    """A compressor that rounds each value to an integer in [-levels, levels] times the step of its block.

    Integers have 2 to 8 bits, and scales are the steps. A step is at least the smallest normal number, so that dividing
    by it is exact enough where all values are denormal or zero.
    """

    @property
    def levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def norms(self, flat: Tensor, parameter: Parameter) -> Tensor:
        """Return the value of each block that is coded as ``levels``."""
        return kernels.largest_of_blocks(flat, self.block_elements(parameter))

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        flat = gradient.view(-1)
        steps = self.norms(flat, parameter).div_(self.levels).clamp_(min=torch.finfo(flat.dtype).tiny)
        block, seed = self.block_elements(parameter), self.draw(parameter, state)
        return Payload((kernels.quantize(flat, steps, block, self.levels, self.bits, seed), steps))

    def add(self, payload: Payload, parameter: Parameter, total: Tensor, negated: bool = False) -> None:
        codes, steps = payload.parts
        block, steps = self.block_elements(parameter), steps.neg() if negated else steps
        kernels.add_quantized(codes, steps, block, self.levels, self.bits, total.view(-1))

    def check(self, codes: Tensor, scales: Tensor, parameter: Parameter) -> None:
        check_steps(scales, self.levels)


def check_steps(steps: Tensor, largest_code: float) -> None:
    """Raise CorruptMessageError for a step that is negative, or too large for a code to decode to a finite value."""
    limit = torch.finfo(steps.dtype).max / largest_code
    low, high = (float(bound) for bound in steps.aminmax()) if steps.numel() else (0.0, 0.0)
    if not (low >= 0.0 and high <= limit * (1 + 1e-6)):
        raise CorruptMessageError(f"steps of quantized values from {low:g} to {high:g}: they are in [0, {limit:g}]")


def check_block(block: int | None, what: str) -> None:
    """Raise ValueError for an impossible size of a block."""
    if not (isinstance(block, int) and block >= 1):
        raise ValueError(f"{what} are of at least 1 element, not {block!r}: at 512 a scale costs 1/16 bit an element")


@dataclass(frozen=True)
class Int8(BlockQuantizer):
    """The compressor of `int8`."""

    block: int = 512
    seed: int | None = None

    bits = 8

    def __post_init__(self) -> None:
        check_block(self.block, "blocks of int8")

    @property
    def name(self) -> str:
        return f"int8({self.block}{'' if self.seed is None else ', stochastic'})"


def int8(block: int = 512, *, stochastic: bool = False, seed: int = 0) -> Int8:
    """Return the quantizer to integers in [-127, 127] times ``max|block| / 127``: 8.06 bits a value by default.

    Rounding to the nearest is wrong by at most half a step of the block, that is max|block| / 254. Stochastic rounding
    is wrong by up to a whole step, but right in expectation, so it needs no memory; `attach` puts error feedback around
    the other.

    Args:
        block: number of consecutive values with one scale.
        stochastic: whether to round up with the probability that makes the expectation right, as `qsgd` does.
        seed: seed of stochastic rounding.

    Raises:
        ValueError: a block below 1.

    Example:
        >>> compressor = int8()
        >>> parameter = Parameter("weight", (3,))
        >>> payload = compressor.compress(torch.tensor([1.0, 0.5, -1.0]), parameter, compressor.init(parameter))
        >>> compressor.decompress(payload, parameter)
        tensor([ 1.0000,  0.5039, -1.0000])
    """
    return Int8(block, seed if stochastic else None)


@dataclass(frozen=True)
class QSGD(BlockQuantizer):
    """The quantizer to a sign and one of s + 1 random levels of a bucket's norm, s = 2^(bits - 1) - 1.

    With x = s |v| / norm the level is floor(x) + 1 with probability x - floor(x), else floor(x) (section 3.1), so that
    the expectation is the value and no memory is needed.

    Args:
        bits: bits of a value, sign included, 2 to 8; at 2 bits it is TernGrad in buckets.
        bucket: number of consecutive values with one norm, which costs 32 / bucket bits a value.
        norm: "max", as in the authors' own runs, with the smaller error; "l2", as in their theorem.
        seed: seed of the random choice, which also depends on the parameter, the step and the rank.

    Raises:
        ValueError: bits out of range, another norm, a bucket below 1.

    Example:
        >>> from thinwire.compress.base import Parameter
        >>> compressor = qsgd(4)
        >>> parameter = Parameter("weight", (1024,))
        >>> compressor.packed_bytes(parameter)  # of 4096
        536
    """

    bits: int = 8
    bucket: int = 512
    _: KW_ONLY
    norm: Literal["max", "l2"] = "max"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in range(2, 9):
            raise ValueError(
                f"qsgd has 2 to 8 bits, not {self.bits!r}: one of them is the sign; for one bit take ef_sign_sgd(),"
                " for more bf16()"
            )
        if self.norm not in ("max", "l2"):
            raise ValueError(f'qsgd scales a bucket by its "max" or "l2" norm, not {self.norm!r}')
        check_block(self.bucket, "buckets of qsgd")

    @property
    def name(self) -> str:
        return f"qsgd({self.bits}, {self.bucket}{'' if self.norm == 'max' else ', l2'})"

    @property
    def block(self) -> int:
        return self.bucket

    def norms(self, flat: Tensor, parameter: Parameter) -> Tensor:
        largest = super().norms(flat, parameter)
        return largest if self.norm == "max" else _two_norms(flat, self.bucket, largest)


def _two_norms(flat: Tensor, bucket: int, largest: Tensor) -> Tensor:
    """Return norms, from values divided by the largest of their bucket, so that no square overflows or vanishes."""
    padded = torch.nn.functional.pad(flat, (0, largest.numel() * bucket - flat.numel())).view(-1, bucket)
    scale = largest.clamp(min=torch.finfo(flat.dtype).tiny)
    return torch.linalg.vector_norm(padded / scale[:, None], dim=1).mul_(scale).clamp_(max=torch.finfo(flat.dtype).max)


qsgd = QSGD


@dataclass(frozen=True)
class TernGrad(BlockQuantizer):
    """TernGrad (Algorithm 1), which codes v as sign(v) max|g| with probability |v| / max|g|, else as zero.

    It sends 2 bits a value. The expectation is right, so no memory is needed; but the variance is large if few values
    are much larger than the rest, against which the paper clips at 2.5 standard deviations. That has a bias, which no
    memory removes: error feedback around a code of that variance can diverge, and `attach` adds none.

    Args:
        clip: limit in standard deviations, such as 2.5; None for no clipping.
        seed: seed of the random choice, which also depends on the parameter, the step and the rank.

    Raises:
        ValueError: a clip that is not positive.
    """

    clip: float | None = None
    seed: int = field(default=0, kw_only=True)

    bits = 2
    block = None

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0.0:
            raise ValueError(
                f"terngrad clips at a positive number of standard deviations, not {self.clip!r}; None never"
            )

    @property
    def memory(self) -> Memory:
        return Memory.UNBIASED if self.clip is None else Memory.OWN

    @property
    def name(self) -> str:
        return "terngrad" if self.clip is None else f"terngrad({self.clip:g})"

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        return super().compress(gradient if self.clip is None else self._clipped(gradient), parameter, state)

    def _clipped(self, gradient: Tensor) -> Tensor:
        """Clip by the root mean square: the standard deviation if the mean is zero, and it never clips a constant."""
        moments = kernels.magnitude_moments(gradient.view(-1))
        limit = (self.clip or math.inf) * math.sqrt(moments.sum_squares / max(1, gradient.numel()))
        limit = min(limit, torch.finfo(gradient.dtype).max)
        return gradient.clamp(-limit, limit)


terngrad = TernGrad
