"""Pieces of a tensor on their way: rows of a part, made into a draft, read from a message, summed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thinwire import kernels, wire
from thinwire.sparse import SparseRows
from thinwire.sync.channel import Channel, Draft
from thinwire.wire import Format, Message, Part

Piece = tuple[Tensor, Tensor]  # (positions in a part, increasing; values [k, width])


def draft(
    formats: tuple[Format, ...],
    part: Part,
    held: SparseRows,
    positions: Tensor,
    values: Tensor,
    order: Tensor | None = None,
) -> Draft:
    """Rows of a part in the format of fewest bytes; ``held`` are all rows of this rank, whose number is told."""
    row_bytes = values.shape[1] * values.element_size()
    format = wire.smallest(formats, positions.numel(), row_bytes, part.size, part.num_rows)
    payload = wire.encode(format, part, positions, values, order)
    return Draft(format, positions.numel(), payload, held.ids.numel())


def decode(message: Message, part: Part, width: int, like: SparseRows, channel: Channel) -> Piece:
    """The rows of a message, ``width`` wide, in the dtype of ``like``.

    Raises:
        CorruptMessageError: see `Channel.reading`.
    """
    header = message.header
    with channel.reading(message):
        return wire.decode(header.format, part, header.count, message.payload, width, like.values.dtype)


def total(
    messages: Sequence[Message], part: Part, width: int, like: SparseRows, channel: Channel, scale: float
) -> Piece:
    """The sum of what all ranks sent for a part, in rank order, times ``scale``, rounded once."""
    return kernels.sum_rows([decode(message, part, width, like, channel) for message in messages], scale)


def limit(part: Part, width: int, like: SparseRows) -> int:
    """The most bytes that a payload for this part can have: all its rows, in the most wasteful format."""
    row_bytes = width * like.values.element_size()
    return max(wire.payload_bytes(format, part.size, row_bytes, part.size, part.num_rows) for format in Format)
