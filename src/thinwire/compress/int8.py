"""Eight-bit integers with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compress.base import Memory, Parameter
from thinwire.compress.blocks import BlockQuantizer, check_block


@dataclass(frozen=True)
class Int8(BlockQuantizer):
    """See `int8`."""

    block: int = 512
    stochastic: bool = False
    random_seed: int = 0

    def __post_init__(self) -> None:
        check_block(self.block, "blocks of int8")

    @property
    def memory(self) -> Memory:
        return Memory.UNBIASED if self.stochastic else Memory.NEEDED

    @property
    def name(self) -> str:
        return f"int8({self.block}{', stochastic' if self.stochastic else ''})"

    @property
    def bits(self) -> int:
        return 8

    @property
    def seed(self) -> int | None:
        return self.random_seed if self.stochastic else None

    def block_elements(self, parameter: Parameter) -> int:
        del parameter
        return self.block


def int8(block: int = 512, *, stochastic: bool = False, seed: int = 0) -> Int8:
    """Each value as an integer in [-127, 127] times ``max|block| / 127``: 8.06 bits a value at the default block.

    To the nearest, an element is wrong by at most half a step of its block, that is max|block| / 254. Stochastic
    rounding is wrong by up to a whole step, but right in expectation, so it needs no memory; `attach` puts error
    feedback around the other.

    Args:
        block: consecutive values with one scale.
        stochastic: round up with the probability that makes the expectation right, as `qsgd` does.
        seed: of stochastic rounding.

    Raises:
        ValueError: a block below 1.

    Example:
        >>> compressor = int8()
        >>> parameter = Parameter("weight", (3,))
        >>> payload = compressor.compress(torch.tensor([1.0, 0.5, -1.0]), parameter, compressor.init(parameter))
        >>> compressor.decompress(payload, parameter)
        tensor([ 1.0000,  0.5039, -1.0000])
    """
    return Int8(block, stochastic, seed)
