"""Parallelism over columns: each owner has some columns of every row, so that all owners get the same work.

Every rank sends its ids to every owner, with the owner's columns of its rows; so every owner, and that is every
rank, knows the union when the push is over, and the pull needs no ids at all. Imbalance is exactly 1 whatever the
ids are, which pays when few wide rows are spread over many owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from thinwire.sparse import SparseRows
from thinwire.sync.channel import Channel, Draft
from thinwire.sync.partition import Whole
from thinwire.sync.patterns import pieces
from thinwire.sync.patterns.pieces import Piece
from thinwire.wire import Format, Kind


def shares(width: int, world_size: int) -> list[slice]:
    """The columns of each owner: consecutive, sizes that differ by at most one.

    Example:
        >>> [(share.start, share.stop) for share in shares(7, 3)]
        [(0, 3), (3, 5), (5, 7)]
    """
    size, rest = divmod(width, world_size)
    starts = [owner * size + min(owner, rest) for owner in range(world_size + 1)]
    return [slice(starts[owner], starts[owner + 1]) for owner in range(world_size)]


def all_reduce(rows: SparseRows, formats: tuple[Format, ...], channel: Channel, scale: float) -> SparseRows:
    """Sum rows over all ranks, each of which adds up its share of the columns; ``formats`` are for the push."""
    owned = shares(rows.width, channel.world_size)
    total = _reduce_scatter(rows, owned, formats, channel, scale)
    return _all_gather(rows, channel.attempt(total), owned, channel)


def _reduce_scatter(
    rows: SparseRows, owned: Sequence[slice], formats: tuple[Format, ...], channel: Channel, scale: float
) -> Callable[[], Piece]:
    whole, mine = Whole(rows.num_rows), owned[channel.rank]
    width = mine.stop - mine.start

    def drafts() -> list[Draft]:
        return [pieces.draft(formats, whole, rows, rows.ids, rows.values[:, columns]) for columns in owned]

    messages = channel.swap(Kind.PUSH, drafts, pieces.limit(whole, width, rows))
    return lambda: pieces.total(messages, whole, width, rows, channel, scale)


def _all_gather(rows: SparseRows, total: Piece, owned: Sequence[slice], channel: Channel) -> SparseRows:
    """All owners have summed the same ids, so that each sends its columns of the union, and nothing else."""
    ids, mine = total
    union = Whole(ids.numel())

    def drafts() -> list[Draft]:
        return [pieces.draft((Format.DENSE,), union, rows, torch.arange(len(ids)), mine)] * channel.world_size

    widest = owned[0].stop - owned[0].start
    messages = channel.swap(Kind.PULL, drafts, pieces.limit(union, widest, rows))
    values = rows.values.new_empty(len(ids), rows.width)
    for columns, message in zip(owned, messages, strict=True):
        _, part = pieces.decode(message, union, columns.stop - columns.start, rows, channel)
        values[:, columns] = part
    return SparseRows.trusted(ids, values, rows.num_rows)
