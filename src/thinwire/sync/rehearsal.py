"""What candidates really take, where processors and not the wire decide: each is run on rows that were summed already.

The estimate of `thinwire.sync.seconds` knows what a rank's work takes alone. On a fast link the ranks of a machine all
work at once, and then it is far off: of 4 ranks on two cores it expected 10 ms of `column_split` for the demo's larger
table, which took 60, and `zen` 35. So there the candidates are tried, once, in a step whose sum is there already.
Nothing of a rehearsal reaches the gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thinwire.sync.choose import Price, prices
from thinwire.sync.demand import Demand
from thinwire.sync.dimensions import Communication
from thinwire.sync.hosts import Hosts
from thinwire.sync.machine import Machine
from thinwire.sync.named import name_of
from thinwire.sync.scheme import Scheme
from thinwire.sync.two_level import TwoLevel

MIN_BYTES = 64 * 1024
"""What sends less than this has little to gain."""
MAX_SECONDS = 0.1
"""Where a run is expected to take longer, the wire decides, and so bytes do; and a rehearsal must not be noticed."""
HOPELESS = 3.0
"""Not rehearsed is what is expected to take so many times the seconds of the fastest."""
REPEATS = 3
DRIFT = 2.0
"""A rehearsal holds until the ranks hold so many times more or fewer rows."""


@dataclass(frozen=True)
class Rehearsal:
    """What was found out.

    Args:
        held: mean over the ranks of the rows that a rank held.
        seconds: of a run on the slowest rank, by name of the scheme.
    """

    held: float
    seconds: Mapping[str, float]

    def is_about(self, demand: Demand) -> bool:
        """Whether it tells anything about that many rows."""
        return self.held / DRIFT <= demand.held <= DRIFT * self.held


def to_rehearse(demand: Demand, machine: Machine, hosts: Hosts = ()) -> list[Scheme | TwoLevel]:
    """The candidates that may be faster than the one of fewest bytes, and that one; none where bytes decide.

    Only schemes that add in the same order as each other: what is taken must not depend on a clock in its last bits.
    Pure: equal on all ranks.
    """
    offers = prices(demand, machine, hosts)
    best, fastest = offers[0], min(offers, key=_seconds)
    if best.sent_bytes < MIN_BYTES or _seconds(best) > MAX_SECONDS:
        return []
    if best.scheme.is_dense or not _adds_in_rank_order(best.scheme):
        return []
    hopeful = [offer.scheme for offer in offers if _seconds(offer) <= HOPELESS * _seconds(fastest)]
    return [point for point in hopeful if point == best.scheme or (not point.is_dense and _adds_in_rank_order(point))]


def rehearse(
    points: Sequence[Scheme | TwoLevel],
    held: float,
    run: Callable[[Scheme | TwoLevel], object],
    slowest: Callable[[float], float],
    clock: Callable[[], float] = time.perf_counter,
) -> Rehearsal:
    """Run each point `REPEATS` times in turns; its time is the least. A collective call.

    Args:
        run: synchronizes by a point.
        slowest: tells all ranks this rank's seconds, and returns the most of any; a collective call.
    """
    seconds: dict[str, float] = {}
    for _ in range(REPEATS):
        for point in points:
            slowest(0.0)  # so that all begin together
            started = clock()
            run(point)
            taken = slowest(clock() - started)
            seconds[name_of(point)] = min(taken, seconds.get(name_of(point), taken))
    return Rehearsal(held, seconds)


def _adds_in_rank_order(point: Scheme | TwoLevel) -> bool:
    return isinstance(point, Scheme) and point.communication is Communication.POINT_TO_POINT


def _seconds(offer: Price) -> float:
    assert offer.seconds is not None, "a machine gives every scheme seconds"
    return offer.seconds
