"""Choice of a scheme from the statistics of a sparse tensor: expected costs, and ranking.

A choice is pure: equal input gives an equal choice, so ranks that know the same statistics need not communicate.

Seconds follow the alpha-beta model (a message costs alpha + beta times its bytes) with measured alpha and beta, and
with the cost of encoding, adding and decoding rows, because on a fast link that is most of the time. Overlap is not
counted twice: columns and rows of the union are streamed, so that work on one chunk hides behind the wire of another.

The choice is the scheme of fewest bytes, unless another one is clearly faster. Bytes are known exactly; seconds are an
estimate from a measurement of a tenth of a second, on machines that do other work too. So seconds decide only where
they leave no doubt: on a fast link, where work on rows costs more than sending zeros would.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from thinwire.comm.channel import Channel
from thinwire.comm.hosts import Hosts, ranks_of_hosts
from thinwire.comm.machine import PROBE_BYTES, Machine
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.rows.sparse import SparseRows
from thinwire.sums.cost import Demand, expected_bytes
from thinwire.sums.named import AGSPARSE_CODED, COLUMN_SPLIT, DENSE, SPARCML_CODED, UNION_SPLIT, ZEN, name_of
from thinwire.sums.schedules import GATHER_SCHEDULES, REDUCE_SCHEDULES
from thinwire.sums.scheme import Aggregation, Communication, Ownership, Scheme, begins_with_opening, unit_shape
from thinwire.sums.synchronize import placed
from thinwire.sums.two_level import TwoLevel

Point = Scheme | TwoLevel

LANE_SHARE, LANE_SECONDS = 1.3, 0.001
"""What a synchronization on the lane costs a step beyond its own seconds, as a factor and in seconds, and a collective
of the model's own group does not: it wakes no thread up."""


def expected_seconds(scheme: Scheme, demand: Demand, machine: Machine, sent_bytes: float) -> float:
    """Return the expected seconds of one synchronization in which the busiest rank sends ``sent_bytes``."""
    world_size = demand.world_size
    if world_size == 1:
        return 0.0
    waiting = _waiting_seconds(scheme, world_size, machine)
    if scheme.is_dense:
        return waiting + sent_bytes * machine.reduced_byte_seconds
    return waiting + sent_bytes * machine.byte_seconds + work_seconds(scheme, demand, machine)


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
    push, pull = REDUCE_SCHEDULES.get(scheme.communication), GATHER_SCHEDULES.get(scheme.pull_by)
    gathers = None if pull is None else len(pull(0, world_size))
    if not scheme.is_parallel:
        return gathers, 0
    return None if push is None else len(push(0, world_size)), gathers


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
"""Factor on the fewest bytes, above which no scheme is chosen for its expected speed: a probe of 128 kB passes through
the burst of a link of 1 Gbit/s as if that were one of 5 Gbit/s."""
CLEAR_SHARE, CLEAR_SECONDS = 0.25, 0.005
"""Least gain, both as a share and in seconds, with which a scheme of more bytes is chosen for its speed."""
DENSE_SHARE = 0.9
"""Share of rows that a rank holds from which leaving out the others is not worth the search for them."""


@dataclass(frozen=True)
class Price:
    """The expected cost of a scheme: bytes of the busiest rank, and seconds, or None without a machine."""

    scheme: Point
    sent_bytes: float
    seconds: float | None

    @property
    def weighted_bytes(self) -> float:
        """Bytes less the gain of streaming, by which schemes are compared."""
        point = self.scheme.between if isinstance(self.scheme, TwoLevel) else self.scheme
        return self.sent_bytes * (1.0 - STREAMING_GAIN * (point.ownership is Ownership.COLUMNS))


def choose(demand: Demand, machine: Machine | None = None, current: Point | None = None, hosts: Hosts = ()) -> Point:
    """Return the cheapest scheme for a demand.

    Args:
        machine: costs to compare seconds; None compares bytes.
        current: the choice that stands unless another one is better by `HYSTERESIS`.
        hosts: the ranks of each host, if several share one: then schemes of two levels compete too.
    """
    return DENSE if is_dense(demand) else ranked(offers_of(demand, machine, hosts), current)[0].scheme


