"""Parallelism over columns: each owner has some columns of every row, so that all owners get the same work.

Every rank sends its ids to every owner, with the owner's columns of its rows; so every owner, and that is every
rank, knows the union when the push is over, and the pull needs no ids at all. Imbalance is exactly 1 whatever the
ids are, which pays when few wide rows are spread over many owners.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire import wire
from thinwire.errors import CorruptHeaderError, CorruptMessageError
from thinwire.sparse import SparseRows
from thinwire.sync.channel import Channel, Draft
from thinwire.sync.partition import Whole
from thinwire.sync.patterns import pieces
from thinwire.wire import Format, Kind, Message


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
    messages = _push(rows, owned, formats, channel)
    whole, width = Whole(rows.num_rows), _width(owned[channel.rank])
    try:
        ids, mine = pieces.total(messages, whole, width, rows, channel, scale)
    except CorruptMessageError as error:
        raise CorruptHeaderError(f"{error}; so this rank does not know how much its peers send next") from error
    return _pull(rows, ids, mine, owned, channel)


def _push(rows: SparseRows, owned: Sequence[slice], formats: tuple[Format, ...], channel: Channel) -> list[Message]:
    whole = Whole(rows.num_rows)

    def drafts() -> list[Draft]:
        return [pieces.draft(formats, whole, rows, rows.ids, rows.values[:, columns]) for columns in owned]

    return channel.swap(Kind.PUSH, drafts, pieces.limit(whole, _width(owned[channel.rank]), rows))


def _pull(rows: SparseRows, ids: Tensor, mine: Tensor, owned: Sequence[slice], channel: Channel) -> SparseRows:
    """All owners have summed the same ids, so that each sends its columns of the union, and nothing else."""
    union = Whole(ids.numel())
    dense = (Format.DENSE,)
    row_bytes = [_width(columns) * rows.values.element_size() for columns in owned]
    sizes = [wire.payload_bytes(Format.DENSE, union.size, size, union.size, union.size) for size in row_bytes]
    messages = channel.swap_known(
        Kind.PULL, lambda: pieces.draft(dense, union, rows, torch.arange(union.size), mine), sizes
    )
    values = rows.values.new_empty(union.size, rows.width)
    for columns, message in zip(owned, messages, strict=True):
        _, values[:, columns] = pieces.decode(message, union, _width(columns), rows, channel)
    return SparseRows.trusted(ids, values, rows.num_rows)


def _width(columns: slice) -> int:
    return columns.stop - columns.start
