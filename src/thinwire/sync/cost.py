"""Expected bytes of every scheme, from how many rows the ranks hold: what "auto" compares and tables show.

Closed forms, which know how many rows there are but not which: `thinwire.lab.ledger` has the exact bytes, for given
ids. No synchronization needs either; what a step cost is worked out when somebody looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from thinwire import wire
from thinwire.comm.channel import opening_bytes
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.sync import staged, union_shares
from thinwire.sync.schedules import gathering
from thinwire.sync.scheme import Aggregation, Communication, Ownership, Scheme, Unit, begins_with_opening, unit_shape
from thinwire.sync.staged import GATHER_SCHEDULES, REDUCE_SCHEDULES
from thinwire.sync.two_level import CHOICE, TwoLevel, flat, shares
from thinwire.wire import Format, FormatChoice, Header, Part, Whole


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


def expected_bytes(
    scheme: Scheme | TwoLevel,
    world_size: int,
    num_rows: int,
    row_bytes: int,
    count: float,
    union: float,
    itemsize: int = 4,
) -> float:
    """Return the bytes of the busiest rank when every rank holds ``count`` rows, ``union`` in all, dealt evenly.

    ``itemsize`` is that of an element, for units other than rows. Rows fill blocks as if they were consecutive,
    which is the best case. The rows of m ranks together are taken to grow as a power of m.

    The closed forms of ZEN (sections 2.3, 3.3 and appendix B.1) with the real headers and formats; for a
    contiguous partition this is the best case, since skewness is not known here.
    """
    single = flat(scheme) if isinstance(scheme, TwoLevel) else scheme
    if single is None:
        assert isinstance(scheme, TwoLevel)
        return _expected_two_level_bytes(scheme, world_size, num_rows, row_bytes, count, union, itemsize)
    single.num_owners(world_size)
    opening = opening_bytes(world_size) if begins_with_opening(single) else 0
    if single.is_dense:
        return opening + ring_all_reduce_bytes(num_rows * row_bytes, world_size)
    if single.unit is not Unit.ROWS:
        return _expected_unit_bytes(single, world_size, num_rows, row_bytes, count, union, itemsize)
    if single.knows_ids:
        by_columns = single.ownership is Ownership.COLUMNS
        held = (round(count),) * world_size
        plan = union_shares.UnionPlan(held, num_rows, row_bytes // itemsize, itemsize, single.push_format, by_columns)
        return opening + plan.expected_bytes(union)

    def rows(ranks: int) -> float:
        if ranks == world_size:
            return union
        return count * (union / count) ** (math.log(ranks) / math.log(world_size)) if count else 0.0

    pattern = _expected_by_owners_bytes if single.is_parallel else _expected_whole_bytes
    return opening + pattern(single, world_size, num_rows, row_bytes, rows)


def _expected_two_level_bytes(
    scheme: TwoLevel, world_size: int, num_rows: int, row_bytes: int, count: float, union: float, itemsize: int
) -> float:
    """Return `expected_bytes` where the ranks of a host reduce first, on the host that has most ranks."""
    assert scheme.hosts is not None
    num_units, unit_width = unit_shape(num_rows, row_bytes // itemsize, scheme.unit)
    unit_bytes = unit_width * itemsize
    held, total = (min(float(num_units), rows * row_bytes / unit_bytes) for rows in (count, union))
    most, linked = max(map(len, scheme.hosts)), min(map(len, scheme.hosts))
    of_host = held * (total / held) ** (math.log(most) / math.log(world_size)) if held else 0.0
    part = shares(scheme, num_units, most).parts[0]
    price = Pricing(CHOICE, unit_bytes)
    push = (linked - 1) * price.message_bytes(round(held / linked), part) + (most - linked) * Header.NUM_BYTES
    pull = (most - 1) * price.message_bytes(round(total / linked), part)
    among_hosts = replace(scheme.between, unit=Unit.ROWS)
    between = expected_bytes(
        among_hosts, len(scheme.hosts), part.size, unit_bytes, of_host / linked, total / linked, itemsize
    )
    return opening_bytes(world_size) + push + between + pull


def _expected_unit_bytes(
    scheme: Scheme, world_size: int, num_rows: int, row_bytes: int, count: float, union: float, itemsize: int
) -> float:
    num_units, unit_width = unit_shape(num_rows, row_bytes // itemsize, scheme.unit)
    ratio = row_bytes / (unit_width * itemsize)
    held, total = (min(float(num_units), rows * ratio) for rows in (count, union))
    return expected_bytes(
        replace(scheme, unit=Unit.ROWS), world_size, num_units, unit_width * itemsize, held, total, itemsize
    )


def _expected_whole_bytes(
    scheme: Scheme, world_size: int, num_rows: int, row_bytes: int, rows: Callable[[int], float]
) -> float:
    """Under centralization, where rank 0 is the busiest; ``rows`` of so many ranks together."""
    price, whole = Pricing(scheme.push_choice, row_bytes), Whole(num_rows)
    if world_size == 1:
        return 0
    if scheme.communication is Communication.POINT_TO_POINT:
        return (world_size - 1) * price.message_bytes(round(rows(1)), whole)
    stages = GATHER_SCHEDULES[scheme.communication](0, world_size)
    if is_doubling(scheme):
        merged = [len(stage.sends) for stage in staged.doubling_schedule(0, world_size) if stage.target is not None]
        return sum(price.message_bytes(round(rows(ranks)), whole) for ranks in merged)
    num_messages = sum(len(stage.sends) for stage in gathering(stages, 0, world_size))
    return num_messages * price.message_bytes(round(rows(1)), whole)


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
        return sum(pushed) + _num_pulls(scheme, rank, world_size) * pull_bytes + _empty_bytes(scheme, rank, world_size)

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


def _num_pulls(scheme: Scheme, rank: int, world_size: int) -> int:
    """How many sums a rank sends on the way back, its own or those of others."""
    num_owners = scheme.num_owners(world_size)
    if scheme.pull_by is Communication.POINT_TO_POINT:
        return world_size - 1 if rank < num_owners else 0
    stages = gathering(GATHER_SCHEDULES[scheme.pull_by](rank, world_size), rank, num_owners)
    return sum(len(stage.sends) for stage in stages)


def _empty_bytes(scheme: Scheme, rank: int, world_size: int) -> int:
    """Headers alone, point to point: to ranks that own no part, and from them."""
    num_idle, owns = world_size - scheme.num_owners(world_size), rank < scheme.num_owners(world_size)
    pushes = num_idle - (not owns) if scheme.communication is Communication.POINT_TO_POINT else 0
    pulls = world_size - 1 if scheme.pull_by is Communication.POINT_TO_POINT and not owns else 0
    return (pushes + pulls) * Header.NUM_BYTES
