"""Cupcake with optional compression: the choice of tensors that travel together, and of groups to compress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from thinwire.fuse.policy import cupcake, groups_ending_at
from thinwire.fuse.profile import Groups, Linear, Profile
from thinwire.fuse.search import CLOCKS, Array, Mode, StateBounds, floor_of, line_below, max_of_suffixes, search
from thinwire.fuse.timeline import iteration_seconds

STATES = 8192
"""Number of states that a search keeps in all: 8 tensors need 100 at most, and 314 cost a second with this number."""

_FREE = Linear(0.0, 0.0)
_MIN_WIDTH = 16


@dataclass(frozen=True)
class Mixed:
    """A plan, and its quality.

    Args:
        groups: the tensors that travel together.
        compressed: for each group, whether it is compressed.
        seconds: seconds of the iteration.
        least_seconds: lower bound of any plan.
    """

    groups: Groups
    compressed: tuple[bool, ...]
    seconds: float
    least_seconds: float

    @property
    def is_optimal(self) -> bool:
        """Whether the plan is proven optimal; otherwise it is within seconds / least_seconds of the best."""
        return self.seconds <= self.least_seconds * (1 + 1e-9)


class TradeBounds(StateBounds):
    """Bounds for modes that trade computing for communication: weighted means of the ends of both.

    The iteration lasts at least as long as all computing, and as the channel; so as any mean of the two. In the mean
    each later byte costs what its cheapest mode does, in any group.
    """

    def __init__(self, profile: Profile, modes: Sequence[Mode]) -> None:
        super().__init__(profile, modes)
        self._trades = [self._trade(weight, modes) for weight in _trade_weights(modes)]

    def seconds(self, tensor: int, states: Array) -> Array:
        least = super().seconds(tensor, states)
        if tensor == self.count:
            return least
        delay, channel, _, decoding = states[CLOCKS]
        for weight, after_channel, after_delay in self._trades:
            rest = channel * (1 - weight) + after_channel[tensor], delay * (1 - weight) + after_delay[tensor]
            least = np.maximum(least, weight * (delay + decoding) + np.maximum(*rest))
        return least

    def _trade(self, weight: float, modes: Sequence[Mode]) -> tuple[float, Array, Array]:
        """Return the bound of one weight of computing."""

        def line(mode: Mode) -> Linear:
            compress, send, decompress = map(line_below, (mode.compress, mode.communicate, mode.decompress))
            return Linear(
                weight * (compress.alpha + decompress.alpha) + (1 - weight) * send.alpha,
                weight * (compress.beta + decompress.beta) + (1 - weight) * send.beta,
            )

        cheapest = floor_of([line(mode) for mode in modes])
        by_ready = max_of_suffixes((1 - weight) * self.ready[1:] - cheapest.beta * self.end_bytes[:-1])
        constant, total = weight * self.ready[-1] + cheapest.alpha, self.end_bytes[-1]
        return weight, constant + cheapest.beta * (total - self.end_bytes), constant + by_ready + cheapest.beta * total


def _trade_weights(modes: Sequence[Mode]) -> list[float]:
    """Return weights of computing at which two modes cost the same a byte; at others, one of them is cheaper anyway."""
    lines = [[line_below(cost).beta for cost in (one.compress, one.decompress, one.communicate)] for one in modes]
    costs, weights = [(compress + decompress, sending) for compress, decompress, sending in lines], set()
    for (computing, sending), (other_computing, other_sending) in combinations(costs, 2):
        saved, paid = other_sending - sending, computing - other_computing
        if saved * paid > 0:
            weights.add(saved / (saved + paid))
    return sorted(weights)


def mixed(profile: Profile, dense: Linear, states: int = STATES) -> tuple[Groups, tuple[bool, ...]]:
    """Return groups, and which of them to compress, with the least `thinwire.plan.iteration_seconds`.

    For arguments and errors see `best_mixed`, which also tells how far from the optimum the plan can be.

    Example:
        >>> costly, link = Linear(alpha=1, beta=0.25), Linear(alpha=1, beta=0.125)
        >>> mixed(Profile([1, 1], [2, 40], costly, costly, link), dense=Linear(alpha=1, beta=1))
        (((0,), (1,)), (False, True))
    """
    best = best_mixed(profile, dense, states=states)
    return best.groups, best.compressed


def best_mixed(profile: Profile, dense: Linear, coded: Mode | None = None, states: int = STATES) -> Mixed:
    """Return the best plan with or without compression of each group, of all 2^(N - 1) groupings x 2^groups choices.

    Compressing one group delays all that follow, so the compute clock is no longer fixed by the number of groups, and
    states form a Pareto frontier. How many matter at once depends on the profile: trading compute for communication is
    a knapsack problem. While they are few enough, the plan is exact; states dropped beyond ``states`` still bound it.

    Args:
        profile: costs of compressed groups.
        dense: costs of communicating a group that is not compressed.
        coded: costs of compressed groups that are not linear, instead of the profile's.
        states: number of states to keep in all, the most promising for each number of tensors. The choice is the same
            on all ranks, and never worse than `thinwire.fuse.cupcake` with all groups compressed, or with none.

    Raises:
        ValueError: fewer than one state.
    """
    if states < 1:
        raise ValueError(f"a search that keeps {states} states finds nothing: use 1 or more")
    best, best_seconds, compressed = _best_pure(profile, dense, with_compressed=coded is None)
    modes = [Mode(_FREE, dense, _FREE), coded or Mode(profile.compress, profile.communicate, profile.decompress)]
    least_seconds = 0.0
    for width in (4, max(_MIN_WIDTH, states // profile.num_tensors)):
        found = search(profile, modes, best_seconds, width, TradeBounds)
        least_seconds = max(least_seconds, found.least_seconds)
        if found.ends:
            best, best_seconds, compressed = groups_ending_at(found.ends), found.seconds, tuple(map(bool, found.modes))
        if best_seconds <= least_seconds * (1 + 1e-9):
            break
    return Mixed(best, compressed, best_seconds, min(least_seconds, best_seconds))


def _best_pure(profile: Profile, dense: Linear, with_compressed: bool) -> tuple[Groups, float, tuple[bool, ...]]:
    """The better of no group compressed and all: groups, seconds, choices."""
    plain = Profile(profile.backward_seconds, profile.size_bytes, _FREE, _FREE, dense)
    groups = cupcake().groups(plain)
    best = groups, iteration_seconds(plain, groups), (False,) * len(groups)
    if with_compressed:
        groups = cupcake().groups(profile)
        coded = groups, iteration_seconds(profile, groups), (True,) * len(groups)
        best = min(best, coded, key=lambda plan: plan[1])
    return best
