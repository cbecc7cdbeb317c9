"""Which scheme, when the user did not say: the one of fewest bytes, unless another one is clearly done first.

Bytes are known exactly; seconds are an estimate from a measurement of a tenth of a second, on machines that do other
things besides. So seconds decide only where they leave no doubt: on a fast link, where work on rows takes longer than
sending zeros would.

Pure: equal input gives an equal choice, so ranks that know the same numbers need not talk about it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.sync.cost import expected_bytes
from thinwire.sync.demand import Demand
from thinwire.sync.dimensions import Communication, Ownership
from thinwire.sync.hosts import Hosts
from thinwire.sync.machine import Machine
from thinwire.sync.named import AGSPARSE_CODED, COLUMN_SPLIT, DENSE, SPARCML_CODED, UNION_SPLIT, ZEN, name_of
from thinwire.sync.scheme import Scheme
from thinwire.sync.seconds import expected_seconds, work_seconds
from thinwire.sync.two_level import TwoLevel

CANDIDATES = (ZEN, COLUMN_SPLIT, UNION_SPLIT, AGSPARSE_CODED, SPARCML_CODED, DENSE)
MIN_COLUMNS = 2
"""An owner of fewer columns handles every id of every rank for a few bytes of values each."""
MIN_ROW_ELEMENTS = 8
"""Narrower rows of the union are hardly more than the ids that all ranks must get."""
STREAMING_GAIN = 0.04
"""By how much columns are faster than schemes of as many bytes, because they are streamed without headers: 4 to 7 % on
the benchmark's recipes at 8 and 16 ranks."""
STRATIFICATION = 0.5
"""Dealing groups of ids evenly halves the imbalance of independent hashing on the benchmark's recipes: 1.07 where
sqrt(2 ln n n / u) gives 1.16 (lstm, 8 ranks), 1.10 for 1.17 (bert)."""
HYSTERESIS = 0.03
"""A choice stands until another scheme promises to send less by this share: sparsity changes a little in every step."""
CLEAR_SHARE, CLEAR_SECONDS = 0.25, 0.005
"""By how much more bytes must be faster to be taken: both as a share, and in seconds."""
MEASURED = 0.02, 0.0
"""The same where the seconds of both were not estimated but taken, see `thinwire.sync.experience`."""
DENSE_SHARE = 0.9
"""Where a rank holds so many of all rows, leaving out the others is not worth looking for them."""


@dataclass(frozen=True)
class Price:
    """What a scheme is expected to cost: bytes of the busiest rank, and seconds where the machine is known.

    Args:
        is_measured: whether the seconds are those of real steps.
    """

    scheme: Scheme | TwoLevel
    sent_bytes: float
    seconds: float | None
    is_measured: bool = False

    @property
    def weighted_bytes(self) -> float:
        """What is compared: bytes, less the gain of streaming."""
        point = self.scheme.between if isinstance(self.scheme, TwoLevel) else self.scheme
        return self.sent_bytes * (1.0 - STREAMING_GAIN * (point.ownership is Ownership.COLUMNS))


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
    """The cheapest scheme for ranks that hold ``counts`` rows of a matrix [num_rows, width].

    Args:
        union: how many rows they hold together; None estimates it.
        machine: to compare seconds; None compares bytes.
        hosts: the ranks of each host, where several share one: then schemes of two levels compete as well.
        current: the choice that stands unless another one is better by `HYSTERESIS`.

    Numbers that cannot be (no ranks' counts at all, nan, more rows than there are) are warned of, and give DENSE, which
    is right whatever the rows are.
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
    """Whether there are hardly any zeros to leave out, or no values at all."""
    return demand.held >= DENSE_SHARE * demand.num_rows or demand.width == 0


def prices(demand: Demand, machine: Machine | None = None, hosts: Hosts = ()) -> list[Price]:
    """Of every candidate for such a demand, the one of fewest bytes first."""
    return sorted(offers_of(demand, machine, hosts), key=lambda offer: offer.weighted_bytes)


def offers_of(demand: Demand, machine: Machine | None, hosts: Hosts) -> list[Price]:
    """As `prices`, of the same schemes in the same order for every number of rows."""
    offers = [price(scheme, demand, machine) for scheme in CANDIDATES if _is_sensible(scheme, demand)]
    if 1 < len(hosts) < demand.world_size:
        offers += _two_level_prices(demand, machine, hosts)
    return offers


def ranked(offers: Sequence[Price], current: Scheme | TwoLevel | None = None) -> list[Price]:
    """First the one to take, then by bytes: that of fewest bytes, unless another one is clearly faster.

    ``current`` stands unless that one is better than it by `HYSTERESIS`, or clearly faster.
    """
    by_bytes = sorted(offers, key=lambda offer: offer.weighted_bytes)
    by_seconds = sorted(offers, key=lambda offer: offer.seconds or 0.0)
    best = next((offer for offer in by_seconds if _is_clearly_faster(offer, by_bytes[0])), by_bytes[0])
    standing = next((offer for offer in offers if offer.scheme == current), None)
    if standing is not None and not _is_better(best, standing):
        best = standing
    return sorted(by_bytes, key=lambda offer: offer is not best)


def _is_better(one: Price, other: Price) -> bool:
    is_less = one.weighted_bytes * (1.0 + HYSTERESIS) < other.weighted_bytes
    return _is_clearly_faster(one, other) or (is_less and not _is_clearly_faster(other, one))


def _is_clearly_faster(one: Price, other: Price) -> bool:
    if one.seconds is None or other.seconds is None:
        return False
    share, least = MEASURED if one.is_measured and other.is_measured else (CLEAR_SHARE, CLEAR_SECONDS)
    gain = other.seconds - one.seconds
    return gain > share * other.seconds and gain > least


def price(scheme: Scheme, demand: Demand, machine: Machine | None = None) -> Price:
    """What one scheme is expected to cost."""
    sent_bytes = busiest_rank_bytes(scheme, demand)
    seconds = None if machine is None else expected_seconds(scheme, demand, machine, sent_bytes)
    return Price(scheme, sent_bytes, seconds)


def _two_level_prices(demand: Demand, machine: Machine | None, hosts: Hosts) -> list[Price]:
    """What crosses hosts, for each rank that sends it, and the work inside a host.

    A host's link is shared, so bytes that stay on it are taken to cost nothing but the work on them.
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
    """What a host has to add up, what hosts have to synchronize for each rank that has a peer elsewhere, and how many
    such ranks a host has."""
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
    """One line: the choice, the next best, and the numbers behind them."""
    return explained(ranked(prices(demand, machine, hosts)), demand)


def explained(offers: Sequence[Price], demand: Demand) -> str:
    """As `explain`, of offers of which the first is taken."""
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
    """Expected bytes of the rank that has most."""
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
    """The busiest rank over the mean, for rows dealt at random: 1 + sqrt(2 ln n / rows of an owner), both phases.

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
    """Columns must not be too narrow to be worth their ids; and sixteen-bit values must be rounded only once."""
    if scheme.ownership is Ownership.COLUMNS:
        return demand.width >= MIN_COLUMNS * demand.world_size
    if scheme.ownership is Ownership.UNION:
        return demand.width >= MIN_ROW_ELEMENTS
    return scheme.communication is not Communication.HIERARCHY or demand.itemsize >= 4
