"""QSGD: random rounding to a few levels of the norm of a bucket (Alistarh et al., NeurIPS'17)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.compress.base import Memory, Parameter
from thinwire.compress.blocks import BlockQuantizer, check_block


@dataclass(frozen=True)
class QSGD(BlockQuantizer):
    """See `qsgd`."""

    num_bits: int = 8
    bucket: int = 512
    norm: Literal["max", "l2"] = "max"
    random_seed: int = 0

    def __post_init__(self) -> None:
        if self.num_bits not in range(2, 9):
            raise ValueError(
                f"qsgd has 2 to 8 bits, not {self.num_bits!r}: one of them is the sign; for one bit take ef_sign_sgd(),"
                " for more bf16()"
            )
        if self.norm not in ("max", "l2"):
            raise ValueError(f'qsgd scales a bucket by its "max" or "l2" norm, not {self.norm!r}')
        check_block(self.bucket, "buckets of qsgd")

    @property
    def name(self) -> str:
        return f"qsgd({self.num_bits}, {self.bucket}{'' if self.norm == 'max' else ', l2'})"

    @property
    def memory(self) -> Memory:
        return Memory.UNBIASED

    @property
    def bits(self) -> int:
        return self.num_bits

    @property
    def seed(self) -> int:
        return self.random_seed

    def block_elements(self, parameter: Parameter) -> int:
        del parameter
        return self.bucket

    def norms(self, flat: Tensor, parameter: Parameter) -> Tensor:
        largest = super().norms(flat, parameter)
        return largest if self.norm == "max" else _two_norms(flat, self.bucket, largest)


def _two_norms(flat: Tensor, bucket: int, largest: Tensor) -> Tensor:
    """Of values divided by the largest of their bucket, so that no square overflows or vanishes."""
    padded = torch.nn.functional.pad(flat, (0, largest.numel() * bucket - flat.numel())).view(-1, bucket)
    scale = largest.clamp(min=torch.finfo(flat.dtype).tiny)
    return torch.linalg.vector_norm(padded / scale[:, None], dim=1).mul_(scale).clamp_(max=torch.finfo(flat.dtype).max)


def qsgd(bits: int = 8, bucket: int = 512, *, norm: Literal["max", "l2"] = "max", seed: int = 0) -> QSGD:
    """A sign and one of s + 1 levels of the norm of a bucket, s = 2^(bits - 1) - 1, chosen at random (section 3.1).

    With x = s |v| / norm the level is floor(x) + 1 with probability x - floor(x), else floor(x), so that the
    expectation is the value and no memory is needed.

    Args:
        bits: of a value, sign included, 2 to 8; at 2 bits it is TernGrad in buckets.
        bucket: consecutive values with one norm, which costs 32 / bucket bits a value.
        norm: "max", as in the authors' own runs, of which the error is smaller; "l2", as their theorem.
        seed: of the random choice; it also depends on the parameter, the step and the rank.

    Raises:
        ValueError: bits out of range, another norm, a bucket below 1.

    Example:
        >>> from thinwire.compress.base import Parameter
        >>> compressor = qsgd(4)
        >>> parameter = Parameter("weight", (1024,))
        >>> compressor.packed_bytes(parameter)  # of 4096
        536
    """
    return QSGD(bits, bucket, norm, seed)
