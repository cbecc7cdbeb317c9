"""Trying candidates in real steps, where processors and not the wire decide.

The estimate of `thinwire.sync.seconds` knows what a rank's work takes alone. On a fast link the ranks of a machine all
work at once, and then it is far off: of 4 ranks on two cores it expected 10 ms of `column_split` for the demo's larger
table, which took 60, and `zen` 35. So there each hopeful candidate gets a step of the training. They add in the same
order, so gradients have the same bits whichever of them runs; and what a rehearsal costs is what the slower ones take
longer, no byte more than the headers by which ranks begin together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thinwire.sync.choose import Price
from thinwire.sync.dimensions import Communication
from thinwire.sync.scheme import Scheme
from thinwire.sync.two_level import TwoLevel

MAX_REHEARSALS = 3
"""Of a table in a run, unless the machine changes: the first, one that repeats what was close and tries what came into
question, and one for batches of another size."""
MIN_BYTES = 64 * 1024
"""What sends less than this has little to gain."""
MAX_SECONDS = 0.1
"""Where a step is expected to take longer, the wire decides, and so bytes do."""
HOPELESS = 1.3
"""Not rehearsed is what is expected to take so many times the seconds of the fastest."""
REGRET_STEPS, REGRET_SHARE, FIRST_REGRET = 50, 0.05, 0.6
"""Of the last so many steps, trials may take that share longer than the best would have; at the beginning, of so many
steps at least. A trial of which more is expected waits; one that takes more than expected puts off the next."""
MAX_STEPS = 16
"""A rehearsal whose batches do not come again in so many steps is over."""
ALIKE = 2.0
"""Batches are alike if the ranks hold at most so many times more or fewer rows."""

Point = Scheme | TwoLevel


class Rehearsal:
    """Which candidate a step tries; the same on all ranks.

    Args:
        points: what to try, each in one step.
        held: mean over the ranks of the rows that they hold in the steps that count.
    """

    def __init__(self, points: Sequence[Point], held: float) -> None:
        self.points = list(points)
        self._held = held
        self._steps = 0

    def next(self, held: float, is_worth_it: Callable[[Point], bool]) -> Point | None:
        """What to try in a step with ``held`` rows; None if this one is no trial."""
        self._steps += 1
        if not self._held / ALIKE <= held <= self._held * ALIKE:
            return None
        point = next(filter(is_worth_it, self.points), None)
        if point is not None:
            self.points.remove(point)
        return point

    @property
    def is_over(self) -> bool:
        return not self.points or self._steps >= MAX_STEPS


def to_rehearse(offers: Sequence[Price]) -> list[Point]:
    """The candidates that may be the fastest, the most promising first; none where bytes decide, or one is sure to be.

    Only schemes that add in the same order as each other: what is taken must not depend on a clock in its last bits.
    Pure: equal on all ranks.

    Args:
        offers: of all candidates, with seconds, the one of fewest bytes first.
    """
    best = offers[0]
    if best.sent_bytes < MIN_BYTES or _seconds(best) > MAX_SECONDS or not adds_in_rank_order(best.scheme):
        return []
    rivals = sorted((offer for offer in offers if adds_in_rank_order(offer.scheme)), key=_seconds)
    hopeful = [offer.scheme for offer in rivals if _seconds(offer) <= HOPELESS * _seconds(rivals[0])]
    return hopeful if len(hopeful) > 1 else []


def rehearse(points: Sequence[Point], held: float) -> Rehearsal:
    """Begin: the next steps with about ``held`` rows try one point each."""
    return Rehearsal(points, held)


def adds_in_rank_order(point: Point) -> bool:
    return isinstance(point, Scheme) and point.communication is Communication.POINT_TO_POINT


def _seconds(offer: Price) -> float:
    assert offer.seconds is not None, "a machine gives every scheme seconds"
    return offer.seconds
