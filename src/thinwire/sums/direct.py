"""Patterns in which every rank sends to every other one directly, as ZEN's push and pull.

There is one stage, so each piece of a tensor travels once: rows of a part, encoded as a draft, decoded and summed.
Balanced parallelism is `reduce_scatter` to the owners, then `all_gather` from them (ZEN, section 2.3);
AGsparse is `all_reduce`. Pieces are added in rank order, so all ranks get the same bits in every run.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.channel import Channel, Draft
from thinwire.comm.process_group import check_fits
from thinwire.rows import formats as wire
from thinwire.rows.formats import Format, FormatChoice, Kind, Message, Part, Whole
from thinwire.rows.partition import Partition
from thinwire.rows.sparse import SparseRows

Piece = tuple[Tensor, Tensor]  # (positions in a part, increasing; values [k, width])


def draft(
    choice: FormatChoice, part: Part, held: SparseRows, channel: Channel, piece: Piece, order: Tensor | None = None
) -> Draft:
    """Encode rows of a part in the format of fewest bytes; the header carries the number of rows in ``held``."""
    positions, values = piece
    count, row_bytes = positions.numel(), values.shape[1] * values.element_size()
    format = choice.smallest(count, row_bytes, part)
    payload = wire.encode(format, part, positions, values, order, codes_values=channel.codes_values)
    saved = wire.payload_bytes(format, count, row_bytes, part.size, part.num_rows) - payload.numel()
    return Draft(format, count, payload, held.ids.numel(), saved)


def as_sent(choice: FormatChoice, part: Part, piece: Piece) -> Piece:
    """Return a piece as its receiver decodes it: with rows of zeros if it would be sent dense."""
    positions, values = piece
    count, width = values.shape
    if count == part.size or choice.smallest(count, width * values.element_size(), part) is not Format.DENSE:
        return piece
    return torch.arange(part.size), values.new_zeros(part.size, width).index_copy_(0, positions, values)


def decode(message: Message, part: Part, width: int, like: SparseRows, channel: Channel) -> Piece:
    """Decode the rows of a message, ``width`` wide, in the dtype of ``like``.

    Raises:
        CorruptMessageError: see `Channel.reading`.
    """
    header, about = message.header, (message.payload, width, like.values.dtype)
    with channel.reading(message):
        return wire.decode(header.format, part, header.count, *about, lambda size: check_fits(size, channel.where))


def total(
    messages: Sequence[Message], part: Part, width: int, like: SparseRows, channel: Channel, scale: float
) -> Piece:
    """Sum what all ranks sent for a part, in rank order, times ``scale``, rounded once."""
    return kernels.sum_rows([decode(message, part, width, like, channel) for message in messages], scale)


def limit(part: Part, width: int, like: SparseRows) -> int:
    """Return the most bytes of a payload for this part: all its rows, in the most wasteful format."""
    return wire.most_payload_bytes(width * like.values.itemsize, part.size, part.num_rows)


def reduce_scatter(
    rows: SparseRows, partition: Partition, choice: FormatChoice, channel: Channel, scale: float
) -> Callable[[], Piece]:
    """Send each owner its share; return a function that sums the pieces of this rank's own part.

    `all_gather` calls that function, so that a piece that arrived corrupt is reported to all ranks there.
    ``scale`` multiplies the sum before it is rounded to the dtype of the rows.
    """
    mine = partition.parts[channel.rank]

    def drafts() -> list[Draft]:
        return [
            draft(choice, part, rows, channel, (positions, rows.values), indices)
            for part, (positions, indices) in zip(partition.parts, partition.split(rows.ids), strict=True)
        ]

    messages = channel.swap(Kind.PUSH, drafts, limit(mine, rows.width, rows))
    return lambda: total(messages, mine, rows.width, rows, channel, scale)


def all_gather(
    rows: SparseRows, total: Callable[[], Piece], partition: Partition, choice: FormatChoice, channel: Channel
) -> SparseRows:
    """Send the total of this rank's part to all ranks, and return the whole sum, ids sorted."""

    def drafts() -> list[Draft]:
        return [draft(choice, partition.parts[channel.rank], rows, channel, total())] * channel.world_size

    messages = channel.swap(Kind.PULL, drafts, max(limit(part, rows.width, rows) for part in partition.parts))
    return joined(messages, rows, partition, channel)


def joined(messages: Sequence[Message], rows: SparseRows, partition: Partition, channel: Channel) -> SparseRows:
    """Join the whole sum, ids sorted, from the messages of the ranks that own a part, in rank order."""
    parts = [
        decode(message, part, rows.width, rows, channel)
        for message, part in zip(messages, partition.parts[: len(messages)], strict=True)
    ]
    owned = partition.join([positions for positions, _ in parts]).split([len(positions) for positions, _ in parts])
    ids, indices = kernels.union_positions(owned, rows.num_rows)
    values = rows.values.new_empty(ids.numel(), rows.width)
    for (_, piece), index in zip(parts, indices, strict=True):
        kernels.scatter_rows(values, index, piece)
    return SparseRows.trusted(ids, values, rows.num_rows)


def all_reduce(rows: SparseRows, choice: FormatChoice, channel: Channel, scale: float) -> SparseRows:
    """Send the whole tensor to all ranks, each of which sums all tensors."""
    whole = Whole(rows.num_rows)

    def drafts() -> list[Draft]:
        return [draft(choice, whole, rows, channel, (rows.ids, rows.values))] * channel.world_size

    messages = channel.swap(Kind.GATHER, drafts, limit(whole, rows.width, rows))
    return SparseRows.trusted(*total(messages, whole, rows.width, rows, channel, scale), rows.num_rows)
