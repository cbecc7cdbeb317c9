"""Search the fastest option to cut gradients into jobs of the lane, and to send each, for any additive costs.

The lane is beside backward, so when a gradient is ready does not depend on the plan. The rest of Cupcake's
recursion (MLSys'23) is the time E(i) at which the lane is done with the first i gradients:

    E(i) = min over j < i and options w of max(E(j), ready(i)) + seconds of gradients j + 1 .. i as one job by w

It is exact because the right side never falls when E(j) rises. Where encoding delays backward this does not hold, and
`thinwire.fuse` has the search for it. O(N^2) for each option.

`fastest_jobs` is that, and sends all gradients of a job the same option. `espresso_jobs` decides for each gradient, by
Algorithm 1 of Espresso (EuroSys'23), and leaves the cuts to the recursion.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from thinwire.lab.planning.costs import Costs, chosen_costs, job_seconds
from thinwire.plan.profile import Groups

_LEAST_GAIN = 1e-6
"""Least relative gain of the timeline for which a decision is changed."""


def fastest_jobs(backward_seconds: Sequence[float], options: Sequence[Costs]) -> tuple[Groups, tuple[int, ...]]:
    """Return the fastest groups, and the index of the option of each.

    Of equal times fewer jobs win, and of equal options the first.

    Args:
        backward_seconds: seconds of each gradient, in backward order.
        options: costs of the same gradients, one entry per option.
    """
    ready = list(accumulate(backward_seconds))
    count = len(ready)
    prices = [_JobPrices(costs) for costs in options]
    done = np.zeros(count + 1)
    origin, chosen = [0] * (count + 1), [0] * (count + 1)
    for end in range(1, count + 1):
        start = np.maximum(done[:end], ready[end - 1])
        totals = np.stack([start + price.ending_at(end) for price in prices])
        option, origin[end] = map(int, np.unravel_index(totals.argmin(), totals.shape))
        chosen[end] = option
        done[end] = totals[option, origin[end]]
    groups, taken, end = [], [], count
    while end:
        groups.append(tuple(range(origin[end], end)))
        taken.append(chosen[end])
        end = origin[end]
    return tuple(groups[::-1]), tuple(taken[::-1])


class _JobPrices:
    """The `Costs.seconds` of all jobs that end at one gradient, computed at once."""

    def __init__(self, costs: Costs) -> None:
        self._opening = costs.opening_seconds
        self._work = _sums(np.array([tensor.encode_seconds + tensor.decode_seconds for tensor in costs.tensors]))
        self._kinds = []
        for messages in dict.fromkeys(tensor.messages for tensor in costs.tensors):
            own = np.array([tensor.messages == messages for tensor in costs.tensors])
            wire = np.array([tensor.wire_seconds for tensor in costs.tensors])
            self._kinds.append((messages, _sums(own), _sums(np.where(own, wire, 0.0))))

    def ending_at(self, end: int) -> np.ndarray:
        """Return [end] costs of the jobs that begin with gradient 0, 1, ..., end - 1."""
        total = self._opening + self._work[end] - self._work[:end]
        for messages, counts, wires in self._kinds:
            wire = wires[end] - wires[:end]
            seconds = messages.fixed + np.maximum(messages.floor, messages.alpha + wire)
            total += np.where(counts[end] > counts[:end], seconds, 0.0)
        return total


def _sums(values: np.ndarray) -> np.ndarray:
    """Return [count + 1] sums of the first 0, 1, ... values."""
    return np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])


def espresso_jobs(
    backward_seconds: Sequence[float], size_bytes: Sequence[float], options: Sequence[Costs]
) -> tuple[Groups, tuple[int, ...]]:
    """Return groups, and the index of each gradient's option: gradients of one job may differ.

    Algorithm 1 from two sides, and the faster of both: from no compression, as published, and from `fastest_jobs`, so
    that the result is never slower than that. It is repeated with new cuts until nothing changes. On 2000 random jobs
    of two to six gradients with up to four options it is as fast as the best of all choices in all but 2, and 0.5 %
    slower at worst; `fastest_jobs` in all but 97, 12 %; as published, without new cuts, in all but 192, 61 %.

    Args:
        backward_seconds: seconds of each gradient, in backward order.
        size_bytes: bytes of each gradient: the largest is decided first.
        options: costs of the same gradients, one entry per option; the first is without compression.
    """
    groups, taken = fastest_jobs(backward_seconds, options)
    alike = [option for group, option in zip(groups, taken, strict=True) for _ in group]
    searches = [_Decisions(backward_seconds, size_bytes, options, start) for start in ([0] * len(alike), alike)]
    for decisions in searches:
        while decisions.decide_all():
            pass
        decisions.undo_all()
    best = min(searches, key=lambda decisions: decisions.seconds)
    return best.groups, tuple(best.choices)


class _Decisions:
    """The option of each gradient so far, the best cuts for these, and their timeline."""

    def __init__(
        self,
        backward_seconds: Sequence[float],
        size_bytes: Sequence[float],
        options: Sequence[Costs],
        choices: Sequence[int],
    ) -> None:
        self._backward, self._ready = backward_seconds, list(accumulate(backward_seconds))
        self._options = options
        self._order = sorted(range(len(size_bytes)), key=lambda tensor: (-size_bytes[tensor], -tensor))
        self.choices = list(choices)
        self._cut()

    def decide_all(self) -> bool:
        """Run one pass of Algorithm 1, the largest gradient first; return whether it changed anything.

        A job before a bubble is hidden: done sooner, it only widens the bubble (Espresso, property 1).
        """
        self._cut()
        before = self.seconds
        for tensor in self._order:
            if self._job_of[tensor] >= self._first_exposed:
                best = min(range(len(self._options)), key=lambda option: self._trial(tensor, option))
                if self._trial(tensor, best) < self.seconds * (1 - _LEAST_GAIN):
                    self._choose(tensor, best)
        return self.seconds < before

    def undo_all(self) -> None:
        """Send exactly all gradients whose compression does not shorten the timeline, the smallest first."""
        for tensor in reversed(self._order):
            if self.choices[tensor] and self._trial(tensor, 0) <= self.seconds:
                self._choose(tensor, 0)
        self._cut()

    def _trial(self, tensor: int, option: int) -> float:
        """Return the timeline with another option for one gradient, with unchanged cuts."""
        number = self._job_of[tensor]
        seconds = self._job_seconds.copy()
        seconds[number] = self._seconds_of(number, {tensor: option})
        return self._timeline(seconds)[0]

    def _choose(self, tensor: int, option: int) -> None:
        self.choices[tensor] = option
        number = self._job_of[tensor]
        self._job_seconds[number] = self._seconds_of(number)
        self.seconds, self._first_exposed = self._timeline(self._job_seconds)

    def _cut(self) -> None:
        self.groups, _ = fastest_jobs(self._backward, (chosen_costs(self._options, self.choices),))
        self._job_of = [number for number, group in enumerate(self.groups) for _ in group]
        self._ready_of = [self._ready[group[-1]] for group in self.groups]
        self._job_seconds = [self._seconds_of(number) for number in range(len(self.groups))]
        self.seconds, self._first_exposed = self._timeline(self._job_seconds)

    def _seconds_of(self, number: int, other: dict[int, int] | None = None) -> float:
        """Return the seconds of one job, in which some gradients have another option than their own."""
        choices = {tensor: self.choices[tensor] for tensor in self.groups[number]} | (other or {})
        tensors = [self._options[option].tensors[tensor] for tensor, option in choices.items()]
        return job_seconds(self._options[0].opening_seconds, tensors)

    def _timeline(self, job_seconds: Sequence[float]) -> tuple[float, int]:
        """Return the end of all jobs, and the first job after the last bubble, when the lane waits for a gradient."""
        clock, first = 0.0, 0
        for number, (ready, seconds) in enumerate(zip(self._ready_of, job_seconds, strict=True)):
            if ready > clock:
                clock, first = ready, number
            clock += seconds
        return clock, first
