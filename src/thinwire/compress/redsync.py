"""A threshold between the mean and the largest magnitude, found by bisection."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.compress.base import Compressor, Parameter, State
from thinwire.compress.sparsify import DensitySparsifier, Selection
from thinwire.compress.threshold import MOST, Tail, largest_nonzero, mean_and_max, nothing

STEPS = 30
"""Of the bisection: after these, the ratio of two thresholds in the bracket is that of two neighbouring float32."""


@dataclass(frozen=True)
class RedSync(DensitySparsifier):
    """See `redsync`."""

    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        del parameter, state
        low, high = mean_and_max(flat)
        if high == 0.0:
            return nothing(flat)
        tail = Tail(flat, min(flat.numel(), MOST * k + 1))
        for _ in range(STEPS):
            threshold = low + 0.5 * (high - low)
            count = tail.count(threshold)
            if k <= count <= MOST * k:
                return tail.select(threshold)
            if count > k:
                low = threshold
            else:
                high = threshold
        return largest_nonzero(flat, k)


def redsync(density: float = 0.001, *, values: Compressor | None = None) -> RedSync:
    """RedSync (Fang et al., arXiv 1808.04357): from ``mean + r (max - mean)`` of the magnitudes on, ``r`` by bisection.

    The first ``r`` at which k to 2 k elements are chosen is taken. Where there is none (many equal magnitudes, or a
    density so large that the threshold is below the mean) the k largest that are not zero are sent. Biased: needs error
    feedback, which `attach` adds.

    Args:
        density: k / numel, in (0, 1]; the paper's is 0.1 %.
        values: how chosen values are coded; None sends them as they are.

    Raises:
        ValueError: a density outside (0, 1].
    """
    return RedSync(density=density, values=values)
