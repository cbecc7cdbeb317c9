"""The search behind Cupcake's policy: an exact dynamic programme over undominated states, with lower bounds.

A state is a way to group, and with several modes to send, the first tensors. It holds the timeline's clocks after the
groups so far; many states are the columns of one array, with the rows

    delay      seconds of compression so far: the compute stream is at ready(tensors) + delay
    channel    when the channel is free
    decoded    when the groups so far would be decompressed, if decompression had not to wait for backward
    decoding   seconds of decompression so far

and the bytes before the next group, and the state's number. The iteration ends at
max(ready(all) + delay + decoding, decoded).

The timeline of a plan only grows in the clocks of its state, so of two states of the same tensors, one that is no
smaller in any clock can be dropped: whatever follows, the other one is no worse. So can a state whose lower bound does
not beat the best plan known. What is left is extended by every possible next group. Nothing else is dropped, so the
result is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.fuse.profile import Linear, Profile

Array = NDArray[np.float64]
Places = NDArray[np.intp]

Cost = Callable[[Any], Any]
"""A cost in seconds of an array of bytes: a `Linear`, or any non-negative function that does not fall with bytes."""

DELAY, CHANNEL, DECODED, DECODING, START_BYTES, NUMBER = range(6)
CLOCKS = slice(DELAY, START_BYTES)


@dataclass(frozen=True)
class Mode:
    """A way to send a group: the cost of each part of it."""

    compress: Cost
    communicate: Cost
    decompress: Cost


def nothing_sent() -> Array:
    """Return the one state of no tensors."""
    return np.zeros((6, 1))


def extended(states: Array, mode: Mode, ready: float, end_bytes: float) -> Array:
    """Return the states after one more group, whose last gradient backward alone has at ``ready``.

    Args:
        states: [6, states], of any numbers of tensors.
        end_bytes: bytes of all tensors up to the group's last one.
    """
    size = end_bytes - states[START_BYTES]
    decompress = mode.decompress(size)
    after = states.copy()
    after[DELAY] += mode.compress(size)
    after[CHANNEL] = np.maximum(states[CHANNEL], ready + after[DELAY]) + mode.communicate(size)
    after[DECODED] = np.maximum(states[DECODED], after[CHANNEL]) + decompress
    after[DECODING] += decompress
    return after


def criteria(states: Array) -> Array:
    """Return [4, states], each of which lengthens the iteration: a state no smaller than another in any is useless."""
    delay, channel, decoded, decoding = states[CLOCKS]
    return np.stack([delay, delay + decoding, channel, decoded])


class StateBounds:
    """Lower bounds of the iteration from a state, and the clocks below which states do not differ.

    For k bytes still to come, ``floor(k)`` of a cost is alpha + beta * k with the least alpha and beta of all modes: no
    number of groups, in no mode, costs less.
    """

    def __init__(self, profile: Profile, modes: Sequence[Mode]) -> None:
        self.ready, self.end_bytes = np.array(profile.ready_seconds), np.array(profile.end_bytes, np.float64)
        self.count = profile.num_tensors
        self._compress = floor_of([line_below(mode.compress) for mode in modes])
        self._communicate = floor_of([line_below(mode.communicate) for mode in modes])
        self._decompress = floor_of([line_below(mode.decompress) for mode in modes])
        self._sizes = np.diff(self.end_bytes)
        self._rest = self.end_bytes[-1] - self.end_bytes
        self._constants()

    @property
    def startup_seconds(self) -> float:
        """Least start-up seconds of one group."""
        return self._compress.alpha + self._communicate.alpha + self._decompress.alpha

    def extended(self, states: Array, mode: Mode, tensor: int) -> Array:
        """Return the states after one more group, of all that is left up to ``tensor`` tensors."""
        return extended(states, mode, float(self.ready[tensor]), float(self.end_bytes[tensor]))

    def seconds(self, tensor: int, states: Array) -> Array:
        """Return the least seconds of an iteration from these states of ``tensor`` tensors; exact ones at the end."""
        delay, channel, decoded, decoding = states[CLOCKS]
        if tensor == self.count:
            return np.maximum(self.ready[-1] + delay + decoding, decoded)
        least = np.maximum(delay + decoding + self._computing[tensor], decoded + self._decompress(self._rest[tensor]))
        least = np.maximum(least, channel + self._after_channel[tensor])
        return np.maximum(least, delay + self._after_delay[tensor])

    def settle(self, tensor: int, states: Array) -> None:
        """Raise clocks, in place, to where they begin to matter: states that differ only below that become equal.

        The channel waits for the next gradient, and decompression for the next group and for the end of backward.
        """
        delay, channel, decoded, decoding = states[CLOCKS]
        size = self._sizes[tensor]
        np.maximum(channel, self.ready[tensor + 1] + delay + self._compress(size), out=channel)
        np.maximum(decoded, channel + self._communicate(size), out=decoded)
        np.maximum(decoded, self.ready[-1] + delay + self._compress(self._rest[tensor]) + decoding, out=decoded)

    def _constants(self) -> None:
        """Compute the least time after each clock, by number of tensors.

        Communication and decompression are a flow shop: all bytes up to some tensor are sent, and then all from this
        tensor on are decompressed; the bound is over the tensor that makes this longest. Sending begins when the
        channel is free, or when some later gradient is ready.
        """
        starts, ends = self.end_bytes[:-1], self.end_bytes[1:]
        compress, send, decode = self._compress, self._communicate, self._decompress
        alphas = send.alpha + decode.alpha
        sent_then_decoded = max_of_suffixes(send.beta * ends + decode.beta * (self.end_bytes[-1] - starts))
        ready = max_of_suffixes(self.ready[1:] + compress.beta * ends - send.beta * starts + sent_then_decoded)
        self._computing = self.ready[-1] + compress(self._rest) + decode(self._rest)
        self._after_channel = alphas - send.beta * starts + sent_then_decoded
        self._after_delay = alphas + compress.alpha - compress.beta * starts + ready


def line_below(cost: Cost) -> Linear:
    """Return a line below the cost."""
    return cost if isinstance(cost, Linear) else Linear(0.0, 0.0)


def floor_of(lines: Sequence[Linear]) -> Linear:
    """Return the least cost of groups, by their total bytes, each priced by one of the lines."""
    return Linear(min(line.alpha for line in lines), min(line.beta for line in lines))


def max_of_suffixes(values: Array) -> Array:
    """Return the largest value from each place on."""
    return np.maximum.accumulate(values[::-1])[::-1]


ROUNDING = 1e-12
"""Relative tolerance of equal times; without it, sums in another order would all be separate states."""


@dataclass(frozen=True)
class Found:
    """The result of a search: groups end before these tensors, each sent in one of the modes.

    Args:
        seconds: seconds of the iteration; infinite if no plan beats the one known before.
        ends: ends of groups; empty if no plan beats the one known before.
        modes: indices of modes in the argument of `search`.
        least_seconds: lower bound of all plans except the one known before.
    """

    seconds: float
    ends: tuple[int, ...]
    modes: tuple[int, ...]
    least_seconds: float


def search(
    profile: Profile,
    modes: Sequence[Mode],
    below_seconds: float,
    width: int | None = None,
    bounds: type[StateBounds] = StateBounds,
) -> Found:
    """Return the best plan whose iteration is shorter than ``below_seconds``.

    Args:
        profile: backward times and sizes; its costs are ignored for those of ``modes``.
        below_seconds: finite seconds of a known plan. The nearer to the best, the faster is the search.
        width: largest number of states kept for each number of tensors, the most promising ones. The plan is then
            proven to be the best only if its seconds equal ``least_seconds``. None keeps all.
        bounds: makes the lower bounds; tighter ones drop more states.
    """
    return _Search(bounds(profile, modes), modes, below_seconds, width).run()


class _Search:
    def __init__(self, bounds: StateBounds, modes: Sequence[Mode], below_seconds: float, width: int | None) -> None:
        self.modes, self.width, self.bounds = modes, width, bounds
        self.below = self.dropped = below_seconds
        self.tolerance = ROUNDING * below_seconds
        # All states that were kept, in order of their numbers; and for each its tensors, its last group's mode, and the
        # number of the state before that group.
        self.kept: list[Array] = []
        self.ends: list[int] = []
        self.sent_as: list[int] = []
        self.parents: list[int] = []
        self.open = [nothing_sent()[:, :0] for _ in modes]  # by mode: states that the next group may still follow

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
        """Return states of ``tensor`` tensors, the least seconds of each, and the mode of its last group."""
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
        """Return indices of states that no other dominates, at most ``width`` of them, the most promising first."""
        values = criteria(states)
        # The least sum is dominated by its equals only. A beam selects the least bound first instead.
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
        """Return the best plan: the best last group after any of the states."""
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
