"""Statistics from which "auto" chooses the scheme of a group of embedding tables: recent batches and measured steps.

The scheme of a step is settled before its batch is known. So the choice is not the best scheme for the last batch,
which alternating lengths would change in every step, but the one that would have cost least over the last
`WINDOW_STEPS`: the best fixed scheme, if lengths stay distributed as they were. A mean over a window changes slowly,
and over equal batches not at all.

Cost of "auto" over the best fixed scheme, where each estimate is wrong by a factor of its own between 1/1.5 and 1.5
(tests/unit/test_experience.py; constant, alternating, uniform and long-tailed batches, 25 sets of factors each): in the
first 50 steps at the median 1.04 to 1.05 times as long, in 9 of 10 cases at most 1.10, at worst 1.16; in any later
50 steps 1.00, 1.05 and 1.12 (constant batches 1.00, 1.02 and 1.04). The bound of 1.05 cannot hold at first: to learn
that one of four schemes costs half of what the others do, these have to run once each.

Everything is pure except seconds, which are gathered: so all ranks learn the same, and decide the same.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from thinwire.comm.hosts import Hosts
from thinwire.comm.machine import Machine
from thinwire.sync.choose import (
    FIRST_REGRET,
    MAX_REHEARSALS,
    REGRET_SHARE,
    REGRET_STEPS,
    TORCHS,
    Demand,
    Point,
    Price,
    Rehearsal,
    Route,
    RoutePrice,
    adds_in_rank_order,
    explained,
    is_clearly_torchs,
    is_dense,
    offers_of,
    ranked,
    route_prices,
    shared_seconds,
    to_rehearse,
)
from thinwire.sync.named import DENSE, name_of
from thinwire.sync.scheme import Scheme

WINDOW_STEPS = 32
CHECK_STEPS = 50
"""Steps between two timings of the current choice, each of which costs the ranks two rounds of headers."""
CLASSES_PER_DOUBLING = 4
"""Classes of batch sizes in each doubling of rows: batches that differ by less than a fifth are priced as one."""
SAMPLES, KEPT_SAMPLES = 3, 12
"""Number of the last samples of a scheme, of which the least counts, because a disturbance makes a step longer; and of
all samples that are kept, those of batches of other sizes included."""
CLOSE = 1.15
"""Factor on the seconds of the fastest, up to which a scheme is tried once more."""
FAR = 4.0
"""Factor of size beyond which batches say little about each other."""
CHANGED, SURPRISES = 2.0, 3
"""Factor by which the current choice must cost more or less than before, and how often in a row, before the machine
counts as changed."""

_OF_TORCH = (name_of(DENSE), name_of(TORCHS))

Size = tuple[int, int]


@dataclass(frozen=True)
class _Sample:
    """A measured step of a scheme, on its slowest rank."""

    size: Size
    seconds: float


@dataclass(eq=False)
class Experience:
    """Statistics of one group of embedding tables, on one machine and its hosts.

    Args:
        choice: the current scheme; None before the first step.
        rehearsal: the rehearsal under way, or None.
        rehearsals: number of rehearsals so far.
        is_told: whether this step is timed and its seconds are to be learned; until `observe`.
        window: the sizes of the last batches, oldest first.
    """

    choice: Point | None = None
    rehearsal: Rehearsal | None = None
    rehearsals: int = 0
    is_told: bool = False
    window: deque[Size] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _tried: Point | None = None
    _wait: int = 0
    _next_wait: int = 1
    _machine: Machine | None = None
    _hosts: Hosts = ()
    _demands: dict[Size, Demand] = field(default_factory=dict)
    _samples: dict[str, deque[_Sample]] = field(default_factory=dict)
    _estimates: dict[Size, list[Price]] = field(default_factory=dict)
    _prices: dict[Size, list[Price]] = field(default_factory=dict)
    _unchecked_steps: int = 0
    _surprises: int = 0
    _is_clear: bool = False  # whether the last step of torch's own all-reduce showed that no other can be faster
    _regrets: deque[float] = field(default_factory=lambda: deque(maxlen=REGRET_STEPS))
    _regret: float = 0.0

    @property
    def is_timed(self) -> bool:
        """Whether the next step is timed: then ranks gather how many rows they hold first, and begin together."""
        is_due = self._unchecked_steps == 0 or (
            self.rehearsal is not None
            and self._wait == 0
            and any(self._affords(point, self.window[-1]) for point in self.rehearsal.points)
        )
        return self.choice is None or (is_due and self._machine is not None)

    def take(self, held: float) -> Point | None:
        """Return the scheme of a timed step in which a rank holds ``held`` rows; None if nothing was chosen yet."""
        self._tried = None
        if self.rehearsal is not None and self._wait == 0:
            size = min(reversed(self.window), key=lambda size: abs(size[0] - _class_of(held)))
            self._tried = self.rehearsal.next(held, lambda point: self._affords(point, size))
        self.is_told = self.choice is not None and (self.rehearsal is None or self._tried is not None)
        return self._tried or self.choice

    def know(self, machine: Machine | None, hosts: Hosts) -> None:
        """Set the machine and the hosts of the next steps."""
        if (machine, hosts) != (self._machine, self._hosts):
            self._machine, self._hosts = machine, hosts
            self._estimates.clear()
            self._prices.clear()

    def estimate(self, point: Point, demand: Demand) -> Price | None:
        """Return the price of a step before any was timed; None if ``point`` is no candidate."""
        return next((offer for offer in self._estimated(self._size(demand)) if offer.scheme == point), None)

    def learn(self, point: Point, demand: Demand, seconds: float) -> None:
        """Learn the seconds of a timed step; those of a scheme that is no candidate are ignored."""
        size, name = self._size(demand), name_of(point)
        if self._machine is None or self.estimate(point, demand) is None:
            return
        before = self._price(point, size)
        self._samples.setdefault(name, deque(maxlen=KEPT_SAMPLES)).append(_Sample(size, seconds))
        self._prices.clear()
        self._next_wait = 1
        if point == TORCHS:
            self._is_clear = is_clearly_torchs(self._estimated(size), seconds, self._machine)
            if self._is_clear and self.rehearsal is not None:
                self.rehearsal.points.clear()
        if self.rehearsal is not None:
            best = min(self._seconds(offer) for offer in self._priced(size) if offer.is_measured)
            self._regret = (seconds - best) / self._mean_cost()
        elif point == self.choice and before.is_measured:
            self._check(name, seconds / self._seconds(before))

    def put_off(self) -> None:
        """Discard the timed step, in which kernels were compiled or loaded, and try its candidate again later."""
        if self.rehearsal is not None and self._tried is not None:
            self.rehearsal.points.insert(0, self._tried)
            self._wait, self._next_wait = self._next_wait, min(CHECK_STEPS, 2 * self._next_wait)

    def observe(self, demand: Demand) -> Point:
        """Record the demand of a step and return the choice from now on."""
        if self.window and not _are_alike(self._demands[self.window[-1]], demand):
            for of_others in (self.window, self._demands, self._estimates, self._prices):
                of_others.clear()
        size = self._size(demand)
        is_like_all = len(self.window) == WINDOW_STEPS == self.window.count(size)
        self.window.append(size)
        was_told, self.is_told = self.is_told, False
        self._wait = max(0, self._wait - 1)
        self._unchecked_steps = (self._unchecked_steps + 1) % CHECK_STEPS
        self._regrets.append(self._regret)
        self._regret = 0.0
        if self.rehearsal is not None and self.rehearsal.is_over:
            self.rehearsal = None
        if was_told or not is_like_all:
            self._decide()
        assert self.choice is not None
        return self.choice

    def hopeful(self, demand: Demand) -> list[Point]:
        """Return the candidates that a rehearsal should try in such steps; none if there is nothing to learn."""
        if self._machine is None or self.rehearsal is not None or self.rehearsals >= MAX_REHEARSALS:
            return []
        if is_dense(demand) or self._is_clear:
            return []
        size = self._size(demand)
        by_bytes = sorted(self._priced(size), key=lambda offer: offer.weighted_bytes)
        measured = [offer for offer in by_bytes if offer.is_measured]
        if len(measured) <= 1:
            return to_rehearse(by_bytes) if self.rehearsals == 0 or self._is_costly(size) else []
        best = min(map(self._seconds, measured))
        close = [offer.scheme for offer in measured if self._seconds(offer) <= CLOSE * best]
        again = [point for point in close if len(close) > 1 and len(self._near(name_of(point), size)) == 1]
        return again + self._untried(best, size)

    def _untried(self, best: float, size: Size) -> list[Point]:
        """Return the untried candidates that are expected to be no slower than the best was measured to be."""
        return [
            offer.scheme
            for offer in self._estimated(size)
            if adds_in_rank_order(offer.scheme)
            and name_of(offer.scheme) not in self._samples
            and self._seconds(offer) <= best
        ]

    def recall(self, choice: Point | None, demands: Sequence[Demand]) -> None:
        """Continue where another run ended, on the same number of ranks or another one."""
        self.choice = choice
        self.window.extend(map(self._size, demands))

    @property
    def demands(self) -> list[Demand]:
        """Demands of the last steps, by class of size, for `recall`."""
        return [self._demands[size] for size in self.window]

    @property
    def is_torchs(self) -> bool:
        """Whether steps have shown that torch's own all-reduce is the fastest."""
        is_known = self.rehearsal is None and name_of(TORCHS) in self._samples
        return is_known and self.choice == TORCHS and self._demands[self.window[-1]].is_torchs

    @property
    def is_settled(self) -> bool:
        """Whether a whole window of batches was seen."""
        return len(self.window) == WINDOW_STEPS

    def begin(self, rehearsal: Rehearsal) -> None:
        """Try candidates from the next step on."""
        self.rehearsal = rehearsal
        self.rehearsals += 1

    def offers(self) -> list[Price]:
        """Return the mean cost of each candidate over the window; the choice is first."""
        counts = Counter(self.window)
        columns = zip(*(self._priced(size) for size in counts), strict=True)
        return ranked([_mean(column, list(counts.values())) for column in columns], self.choice)

    def explain(self) -> str:
        """Return a line with the choice, the next best, and the numbers behind them."""
        demands = self.demands
        held, union = (statistics.fmean(getattr(one, name) for one in demands) for name in ("held", "union"))
        demand = replace(demands[-1], held=held, union=union)
        if self.choice == DENSE and is_dense(demand):
            return f"dense: {demand.world_size} ranks, density {held / max(1, demand.num_rows):.2%}"
        return explained(sorted(self.offers(), key=lambda offer: offer.scheme != self.choice), demand)

    def _decide(self) -> None:
        every = all(is_dense(self._demands[size]) for size in set(self.window))
        choice = DENSE if every else TORCHS if self._is_clear else self.offers()[0].scheme
        if choice != self.choice:
            self.choice, self._unchecked_steps, self._surprises = choice, 0, 0

    def _check(self, name: str, ratio: float) -> None:
        """Check whether the choice costs what it did before; if not, time it again soon, and at last forget samples."""
        self._surprises = 0 if 1 / CHANGED <= ratio <= CHANGED else self._surprises + 1
        if self._surprises:
            self._unchecked_steps = -1
        if self._surprises >= SURPRISES:
            last = self._samples[name][-1]
            self._samples = {name: deque([last], maxlen=KEPT_SAMPLES)}
            self.rehearsals = self._surprises = 0

    def _affords(self, point: Point, size: Size) -> bool:
        """Return whether a trial in a step of this size is expected to keep the cost of trials within bounds."""
        if point == TORCHS and name_of(point) not in self._samples:
            return True  # one step, and what is expected of it follows from nothing that was measured
        seconds, best = self._seconds(self._price(point, size)), self._cost(size)
        expected = sum(self._regrets) + (seconds - best) / self._mean_cost()
        return expected <= max(FIRST_REGRET, REGRET_SHARE * len(self._regrets))

    def _mean_cost(self) -> float:
        """Return the mean seconds of a step of the window, each with its best scheme."""
        return statistics.fmean(map(self._cost, self.window))

    def _is_costly(self, size: Size) -> bool:
        """Return whether batches of about this size are most of the cost of the window."""
        alike = sum(self._cost(other) for other in self.window if _distance(other, size) <= math.log2(FAR))
        return 2 * alike > sum(map(self._cost, self.window))

    def _cost(self, size: Size) -> float:
        return min(map(self._seconds, self._priced(size)))

    def _price(self, point: Point, size: Size) -> Price:
        return next(offer for offer in self._priced(size) if offer.scheme == point)

    def _priced(self, size: Size) -> list[Price]:
        if size not in self._prices:
            self._prices[size] = [self._corrected(offer, size) for offer in self._estimated(size)]
        return self._prices[size]

    def _estimated(self, size: Size) -> list[Price]:
        if size not in self._estimates:
            self._estimates[size] = offers_of(self._demands[size], self._machine, self._hosts)
        return self._estimates[size]

    def _corrected(self, offer: Price, size: Size) -> Price:
        """Return the price corrected by samples of its scheme, or by those of the others if it has none.

        Steps of torch's own all-reduces say nothing about the others, nor the reverse.
        """
        if offer.seconds is None:
            return offer
        samples = self._samples.get(name_of(offer.scheme))
        if not samples:
            ratios = [self._ratio(name, size) for name in self._samples if name not in _OF_TORCH]
            return replace(offer, seconds=offer.seconds * (statistics.median(ratios) if ratios else 1.0))
        name = name_of(offer.scheme)
        is_measured = bool(self._near(name, size))
        return replace(offer, seconds=offer.seconds * self._ratio(name, size), is_measured=is_measured)

    def _ratio(self, name: str, size: Size) -> float:
        """Return measured over expected seconds of a scheme, in the steps most like this size."""
        samples = self._samples[name]
        least = min(_distance(sample.size, size) for sample in samples)
        nearest = [sample for sample in samples if _distance(sample.size, size) <= max(1.0, least)]
        return min(sample.seconds / self._expected(name, sample.size) for sample in nearest[-SAMPLES:])

    def _expected(self, name: str, size: Size) -> float:
        return next(self._seconds(offer) for offer in self._estimated(size) if name_of(offer.scheme) == name)

    def _near(self, name: str, size: Size) -> list[_Sample]:
        return [sample for sample in self._samples.get(name, ()) if _distance(sample.size, size) <= math.log2(FAR)]

    def _size(self, demand: Demand) -> Size:
        size = _class_of(demand.held), _class_of(demand.union)
        self._demands.setdefault(size, demand)
        return size

    @staticmethod
    def _seconds(offer: Price) -> float:
        return offer.seconds or 0.0


