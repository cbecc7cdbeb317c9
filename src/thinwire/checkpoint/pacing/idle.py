"""Profile of the timespans in which training leaves the network idle.

GEMINI (Wang et al., SOSP'23), section 5: timespans are profiled over some iterations, and discounted for how much they
vary. All seconds are of one machine's clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, pstdev

GAMMA = 0.9  # of a timespan is used at most: the paper reports timespans that vary by less than 10 %
PROFILED_ITERATIONS = 20


@dataclass(frozen=True)
class Timespan:
    """A period in which the network is idle, counted from the start of an iteration."""

    start_seconds: float
    length_seconds: float


@dataclass(frozen=True)
class IdleProfile:
    """Profile of the idle timespans of an iteration.

    Args:
        timespans: medians over the profiled iterations.
        variation: standard deviation of their lengths over their median, all timespans together.
        agreement: the part of the iterations with the most common number of timespans; the others are left out.
    """

    timespans: tuple[Timespan, ...]
    variation: float
    agreement: float

    @property
    def spans(self) -> tuple[float, ...]:
        """Seconds of each timespan."""
        return tuple(timespan.length_seconds for timespan in self.timespans)

    @property
    def steady(self) -> bool:
        """Whether timespans vary by less than 10 %, as in the paper."""
        return self.variation < 1 - GAMMA and self.agreement > GAMMA

    @property
    def gamma(self) -> float:
        """The part of each timespan to use: 0.9, or less where they vary by more, and never below 0.1."""
        return max(1 - GAMMA, min(GAMMA, 1 - self.variation) * self.agreement)


def profile(iterations: Sequence[Sequence[tuple[float, float]]]) -> IdleProfile:
    """Return the medians of the network-idle timespans over some iterations (20 in the paper), and their variation.

    Args:
        iterations: for each, (start, length) in seconds of its timespans, in their order.

    Raises:
        ValueError: no iteration, or none that had a timespan.

    Example:
        >>> profile([[(0.0, 1.0)], [(0.0, 1.1)], [(0.0, 1.2)]]).spans
        (1.1,)
    """
    counts = Counter(len(timespans) for timespans in iterations if timespans)
    if not counts:
        raise ValueError(f"{len(iterations)} iterations were profiled, and none had a network-idle timespan")
    most = max(counts.values())
    count = min(count for count, times in counts.items() if times == most)
    columns = list(zip(*(timespans for timespans in iterations if len(timespans) == count), strict=True))
    timespans = tuple(
        Timespan(median(start for start, _ in column), median(length for _, length in column)) for column in columns
    )
    total = sum(timespan.length_seconds for timespan in timespans)
    deviation = sum(pstdev(length for _, length in column) for column in columns)
    variation = deviation / total if total > 0 else math.inf
    return IdleProfile(timespans, variation, most / len(iterations))
