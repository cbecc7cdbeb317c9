"""Bytes of every scheme, before anything is sent. Pure functions; tests hold them equal to what is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire import wire
from thinwire.sync.exchange import ring_all_reduce_bytes
from thinwire.sync.partition import Whole
from thinwire.sync.patterns import hierarchy, ring
from thinwire.sync.patterns.columns import shares
from thinwire.sync.scheme import Aggregation, Communication, Ownership, Partitioning, Scheme
from thinwire.sync.stages import Stage
from thinwire.sync.units import Unit, unit_ids, unit_shape
from thinwire.wire import Format, Header, Part


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
    """
    world_size = len(ids_per_rank)
    if world_size == 1:
        return [0]
    if scheme.unit is not Unit.ROWS:
        ids_per_rank = [unit_ids(ids, width, scheme.unit) for ids in ids_per_rank]
        num_rows, width = unit_shape(num_rows, width, scheme.unit)
    row_bytes = width * dtype.itemsize
    peers = world_size - 1
    if scheme.is_dense:
        return [opening_bytes(world_size) + ring_all_reduce_bytes(num_rows * row_bytes, world_size)] * world_size
    if scheme.communication is not Communication.POINT_TO_POINT:
        opening = opening_bytes(world_size)
        return [opening + sent for sent in _staged_bytes(scheme, ids_per_rank, num_rows, row_bytes)]
    if scheme.partition is Partitioning.CENTRALIZATION:
        whole = Whole(num_rows)
        return [peers * _message_bytes(scheme.push_format, ids.numel(), row_bytes, whole) for ids in ids_per_rank]
    if scheme.ownership is Ownership.COLUMNS:
        return _column_bytes(scheme, ids_per_rank, num_rows, width, dtype)
    partition = scheme.rows_partition(num_rows, world_size)
    parts = partition.parts
    union = torch.cat(list(ids_per_rank)).unique()
    summed = _counts(partition.owners(union), world_size)
    if scheme.push_format == (Format.DENSE,):
        summed = [part.size for part in parts]
    totals = []
    for rank, ids in enumerate(ids_per_rank):
        counts = _counts(partition.owners(ids), world_size)
        push = sum(
            _message_bytes(scheme.push_format, counts[owner], row_bytes, parts[owner])
            for owner in range(world_size)
            if owner != rank
        )
        pull = peers * _message_bytes(scheme.pull_format, summed[rank], row_bytes, parts[rank])
        totals.append(push + pull)
    return totals


