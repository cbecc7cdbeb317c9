"""A fixed threshold; and what methods that estimate one share: the promise that something is sent, and not too much."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Compressor, Parameter, State
from thinwire.compress.sparsify import Selection, Sparsifier

MOST = 2
"""Methods that search a threshold never send more than so many times ``k``."""
FEWEST, MOST_ACCEPTED = 2 / 3, 4 / 3
"""Of k: what an estimated threshold may leave."""
CORRECTIONS = 8
RAISE, LOWER = 1.2, 0.8


@dataclass(frozen=True)
class Threshold(Sparsifier):
    """See `threshold`."""

    value: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.value > 0.0 and math.isfinite(self.value)):
            raise ValueError(f"elements are sent from a positive, finite magnitude on, not from {self.value}")

    @property
    def settings(self) -> tuple[str, ...]:
        return (f"{self.value:g}",)

    def select(self, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        del parameter, state
        ids, chosen = kernels.select_at_least(flat, self.value)
        return (ids, chosen) if ids.numel() else largest_nonzero(flat, min(1, flat.numel()))


def threshold(value: float, *, values: Compressor | None = None) -> Threshold:
    """Every element of at least a fixed magnitude (Strom, Interspeech'15).

    With error feedback a small gradient is sent once it has grown to the threshold. If no element reaches it the
    largest one is sent, unless all are zero; there is no upper bound, so too small a threshold sends everything.
    The magnitude of gradients changes in training, from which a density does not suffer: prefer the other methods.

    Args:
        value: of the dtype and scale of the gradients, positive.
        values: how chosen values are coded; None sends them as they are.

    Raises:
        ValueError: a threshold that is not positive and finite.
    """
    return Threshold(value=value, values=values)


def nothing(flat: Tensor) -> Selection:
    """The selection of an all-zero gradient."""
    return torch.empty(0, dtype=torch.int64), flat.new_empty(0)


def largest_nonzero(flat: Tensor, k: int) -> Selection:
    """The ``k`` largest; fewer if not so many differ from zero."""
    ids, chosen = kernels.top_magnitudes(flat, k)
    present = chosen != 0
    return (ids, chosen) if bool(present.all()) else (ids[present], chosen[present])


def largest_of(selection: Selection, k: int) -> Selection:
    """The ``k`` largest of a selection, or all if there are no more."""
    ids, chosen = selection
    if ids.numel() <= k:
        return selection
    places, chosen = kernels.top_magnitudes(chosen, k)
    return ids[places], chosen


def select_near(flat: Tensor, threshold: float, k: int, count: int) -> Selection:
    """From a threshold on, corrected until 2/3 k to 4/3 k elements reach it; else the ``k`` largest.

    ``count`` elements reach the threshold as it was estimated, which can be anything on data that is not like its
    model: infinite, below zero, beyond the largest magnitude. A correction raises or lowers it by a fifth; once
    thresholds on both sides of k are known it goes to their geometric mean. Error feedback needs that: it leaves a
    sharp edge at the last thresholds, where a fifth is the difference between k / 5 and 10 k elements. Gradients of a
    small transformer took Gaussian-K 2.8 corrections at the mean and 5 at most, SIDCo 0.8 to 1.7 and 8.
    """
    low, high = 0.0, math.inf
    for _ in range(CORRECTIONS):
        if FEWEST * k <= count <= MOST_ACCEPTED * k or not 0.0 < threshold < math.inf:
            break
        low, high = (threshold, high) if count > k else (low, threshold)
        threshold = _between(low, high)
        count = kernels.count_at_least(flat, threshold)
    if threshold > 0.0 and FEWEST * k <= count <= MOST_ACCEPTED * k:
        return kernels.select_at_least(flat, threshold, count)
    return largest_nonzero(flat, k)


def _between(low: float, high: float) -> float:
    """The geometric mean; beyond the one bound that is known, where there is only one."""
    if high == math.inf:
        return low * RAISE
    return math.sqrt(low) * math.sqrt(high) if low > 0.0 else high * LOWER


class Tail:
    """What a search for a threshold that about ``fewest`` elements reach has to look at: little of a gradient.

    These are copied once, by their leading bits. All steps of a search then look at them alone, and decide as if they
    counted the whole gradient.
    """

    def __init__(self, flat: Tensor, fewest: int) -> None:
        self._ids, self._chosen = kernels.leading_magnitudes(flat, fewest)

    def count(self, threshold: float) -> int:
        """How many elements of the gradient reach a threshold, if fewer than ``fewest``; else at least so many."""
        return kernels.count_at_least(self._chosen, threshold)

    def select(self, threshold: float) -> Selection:
        places, chosen = kernels.select_at_least(self._chosen, threshold)
        return self._ids[places], chosen


def mean_and_max(flat: Tensor) -> tuple[float, float]:
    """Of the magnitudes."""
    low, high = torch.aminmax(flat)
    return kernels.magnitude_moments(flat).sum / flat.numel(), max(-float(low), float(high))
