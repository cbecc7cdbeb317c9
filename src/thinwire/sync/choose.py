"""Choice of a scheme from the statistics of a sparse tensor: expected costs, ranking, and rehearsals.

A choice is pure: equal input gives an equal choice, so ranks that know the same statistics need not communicate.

Seconds follow the alpha-beta model (a message costs alpha + beta times its bytes) with measured alpha and beta, and
with the cost of encoding, adding and decoding rows, because on a fast link that is most of the time. Overlap is not
counted twice: columns and rows of the union are streamed, so that work on one chunk hides behind the wire of another.

The choice is the scheme of fewest bytes, unless another one is clearly faster. Bytes are known exactly; seconds are an
estimate from a measurement of a tenth of a second, on machines that do other work too. So seconds decide only where
they leave no doubt: on a fast link, where work on rows costs more than sending zeros would.

A rehearsal tries candidates in real steps, where processors and not the wire decide. The estimate assumes that a rank
works alone. On a fast link the ranks of a machine all work at once, and then it is far off: of 4 ranks on two cores it
expected 10 ms of `column_split` for the demo's larger embedding table, which cost 60, and `zen` 35. So there each
hopeful candidate gets a step of the training. All add in the same order, so gradients have the same bits whichever of
them runs; a rehearsal costs the extra seconds of the slower ones, and only the headers by which ranks begin together.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from thinwire.comm.hosts import Hosts
from thinwire.comm.machine import PROBE_BYTES, Machine
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.sync.cost import expected_bytes
from thinwire.sync.named import (
    AGSPARSE_CODED,
    AGSPARSE_RING,
    COLUMN_SPLIT,
    DENSE,
    SPARCML_CODED,
    UNION_SPLIT,
    ZEN,
    name_of,
)
from thinwire.sync.scheme import Aggregation, Communication, Ownership, Scheme, begins_with_opening, unit_shape
from thinwire.sync.staged import GATHER_SCHEDULES, REDUCE_SCHEDULES
from thinwire.sync.two_level import TwoLevel

DENSIFICATION_EXPONENT = 0.6
"""Aggregating n ranks multiplies the density by about n^0.6: the published models lie between n^0.3 (DeepFM,
8 ranks) and n^0.78 (an LLM's top 5 %, 16 ranks); ZEN, sections 2.1, 2.4, 3.3.1 and 5.3."""


@dataclass(frozen=True)
class Demand:
    """Statistics of a matrix [num_rows, width] that is to be summed over ``world_size`` ranks.

    Args:
        itemsize: bytes of an element.
        held: rows that a rank holds, as the mean over ranks.
        union: rows that all ranks hold together.
        is_torchs: whether torch's own all-reduce of sparse tensors may sum it.
    """

    world_size: int
    num_rows: int
    width: int
    itemsize: int
    held: float
    union: float
    is_torchs: bool = False

    @classmethod
    def of(
        cls, counts: Sequence[float], num_rows: int, width: int, itemsize: int, union: float | None = None
    ) -> Demand:
        """Return the demand of ranks that hold ``counts`` rows; a ``union`` that is None is estimated."""
        world_size = len(counts)
        mean = sum(counts) / max(1, world_size)
        if union is None:
            union = min(num_rows, max([*counts, mean * world_size**DENSIFICATION_EXPONENT, 0.0]))
        return cls(world_size, num_rows, width, itemsize, mean, union)

    @property
    def row_bytes(self) -> int:
        return self.width * self.itemsize

    @property
    def fault(self) -> str | None:
        """Reason why these numbers are impossible, or None if they are possible."""
        if not all(math.isfinite(value) for value in (self.held, self.union)):
            return f"{self.held} rows a rank and {self.union} in all are not finite numbers"
        if not 0 <= self.held <= self.num_rows:
            return f"a rank holds {self.held:g} rows of a tensor that has {self.num_rows}"
        if self.union > self.num_rows or self.union < math.floor(self.held):
            return f"{self.union:g} rows in all, where a rank holds {self.held:g} of {self.num_rows}"
        return None


CONTENTION = 2.0
"""Factor on the measured cost of work and of waiting, where ranks share processors."""
TORCHS = AGSPARSE_RING
"""The scheme of torch's own all-reduce of sparse tensors over Gloo, which runs it in C++ and straight from the hook."""
LANE_SHARE, LANE_SECONDS = 1.3, 0.001
"""What a synchronization on the lane costs a step beyond its own seconds, as a factor and in seconds, and torch's own
all-reduce does not: it wakes no thread up, and runs beside backward. For the larger table of the demo `zen` took
21 to 36 ms on the lane and torch 28 to 45, of 4 ranks on two processors; and a step was 9 % longer with `zen`."""


def expected_seconds(scheme: Scheme, demand: Demand, machine: Machine, sent_bytes: float) -> float:
    """Return the expected seconds of one synchronization in which the busiest rank sends ``sent_bytes``."""
    world_size = demand.world_size
    if world_size == 1:
        return 0.0
    waiting = _waiting_seconds(scheme, world_size, machine)
    if scheme.is_dense:
        return waiting + sent_bytes * machine.reduced_byte_seconds
    return waiting + sent_bytes * machine.byte_seconds + work_seconds(scheme, demand, machine)


def seen_byte_seconds(scheme: Scheme, demand: Demand, machine: Machine, sent_bytes: float, seconds: float) -> float:
    """Return the least cost of a byte in a synchronization that took ``seconds``.

    It is the time that is not work or waiting; these may cost twice what was measured, where ranks share processors.
    """
    rest = expected_seconds(scheme, demand, machine, sent_bytes)
    rest -= sent_bytes * (machine.reduced_byte_seconds if scheme.is_dense else machine.byte_seconds)
    return max(0.0, seconds - CONTENTION * rest) / sent_bytes


def _waiting_seconds(scheme: Scheme, world_size: int, machine: Machine) -> float:
    """Return the seconds of waiting for headers and of the fixed cost of each message."""
    opening = machine.round_seconds if begins_with_opening(scheme) else 0.0
    if scheme.is_dense:
        return opening + 2 * (world_size - 1) * machine.message_seconds
    if scheme.knows_ids:
        return opening + machine.round_seconds
    push, pull = _num_stages(scheme, world_size)
    return opening + sum(
        2 * machine.round_seconds if stages is None else 2 * stages * machine.message_seconds for stages in (push, pull)
    )


def _num_stages(scheme: Scheme, world_size: int) -> tuple[int | None, int | None]:
    """Return the stages on the way to the owners and back; None where all ranks send to all at once."""
    direct = Communication.POINT_TO_POINT
    if not scheme.is_parallel:
        gathers = None if scheme.communication is direct else GATHER_SCHEDULES[scheme.communication](0, world_size)
        return (None if gathers is None else len(gathers)), 0
    push = None if scheme.communication is direct else len(REDUCE_SCHEDULES[scheme.communication](0, world_size))
    pull = None if scheme.pull_by is direct else len(GATHER_SCHEDULES[scheme.pull_by](0, world_size))
    return push, pull


def work_seconds(scheme: Scheme, demand: Demand, machine: Machine) -> float:
    """Return the seconds of work on rows of the busiest rank."""
    num_units, width = unit_shape(demand.num_rows, demand.width, scheme.unit)
    ratio = demand.width / width
    held, union = min(demand.held * ratio, num_units), min(demand.union * ratio, num_units)
    world_size, row_bytes = demand.world_size, width * demand.itemsize

    def seconds(sent: float, added: float, joined: float, parts: float) -> float:
        send = sent * (machine.send_id_seconds + row_bytes * machine.send_byte_seconds)
        add = added * (machine.add_id_seconds + row_bytes * machine.add_byte_seconds)
        join = joined * (machine.join_id_seconds + row_bytes * machine.join_byte_seconds)
        return parts * machine.part_seconds + send + add + join

    if scheme.knows_ids:
        ids = held * machine.send_id_seconds + world_size * held * machine.add_id_seconds
        last_chunk = (held * machine.add_byte_seconds + union * machine.join_byte_seconds) * row_bytes / world_size
        return ids + last_chunk + world_size * machine.part_seconds
    if not scheme.is_parallel:
        if scheme.aggregation is Aggregation.ONE_SHOT:
            return seconds(held, world_size * held, 0, world_size)
        stages = math.ceil(math.log2(world_size))
        merged = sum(held * (union / held) ** (stage / stages) for stage in range(stages)) if held else 0.0
        return seconds(merged, 2 * merged, 0, stages)
    owned = union / scheme.num_owners(world_size)
    return seconds(held + owned, held, union, 2 * world_size)


CANDIDATES = (ZEN, COLUMN_SPLIT, UNION_SPLIT, AGSPARSE_CODED, SPARCML_CODED, DENSE)
MIN_COLUMNS = 2
"""Fewest columns of an owner: with fewer it would handle every id of every rank for a few bytes of values each."""
MIN_ROW_ELEMENTS = 8
"""Fewest elements of a row of the union: narrower rows are hardly more than the ids that all ranks must get."""
STREAMING_GAIN = 0.04
"""Share by which columns are faster than schemes of equal bytes, because they are streamed without headers: 4 to 7 % on
the benchmark's recipes at 8 and 16 ranks."""
STRATIFICATION = 0.5
"""Factor on the imbalance of independent hashing, which dealing groups of ids evenly halves on the benchmark's recipes:
1.07 where sqrt(2 ln n n / u) gives 1.16 (lstm, 8 ranks), 1.10 for 1.17 (bert)."""
HYSTERESIS = 0.03
"""Share of bytes that another scheme must save to replace a choice: sparsity changes a little in every step."""
MANY_TIMES = 5.0
"""Factor on the fewest bytes, above which a scheme is chosen for its speed only if steps have measured it: a probe of
128 kB passes through the burst of a link of 1 Gbit/s as if that were one of 5 Gbit/s."""
CLEAR_SHARE, CLEAR_SECONDS = 0.25, 0.005
"""Least gain, both as a share and in seconds, with which a scheme of more bytes is chosen for its speed."""
MEASURED = 0.02, 0.0
"""Least gain, as a share and in seconds, if the seconds of both were measured; see `thinwire.sync.experience`."""
DENSE_SHARE = 0.9
"""Share of rows that a rank holds from which leaving out the others is not worth the search for them."""


@dataclass(frozen=True)
class Price:
    """The expected cost of a scheme: bytes of the busiest rank, and seconds, or None without a machine.

    Args:
        is_measured: whether the seconds were measured in real steps.
    """

    scheme: Scheme | TwoLevel
    sent_bytes: float
    seconds: float | None
    is_measured: bool = False

    @property
    def weighted_bytes(self) -> float:
        """Bytes less the gain of streaming, by which schemes are compared."""
        point = self.scheme.between if isinstance(self.scheme, TwoLevel) else self.scheme
        return self.sent_bytes * (1.0 - STREAMING_GAIN * (point.ownership is Ownership.COLUMNS))

    @property
    def weighted_seconds(self) -> float:
        """Seconds less what the lane costs and torch's own all-reduce does not, by which schemes are compared."""
        seconds = self.seconds or 0.0
        return max(0.0, seconds - LANE_SECONDS) / LANE_SHARE if self.scheme == TORCHS else seconds


def choose(
    counts: Sequence[float],
    num_rows: int,
    width: int,
    itemsize: int,
    union: float | None = None,
    machine: Machine | None = None,
    current: Scheme | TwoLevel | None = None,
    hosts: Hosts = (),
) -> Scheme | TwoLevel:
    """Return the cheapest scheme for ranks that hold ``counts`` rows of a matrix [num_rows, width].

    Impossible numbers (no counts at all, nan, more rows than there are) give a warning and DENSE, which is right
    whatever the rows are.

    Args:
        union: number of rows that they hold together; None estimates it.
        machine: costs to compare seconds; None compares bytes.
        current: the choice that stands unless another one is better by `HYSTERESIS`.
        hosts: the ranks of each host, if several share one: then schemes of two levels compete too.
    """
    if not counts:
        warnings.warn("no step was observed, so nothing is known about sparsity: using dense", stacklevel=2)
        return DENSE
    demand = Demand.of(counts, num_rows, width, itemsize, union)
    if demand.fault is not None:
        warnings.warn(f"sparsity statistics that cannot be: {demand.fault}; using dense", stacklevel=2)
        return DENSE
    return DENSE if is_dense(demand) else ranked(prices(demand, machine, hosts), current)[0].scheme


def is_dense(demand: Demand) -> bool:
    """Return whether there are hardly any zeros to leave out, or no values at all."""
    return demand.held >= DENSE_SHARE * demand.num_rows or demand.width == 0


def prices(demand: Demand, machine: Machine | None = None, hosts: Hosts = ()) -> list[Price]:
    """Return the prices of all candidates for a demand, the one of fewest bytes first."""
    return sorted(offers_of(demand, machine, hosts), key=lambda offer: offer.weighted_bytes)


def offers_of(demand: Demand, machine: Machine | None, hosts: Hosts) -> list[Price]:
    """Return the prices of all candidates, in an order that does not depend on the number of rows."""
    offers = [price(scheme, demand, machine) for scheme in CANDIDATES if _is_sensible(scheme, demand)]
    if demand.is_torchs and machine is not None:
        offers.append(price(TORCHS, demand, machine))
    if 1 < len(hosts) < demand.world_size:
        offers += _two_level_prices(demand, machine, hosts)
    return offers


def ranked(offers: Sequence[Price], current: Scheme | TwoLevel | None = None) -> list[Price]:
    """Sort offers by bytes, but put the choice first: that of fewest bytes, unless another one is clearly faster.

    ``current`` stays the choice unless that one is better by `HYSTERESIS`, or clearly faster.
    """
    by_bytes = sorted(offers, key=lambda offer: offer.weighted_bytes)
    by_seconds = sorted(offers, key=lambda offer: offer.weighted_seconds)
    trusted = [offer for offer in by_seconds if _is_trusted(offer, by_bytes[0])]
    best = next((offer for offer in trusted if _is_clearly_faster(offer, by_bytes[0])), by_bytes[0])
    standing = next((offer for offer in trusted if offer.scheme == current), None)
    if standing is not None and not _is_better(best, standing):
        best = standing
    return sorted(by_bytes, key=lambda offer: offer is not best)


def _is_trusted(offer: Price, smallest: Price) -> bool:
    """Return whether its seconds were measured, or an estimate suffices: its bytes are few, or few times the fewest."""
    is_small = offer.sent_bytes <= max(MANY_TIMES * smallest.sent_bytes, PROBE_BYTES)
    return offer.is_measured or (is_small and offer.scheme != TORCHS)


def _is_better(one: Price, other: Price) -> bool:
    is_less = one.weighted_bytes * (1.0 + HYSTERESIS) < other.weighted_bytes
    return _is_clearly_faster(one, other) or (is_less and not _is_clearly_faster(other, one))


def _is_clearly_faster(one: Price, other: Price) -> bool:
    if one.seconds is None or other.seconds is None:
        return False
    share, least = MEASURED if one.is_measured and other.is_measured else (CLEAR_SHARE, CLEAR_SECONDS)
    gain = other.weighted_seconds - one.weighted_seconds
    return gain > share * other.weighted_seconds and gain > least


def price(scheme: Scheme, demand: Demand, machine: Machine | None = None) -> Price:
    """Return the expected cost of one scheme."""
    sent_bytes = busiest_rank_bytes(scheme, demand)
    seconds = None if machine is None else expected_seconds(scheme, demand, machine, sent_bytes)
    return Price(scheme, sent_bytes, seconds)


def _two_level_prices(demand: Demand, machine: Machine | None, hosts: Hosts) -> list[Price]:
    """Return the prices of schemes of two levels: bytes that cross hosts, for each rank, and work inside a host.

    A host's link is shared, so bytes that stay on the host are assumed to cost nothing but the work on them.
    """
    inside, between, linked = _levels(demand, hosts)
    among_hosts = machine
    if machine is not None:
        crossing = (demand.world_size - 1) / (demand.world_size - max(map(len, hosts)))
        among_hosts = replace(machine, byte_seconds=machine.byte_seconds * crossing)
    offers = []
    for scheme in CANDIDATES:
        if scheme.is_dense or not _is_sensible(scheme, between):
            continue
        offer = price(scheme, between, among_hosts)
        seconds = offer.seconds
        if machine is not None and seconds is not None:
            seconds += 5 * machine.round_seconds + work_seconds(ZEN, inside, machine)
        share = linked / max(map(len, hosts))  # in bytes of a host, all of its ranks have a part
        offers.append(Price(TwoLevel(scheme), offer.sent_bytes * share, seconds))
    return offers


def _levels(demand: Demand, hosts: Hosts) -> tuple[Demand, Demand, int]:
    """Return the demand inside a host, that between hosts for each linked rank, and the linked ranks of a host.

    A rank is linked if it has a partner on every other host.
    """
    most, linked = max(map(len, hosts)), min(map(len, hosts))
    growth = math.log(most) / math.log(demand.world_size)
    of_host = demand.held * (demand.union / demand.held) ** growth if demand.held else 0.0
    inside = replace(demand, world_size=most, union=max(of_host, demand.held))
    rows = -(-demand.num_rows // linked)
    between = replace(
        demand,
        world_size=len(hosts),
        num_rows=rows,
        held=min(rows, of_host / linked),
        union=min(rows, demand.union / linked),
    )
    return inside, between, linked


def explain(demand: Demand, machine: Machine | None = None, hosts: Hosts = ()) -> str:
    """Return a line with the choice, the next best, and the numbers behind them."""
    return explained(ranked(prices(demand, machine, hosts)), demand)


def explained(offers: Sequence[Price], demand: Demand) -> str:
    """Return the line of `explain` for offers of which the first is the choice."""
    best, *others = offers
    density, ratio = demand.held / max(1, demand.num_rows), demand.union / max(1.0, demand.held)
    rather = f" rather than {_told(others[0])}" if others else ""
    return (
        f"{_told(best)}{rather}: {demand.world_size} ranks, density {density:.2%}, densification {ratio:.2f},"
        f" rows of {demand.row_bytes} bytes"
    )


def _told(offer: Price) -> str:
    seconds = "" if offer.seconds is None else f" in {1e3 * offer.seconds:.1f} ms"
    how = ", measured" if offer.is_measured else ""
    return f"{name_of(offer.scheme)} ({offer.sent_bytes / 1e6:.3f} MB{seconds}{how})"


def busiest_rank_bytes(scheme: Scheme, demand: Demand) -> float:
    """Return the expected bytes of the busiest rank."""
    even = expected_bytes(
        scheme,
        demand.world_size,
        demand.num_rows,
        demand.row_bytes,
        demand.held,
        demand.union,
        demand.itemsize,
    )
    return even * imbalance(scheme, demand)


def imbalance(scheme: Scheme, demand: Demand) -> float:
    """Return the busiest rank over the mean for rows dealt at random: 1 + sqrt(2 ln n / rows of an owner), both phases.

    The maximum of n sums of independent 0/1 variables with mean m exceeds it by about sqrt(2 m ln n). An
    owner receives ``held`` rows in the push, over all ranks, and sends ``union`` / n in the pull.
    """
    world_size, held, union = demand.world_size, demand.held, demand.union
    if scheme.ownership is not Ownership.PERMUTATION or world_size == 1 or held == 0:
        return 1.0
    push = math.sqrt(2 * math.log(world_size) / held)
    pull = math.sqrt(2 * math.log(world_size) * world_size / union)
    return 1.0 + STRATIFICATION * (push * held + pull * union) / (held + union)


def _is_sensible(scheme: Scheme, demand: Demand) -> bool:
    """Return whether columns are wide enough to be worth their ids, and sixteen-bit values are rounded only once."""
    if scheme.ownership is Ownership.COLUMNS:
        return demand.width >= MIN_COLUMNS * demand.world_size
    if scheme.ownership is Ownership.UNION:
        return demand.width >= MIN_ROW_ELEMENTS
    return scheme.communication is not Communication.HIERARCHY or demand.itemsize >= 4


class Route(StrEnum):
    """The way of a table whose tensor the model's own group takes, as NCCL takes those of a GPU."""

    NATIVE = "native"  # all-reduced with the rest of its bucket
    COLLECTIVE = "collective"  # rows, by collectives of the model's own group
    STAGED = "staged"  # rows, through memory of the host, by the lane


@dataclass(frozen=True)
class RoutePrice:
    """A route and its price for one table. Seconds of sums that tables share are not part of it."""

    route: Route
    price: Price

    @property
    def seconds(self) -> float:
        return _seconds(self.price)

    @property
    def told(self) -> str:
        """The route and its expected cost, for `thinwire.Synchronizer.table`."""
        cost = f"{self.price.sent_bytes / 1e6:.3f} MB in {1e3 * self.seconds:.2f} ms"
        scheme = "" if self.route is Route.NATIVE else f" {name_of(self.price.scheme)}"
        return f"{self.route}{scheme} ({cost})"


LAUNCH_SECONDS = 6e-6
"""Seconds of the host for an operation that it launches on a GPU, by PyTorch. After backward nothing hides them."""
SUM_LAUNCHES, TABLE_LAUNCHES, STAGED_LAUNCHES = 115, 6, 20
"""Operations of a sum by collectives that its tables share, those of each table, and those of a staged table."""
SCAN_BYTE_SECONDS = 3.3e-13
"""Seconds to search a byte of a dense gradient on a GPU for non-zero rows: those of an H100 that reads 3 TB/s."""
COPY_BYTE_SECONDS = 1e-10
"""Seconds to copy a byte of rows between a GPU and pinned memory, and once more on the host."""


def shared_seconds(machine: Machine, is_host: bool) -> float:
    """Return the seconds of a sum by collectives that do not depend on its tables: two rounds, two messages, launches.

    The host waits for the counts of rows, and for the sizes of sums; it does not wait for the rows.
    """
    launches = 0 if is_host else SUM_LAUNCHES
    return 2 * (machine.round_seconds + machine.message_seconds) + launches * LAUNCH_SECONDS


def route_prices(
    demand: Demand, schemes: Sequence[Scheme], own: Machine, lane: Machine | None, hosts: Hosts, is_sparse: bool,
    is_host: bool, ratio: float = 1.0,
) -> list[RoutePrice]:  # fmt: skip
    """Return the ways of a table, the fastest of each route.

    Args:
        schemes: the schemes that run on the collectives.
        own, lane: costs on the model's own group, and on the lane; None without those.
        is_sparse: whether its gradient is a COO tensor, which NCCL does not all-reduce.
        is_host: whether gradients are on the CPU.
        ratio: measured over expected seconds of sums by collectives.
    """
    table_bytes = demand.num_rows * demand.row_bytes
    found = []
    if not is_sparse:
        sent = ring_all_reduce_bytes(table_bytes, demand.world_size)
        found.append(RoutePrice(Route.NATIVE, Price(DENSE, sent, sent * own.reduced_byte_seconds)))
    launched = 0.0 if is_host else TABLE_LAUNCHES * LAUNCH_SECONDS
    scan = launched + (0.0 if is_sparse or is_host else table_bytes * SCAN_BYTE_SECONDS)
    rows = []
    for scheme in schemes:
        sent_bytes = busiest_rank_bytes(scheme, demand)
        seconds = scan + sent_bytes * own.byte_seconds + work_seconds(scheme, demand, own)
        rows.append(RoutePrice(Route.COLLECTIVE, Price(scheme, sent_bytes, ratio * seconds)))
    found.append(min(rows, key=lambda way: way.seconds))
    if lane is not None:
        offers = [offer for offer in offers_of(replace(demand, is_torchs=False), lane, hosts) if not _is_dense(offer)]
        offer = min(offers, key=_seconds)
        moved = (demand.held + demand.union) * demand.row_bytes
        copies = 0.0 if is_host else moved * COPY_BYTE_SECONDS + STAGED_LAUNCHES * LAUNCH_SECONDS
        seconds = LANE_SHARE * (_seconds(offer) + copies) + LANE_SECONDS
        found.append(RoutePrice(Route.STAGED, replace(offer, seconds=seconds)))
    return found


MAX_REHEARSALS = 3
"""Most rehearsals of an embedding table in a run, unless the machine changes: the first, one that repeats what was
close and tries new candidates, and one for batches of another size."""
MIN_BYTES = 64 * 1024
"""Fewest sent bytes for a rehearsal: less has little to gain."""
MAX_SECONDS = 0.1
"""Longest expected step for a rehearsal: in longer ones the wire decides, and so bytes do."""
HOPELESS = 1.3
"""Factor on the expected seconds of the fastest, above which a candidate is not rehearsed."""
HOPELESS_OF_TORCH = 4.0
"""The same factor for torch's own all-reduce, which moves more bytes with less work: a probe that ranks make together
on few processors takes a link for ten times slower than it is."""
REGRET_STEPS, REGRET_SHARE, FIRST_REGRET = 50, 0.05, 0.6
"""Bound of the extra time of trials: a share of the last 50 steps, and at least 0.6 of a step. A trial that is expected
to exceed it waits; one that costs more than expected delays the next."""
MAX_STEPS = 16
"""Steps after which a rehearsal ends even if candidates are left, because no batches of its size come."""
ALIKE = 2.0
"""Factor within which the rows that ranks hold make batches alike."""

Point = Scheme | TwoLevel


class Rehearsal:
    """A series of steps that each try one candidate, the same on all ranks.

    Args:
        points: candidates, each of which is tried in one step.
        held: rows that a rank holds in the steps that count, as the mean over ranks.
    """

    def __init__(self, points: Sequence[Point], held: float) -> None:
        self.points = list(points)
        self._held = held
        self._steps = 0

    def next(self, held: float, is_worth_it: Callable[[Point], bool]) -> Point | None:
        """Return the candidate to try in a step with ``held`` rows, or None if this step is no trial."""
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
    """Return the candidates that may be the fastest, the most promising first; none if bytes decide or only one may be.

    All of them add in rank order, so that the last bits of a sum do not depend on a clock. The function is pure, so
    the result is equal on all ranks.

    Args:
        offers: prices of all candidates, with seconds, the one of fewest bytes first.
    """
    best = offers[0]
    if best.sent_bytes < MIN_BYTES or _seconds(best) > MAX_SECONDS or not adds_in_rank_order(best.scheme):
        return []
    rivals = [offer for offer in offers if adds_in_rank_order(offer.scheme) and offer.scheme != TORCHS]
    rivals.sort(key=_seconds)
    torchs = [offer for offer in offers if offer.scheme == TORCHS]
    trials = [offer.scheme for offer in torchs if _seconds(offer) <= HOPELESS_OF_TORCH * _seconds(rivals[0])]
    hopeful = [offer.scheme for offer in rivals if _seconds(offer) <= HOPELESS * _seconds(rivals[0])]
    return trials + hopeful if len(trials + hopeful) > 1 else []  # torch's first: alone it can end the rehearsal


def adds_in_rank_order(point: Point) -> bool:
    return isinstance(point, Scheme) and (point.communication is Communication.POINT_TO_POINT or point == TORCHS)


def is_clearly_torchs(offers: Sequence[Price], seconds: float, machine: Machine) -> bool:
    """Return whether torch's own all-reduce, which took ``seconds``, is the fastest, even if they were all wire.

    The bytes of other schemes would then take their share of ``seconds``, and their work comes on top of that.
    """
    torchs = next(offer for offer in offers if offer.scheme == TORCHS)

    def least_seconds(offer: Price) -> float:
        work = _seconds(offer) - offer.sent_bytes * machine.byte_seconds
        return seconds * offer.sent_bytes / torchs.sent_bytes + CONTENTION * work

    needed = replace(torchs, seconds=seconds).weighted_seconds
    return all(needed <= least_seconds(offer) for offer in offers if offer is not torchs and not _is_dense(offer))


def _is_dense(offer: Price) -> bool:
    return isinstance(offer.scheme, Scheme) and offer.scheme.is_dense


def _seconds(offer: Price) -> float:
    assert offer.seconds is not None, "a machine gives every scheme seconds"
    return offer.seconds