def chosen(rows: SparseRows, channel: Channel, in_rank_order: bool = False, by_bytes: bool = False) -> Point:
    """Return the choice of "auto" for rows like these, after `Channel.open` gathered how many the ranks hold.

    All ranks get the same answer, since it follows from numbers that all of them know. The first call measures the
    machine, unless ``by_bytes``. With ``in_rank_order`` the bits of the sum do not depend on what it measures.
    """
    sizes = rows.num_rows, rows.width, rows.values.element_size()
    demand = Demand.of(channel.held, *sizes, in_rank_order=in_rank_order)
    machine = None if by_bytes else channel.machine()
    return placed(choose(demand, machine, hosts=ranks_of_hosts(channel.exchange.hosts)), channel)


def is_dense(demand: Demand) -> bool:
    """Return whether there are hardly any zeros to leave out, or no values at all."""
    has_zeros = demand.in_rank_order or demand.held < DENSE_SHARE * demand.num_rows
    return not has_zeros or demand.width == 0


def offers_of(demand: Demand, machine: Machine | None = None, hosts: Hosts = ()) -> list[Price]:
    """Return the prices of all candidates, in an order that does not depend on the number of rows."""
    offers = [price(scheme, demand, machine) for scheme in CANDIDATES if _is_sensible(scheme, demand)]
    if 1 < len(hosts) < demand.world_size:
        offers += _two_level_prices(demand, machine, hosts)
    return [offer for offer in offers if adds_in_rank_order(offer.scheme)] if demand.in_rank_order else offers


def ranked(offers: Sequence[Price], current: Point | None = None) -> list[Price]:
    """Sort offers by bytes, but put the choice first: that of fewest bytes, unless another one is clearly faster.

    ``current`` stays the choice unless that one is better by `HYSTERESIS`, or clearly faster.
    """
    by_bytes = sorted(offers, key=lambda offer: offer.weighted_bytes)
    most = max(MANY_TIMES * by_bytes[0].sent_bytes, PROBE_BYTES)
    trusted = [offer for offer in by_bytes if offer.sent_bytes <= most]
    faster = [offer for offer in trusted if _is_clearly_faster(offer, by_bytes[0])]
    best = min(faster, key=lambda offer: offer.seconds or 0.0, default=by_bytes[0])
    standing = next((offer for offer in trusted if offer.scheme == current), None)
    if standing is not None and not _is_better(best, standing):
        best = standing
    return sorted(by_bytes, key=lambda offer: offer is not best)


def _is_better(one: Price, other: Price) -> bool:
    is_less = one.weighted_bytes * (1.0 + HYSTERESIS) < other.weighted_bytes
    return _is_clearly_faster(one, other) or (is_less and not _is_clearly_faster(other, one))


def _is_clearly_faster(one: Price, other: Price) -> bool:
    if one.seconds is None or other.seconds is None:
        return False
    gain = other.seconds - one.seconds
    return gain > CLEAR_SHARE * other.seconds and gain > CLEAR_SECONDS


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
    held, union = min(rows, of_host / linked), min(rows, demand.union / linked)
    between = replace(demand, world_size=len(hosts), num_rows=rows, held=held, union=union)
    return inside, between, linked


def explained(offers: Sequence[Price], demand: Demand) -> str:
    """Return a line with the choice, which is the first of the offers, the next best, and the numbers behind them."""
    best, *others = offers
    density, ratio = demand.held / max(1, demand.num_rows), demand.union / max(1.0, demand.held)
    rather = f" rather than {_text(others[0])}" if others else ""
    return (
        f"{_text(best)}{rather}: {demand.world_size} ranks, density {density:.2%}, densification {ratio:.2f},"
        f" rows of {demand.row_bytes} bytes"
    )


