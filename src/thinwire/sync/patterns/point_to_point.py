"""Every rank talks to every rank directly: one stage, so each piece travels once.

Balanced parallelism is `reduce_scatter` to the owners, then `all_gather` from them (ZEN, section 2.3);
AGsparse is `all_reduce`. Pieces are added in rank order, so all ranks get the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
) -> Callable[[], Piece]:
    """Send each owner its share; returns what sums the pieces that arrived here, the total of this rank's own part.

    The sum is left for `all_gather` to take, so that a piece that arrived corrupt is reported to all ranks there.
    ``scale`` multiplies the sum before it is rounded to the dtype of the rows.
    """
    mine = partition.parts[channel.rank]

    def drafts() -> list[Draft]:
        return [
            _draft(formats, part, rows, positions, rows.values, places)
            for part, (positions, places) in zip(partition.parts, partition.split(rows.ids), strict=True)
        ]

    messages = channel.swap(Kind.PUSH, drafts, _limit(mine, rows))
    return lambda: _sum(messages, mine, rows, channel, scale)


def all_gather(
    rows: SparseRows, total: Callable[[], Piece], partition: Partition, formats: tuple[Format, ...], channel: Channel
) -> SparseRows:
    """Send the total of this rank's part to all, and put together what arrives: the whole sum, ids sorted."""

    def drafts() -> list[Draft]:
        return [_draft(formats, partition.parts[channel.rank], rows, *total())] * channel.world_size

    messages = channel.swap(Kind.PULL, drafts, max(_limit(part, rows) for part in partition.parts))
    pieces = [_decode(message, part, rows, channel) for message, part in zip(messages, partition.parts, strict=True)]
    ids, order = partition.join([positions for positions, _ in pieces]).sort()
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
    values = rows.values.new_empty(ids.numel(), rows.width)
    for (_, piece), part_place in zip(pieces, place.split([len(positions) for positions, _ in pieces]), strict=True):
        values.index_copy_(0, part_place, piece)
    return SparseRows.trusted(ids, values, rows.num_rows)


def all_reduce(rows: SparseRows, formats: tuple[Format, ...], channel: Channel, scale: float) -> SparseRows:
    """Send the whole tensor to all ranks; each sums all of them."""
    whole = Whole(rows.num_rows)

    def drafts() -> list[Draft]:
        return [_draft(formats, whole, rows, rows.ids, rows.values)] * channel.world_size

    messages = channel.swap(Kind.GATHER, drafts, _limit(whole, rows))
    return SparseRows.trusted(*_sum(messages, whole, rows, channel, scale), rows.num_rows)


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


def _decode(message: Message, part: Part, like: SparseRows, channel: Channel) -> Piece:
    header = message.header
    with channel.reading(message):
        return wire.decode(header.format, part, header.count, message.payload, like.width, like.values.dtype)


def _sum(messages: Sequence[Message], part: Part, like: SparseRows, channel: Channel, scale: float) -> Piece:
    return kernels.sum_rows([_decode(message, part, like, channel) for message in messages], scale)


def _limit(part: Part, rows: SparseRows) -> int:
    """The most bytes that a payload for this part can have: all its rows, in the most wasteful format."""
    row_bytes = rows.width * rows.values.element_size()
    return max(wire.payload_bytes(format, part.size, row_bytes, part.size, part.num_rows) for format in Format)
