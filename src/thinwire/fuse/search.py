"""The best contiguous grouping under the timeline: a dynamic programme over states that no other state dominates.

All plans of the first tensors are states (`thinwire.fuse.states`). What the timeline makes of a plan only grows in the
clocks of its state, so of two states of the same tensors, one that is no smaller in any clock can be dropped: whatever
follows, the other one is no worse. So can a state that cannot end before a plan that is known (`thinwire.fuse.bounds`).
What is left is extended by every possible next group. Nothing else is dropped, so the result is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.fuse.bounds import Bounds
from thinwire.fuse.states import NUMBER, START_BYTES, Array, Mode, Places, criteria, nothing_sent
from thinwire.plan.profile import Profile

ROUNDING = 1e-12
"""Of the iteration: what is nearer counts as equal, or sums in another order would all be states of their own."""


@dataclass(frozen=True)
class Found:
    """The best plan that was found: groups end before these tensors, each sent in one of the modes.

    Args:
        seconds: of the iteration; infinite if nothing beats what was known before.
        ends: empty then, too.
        modes: places in what `search` was given.
        least_seconds: no plan takes less, but for what was known before.
    """

    seconds: float
    ends: tuple[int, ...]
    modes: tuple[int, ...]
    least_seconds: float


def search(profile: Profile, modes: Sequence[Mode], below_seconds: float, width: int | None = None) -> Found:
    """The best plan that takes less than ``below_seconds``.

    Args:
        profile: its backward times and sizes; costs are those of ``modes``.
        below_seconds: of a plan that is known; finite. The nearer to the best, the faster is the search.
        width: keep at most so many states for each number of tensors, the most promising ones. The plan is then proven
            to be the best only if it takes ``least_seconds``. None keeps all.
    """
    return _Search(profile, modes, below_seconds, width).run()


class _Search:
    def __init__(self, profile: Profile, modes: Sequence[Mode], below_seconds: float, width: int | None) -> None:
        self.modes, self.width, self.bounds = modes, width, Bounds(profile, modes)
        self.below = self.dropped = below_seconds
        self.tolerance = ROUNDING * below_seconds
        # All states that were kept, in order of their numbers; and for each its tensors, its last group's mode, and the
        # number of the state before that group.
        self.kept: list[Array] = []
        self.ends: list[int] = []
        self.sent_as: list[int] = []
        self.parents: list[int] = []
        self.open = [nothing_sent()[:, :0] for _ in modes]  # by mode: which states the next group may still follow

    def run(self) -> Found:
        self._keep(0, nothing_sent(), np.array([-1]))
        for tensor in range(1, self.bounds.count):
            states, seconds, sent_as = self._grown(tensor)
            if seconds.size:
                self.bounds.settle(tensor, states)
                places = self._undominated(states, seconds)
                self._keep(tensor, states[:, places], sent_as[places])
        return self._found()

    def _grown(self, tensor: int) -> tuple[Array, Array, Places]:
        """States of ``tensor`` tensors, the least seconds each can end in, and the mode of its last group."""
        grown, least = [], []
        for place, mode in enumerate(self.modes):
            states = self.bounds.extended(self.open[place], mode, tensor)
            seconds = self.bounds.seconds(tensor, states)
            # A longer last group saves at most the start-ups of the groups after it.
            hopeful = seconds < self.below + self.bounds.startup_seconds
            self.open[place] = self.open[place][:, hopeful]
            alive = seconds < self.below - self.tolerance
            grown.append(states[:, alive])
            least.append(seconds[alive])
        sent_as = np.repeat(np.arange(len(grown)), [states.shape[1] for states in grown])
        return np.concatenate(grown, axis=1), np.concatenate(least), sent_as

    def _undominated(self, states: Array, seconds: Array) -> Places:
        """Places of the states that none other dominates; at most ``width`` of them, the most promising first."""
        values = criteria(states)
        # What has the least sum is dominated by its equals only. A beam takes the least bound first instead.
        rank = values.sum(axis=0) if self.width is None else seconds
        kept: list[int] = []
        places = np.arange(rank.size)
        while places.size:
            first = int(rank.argmin())
            if len(kept) == self.width:
                self.dropped = min(self.dropped, float(rank[first]))
                break
            kept.append(int(places[first]))
            left = (values < values[:, first : first + 1] - self.tolerance).any(axis=0)
            values, rank, places = values[:, left], rank[left], places[left]
        return np.array(kept)

    def _keep(self, tensor: int, states: Array, sent_as: Places) -> None:
        """Number the states, and open them to further groups."""
        numbers = np.arange(len(self.ends), len(self.ends) + sent_as.size)
        self.ends += [tensor] * sent_as.size
        self.sent_as += sent_as.tolist()
        self.parents += states[NUMBER].astype(int).tolist()
        states[START_BYTES], states[NUMBER] = self.bounds.end_bytes[tensor], numbers
        self.kept.append(states)
        self.open = [np.concatenate([states_before, states], axis=1) for states_before in self.open]

    def _found(self) -> Found:
        """The best way to end: with one last group after any of the states."""
        states, count = np.concatenate(self.kept, axis=1), self.bounds.count
        endings = [self.bounds.seconds(count, self.bounds.extended(states, mode, count)) for mode in self.modes]
        mode, state = divmod(int(np.argmin(endings)), states.shape[1])
        seconds = float(endings[mode][state])
        if seconds >= self.below - self.tolerance:
            return Found(math.inf, (), (), self.dropped)
        path = [(count, mode)]
        while state > 0:
            path.append((self.ends[state], self.sent_as[state]))
            state = self.parents[state]
        path.reverse()
        return Found(
            seconds, tuple(end for end, _ in path), tuple(mode for _, mode in path), min(self.dropped, seconds)
        )
