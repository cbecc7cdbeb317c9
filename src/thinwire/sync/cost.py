"""Bytes of every scheme, before anything is sent. Pure functions; tests hold them equal to what is counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire import wire
from thinwire.sync.exchange import ring_all_reduce_bytes
from thinwire.sync.partition import Whole
from thinwire.sync.patterns.columns import shares
from thinwire.sync.scheme import Ownership, Partitioning, Scheme
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
        ids_per_rank: for each rank its sorted unique row ids, int64.

    Returns:
        One number for each rank. It equals what `Traffic.sent_bytes` grows by, to the byte.
    """
    world_size = len(ids_per_rank)
    row_bytes = width * dtype.itemsize
    if world_size == 1:
        return [0]
    peers = world_size - 1
    if scheme.is_dense:
        return [opening_bytes(world_size) + ring_all_reduce_bytes(num_rows * row_bytes, world_size)] * world_size
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


def expected_bytes(scheme: Scheme, world_size: int, num_rows: int, row_bytes: int, count: float, union: float) -> float:
    """Bytes that a rank sends when every rank holds ``count`` rows, ``union`` in all, dealt evenly.

    The closed forms of ZEN (sections 2.3, 3.3 and appendix B.1) with the real headers and formats; for a
    contiguous partition this is the best case, since skewness is not known here.
    """
    peers = world_size - 1
    if scheme.is_dense:
        return opening_bytes(world_size) + ring_all_reduce_bytes(num_rows * row_bytes, world_size)
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


def _counts(owners: Tensor, world_size: int) -> list[int]:
    return torch.bincount(owners, minlength=world_size).tolist()


def _message_bytes(formats: tuple[Format, ...], count: int, row_bytes: int, part: Part) -> int:
    format = wire.smallest(formats, count, row_bytes, part.size, part.num_rows)
    return Header.NUM_BYTES + wire.payload_bytes(format, count, row_bytes, part.size, part.num_rows)
