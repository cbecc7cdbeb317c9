"""Top-k by a fixed number of bisections of a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Compressor, Parameter, State
from thinwire.compress.sparsify import DensitySparsifier, Selection
from thinwire.compress.threshold import Tail, mean_and_max


@dataclass(frozen=True)
class MsTopK(DensitySparsifier):
    """See `ms_top_k`."""

    steps: int = 30

    has_fixed_count: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ValueError(f"MSTop-K bisects at least once, not {self.steps} times")

    @property
    def settings(self) -> tuple[str, ...]:
        return (*super().settings, *((f"steps={self.steps}",) if self.steps != 30 else ()))

    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        del parameter, state
        low, high = mean_and_max(flat)
        tail = Tail(flat, k)
        enough, too_few = 0.0, math.inf  # the tightest thresholds on both sides: at least k elements, fewer than k
        for _ in range(self.steps):
            threshold = low + 0.5 * (high - low)
            count = tail.count(threshold)
            if count >= k:
                low = enough = threshold
            else:
                high = too_few = threshold
        return _filled(tail.select(enough), too_few, k)


def ms_top_k(density: float = 0.01, *, steps: int = 30, values: Compressor | None = None) -> MsTopK:
    """MSTopK (Shi et al., MLSys'21, arXiv 2010.10458): exactly ``k`` elements, by a search that sorts nothing.

    A threshold between the mean and the largest magnitude is bisected ``steps`` times. All elements from the tightest
    one on that fewer than k reach are taken; the rest, in the order of their ids, from those between it and the
    tightest one that at least k reach. Biased: needs error feedback, which `attach` adds.

    Args:
        density: k / numel, in (0, 1].
        steps: of the search.
        values: how chosen values are coded; None sends them as they are.

    Raises:
        ValueError: a density outside (0, 1]; no steps.
    """
    return MsTopK(density=density, steps=steps, values=values)


def _filled(selection: Selection, too_few: float, k: int) -> Selection:
    """Those of a selection that reach a threshold, and as many of the others as make ``k``, the first ones."""
    ids, chosen = selection
    sure, _ = kernels.select_at_least(chosen, too_few)
    taken = torch.zeros(ids.numel(), dtype=torch.bool).index_fill_(0, sure, True)
    others = (~taken).nonzero().flatten()[: k - sure.numel()]
    taken.index_fill_(0, others, True)
    return ids[taken], chosen[taken]
