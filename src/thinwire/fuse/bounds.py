"""Lower bounds: the least that an iteration takes which begins with given states."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from thinwire.fuse.states import CLOCKS, Array, Cost, Mode, extended
from thinwire.plan.profile import Linear, Profile


class Bounds:
    """What a state costs at least until the end, and up to where its clocks do not matter.

    For k bytes still to come, ``floor(k)`` of a cost is alpha + beta * k with the least alpha and beta of all modes: no
    number of groups, in no mode, costs less.
    """

    def __init__(self, profile: Profile, modes: Sequence[Mode]) -> None:
        self.ready, self.end_bytes = np.array(profile.ready_seconds), np.array(profile.end_bytes, np.float64)
        self.count = profile.num_tensors
        self._compress = _floor([_line(mode.compress) for mode in modes])
        self._communicate = _floor([_line(mode.communicate) for mode in modes])
        self._decompress = _floor([_line(mode.decompress) for mode in modes])
        self._sizes = np.diff(self.end_bytes)
        self._rest = self.end_bytes[-1] - self.end_bytes
        self._constants()
        self._trades = [self._trade(weight, modes) for weight in _trade_weights(modes)]

    @property
    def startup_seconds(self) -> float:
        """Of one group at least."""
        return self._compress.alpha + self._communicate.alpha + self._decompress.alpha

    def extended(self, states: Array, mode: Mode, tensor: int) -> Array:
        """The states after one more group, of all that is left up to ``tensor`` tensors."""
        return extended(states, mode, float(self.ready[tensor]), float(self.end_bytes[tensor]))

    def seconds(self, tensor: int, states: Array) -> Array:
        """The least seconds of an iteration that begins with these states of ``tensor`` tensors; at the end, exact."""
        delay, channel, decoded, decoding = states[CLOCKS]
        if tensor == self.count:
            return np.maximum(self.ready[-1] + delay + decoding, decoded)
        least = np.maximum(delay + decoding + self._computing[tensor], decoded + self._decompress(self._rest[tensor]))
        least = np.maximum(least, channel + self._after_channel[tensor])
        least = np.maximum(least, delay + self._after_delay[tensor])
        for weight, after_channel, after_delay in self._trades:
            sent = np.maximum(
                channel * (1 - weight) + after_channel[tensor], delay * (1 - weight) + after_delay[tensor]
            )
            least = np.maximum(least, weight * (delay + decoding) + sent)
        return least

    def settle(self, tensor: int, states: Array) -> None:
        """Raise clocks, in place, to where they begin to matter: states that differ below it are alike.

        The channel waits for the next gradient, and decompression for the next group and for the end of backward.
        """
        delay, channel, decoded, decoding = states[CLOCKS]
        size = self._sizes[tensor]
        np.maximum(channel, self.ready[tensor + 1] + delay + self._compress(size), out=channel)
        np.maximum(decoded, channel + self._communicate(size), out=decoded)
        np.maximum(decoded, self.ready[-1] + delay + self._compress(self._rest[tensor]) + decoding, out=decoded)

    def _constants(self) -> None:
        """What follows a clock at least, by number of tensors.

        Communication and decompression are a flow shop: all bytes up to some tensor are sent, and then all from this
        tensor on are decompressed; whichever tensor makes that longest. The sending begins when the channel is free, or
        when some later gradient is ready.
        """
        starts, ends = self.end_bytes[:-1], self.end_bytes[1:]
        compress, send, decode = self._compress, self._communicate, self._decompress
        alphas = send.alpha + decode.alpha
        sent_then_decoded = _max_of_suffixes(send.beta * ends + decode.beta * (self.end_bytes[-1] - starts))
        ready = _max_of_suffixes(self.ready[1:] + compress.beta * ends - send.beta * starts + sent_then_decoded)
        self._computing = self.ready[-1] + compress(self._rest) + decode(self._rest)
        self._after_channel = alphas - send.beta * starts + sent_then_decoded
        self._after_delay = alphas + compress.alpha - compress.beta * starts + ready

    def _trade(self, weight: float, modes: Sequence[Mode]) -> tuple[float, Array, Array]:
        """A bound for modes that trade computing for communication: the mean of both ends, weighted.

        The iteration takes as long as all computing, and as long as the channel; so as any mean of the two. In the mean
        each byte to come costs what its cheapest mode does, whichever groups it comes to be in.
        """

        def line(mode: Mode) -> Linear:
            compress, send, decompress = map(_line, (mode.compress, mode.communicate, mode.decompress))
            return Linear(
                weight * (compress.alpha + decompress.alpha) + (1 - weight) * send.alpha,
                weight * (compress.beta + decompress.beta) + (1 - weight) * send.beta,
            )

        cheapest = _floor([line(mode) for mode in modes])
        starts = self.end_bytes[:-1]
        by_ready = _max_of_suffixes((1 - weight) * self.ready[1:] - cheapest.beta * starts)
        constant = weight * self.ready[-1] + cheapest.alpha
        return weight, constant + cheapest.beta * self._rest, constant + by_ready + cheapest.beta * self.end_bytes[-1]


def _trade_weights(modes: Sequence[Mode]) -> list[float]:
    """Weights of computing at which two modes cost the same for a byte: elsewhere, one of them is cheaper anyway."""
    weights = set()
    lines = [(_line(mode.compress).beta + _line(mode.decompress).beta, _line(mode.communicate).beta) for mode in modes]
    for (computing, sending), (other_computing, other_sending) in combinations(lines, 2):
        saved, paid = other_sending - sending, computing - other_computing
        if saved * paid > 0:
            weights.add(saved / (saved + paid))
    return sorted(weights)


def _line(cost: Cost) -> Linear:
    """A line below the cost."""
    return cost if isinstance(cost, Linear) else Linear(0.0, 0.0)


def _floor(lines: Sequence[Linear]) -> Linear:
    """What groups of so many bytes cost at least together, each priced by one of the lines."""
    return Linear(min(line.alpha for line in lines), min(line.beta for line in lines))


def _max_of_suffixes(values: Array) -> Array:
    return np.maximum.accumulate(values[::-1])[::-1]
