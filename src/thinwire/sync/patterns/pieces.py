"""Pieces of a tensor on their way: rows of a part, made into a draft, read from a message, summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire import kernels, wire
from thinwire.sparse import SparseRows
from thinwire.sync.channel import Channel, Draft
from thinwire.wire import Choice, Format, Message, Part

Piece = tuple[Tensor, Tensor]  # (positions in a part, increasing; values [k, width])


def draft(
    choice: Choice,
    part: Part,
    held: SparseRows,
    positions: Tensor,
    values: Tensor,
    order: Tensor | None = None,
) -> Draft:
    """Rows of a part in the format of fewest bytes; ``held`` are all rows of this rank, whose number is told."""
    format = choice.smallest(positions.numel(), values.shape[1] * values.element_size(), part)
    payload = wire.encode(format, part, positions, values, order)
    return Draft(format, positions.numel(), payload, held.ids.numel())


def as_sent(choice: Choice, part: Part, piece: Piece) -> Piece:
    """A piece as it arrives elsewhere: with rows of zeros where it would travel dense."""
    positions, values = piece
    count, width = values.shape
    if count == part.size or choice.smallest(count, width * values.element_size(), part) is not Format.DENSE:
        return piece
    return torch.arange(part.size), values.new_zeros(part.size, width).index_copy_(0, positions, values)


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
    return wire.most_payload_bytes(width * like.values.itemsize, part.size, part.num_rows)
