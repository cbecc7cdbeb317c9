"""Expected bytes of every scheme, from how many rows the ranks hold: what "auto" compares and tables show.

Closed forms, which know how many rows there are but not which: `thinwire.lab.ledger` has the exact bytes, for given
ids. No synchronization needs either; what a step cost is worked out when somebody looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from thinwire.comm.channel import opening_bytes
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.rows import formats as wire
from thinwire.rows.formats import Format, FormatChoice, Header, Part, Whole
from thinwire.sums import union_shares
from thinwire.sums.schedules import GATHER_SCHEDULES, REDUCE_SCHEDULES, doubling_schedule, gathering
from thinwire.sums.scheme import Aggregation, Communication, Scheme, Unit, begins_with_opening, unit_shape
from thinwire.sums.two_level import WITHIN, TwoLevel, flat, shares

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
        in_rank_order: whether only schemes are candidates that add in rank order, so that bits depend on no clock.
    """

    world_size: int
    num_rows: int
    width: int
    itemsize: int
    held: float
    union: float
    in_rank_order: bool = False

    @classmethod
    def of(
        cls,
        counts: Sequence[float],
        num_rows: int,
        width: int,
        itemsize: int,
        union: float | None = None,
        in_rank_order: bool = False,
    ) -> Demand:
        """Return the demand of ranks that hold ``counts`` rows; a ``union`` that is None is estimated."""
        world_size = len(counts)
        mean = sum(counts) / max(1, world_size)
        if union is None:
            union = min(num_rows, max([*counts, mean * world_size**DENSIFICATION_EXPONENT, 0.0]))
        return cls(world_size, num_rows, width, itemsize, mean, union, in_rank_order=in_rank_order)

    @property
    def row_bytes(self) -> int:
        return self.width * self.itemsize


@dataclass(frozen=True)
class Pricing:
    """Knows the bytes of messages of rows, each of ``row_bytes``, in the format that ``choice`` takes."""

    choice: FormatChoice
    row_bytes: int

    def message_bytes(self, count: int, part: Part) -> int:
        """Return the bytes of a message of ``count`` rows of a part, header and payload."""
        format = self.choice.smallest(count, self.row_bytes, part)
        return Header.NUM_BYTES + wire.payload_bytes(format, count, self.row_bytes, part.size, part.num_rows)

    def is_dense(self, count: int, part: Part) -> bool:
        """Return whether all rows of the part arrive where ``count`` of them are sent."""
        return self.choice.smallest(count, self.row_bytes, part) is Format.DENSE


def is_doubling(scheme: Scheme) -> bool:
    """Return whether partners exchange and merge all that they have, in stages."""
    merges = scheme.aggregation is Aggregation.INCREMENTAL and not scheme.is_parallel
    return merges and scheme.communication is Communication.HIERARCHY


def expected_bytes(scheme: Scheme | TwoLevel, demand: Demand) -> float:
    """Return the bytes of the busiest rank when every rank holds equally many rows, dealt evenly.

    Rows fill blocks as if they were consecutive, which is the best case. The rows of m ranks together are taken to grow
    as a power of m.

    The closed forms of ZEN (sections 2.3, 3.3 and appendix B.1) with the real headers and formats; for a
    contiguous partition this is the best case, since skewness is not known here.
    """
    single = flat(scheme) if isinstance(scheme, TwoLevel) else scheme
    if single is None:
        assert isinstance(scheme, TwoLevel)
        return _expected_two_level_bytes(scheme, demand)
    world_size, count, union = demand.world_size, demand.held, demand.union
    single.num_owners(world_size)
    opening = opening_bytes(world_size) if begins_with_opening(single) else 0
    if single.is_dense:
        return opening + ring_all_reduce_bytes(demand.num_rows * demand.row_bytes, world_size)
    if single.unit is not Unit.ROWS:
        return expected_bytes(replace(single, unit=Unit.ROWS), _in_units(demand, single.unit))
    if single.knows_ids:
        held = (round(count),) * world_size
        plan = union_shares.UnionPlan(held, demand.num_rows, demand.width, demand.itemsize, single)
        return opening + plan.expected_bytes(union)

    def rows(ranks: int) -> float:
        if ranks == world_size:
            return union
        return count * (union / count) ** (math.log(ranks) / math.log(world_size)) if count else 0.0

    pattern = _expected_by_owners_bytes if single.is_parallel else _expected_whole_bytes
    return opening + pattern(single, world_size, demand.num_rows, demand.row_bytes, rows)


def _in_units(demand: Demand, unit: Unit) -> Demand:
    """Return the demand of a matrix seen in units, which rows fill as if they were consecutive."""
    num_units, width = unit_shape(demand.num_rows, demand.width, unit)
    held, union = (min(float(num_units), rows * demand.width / width) for rows in (demand.held, demand.union))
    return replace(demand, num_rows=num_units, width=width, held=held, union=union)