@dataclass(eq=False)
class Routes:
    """What was learned of the ways of all tables of a model whose own group takes their tensors.

    Tables that travel as rows share one sum a step, with its rounds and launches. So which of them do is decided
    together: those that are faster that way, if they save more than the sum costs before its first byte.

    Args:
        own, lane: costs on the model's own group, and on the lane; None without those.
        hosts: the ranks of each host.
        schemes: the schemes that run on the collectives of the group.
        is_host: whether gradients are on the CPU.
    """

    own: Machine
    lane: Machine | None
    hosts: Hosts
    schemes: Sequence[Scheme]
    is_host: bool = False
    _last: dict[str, tuple[Demand, bool]] = field(default_factory=dict)
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _known: dict[tuple[object, ...], dict[Route, RoutePrice]] = field(default_factory=dict)  # by class of size

    def learn(self, seconds: float, demands: Mapping[str, tuple[Demand, bool]], schemes: Mapping[str, Scheme]) -> None:
        """Learn the seconds of a sum, from demands as in `choose`, by these schemes."""
        expected = shared_seconds(self.own, self.is_host)
        for name, (demand, is_sparse) in demands.items():
            expected += self._priced(demand, is_sparse, [schemes[name]])[Route.COLLECTIVE].seconds
        self._ratios.append(seconds / expected)
        self._known.clear()

    def choose(self, demands: Mapping[str, tuple[Demand, bool]]) -> dict[str, list[RoutePrice]]:
        """Return the ways of each table, the choice first.

        Args:
            demands: for each table of this step its demand, and whether its gradient is a COO tensor. Those of other
                tables are remembered.
        """
        self._last.update(demands)
        ratio = min(self._ratios, default=1.0)
        known = {name: self._ways(*one, ratio) for name, one in self._last.items()}
        best = {name: self._best(found, self._last[name][0]) for name, found in known.items()}
        others = {name: self._others(found) for name, found in known.items()}
        rows = [name for name, way in best.items() if way.route is Route.COLLECTIVE]
        saved = sum(others[name][0].seconds - best[name].seconds for name in rows if others[name])
        if saved <= ratio * shared_seconds(self.own, self.is_host) and all(others[name] for name in rows):
            best.update({name: others[name][0] for name in rows})
        return {name: [best[name], *(way for way in known[name].values() if way is not best[name])] for name in demands}

    def _ways(self, demand: Demand, is_sparse: bool, ratio: float) -> dict[Route, RoutePrice]:
        """Return the prices of about such a demand: to work them out takes as long as a small sum."""
        sizes = demand.num_rows, demand.row_bytes, _class_of(demand.held), _class_of(demand.union), is_dense(demand)
        key = (*sizes, is_sparse)
        if key not in self._known:
            self._known[key] = self._priced(demand, is_sparse, self.schemes, ratio)
        return self._known[key]

    def _priced(
        self, demand: Demand, is_sparse: bool, schemes: Sequence[Scheme], ratio: float = 1.0
    ) -> dict[Route, RoutePrice]:
        found = route_prices(demand, schemes, self.own, self.lane, self.hosts, is_sparse, self.is_host, ratio)
        return {way.route: way for way in found}

    @staticmethod
    def _best(found: Mapping[Route, RoutePrice], demand: Demand) -> RoutePrice:
        """Return the fastest way; a table with hardly any zeros goes with its bucket, which hides behind backward."""
        if is_dense(demand) and Route.NATIVE in found:
            return found[Route.NATIVE]
        return min(found.values(), key=lambda way: way.seconds)

    @staticmethod
    def _others(found: Mapping[Route, RoutePrice]) -> list[RoutePrice]:
        """Return the ways of a table that are not a sum by collectives, the fastest first."""
        rest = [way for route, way in found.items() if route is not Route.COLLECTIVE]
        return sorted(rest, key=lambda way: way.seconds)


