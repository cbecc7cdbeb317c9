"""Every rank talks to every rank directly: one stage, so each piece travels once.

Balanced parallelism is `reduce_scatter` to the owners, then `all_gather` from them (ZEN, section 2.3);
AGsparse is `all_reduce`. Pieces are added in rank order, so all ranks get the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire import kernels, wire
from thinwire.sparse import SparseRows
from thinwire.sync.channel import Channel, Draft
from thinwire.sync.partition import Partition, Whole
from thinwire.wire import Format, Kind, Message, Part

Piece = tuple[Tensor, Tensor]  # (positions in a part, values)


def reduce_scatter(
    rows: SparseRows, partition: Partition, formats: tuple[Format, ...], channel: Channel, scale: float
) -> Piece:
    """Send each owner its share and sum what arrives here: the total of this rank's own part.

    ``scale`` multiplies the sum before it is rounded to the dtype of the rows.
    """
    mine = partition.part(channel.rank)

    def drafts() -> list[Draft]:
        return [
            _draft(formats, partition.part(owner), rows, positions, rows.values, places)
            for owner, (positions, places) in enumerate(partition.split(rows.ids))
        ]

    messages = channel.swap(Kind.PUSH, drafts, _limit(mine, rows))
    return _sum(messages, mine, rows, scale)


def all_gather(
    rows: SparseRows, total: Piece, partition: Partition, formats: tuple[Format, ...], channel: Channel
) -> SparseRows:
    """Send the total of this rank's part to all, and put together what arrives: the whole sum, ids sorted."""
    mine = partition.part(channel.rank)

    def drafts() -> list[Draft]:
        return [_draft(formats, mine, rows, *total)] * channel.world_size

    parts = [partition.part(owner) for owner in range(channel.world_size)]
    messages = channel.swap(Kind.PULL, drafts, max(_limit(part, rows) for part in parts))
    pieces = [_decode(message, part, rows) for message, part in zip(messages, parts, strict=True)]
    ids = torch.cat([part.ids(positions) for part, (positions, _) in zip(parts, pieces, strict=True)])
    order = torch.argsort(ids)
    values = torch.cat([values for _, values in pieces])
    return SparseRows.trusted(ids[order], values.index_select(0, order), rows.num_rows)


def all_reduce(rows: SparseRows, formats: tuple[Format, ...], channel: Channel, scale: float) -> SparseRows:
    """Send the whole tensor to all ranks; each sums all of them."""
    whole = Whole(rows.num_rows)

    def drafts() -> list[Draft]:
        return [_draft(formats, whole, rows, rows.ids, rows.values)] * channel.world_size

    messages = channel.swap(Kind.GATHER, drafts, _limit(whole, rows))
    return SparseRows.trusted(*_sum(messages, whole, rows, scale), rows.num_rows)


def _draft(
    formats: tuple[Format, ...],
    part: Part,
    held: SparseRows,
    positions: Tensor,
    values: Tensor,
    order: Tensor | None = None,
) -> Draft:
    row_bytes = values.shape[1] * values.element_size()
    format = wire.smallest(formats, positions.numel(), row_bytes, part.size, part.num_rows)
    payload = wire.encode(format, part, positions, values, order)
    return Draft(format, positions.numel(), payload, held.ids.numel())


def _decode(message: Message, part: Part, like: SparseRows) -> Piece:
    header = message.header
    return wire.decode(header.format, part, header.count, message.payload, like.width, like.values.dtype)


def _sum(messages: Sequence[Message], part: Part, like: SparseRows, scale: float) -> Piece:
    return kernels.sum_rows([_decode(message, part, like) for message in messages], scale)


def _limit(part: Part, rows: SparseRows) -> int:
    """The most bytes that a payload for this part can have: all its rows, in the most wasteful format."""
    row_bytes = rows.width * rows.values.element_size()
    return max(wire.payload_bytes(format, part.size, row_bytes, part.size, part.num_rows) for format in Format)