def _expected_two_level_bytes(scheme: TwoLevel, demand: Demand) -> float:
    """Return `expected_bytes` where the ranks of a host reduce first, on the host that has most ranks."""
    assert scheme.hosts is not None
    units = _in_units(demand, scheme.unit)
    held, total = units.held, units.union
    most, linked = max(map(len, scheme.hosts)), min(map(len, scheme.hosts))
    of_host = held * (total / held) ** (math.log(most) / math.log(demand.world_size)) if held else 0.0
    part = shares(scheme, units.num_rows, most).parts[0]
    price = Pricing(WITHIN.push_choice, units.row_bytes)
    push = (linked - 1) * price.message_bytes(round(held / linked), part) + (most - linked) * Header.NUM_BYTES
    pull = (most - 1) * price.message_bytes(round(total / linked), part)
    between = replace(
        units, world_size=len(scheme.hosts), num_rows=part.size, held=of_host / linked, union=total / linked
    )
    among_hosts = expected_bytes(replace(scheme.between, unit=Unit.ROWS), between)
    return opening_bytes(demand.world_size) + push + among_hosts + pull


def _expected_whole_bytes(
    scheme: Scheme, world_size: int, num_rows: int, row_bytes: int, rows: Callable[[int], float]
) -> float:
    """Under centralization, where rank 0 is the busiest; ``rows`` of so many ranks together."""
    price, whole = Pricing(scheme.push_choice, row_bytes), Whole(num_rows)
    if is_doubling(scheme):
        merged = [len(stage.sends) for stage in doubling_schedule(0, world_size) if stage.target is not None]
        return sum(price.message_bytes(round(rows(ranks)), whole) for ranks in merged)
    return _num_gathered(scheme, 0, world_size, world_size) * price.message_bytes(round(rows(1)), whole)


def _expected_by_owners_bytes(
    scheme: Scheme, world_size: int, num_rows: int, row_bytes: int, rows: Callable[[int], float]
) -> float:
    """Under parallelism over rows; ``rows`` of so many ranks together. Where all own a part, rank 0 is the busiest."""
    if world_size == 1:
        return 0
    num_owners = scheme.num_owners(world_size)
    part = scheme.rows_partition(num_rows, world_size).parts[0]
    push, pull = Pricing(scheme.push_choice, row_bytes), Pricing(scheme.pull_choice, row_bytes)

    def share(ranks: int) -> int:
        return round(rows(ranks) / num_owners)

    def rank_bytes(rank: int) -> float:
        pushed = [push.message_bytes(share(ranks), part) for ranks in _merged(scheme, rank, world_size)]
        pulled = _num_gathered(scheme, rank, world_size, num_owners) * pull_bytes
        return sum(pushed) + pulled + _empty_bytes(scheme, rank, world_size)

    grows = any(push.is_dense(share(ranks), part) for ranks in _merged(scheme, 0, world_size))
    pull_bytes = pull.message_bytes(part.size if grows else share(world_size), part)
    return max(map(rank_bytes, range(world_size if num_owners < world_size else 1)))


def _merged(scheme: Scheme, rank: int, world_size: int) -> list[int]:
    """For each part that a rank pushes, in order: the rows of how many ranks are in it."""
    num_owners = scheme.num_owners(world_size)
    if scheme.communication is Communication.POINT_TO_POINT:
        return [1] * (num_owners - (rank < num_owners))
    sent = [len(stage.sends) for stage in REDUCE_SCHEDULES[scheme.communication](rank, world_size) if stage.sends]
    if scheme.communication is Communication.RING:
        return [step + 1 for step in range(len(sent))]
    if rank >= num_owners:
        return [1] * sum(sent)
    merged = []
    for halvings, num_parts in enumerate(sent):
        apart = num_owners >> halvings
        members = range(rank % apart, num_owners, apart)
        merged += [sum(1 + (member + num_owners < world_size) for member in members)] * num_parts
    return merged


def _num_gathered(scheme: Scheme, rank: int, world_size: int, num_origins: int) -> int:
    """How many messages a rank sends, its own or others', where all ranks get one of each of the first ranks."""
    if scheme.pull_by is Communication.POINT_TO_POINT:
        return world_size - 1 if rank < num_origins else 0
    stages = gathering(GATHER_SCHEDULES[scheme.pull_by](rank, world_size), rank, num_origins)
    return sum(len(stage.sends) for stage in stages)


def _empty_bytes(scheme: Scheme, rank: int, world_size: int) -> int:
    """Headers alone, point to point: to ranks that own no part, and from them."""
    num_idle, owns = world_size - scheme.num_owners(world_size), rank < scheme.num_owners(world_size)
    pushes = num_idle - (not owns) if scheme.communication is Communication.POINT_TO_POINT else 0
    pulls = world_size - 1 if scheme.pull_by is Communication.POINT_TO_POINT and not owns else 0
    return (pushes + pulls) * Header.NUM_BYTES
