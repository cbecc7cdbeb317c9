"""A threshold from a normal distribution fitted to the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Compressor, Parameter, State
from thinwire.compress.sparsify import DensitySparsifier, Selection
from thinwire.compress.threshold import nothing, select_near


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
        return select_near(flat, threshold, k, kernels.count_at_least(flat, threshold))


def gaussian_k(density: float = 0.01, *, values: Compressor | None = None) -> GaussianK:
    """Gaussian-K (Shi et al., arXiv 1911.08772): elements beyond the ``1 - k / (2 n)`` quantile of a normal one.

    Its deviation is that of the gradient, about zero. While the count is outside [2/3, 4/3] of k the threshold is
    corrected, by 1.2 or 0.8 until it is bracketed and by bisection then; if that takes more than eight times, the k
    largest are taken. So 2/3 k to 4/3 k elements are sent, or all that are not zero if there are fewer. Biased: needs
    error feedback, which `attach` adds.

    Args:
        density: k / numel, in (0, 1].
        values: how chosen values are coded; None sends them as they are.

    Raises:
        ValueError: a density outside (0, 1].
    """
    return GaussianK(density=density, values=values)
