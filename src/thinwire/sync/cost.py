"""Bytes of every scheme, before anything is sent.

The bytes of every message of a synchronization, by following the ids of all ranks through it.

Bytes of every scheme, before anything is sent. Pure functions; tests hold them equal to what is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire import wire
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.partition import Partition, Whole
from thinwire.sync import staged, union_shares
from thinwire.sync.schedules import gathering
from thinwire.sync.scheme import (
    Aggregation,
    Communication,
    Ownership,
    Scheme,
    Unit,
    begins_with_opening,
    unit_ids,
    unit_shape,
)
from thinwire.sync.staged import GATHER_SCHEDULES, REDUCE_SCHEDULES
from thinwire.wire import Format, FormatChoice, Header, Part


@dataclass(frozen=True)
class Pricing:
    """What messages of rows of ``row_bytes`` cost."""

    choice: FormatChoice
    row_bytes: int

    def message_bytes(self, count: int, part: Part) -> int:
        """Header and payload of ``count`` rows of a part."""
        format = self.choice.smallest(count, self.row_bytes, part)
        return Header.NUM_BYTES + wire.payload_bytes(format, count, self.row_bytes, part.size, part.num_rows)

    def is_dense(self, count: int, part: Part) -> bool:
        """Whether all rows of the part arrive."""
        return self.choice.smallest(count, self.row_bytes, part) is Format.DENSE

    def arriving(self, ids: Tensor, part: Part) -> Tensor:
        """Which rows of a part arrive where ``ids`` are sent."""
        return part.ids(torch.arange(part.size)) if self.is_dense(ids.numel(), part) else ids


def gathered_bytes(scheme: Scheme, ids_per_rank: Sequence[Tensor], num_rows: int, row_bytes: int) -> list[int]:
    """For each rank, where the rows of all travel to all as they are."""
    price, whole = Pricing(scheme.push_choice, row_bytes), Whole(num_rows)
    messages = [price.message_bytes(ids.numel(), whole) for ids in ids_per_rank]
    return _to_all(scheme.communication, messages, len(ids_per_rank))


def doubling_bytes(scheme: Scheme, ids_per_rank: Sequence[Tensor], num_rows: int, row_bytes: int) -> list[int]:
    """For each rank, where partners add up all that both have."""
    price, whole = Pricing(scheme.push_choice, row_bytes), Whole(num_rows)
    world_size = len(ids_per_rank)
    held, totals = list(ids_per_rank), [0] * world_size
    for stages in zip(*(staged.doubling_schedule(rank, world_size) for rank in range(world_size)), strict=True):
        held = [price.arriving(ids, whole) for ids in held]
        for rank, stage in enumerate(stages):
            if stage.target is not None:
                totals[rank] += price.message_bytes(held[rank].numel(), whole)
        held = [
            ids if stage.source is None else _union([ids, held[stage.source]])
            for ids, stage in zip(held, stages, strict=True)
        ]
    return totals


def by_owners_bytes(scheme: Scheme, ids_per_rank: Sequence[Tensor], num_rows: int, row_bytes: int) -> list[int]:
    """For each rank, where owners of rows add up their parts."""
    world_size = len(ids_per_rank)
    partition = scheme.rows_partition(num_rows, world_size)
    push, pull = Pricing(scheme.push_choice, row_bytes), Pricing(scheme.pull_choice, row_bytes)
    if scheme.communication is Communication.POINT_TO_POINT:
        pushed, summed = _pushed_directly(push, ids_per_rank, partition)
    else:
        pushed, summed = _pushed_in_stages(push, ids_per_rank, partition, scheme.communication)
    senders = world_size if scheme.pull_by is Communication.POINT_TO_POINT else scheme.num_owners(world_size)
    messages = [pull.message_bytes(summed[owner], partition.parts[owner]) for owner in range(senders)]
    pulled = _to_all(scheme.pull_by, messages, world_size)
    return [a + b for a, b in zip(pushed, pulled, strict=True)]


def _to_all(communication: Communication, messages: Sequence[int], world_size: int) -> list[int]:
    """For each rank, where a message of each of the first ranks, of so many bytes, travels to all."""
    if communication is Communication.POINT_TO_POINT:
        return [(world_size - 1) * num_bytes for num_bytes in messages]
    schedule = GATHER_SCHEDULES[communication]
    return [
        sum(
            messages[origin]
            for stage in gathering(schedule(rank, world_size), rank, len(messages))
            for origin in stage.sends
        )
        for rank in range(world_size)
    ]


def _pushed_directly(
    price: Pricing, ids_per_rank: Sequence[Tensor], partition: Partition
) -> tuple[list[int], list[int]]:
    """Bytes of each rank, and how many rows each has in the sum of its part."""
    parts = partition.parts
    counts = [_counts(partition.owners(ids), len(parts)) for ids in ids_per_rank]
    summed = _counts(partition.owners(_union(ids_per_rank)), len(parts))
    for owner, part in enumerate(parts):
        if any(price.is_dense(held[owner], part) for held in counts):
            summed[owner] = part.size
    pushed = [
        sum(price.message_bytes(held[owner], part) for owner, part in enumerate(parts) if owner != rank)
        for rank, held in enumerate(counts)
    ]
    return pushed, summed


def _pushed_in_stages(
    price: Pricing, ids_per_rank: Sequence[Tensor], partition: Partition, communication: Communication
) -> tuple[list[int], list[int]]:
    """Bytes of each rank, and how many rows each has in the sum of its part."""
    world_size, parts = len(ids_per_rank), partition.parts
    held = [_dealt(ids, partition) for ids in ids_per_rank]
    pushed = [0] * world_size
    schedule = REDUCE_SCHEDULES[communication]
    for stages in zip(*(schedule(rank, world_size) for rank in range(world_size)), strict=True):
        sent = [{part: held[rank][part] for part in stage.sends} for rank, stage in enumerate(stages)]
        for rank, pieces in enumerate(sent):
            pushed[rank] += sum(price.message_bytes(ids.numel(), parts[part]) for part, ids in pieces.items())
        for rank, stage in enumerate(stages):
            for part in stage.receives:
                assert stage.source is not None
                arriving = price.arriving(sent[stage.source][part], parts[part])
                held[rank][part] = _union([held[rank][part], arriving])
    return pushed, [held[owner][owner].numel() for owner in range(world_size)]


def _dealt(ids: Tensor, partition: Partition) -> list[Tensor]:
    owners = partition.owners(ids)
    order = torch.argsort(owners, stable=True)
    return list(ids[order].split(_counts(owners, len(partition.parts))))


def _union(ids: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(ids)).unique()


def _counts(owners: Tensor, num_owners: int) -> list[int]:
    return torch.bincount(owners, minlength=num_owners).tolist()


def opening_bytes(world_size: int) -> int:
    """Bytes that a rank sends to agree with the others before anything else: with "auto" and for dense."""
    return (world_size - 1) * Header.NUM_BYTES


def sent_bytes(
    scheme: Scheme, ids_per_rank: Sequence[Tensor], num_rows: int, width: int, dtype: torch.dtype
) -> list[int]:
    """Exact bytes that each rank sends in one synchronization of the given rows, headers included.

    Args:
        scheme: a scheme; what "auto" chooses costs `opening_bytes` more, unless it chose before.
        ids_per_rank: for each rank its sorted unique row ids, int64. For units other than rows every element
            of these rows is taken to be not zero.

    Returns:
        One number for each rank. It equals what `Traffic.sent_bytes` grows by, to the byte.

    Raises:
        ValueError: the scheme has more servers than there are ranks.
    """
    world_size = len(ids_per_rank)
    scheme.num_owners(world_size)
    if world_size == 1:
        return [0]
    if scheme.unit is not Unit.ROWS:
        ids_per_rank = [unit_ids(ids, width, scheme.unit) for ids in ids_per_rank]
        num_rows, width = unit_shape(num_rows, width, scheme.unit)
    row_bytes = width * dtype.itemsize
    opening = opening_bytes(world_size) if begins_with_opening(scheme) else 0
    if scheme.is_dense:
        return [opening + ring_all_reduce_bytes(num_rows * row_bytes, world_size)] * world_size
    if scheme.knows_ids:
        plan = union_shares.UnionPlan(
            tuple(ids.numel() for ids in ids_per_rank),
            num_rows,
            width,
            dtype.itemsize,
            scheme.push_format,
            scheme.ownership is Ownership.COLUMNS,
        )
        return [opening + sent for sent in union_shares.sent_bytes(plan, ids_per_rank)]
    if scheme.is_parallel:
        pattern_bytes = by_owners_bytes
    else:
        pattern_bytes = doubling_bytes if _is_doubling(scheme) else gathered_bytes
    return [opening + sent for sent in pattern_bytes(scheme, ids_per_rank, num_rows, row_bytes)]


def _is_doubling(scheme: Scheme) -> bool:
    """Whether partners add up all that they have."""
    adds = scheme.aggregation is Aggregation.INCREMENTAL and not scheme.is_parallel
    return adds and scheme.communication is Communication.HIERARCHY


def expected_bytes(
    scheme: Scheme, world_size: int, num_rows: int, row_bytes: int, count: float, union: float, itemsize: int = 4
) -> float:
    """Bytes that the busiest rank sends when every rank holds ``count`` rows, ``union`` in all, dealt evenly.

    ``itemsize`` is that of an element, for units other than rows. Rows fill blocks as if they were consecutive,
    which is the best case. The rows of m ranks together are taken to grow as a power of m.

    The closed forms of ZEN (sections 2.3, 3.3 and appendix B.1) with the real headers and formats; for a
    contiguous partition this is the best case, since skewness is not known here.
    """
    scheme.num_owners(world_size)
    opening = opening_bytes(world_size) if begins_with_opening(scheme) else 0
    if scheme.is_dense:
        return opening + ring_all_reduce_bytes(num_rows * row_bytes, world_size)
    if scheme.unit is not Unit.ROWS:
        return _expected_unit_bytes(scheme, world_size, num_rows, row_bytes, count, union, itemsize)
    if scheme.knows_ids:
        by_columns = scheme.ownership is Ownership.COLUMNS
        held = (round(count),) * world_size
        plan = union_shares.UnionPlan(held, num_rows, row_bytes // itemsize, itemsize, scheme.push_format, by_columns)
        return opening + plan.expected_bytes(union)

    def rows(ranks: int) -> float:
        if ranks == world_size:
            return union
        return count * (union / count) ** (math.log(ranks) / math.log(world_size)) if count else 0.0

    pattern = _expected_by_owners_bytes if scheme.is_parallel else _expected_whole_bytes
    return opening + pattern(scheme, world_size, num_rows, row_bytes, rows)


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
    if _is_doubling(scheme):
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


def value_lower_bound_bytes(ids_per_rank: Sequence[Tensor], row_bytes: int) -> float:
    """The fewest value bytes that any scheme must send, mean over ranks.

    A row that m of n ranks hold needs m - 1 messages to bring its parts together, and each of the other
    n - 1 ranks must receive the sum: at least n + m - 2 rows travel, so a rank sends on average
    (1/n) sum over the union of (n + m_i - 2) rows. Ids are not counted; network coding is outside the bound.
    """
    world_size = len(ids_per_rank)
    if world_size == 1:
        return 0.0
    _, holders = torch.cat(list(ids_per_rank)).unique(return_counts=True)
    return float((holders + world_size - 2).sum()) * row_bytes / world_size