def _text(offer: Price) -> str:
    seconds = "" if offer.seconds is None else f" in {1e3 * offer.seconds:.1f} ms"
    return f"{name_of(offer.scheme)} ({offer.sent_bytes / 1e6:.3f} MB{seconds})"


def busiest_rank_bytes(scheme: Scheme, demand: Demand) -> float:
    """Return the expected bytes of the busiest rank."""
    return expected_bytes(scheme, demand) * imbalance(scheme, demand)


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
    """The way of a table whose tensor the model's own group takes, as NCCL does on a GPU."""

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
    def text(self) -> str:
        """The route and its expected cost, for `thinwire.Synchronizer.table`."""
        cost = f"{self.price.sent_bytes / 1e6:.3f} MB in {1e3 * self.seconds:.2f} ms"
        scheme = "" if self.route is Route.NATIVE else f" {name_of(self.price.scheme)}"
        return f"{self.route}{scheme} ({cost})"


LAUNCH_SECONDS = 6e-6
"""Seconds of the host for an operation that it launches on a GPU, by PyTorch. After backward nothing hides them."""
SUM_LAUNCHES, LEVEL_LAUNCHES, TABLE_LAUNCHES, STAGED_LAUNCHES = 115, 90, 6, 20
"""Operations of a sum by collectives that its tables share, those that a second level adds, of each table, and of a
staged table."""
SCAN_BYTE_SECONDS = 3.3e-13
"""Seconds to search a byte of a dense gradient on a GPU for non-zero rows: an H100 reads 3 TB/s."""
COPY_BYTE_SECONDS = 1e-10
"""Seconds to copy a byte of rows between a GPU and pinned memory, and once more on the host."""


def shared_seconds(machine: Machine, is_host: bool, schemes: Iterable[Point] = ()) -> float:
    """Return the seconds of a sum by collectives that do not depend on its tables: two rounds, two messages, launches.

    The host waits for the counts of rows, and for the sizes of sums; it does not wait for the rows. If one of the
    ``schemes`` has two levels, there is one round more, for the rows of hosts, and two messages.
    """
    is_two = any(isinstance(scheme, TwoLevel) for scheme in schemes)
    launches = 0 if is_host else SUM_LAUNCHES + is_two * LEVEL_LAUNCHES
    rounds = (2 + is_two) * machine.round_seconds + (2 + 2 * is_two) * machine.message_seconds
    return rounds + launches * LAUNCH_SECONDS


def route_prices(
    demand: Demand, schemes: Sequence[Point], own: Sequence[Machine], lane: Machine | None, hosts: Hosts,
    is_sparse: bool, is_host: bool, ratio: float = 1.0,
) -> list[RoutePrice]:  # fmt: skip
    """Return the ways of a table, the fastest of each route.

    Args:
        schemes: the schemes that run on the collectives.
        own: costs on the model's own group, as `thinwire.comm.machine.measure_collectives` returns them.
        lane: costs on the lane; None without those.
        is_sparse: whether its gradient is a COO tensor, which NCCL does not all-reduce.
        is_host: whether gradients are on the CPU.
        ratio: measured over expected seconds of sums by collectives.
    """
    table_bytes = demand.num_rows * demand.row_bytes
    options = []
    if not is_sparse and not demand.in_rank_order:
        sent = ring_all_reduce_bytes(table_bytes, demand.world_size)
        options.append(RoutePrice(Route.NATIVE, Price(DENSE, sent, sent * own[0].reduced_byte_seconds)))
    launched = 0.0 if is_host else TABLE_LAUNCHES * LAUNCH_SECONDS
    scan = launched + (0.0 if is_sparse or is_host else table_bytes * SCAN_BYTE_SECONDS)
    rows = []
    for scheme in schemes:
        if demand.in_rank_order and not adds_in_rank_order(scheme):
            continue
        by_levels = _by_two_levels if isinstance(scheme, TwoLevel) else _by_collectives
        sent_bytes, seconds = by_levels(scheme, demand, own, hosts)  # type: ignore[arg-type]
        rows.append(RoutePrice(Route.COLLECTIVE, Price(scheme, sent_bytes, ratio * (scan + seconds))))
    options.append(min(rows, key=lambda option: option.seconds))
    if lane is not None and not demand.in_rank_order:  # a GPU sums the values of a row in another order than the host
        offers = offers_of(demand, lane, hosts)
        offer = min((one for one in offers if one.scheme != DENSE), key=_seconds)
        moved = (demand.held + demand.union) * demand.row_bytes
        copies = 0.0 if is_host else moved * COPY_BYTE_SECONDS + STAGED_LAUNCHES * LAUNCH_SECONDS
        seconds = LANE_SHARE * (_seconds(offer) + copies) + LANE_SECONDS
        options.append(RoutePrice(Route.STAGED, replace(offer, seconds=seconds)))
    return options


