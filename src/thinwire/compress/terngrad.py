"""TernGrad: -1, 0 or 1 times the largest value (Wen et al., NeurIPS'17)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Memory, Parameter, Payload, State
from thinwire.compress.blocks import BlockQuantizer


@dataclass(frozen=True)
class TernGrad(BlockQuantizer):
    """See `terngrad`."""

    clip: float | None = None
    random_seed: int = 0

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

    @property
    def bits(self) -> int:
        return 2

    @property
    def seed(self) -> int:
        return self.random_seed

    def block_elements(self, parameter: Parameter) -> int:
        return max(1, parameter.numel)

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        return super().compress(gradient if self.clip is None else self._clipped(gradient), parameter, state)

    def _clipped(self, gradient: Tensor) -> Tensor:
        """By the root mean square: the standard deviation where the mean is zero, and it never clips a constant."""
        moments = kernels.magnitude_moments(gradient.view(-1))
        limit = (self.clip or math.inf) * math.sqrt(moments.sum_squares / max(1, gradient.numel()))
        limit = min(limit, torch.finfo(gradient.dtype).max)
        return gradient.clamp(-limit, limit)


def terngrad(clip: float | None = None, *, seed: int = 0) -> TernGrad:
    """Each value becomes sign(v) max|g| with probability |v| / max|g|, else zero (Algorithm 1): 2 bits a value.

    Right in expectation, so no memory is needed; but the variance is large where few values are much larger than the
    rest, against which the paper clips at 2.5 standard deviations. That has a bias, which no memory takes
    away: error feedback around a code of so large a variance can diverge, and `attach` adds none.

    Args:
        clip: in standard deviations, as 2.5; None for no clipping.
        seed: of the random choice; it also depends on the parameter, the step and the rank.

    Raises:
        ValueError: a clip that is not positive.
    """
    return TernGrad(clip, seed)
