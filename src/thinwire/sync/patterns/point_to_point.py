"""Every rank talks to every rank directly: one stage, so each piece travels once.

Balanced parallelism is `reduce_scatter` to the owners, then `all_gather` from them (ZEN, section 2.3);
AGsparse is `all_reduce`. Pieces are added in rank order, so all ranks get the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thinwire import kernels
from thinwire.sparse import SparseRows
from thinwire.sync.channel import Channel, Draft
from thinwire.sync.partition import Partition, Whole
from thinwire.sync.patterns import pieces
from thinwire.sync.patterns.pieces import Piece
from thinwire.wire import Choice, Kind, Message


def reduce_scatter(
    rows: SparseRows, partition: Partition, choice: Choice, channel: Channel, scale: float
) -> Callable[[], Piece]:
    """Send each owner its share; returns what sums the pieces that arrived here, the total of this rank's own part.

    The sum is left for `all_gather` to take, so that a piece that arrived corrupt is reported to all ranks there.
    ``scale`` multiplies the sum before it is rounded to the dtype of the rows.
    """
    mine = partition.parts[channel.rank]

    def drafts() -> list[Draft]:
        return [
            pieces.draft(choice, part, rows, positions, rows.values, places)
            for part, (positions, places) in zip(partition.parts, partition.split(rows.ids), strict=True)
        ]

    messages = channel.swap(Kind.PUSH, drafts, pieces.limit(mine, rows.width, rows))
    return lambda: pieces.total(messages, mine, rows.width, rows, channel, scale)


def all_gather(
    rows: SparseRows, total: Callable[[], Piece], partition: Partition, choice: Choice, channel: Channel
) -> SparseRows:
    """Send the total of this rank's part to all, and put together what arrives: the whole sum, ids sorted."""

    def drafts() -> list[Draft]:
        return [pieces.draft(choice, partition.parts[channel.rank], rows, *total())] * channel.world_size

    messages = channel.swap(Kind.PULL, drafts, max(pieces.limit(part, rows.width, rows) for part in partition.parts))
    return joined(messages, rows, partition, channel)


def joined(messages: Sequence[Message], rows: SparseRows, partition: Partition, channel: Channel) -> SparseRows:
    """The sum of all parts, from a message of each rank that owns one, in rank order: ids sorted."""
    parts = [
        pieces.decode(message, part, rows.width, rows, channel)
        for message, part in zip(messages, partition.parts[: len(messages)], strict=True)
    ]
    owned = partition.join([positions for positions, _ in parts]).split([len(positions) for positions, _ in parts])
    ids, places = kernels.union_places(owned, rows.num_rows)
    values = rows.values.new_empty(ids.numel(), rows.width)
    for (_, piece), place in zip(parts, places, strict=True):
        kernels.scatter_rows(values, place, piece)
    return SparseRows.trusted(ids, values, rows.num_rows)


def all_reduce(rows: SparseRows, choice: Choice, channel: Channel, scale: float) -> SparseRows:
    """Send the whole tensor to all ranks; each sums all of them."""
    whole = Whole(rows.num_rows)

    def drafts() -> list[Draft]:
        return [pieces.draft(choice, whole, rows, rows.ids, rows.values)] * channel.world_size

    messages = channel.swap(Kind.GATHER, drafts, pieces.limit(whole, rows.width, rows))
    return SparseRows.trusted(*pieces.total(messages, whole, rows.width, rows, channel, scale), rows.num_rows)
