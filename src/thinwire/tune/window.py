"""The scheme that "auto" gives a group of embedding tables, by prices in closed form of its recent batches.

The scheme of a step is settled before its batch is known. So the choice is not the best scheme for the last batch,
which alternating lengths would change in every step, but the one that would have cost least over the last
`WINDOW_STEPS`: the best fixed scheme, if lengths stay distributed as they were. A mean over a window changes slowly,
and over equal batches not at all.

Everything is pure, and made of numbers that all ranks know: so all ranks decide the same. What prices cannot know, how
long a step really takes, `thinwire.tune.trial` decides.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from thinwire.comm.hosts import ranks_of_hosts
from thinwire.comm.machine import Machine
from thinwire.sums.cost import Demand
from thinwire.sums.named import DENSE
from thinwire.tune.prices import Point, Price, explained, is_dense, offers_of, ranked, rivals

WINDOW_STEPS = 32
CLASSES_PER_DOUBLING = 4
"""Classes of batch sizes in each doubling of rows: batches that differ by less than a fifth are priced as one."""

Size = tuple[int, int]


@dataclass(eq=False)
class Window:
    """The recent batches of one group of embedding tables, and the choice that follows from them.

    Args:
        choice: the current scheme; None before the first step.
        sizes: the classes of size of the last batches, oldest first.
    """

    choice: Point | None = None
    sizes: deque[Size] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _machine: Machine | None = None
    _host_of_rank: Sequence[int] = ()
    _demands: dict[Size, Demand] = field(default_factory=dict)
    _prices: dict[Size, list[Price]] = field(default_factory=dict)

    def know(self, machine: Machine | None, host_of_rank: Sequence[int]) -> None:
        """Set the machine and the hosts (`Exchange.hosts`) of the next steps."""
        if (machine, host_of_rank) != (self._machine, self._host_of_rank):
            self._machine, self._host_of_rank = machine, host_of_rank
            self._prices.clear()

    def observe(self, demand: Demand) -> Point:
        """Record the demand of a step and return the choice from now on."""
        before = self._demands[self.sizes[-1]] if self.sizes else demand
        if (before.world_size, before.in_rank_order) != (demand.world_size, demand.in_rank_order):
            for of_others in (self.sizes, self._demands, self._prices):
                of_others.clear()
        size = self._size(demand)
        is_like_all = len(self.sizes) == WINDOW_STEPS == self.sizes.count(size)
        self.sizes.append(size)
        if not is_like_all or self.choice is None:
            every = all(is_dense(self._demands[size]) for size in set(self.sizes))
            self.choice = DENSE if every else self.offers()[0].scheme
        assert self.choice is not None
        return self.choice

    def recall(self, choice: Point | None, demands: Sequence[Demand]) -> None:
        """Continue where another run ended, on the same number of ranks or another one."""
        self.choice = choice
        self.sizes.extend(map(self._size, demands))

    @property
    def demands(self) -> list[Demand]:
        """Demands of the last steps, by class of size, for `recall`."""
        return [self._demands[size] for size in self.sizes]

    def offers(self) -> list[Price]:
        """Return the mean cost of each candidate over the window; the choice is first."""
        counts = Counter(self.sizes)
        columns = zip(*(self._priced(size) for size in counts), strict=True)
        return ranked([_mean(column, list(counts.values())) for column in columns], self.choice)

    def rivals(self) -> list[Price]:
        """Return the choice and the candidates that real steps may show to be faster; none if none may be."""
        if self._machine is None or not self.sizes or all(map(is_dense, self.demands)):
            return []
        return rivals(self.offers())

    def explain(self) -> str:
        """Return a line with the choice, the next best, and the numbers behind them."""
        demands = self.demands
        held, union = (statistics.fmean(getattr(one, name) for one in demands) for name in ("held", "union"))
        demand = replace(demands[-1], held=held, union=union)
        if self.choice == DENSE and is_dense(demand):
            return f"dense: {demand.world_size} ranks, density {held / max(1, demand.num_rows):.2%}"
        return explained(sorted(self.offers(), key=lambda offer: offer.scheme != self.choice), demand)

    def _priced(self, size: Size) -> list[Price]:
        if size not in self._prices:
            self._prices[size] = offers_of(self._demands[size], self._machine, ranks_of_hosts(self._host_of_rank))
        return self._prices[size]

    def _size(self, demand: Demand) -> Size:
        size = class_of(demand.held), class_of(demand.union)
        self._demands.setdefault(size, demand)
        return size


def class_of(rows: float) -> int:
    return round(CLASSES_PER_DOUBLING * math.log2(1.0 + rows))


def _mean(offers: Sequence[Price], weights: Sequence[int]) -> Price:
    """Return the mean price of one scheme over several sizes."""
    sent = statistics.fmean([offer.sent_bytes for offer in offers], weights)
    seconds = [offer.seconds for offer in offers if offer.seconds is not None]
    return replace(offers[0], sent_bytes=sent, seconds=statistics.fmean(seconds, weights) if seconds else None)
