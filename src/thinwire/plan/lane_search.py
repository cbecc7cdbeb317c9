"""The fastest way to cut gradients into jobs of the lane, each compressed or not: exact, and for any costs that add up.

The lane is beside backward, so when a gradient is ready does not depend on the plan. What is left of Cupcake's
recursion (MLSys'23) is the time E(i) at which the lane is done with the first i gradients:

    E(i) = min over j < i and ways w of max(E(j), ready(i)) + seconds of gradients j + 1 .. i as one job by w

It is exact because the right side never falls when E(j) rises. Where encoding delays backward this does not hold, and
`thinwire.fuse` has the search for it. O(N^2) for each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from thinwire.plan.costs import Costs
from thinwire.plan.profile import Groups


def fastest_jobs(backward_seconds: Sequence[float], ways: Sequence[Costs]) -> tuple[Groups, tuple[int, ...]]:
    """Groups, and the number of the way that each of them takes.

    Of equal times fewer jobs win, and of equal ways the first.

    Args:
        backward_seconds: of each gradient, in backward order.
        ways: costs of the same gradients.
    """
    ready = list(accumulate(backward_seconds))
    count = len(ready)
    prices = [_JobPrices(costs) for costs in ways]
    done = np.zeros(count + 1)
    origin, chosen = [0] * (count + 1), [0] * (count + 1)
    for end in range(1, count + 1):
        start = np.maximum(done[:end], ready[end - 1])
        totals = np.stack([start + price.ending_at(end) for price in prices])
        way, origin[end] = map(int, np.unravel_index(totals.argmin(), totals.shape))
        chosen[end] = way
        done[end] = totals[way, origin[end]]
    groups, ways_taken, end = [], [], count
    while end:
        groups.append(tuple(range(origin[end], end)))
        ways_taken.append(chosen[end])
        end = origin[end]
    return tuple(groups[::-1]), tuple(ways_taken[::-1])


class _JobPrices:
    """`Costs.seconds` of all jobs that end at one gradient, at once."""

    def __init__(self, costs: Costs) -> None:
        coded, wire = np.array(costs.coded), np.array(costs.wire_seconds)
        self._costs = costs
        self._work = _sums(np.array(costs.encode_seconds) + np.array(costs.decode_seconds))
        self._exact = _sums(~coded), _sums(np.where(coded, 0.0, wire)), costs.exact
        self._coded = _sums(coded), _sums(np.where(coded, wire, 0.0)), costs.compressed

    def ending_at(self, end: int) -> np.ndarray:
        """[end]: of the jobs that begin with gradient 0, 1, ..., end - 1."""
        total = self._costs.opening_seconds + self._work[end] - self._work[:end]
        for counts, wires, messages in (self._exact, self._coded):
            wire = wires[end] - wires[:end]
            seconds = messages.fixed + np.maximum(messages.floor, messages.alpha + wire)
            total += np.where(counts[end] > counts[:end], seconds, 0.0)
        return total


def _sums(values: np.ndarray) -> np.ndarray:
    """[count + 1]: of the first 0, 1, ... of them."""
    return np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
