"""Deep gradient compression: a sampled threshold, momentum before it, and a warm-up of the density."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Compressor, Parameter, State
from thinwire.compress.memory import MomentumCorrection
from thinwire.compress.methods.select import MOST, largest_nonzero, largest_of
from thinwire.compress.methods.sparsify import DensitySparsifier, Selection
from thinwire.compress.warm_up import WarmUp

FEWEST = 0.8  # of k, without another threshold
LOWER = 0.8
ADAPTATIONS = 10


@dataclass(frozen=True)
class SampledTopK(DensitySparsifier):
    """The selection of DGC (Lin et al., ICLR'18, section 3): a threshold from a sample, then at most the ``k`` largest.

    The threshold is the one that a strided sample needs. While fewer than 0.8 k elements reach it, it is lowered by
    0.8, up to ten times; of more than k the k largest are kept. So 0.8 k to k elements are sent, or all that are not
    zero if there are fewer.

    Args:
        density: k / numel, in (0, 1].
        sample: fraction of the elements that is sampled.
        min_sample: least number of elements in the sample, if there are that many.
        values: code of the selected values; None sends them as they are.

    Raises:
        ValueError: a density or sample outside (0, 1], a sample of no elements.
    """

    sample: float = 0.01
    min_sample: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.sample <= 1.0 or self.min_sample < 1:
            raise ValueError(
                f"a sample is a part of the elements in (0, 1] and at least one of them, not {self.sample} and"
                f" {self.min_sample}"
            )

    @property
    def settings(self) -> tuple[str, ...]:
        if (self.sample, self.min_sample) == (0.01, 4096):
            return super().settings
        return (*super().settings, f"sample={self.sample:g}/{self.min_sample}")

    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        threshold = self._sampled_threshold(flat, k)
        if not threshold > 0.0:  # nearly all elements are zero
            return largest_nonzero(flat, k)
        for _ in range(ADAPTATIONS + 1):
            count = kernels.count_at_least(flat, threshold)
            if count > MOST * k:
                break
            if count >= FEWEST * k:
                return largest_of(kernels.select_at_least(flat, threshold, count), k)
            threshold *= LOWER
        return largest_nonzero(flat, k)

    def _sampled_threshold(self, flat: Tensor, k: int) -> float:
        size = flat.numel()
        sample = flat[:: _stride(size, max(self.sample, self.min_sample / size))].contiguous()
        _, largest = kernels.top_magnitudes(sample, max(1, round(k * sample.numel() / size)))
        return float(largest.abs().min())


def dgc(
    density: float = 0.001,
    momentum: float = 0.9,
    *,
    nesterov: bool = False,
    clip_norm: float | None = None,
    masking: bool = True,
    warm_up_epochs: int = 4,
    steps_per_epoch: int | None = None,
    values: Compressor | None = None,
) -> MomentumCorrection:
    """Return DGC (Lin et al., ICLR'18, arXiv 1712.01887): sampled top-k with momentum correction and warm-up.

    The density of epoch ``e`` is ``max(c^(e + 1), density)`` with ``c = density^(1 / (warm_up_epochs + 1))``: for 0.1 %
    and four epochs 25 %, 6.3 %, 1.6 %, 0.4 %, then 0.1 %. The optimizer must have no momentum for these parameters, and
    keeps its own for those that are not compressed: see "Momentum" in docs/guides/compression.md.

    Args:
        density: density after the warm-up, in (0, 1].
        momentum, nesterov, clip_norm, masking: see `thinwire.compress.memory.MomentumCorrection`.
        warm_up_epochs: number of epochs of the warm-up; 0 for none.
        steps_per_epoch: number of steps, such as ``len(data_loader)``; None leaves the warm-up out.
        values: code of the selected values; None sends them as they are.

    Raises:
        ValueError: a density outside (0, 1], momentum outside [0, 1), epochs below 0 or steps below 1.

    Example:
        >>> dgc(0.001, steps_per_epoch=500).name
        'momentum_correction(warm_up(sampled_top_k(0.001), 2000 steps in 4 from 0.251189), 0.9)'
    """
    if warm_up_epochs < 0 or (steps_per_epoch is not None and steps_per_epoch < 1):
        raise ValueError(
            f"DGC cannot warm up over {warm_up_epochs} epochs of {steps_per_epoch} steps: pass warm_up_epochs=0 for no"
            " warm-up, and steps_per_epoch=len(data_loader)"
        )
    chosen: Compressor = SampledTopK(density=density, values=values)
    if warm_up_epochs and steps_per_epoch:
        start = density ** (1.0 / (warm_up_epochs + 1))
        chosen = WarmUp(chosen, warm_up_epochs * steps_per_epoch, start, stairs=warm_up_epochs)
    return MomentumCorrection(chosen, momentum, nesterov=nesterov, clip_norm=clip_norm, masking=masking)


def _stride(size: int, share: float) -> int:
    """Return about 1 / share, coprime to the size: else a sample may be a single column of a matrix."""
    stride = max(1, int(1.0 / share))
    while math.gcd(stride, size) > 1:
        stride -= 1
    return stride