def _are_alike(one: Demand, other: Demand) -> bool:
    """Return whether two demands are of a run on equally many ranks, with the same candidates."""
    return (one.world_size, one.is_torchs) == (other.world_size, other.is_torchs)


def _class_of(rows: float) -> int:
    return round(CLASSES_PER_DOUBLING * math.log2(1.0 + rows))


def _distance(one: Size, other: Size) -> float:
    """Return the distance of two sizes in doublings of the rows that a rank holds."""
    return abs(one[0] - other[0]) / CLASSES_PER_DOUBLING


def _mean(offers: Sequence[Price], weights: Sequence[int]) -> Price:
    """Return the mean price of one scheme over several sizes; measured if most of the seconds are."""
    total = sum(weights)
    sent = sum(offer.sent_bytes * weight for offer, weight in zip(offers, weights, strict=True)) / total
    if offers[0].seconds is None:
        return replace(offers[0], sent_bytes=sent)
    seconds = sum((offer.seconds or 0.0) * weight for offer, weight in zip(offers, weights, strict=True)) / total
    measured = sum(
        (one.seconds or 0.0) * weight for one, weight in zip(offers, weights, strict=True) if one.is_measured
    )
    return replace(offers[0], sent_bytes=sent, seconds=seconds, is_measured=2 * measured >= total * seconds)
