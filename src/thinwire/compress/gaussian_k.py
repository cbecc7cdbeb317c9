"""A threshold from a normal distribution fitted to the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Compressor, Parameter, State
from thinwire.compress.sparsify import DensitySparsifier, Selection
from thinwire.compress.threshold import nothing, select_bounded

CORRECTIONS = 4
FEWEST, MOST_ACCEPTED = 2 / 3, 4 / 3  # of k, without correction
RAISE, LOWER = 1.2, 0.8


@dataclass(frozen=True)
class GaussianK(DensitySparsifier):
    """See `gaussian_k`."""

    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        del parameter, state
        moments = kernels.magnitude_moments(flat)
        if not moments.count:
            return nothing(flat)
        sigma = math.sqrt(moments.sum_squares / flat.numel())
        threshold = -sigma * NormalDist().inv_cdf(0.5 * k / flat.numel())
        count = kernels.count_at_least(flat, threshold)
        for _ in range(CORRECTIONS):
            if FEWEST * k <= count <= MOST_ACCEPTED * k:
                break
            threshold *= RAISE if count > k else LOWER
            count = kernels.count_at_least(flat, threshold)
        return select_bounded(flat, threshold, k, count)


def gaussian_k(density: float = 0.01, *, values: Compressor | None = None) -> GaussianK:
    """Gaussian-K (Shi et al., arXiv 1911.08772): elements beyond the ``1 - k / (2 n)`` quantile of a normal one.

    Its deviation is that of the gradient, about zero. The threshold is corrected up to four times, by 1.2 or 0.8, while
    the count is outside [2/3, 4/3] of k; if it is then none or more than 2 k, the k largest are taken. So at least one
    element is sent, unless all are zero, and at most 2 k. Biased: needs error feedback, which `attach` adds.

    Args:
        density: k / numel, in (0, 1].
        values: how chosen values are coded; None sends them as they are.

    Raises:
        ValueError: a density outside (0, 1].
    """
    return GaussianK(density=density, values=values)