def _by_collectives(scheme: Scheme, demand: Demand, own: Sequence[Machine], hosts: Hosts) -> tuple[float, float]:
    """Return the bytes that a rank sends in one level, and the seconds of these and of the work on rows.

    Rows go straight to their owners. Sums go around in a ring, so that they leave a host once, by one of its ranks.
    """
    sent, work = busiest_rank_bytes(scheme, demand), work_seconds(scheme, demand, own[0])
    if len(own) == 1:
        return sent, sent * own[0].byte_seconds + work
    _, inside, between = own
    ranks, dealt = len(hosts[0]), demand.held / max(1.0, demand.held + demand.union) if scheme.is_parallel else 0.0
    apart = dealt * (demand.world_size - ranks) / (demand.world_size - 1) + (1.0 - dealt) / ranks
    return sent, sent * (apart * between.byte_seconds + inside.byte_seconds) + work


def _by_two_levels(scheme: TwoLevel, demand: Demand, own: Sequence[Machine], hosts: Hosts) -> tuple[float, float]:
    """Return the bytes that a rank sends in two levels, and the seconds of these and of the work on rows."""
    of_host, of_share, _ = _levels(demand, hosts)
    machine, inside, between = own
    apart = busiest_rank_bytes(scheme.between, of_share)
    within = max(0.0, expected_bytes(scheme, demand) - expected_bytes(scheme.between, of_share))
    work = work_seconds(ZEN, of_host, machine) + work_seconds(scheme.between, of_share, machine)
    return apart + within, apart * between.byte_seconds + within * inside.byte_seconds + work


MIN_BYTES = 64 * 1024
"""Fewest sent bytes for which schemes are tried in steps: less has little to gain."""
MAX_SECONDS = 0.1
"""Longest expected sum for that: in longer ones the wire decides, and so bytes do."""
HOPELESS = 1.3
"""Factor on the expected seconds of the fastest, above which a candidate is not tried."""


def rivals(offers: Sequence[Price]) -> list[Price]:
    """Return the choice and the candidates that may be faster, the most promising first; none if bytes decide.

    Where the choice sends more than the fewest bytes, because a probe took the link for fast, that of the fewest is one
    of them. All of them add in rank order, so that the last bits of a sum do not depend on which of them is tried.

    Args:
        offers: prices of all candidates, with seconds, the choice first.
    """
    best = offers[0]
    if best.sent_bytes < MIN_BYTES or _seconds(best) > MAX_SECONDS or not adds_in_rank_order(best.scheme):
        return []
    others = [offer for offer in offers[1:] if adds_in_rank_order(offer.scheme)]
    fastest, fewest = min(map(_seconds, [best, *others])), min(offer.sent_bytes for offer in [best, *others])
    hopeful = [one for one in others if _seconds(one) <= HOPELESS * fastest or one.sent_bytes == fewest]
    return [best, *sorted(hopeful, key=_seconds)] if hopeful else []


def adds_in_rank_order(point: Point) -> bool:
    """Return whether a scheme adds the ranks' values in rank order, so that all such schemes give the same bits."""
    return isinstance(point, Scheme) and point.communication is Communication.POINT_TO_POINT


def _seconds(offer: Price) -> float:
    assert offer.seconds is not None, "a machine gives every scheme seconds"
    return offer.seconds
