"""The search behind Cupcake's policy: an exact dynamic programme over undominated states, with lower bounds.

A state is a grouping of the first tensors. It holds the timeline's clocks after the groups so far; many states are
the columns of one array, with the rows

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

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.plan.profile import Profile

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
ArrayCost = Callable[[Any], Any]
"""A `thinwire.plan.Linear`, of an array of bytes."""

DELAY, CHANNEL, DECODED, DECODING, START_BYTES, NUMBER = range(6)
CLOCKS = slice(DELAY, START_BYTES)


def criteria(states: Array) -> Array:
    """Return [4, states], each of which lengthens the iteration: a state no smaller than another in any is useless."""
    delay, channel, decoded, decoding = states[CLOCKS]
    return np.stack([delay, delay + decoding, channel, decoded])


class StateBounds:
    """The states after one more group, lower bounds of the iteration from a state, and the clocks below which states do
    not differ.
    """

    def __init__(self, profile: Profile) -> None:
        self.ready, self.end_bytes = np.array(profile.ready_seconds), np.array(profile.end_bytes, np.float64)
        self.count = profile.num_tensors
        self._compress: ArrayCost = profile.compress
        self._communicate: ArrayCost = profile.communicate
        self._decompress: ArrayCost = profile.decompress
        self.startup_seconds = profile.compress.alpha + profile.communicate.alpha + profile.decompress.alpha
        self._sizes = np.diff(self.end_bytes)
        self._rest = self.end_bytes[-1] - self.end_bytes
        self._constants(profile)

    def extended(self, states: Array, tensor: int) -> Array:
        """Return the states [6, states] after one more group, of all that is left up to ``tensor`` tensors."""
        size = self.end_bytes[tensor] - states[START_BYTES]
        decompress = self._decompress(size)
        after = states.copy()
        after[DELAY] += self._compress(size)
        ready = self.ready[tensor] + after[DELAY]
        after[CHANNEL] = np.maximum(states[CHANNEL], ready) + self._communicate(size)
        after[DECODED] = np.maximum(states[DECODED], after[CHANNEL]) + decompress
        after[DECODING] += decompress
        return after

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

    def _constants(self, profile: Profile) -> None:
        """Compute the least time after each clock, by number of tensors.

        Communication and decompression are a flow shop: all bytes up to some tensor are sent, and then all from this
        tensor on are decompressed; the bound is over the tensor that makes this longest. Sending begins when the
        channel is free, or when some later gradient is ready.
        """
        starts, ends = self.end_bytes[:-1], self.end_bytes[1:]
        compress, send, decode = profile.compress, profile.communicate, profile.decompress
        alphas = send.alpha + decode.alpha
        sent_then_decoded = max_of_suffixes(send.beta * ends + decode.beta * (self.end_bytes[-1] - starts))
        ready = max_of_suffixes(self.ready[1:] + compress.beta * ends - send.beta * starts + sent_then_decoded)
        self._computing = self.ready[-1] + self._compress(self._rest) + self._decompress(self._rest)
        self._after_channel = alphas - send.beta * starts + sent_then_decoded
        self._after_delay = alphas + compress.alpha - compress.beta * starts + ready


def max_of_suffixes(values: Array) -> Array:
    """Return the largest value from each index on."""
    return np.maximum.accumulate(values[::-1])[::-1]


ROUNDING = 1e-12
"""Relative tolerance of equal times; without it, sums in another order would all be separate states."""


def search(profile: Profile, below_seconds: float, width: int | None = None) -> tuple[int, ...]:
    """Return the ends of the groups of the best plan whose iteration is shorter than ``below_seconds``, if any is.

    Args:
        below_seconds: finite seconds of a known plan. The nearer to the best, the faster is the search.
        width: largest number of states kept for each number of tensors, the most promising ones; the best plan may be
            missed then. None keeps all.
    """
    return _Search(StateBounds(profile), below_seconds, width).run()


class _Search:
    def __init__(self, bounds: StateBounds, below_seconds: float, width: int | None) -> None:
        self.width, self.bounds = width, bounds
        self.below = below_seconds
        self.tolerance = ROUNDING * below_seconds
        # All states that were kept, in order of their numbers; and for each its tensors, and the number of the state
        # before its last group.
        self.kept: list[Array] = []
        self.ends: list[int] = []
        self.parents: list[int] = []
        self.open = np.zeros((6, 0))  # states that the next group may still follow

    def run(self) -> tuple[int, ...]:
        self._keep(0, np.zeros((6, 1)))
        for tensor in range(1, self.bounds.count):
            states, seconds = self._grown(tensor)
            if seconds.size:
                self.bounds.settle(tensor, states)
                self._keep(tensor, states[:, self._undominated(states, seconds)])
        return self._best()

    def _grown(self, tensor: int) -> tuple[Array, Array]:
        """Return states of ``tensor`` tensors, and the least seconds of each."""
        states = self.bounds.extended(self.open, tensor)
        seconds = self.bounds.seconds(tensor, states)
        # A longer last group saves at most the start-ups of the groups after it.
        self.open = self.open[:, seconds < self.below + self.bounds.startup_seconds]
        alive = seconds < self.below - self.tolerance
        return states[:, alive], seconds[alive]

    def _undominated(self, states: Array, seconds: Array) -> Indices:
        """Return indices of states that no other dominates, at most ``width`` of them, the most promising first."""
        values = criteria(states)
        # The least sum is dominated by its equals only. A beam selects the least bound first instead.
        rank = values.sum(axis=0) if self.width is None else seconds
        kept: list[int] = []
        indices = np.arange(rank.size)
        while indices.size and len(kept) != self.width:
            first = int(rank.argmin())
            kept.append(int(indices[first]))
            left = (values < values[:, first : first + 1] - self.tolerance).any(axis=0)
            values, rank, indices = values[:, left], rank[left], indices[left]
        return np.array(kept)

    def _keep(self, tensor: int, states: Array) -> None:
        """Number the states, and open them to further groups."""
        count = states.shape[1]
        self.parents += states[NUMBER].astype(int).tolist()
        states[START_BYTES] = self.bounds.end_bytes[tensor]
        states[NUMBER] = np.arange(len(self.ends), len(self.ends) + count)
        self.ends += [tensor] * count
        self.kept.append(states)
        self.open = np.concatenate([self.open, states], axis=1)

    def _best(self) -> tuple[int, ...]:
        """Return the ends of the best plan: the best last group after any of the states."""
        states, count = np.concatenate(self.kept, axis=1), self.bounds.count
        endings = self.bounds.seconds(count, self.bounds.extended(states, count))
        state = int(np.argmin(endings))
        if endings[state] >= self.below - self.tolerance:
            return ()
        path = [count]
        while state > 0:
            path.append(self.ends[state])
            state = self.parents[state]
        return tuple(reversed(path))
