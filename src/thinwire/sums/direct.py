"""Rows as messages: pushed to their owners, and gathered on all ranks, as ZEN's push and pull.

A piece of a tensor, rows of a part, is encoded as a draft, decoded and summed. Where every rank sends to every other
one directly, there is one stage, so each piece travels once. Balanced parallelism is `reduce_scatter` to the owners,
then `all_gather` from them (ZEN, section 2.3); AGsparse is `all_reduce`. Pieces are added in rank order, so all ranks
get the same bits in every run. Messages may also be gathered along a schedule, which changes nothing of them.
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
from thinwire.sums import schedules
from thinwire.sums.schedules import Stages
from thinwire.sums.scheme import Communication, Scheme

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


def decode(message: Message, part: Part, like: SparseRows, channel: Channel) -> Piece:
    """Decode the rows of a message, of the width and dtype of ``like``.

    Raises:
        CorruptMessageError: see `Channel.reading`.
    """
    header, about = message.header, (message.payload, like.width, like.values.dtype)
    with channel.reading(message):
        return wire.decode(header.format, part, header.count, *about, lambda size: check_fits(size, channel.where))


def total(messages: Sequence[Message], part: Part, like: SparseRows, channel: Channel, scale: float) -> Piece:
    """Sum what all ranks sent for a part, in rank order, times ``scale``, rounded once."""
    return kernels.sum_rows([decode(message, part, like, channel) for message in messages], scale)


def limit(rows: SparseRows, *parts: Part) -> int:
    """Return the most bytes of a payload for one of these parts: all its rows, in the most wasteful format."""
    row_bytes = rows.width * rows.values.itemsize
    return max(wire.most_payload_bytes(row_bytes, part.size, part.num_rows) for part in parts)


def reduce_scatter(
    rows: SparseRows, partition: Partition, scheme: Scheme, channel: Channel, scale: float
) -> Callable[[], Piece]:
    """Send each owner its share; return a function that sums the pieces of this rank's own part.

    `all_gather` calls that function, so that a piece that arrived corrupt is reported to all ranks there.
    ``scale`` multiplies the sum before it is rounded to the dtype of the rows.
    """
    mine = partition.parts[channel.rank]

    def drafts() -> list[Draft]:
        return [
            draft(scheme.push_choice, part, rows, channel, (positions, rows.values), indices)
            for part, (positions, indices) in zip(partition.parts, partition.split(rows.ids), strict=True)
        ]

    messages = channel.swap(Kind.PUSH, drafts, limit(rows, mine))
    return lambda: total(messages, mine, rows, channel, scale)


def all_gather(
    rows: SparseRows,
    total: Callable[[], Piece],
    partition: Partition,
    scheme: Scheme,
    channel: Channel,
    stages: Stages | None = None,
) -> SparseRows:
    """Send the total of this rank's part to all ranks, and return the whole sum, ids sorted.

    Args:
        stages: those in which parts came to their owners, if they did in stages; a failure in them is reported here.
    """

    def prepare() -> Draft:
        return draft(scheme.pull_choice, partition.parts[channel.rank], rows, channel, total())

    messages = _gathered(Kind.PULL, prepare, limit(rows, *partition.parts), scheme, channel, stages)
    parts = [decode(message, part, rows, channel) for message, part in zip(messages, partition.parts, strict=False)]
    owned = partition.join([positions for positions, _ in parts]).split([len(positions) for positions, _ in parts])
    ids, indices = kernels.union_positions(owned, rows.num_rows)
    values = rows.values.new_empty(ids.numel(), rows.width)
    for (_, piece), index in zip(parts, indices, strict=True):
        kernels.scatter_rows(values, index, piece)
    return SparseRows.trusted(ids, values, rows.num_rows)


def all_reduce(rows: SparseRows, scheme: Scheme, channel: Channel, scale: float) -> SparseRows:
    """Gather the whole tensors of all ranks, each of which sums all of them; in stages after `Channel.open`."""
    whole = Whole(rows.num_rows)

    def prepare() -> Draft:
        return draft(scheme.push_choice, whole, rows, channel, (rows.ids, rows.values))

    messages = _gathered(Kind.GATHER, prepare, limit(rows, whole), scheme, channel)
    return SparseRows.trusted(*total(messages, whole, rows, channel, scale), rows.num_rows)


def _gathered(
    kind: Kind, prepare: Callable[[], Draft], most: int, scheme: Scheme, channel: Channel, stages: Stages | None = None
) -> list[Message]:
    """Return the message of each rank, of at most ``most`` bytes, in rank order; see `schedules.all_gather`."""
    if scheme.pull_by is Communication.POINT_TO_POINT:
        return channel.swap(kind, lambda: [prepare()] * channel.world_size, most)
    return schedules.all_gather(stages or Stages(channel), scheme, kind, prepare, most)