def expected_bytes(
    scheme: Scheme, world_size: int, num_rows: int, row_bytes: int, count: float, union: float, itemsize: int = 4
) -> float:
    """Bytes that the busiest rank sends when every rank holds ``count`` rows, ``union`` in all, dealt evenly.

    ``itemsize`` is that of an element, for units other than rows. Rows fill blocks as if they were consecutive,
    which is the best case. The rows of m ranks together are taken to grow as a power of m.

    The closed forms of ZEN (sections 2.3, 3.3 and appendix B.1) with the real headers and formats; for a
    contiguous partition this is the best case, since skewness is not known here.
    """
    peers = world_size - 1
    if scheme.is_dense:
        return opening_bytes(world_size) + ring_all_reduce_bytes(num_rows * row_bytes, world_size)
    if scheme.unit is not Unit.ROWS:
        return _expected_unit_bytes(scheme, world_size, num_rows, row_bytes, count, union, itemsize)
    if scheme.communication is not Communication.POINT_TO_POINT:
        return opening_bytes(world_size) + _expected_staged_bytes(scheme, world_size, num_rows, row_bytes, count, union)
    if scheme.partition is Partitioning.CENTRALIZATION:
        return peers * _message_bytes(scheme.push_format, round(count), row_bytes, Whole(num_rows))
    if scheme.ownership is Ownership.COLUMNS:
        share = -(-row_bytes // world_size)
        push = _message_bytes(scheme.push_format, round(count), share, Whole(num_rows))
        return peers * (push + _message_bytes((Format.DENSE,), round(union), share, Whole(round(union))))
    part = scheme.rows_partition(num_rows, world_size).parts[0]
    push = _message_bytes(scheme.push_format, round(count / world_size), row_bytes, part)
    pull = _message_bytes(scheme.pull_format, round(union / world_size), row_bytes, part)
    return peers * (push + pull)


def _expected_unit_bytes(
    scheme: Scheme, world_size: int, num_rows: int, row_bytes: int, count: float, union: float, itemsize: int
) -> float:
    num_units, unit_width = unit_shape(num_rows, row_bytes // itemsize, scheme.unit)
    ratio = row_bytes / (unit_width * itemsize)
    held, total = (min(float(num_units), rows * ratio) for rows in (count, union))
    return expected_bytes(
        replace(scheme, unit=Unit.ROWS), world_size, num_units, unit_width * itemsize, held, total, itemsize
    )


def _expected_staged_bytes(
    scheme: Scheme, world_size: int, num_rows: int, row_bytes: int, count: float, union: float
) -> float:
    def rows(ranks: int) -> float:
        return count * (union / count) ** (math.log(ranks) / math.log(world_size)) if count else 0.0

    if scheme.partition is Partitioning.PARALLELISM:
        part = scheme.rows_partition(num_rows, world_size).parts[0]
        pull = _message_bytes(scheme.pull_format, round(union / world_size), row_bytes, part)
        return (world_size - 1) * pull + sum(
            _message_bytes(scheme.push_format, round(rows(ranks) / world_size), row_bytes, part)
            for ranks in range(1, world_size)
        )
    whole, one_shot = Whole(num_rows), scheme.aggregation is Aggregation.ONE_SHOT
    single = _message_bytes(scheme.push_format, round(count), row_bytes, whole)
    if scheme.communication is Communication.RING:
        return (world_size - 1) * single
    sends = [stage for stage in hierarchy.schedule(0, world_size) if stage.target is not None]  # rank 0 is busiest
    if one_shot:
        return single * sum(len([origin for origin in stage.sends if origin != stage.target]) for stage in sends)
    return sum(_message_bytes(scheme.push_format, round(rows(len(stage.sends))), row_bytes, whole) for stage in sends)


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


def _column_bytes(
    scheme: Scheme, ids_per_rank: Sequence[Tensor], num_rows: int, width: int, dtype: torch.dtype
) -> list[int]:
    world_size = len(ids_per_rank)
    widths = [columns.stop - columns.start for columns in shares(width, world_size)]
    union = torch.cat(list(ids_per_rank)).unique().numel()
    totals = []
    for rank, ids in enumerate(ids_per_rank):
        push = sum(
            _message_bytes(scheme.push_format, ids.numel(), share * dtype.itemsize, Whole(num_rows))
            for owner, share in enumerate(widths)
            if owner != rank
        )
        pull = _message_bytes((Format.DENSE,), union, widths[rank] * dtype.itemsize, Whole(union))
        totals.append(push + (world_size - 1) * pull)
    return totals


def _staged_bytes(scheme: Scheme, ids_per_rank: Sequence[Tensor], num_rows: int, row_bytes: int) -> list[int]:
    """Bytes of all stages, for each rank; what is merged before a stage follows from the schedule."""
    world_size = len(ids_per_rank)
    whole = Whole(num_rows)
    if scheme.partition is Partitioning.PARALLELISM:
        return _ring_bytes(scheme, ids_per_rank, num_rows, row_bytes)
    schedule = ring.gather_schedule if scheme.communication is Communication.RING else hierarchy.schedule

    def stage_bytes(stage: Stage) -> int:
        if stage.target is None:
            return 0
        if scheme.aggregation is Aggregation.INCREMENTAL:
            return _message_bytes(scheme.push_format, _union(ids_per_rank, stage.sends).numel(), row_bytes, whole)
        counts = [ids_per_rank[origin].numel() for origin in stage.sends if origin != stage.target]
        return sum(_message_bytes(scheme.push_format, count, row_bytes, whole) for count in counts)

    return [sum(map(stage_bytes, schedule(rank, world_size))) for rank in range(world_size)]


def _ring_bytes(scheme: Scheme, ids_per_rank: Sequence[Tensor], num_rows: int, row_bytes: int) -> list[int]:
    world_size = len(ids_per_rank)
    partition = scheme.rows_partition(num_rows, world_size)
    parts = partition.parts
    held = [[ids[partition.owners(ids) == owner] for ids in ids_per_rank] for owner in range(world_size)]
    summed = [_union(pieces, range(world_size)).numel() for pieces in held]
    if scheme.push_format == (Format.DENSE,):
        summed = [part.size for part in parts]
    totals = []
    for rank in range(world_size):
        push = sum(
            _message_bytes(scheme.push_format, _union(held[part], merged).numel(), row_bytes, parts[part])
            for part, merged in ring.summed_on_the_way(rank, world_size)
        )
        pull = sum(
            _message_bytes(scheme.pull_format, summed[owner], row_bytes, parts[owner])
            for stage in ring.gather_schedule(rank, world_size)
            for owner in stage.sends
        )
        totals.append(push + pull)
    return totals


def _union(ids_per_rank: Sequence[Tensor], ranks: Sequence[int]) -> Tensor:
    return torch.cat([ids_per_rank[rank] for rank in ranks]).unique()


def _counts(owners: Tensor, world_size: int) -> list[int]:
    return torch.bincount(owners, minlength=world_size).tolist()


def _message_bytes(formats: tuple[Format, ...], count: int, row_bytes: int, part: Part) -> int:
    format = wire.smallest(formats, count, row_bytes, part.size, part.num_rows)
    return Header.NUM_BYTES + wire.payload_bytes(format, count, row_bytes, part.size, part.num_rows)
