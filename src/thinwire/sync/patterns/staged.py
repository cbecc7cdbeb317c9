"""Parallelism in stages: parts are added up on their way to their owners, and the sums come back, along schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thinwire import kernels
from thinwire.sparse import SparseRows
from thinwire.sync.channel import Draft
from thinwire.sync.dimensions import Communication
from thinwire.sync.partition import Partition
from thinwire.sync.patterns import halving, hierarchy, pieces, point_to_point, ring
from thinwire.sync.patterns.pieces import Piece
from thinwire.sync.stages import Stage, Stages, all_gather
from thinwire.wire import Choice, Kind, Message

REDUCE_SCHEDULES = {Communication.RING: ring.reduce_schedule, Communication.HIERARCHY: halving.schedule}
"""(rank, world size) -> stages in which parts travel to their owners."""

GATHER_SCHEDULES = {Communication.RING: ring.gather_schedule, Communication.HIERARCHY: hierarchy.schedule}
"""(rank, world size) -> stages in which what each rank began with travels to all."""


def reduce_scatter(
    rows: SparseRows,
    partition: Partition,
    choice: Choice,
    stages: Stages,
    scale: float,
    schedule: Sequence[Stage],
) -> Callable[[], Piece]:
    """Add up parts along a schedule; returns what gives the total of this rank's own part, or raises what failed.

    Partial sums travel in the dtype of the rows, so that sixteen-bit values are rounded at every stage, and can
    overflow where their mean does not. One rank computes the sum of a part, so all ranks get the same bits.
    """
    channel = stages.channel
    held: list[Piece] = []
    max_payload_bytes = _limit(rows, partition)
    last = max((place for place, stage in enumerate(schedule) if channel.rank in stage.receives), default=-1)

    def split() -> None:
        held.extend((positions, rows.values.index_select(0, places)) for positions, places in partition.split(rows.ids))

    def drafts(sent: tuple[int, ...]) -> list[Draft]:
        return [pieces.draft(choice, partition.parts[part], rows, *held[part]) for part in sent]

    def add(received: tuple[int, ...], messages: Sequence[Message], factor: float) -> None:
        for part, message in zip(received, messages, strict=True):
            theirs = pieces.decode(message, partition.parts[part], rows.width, rows, channel)
            held[part] = kernels.sum_rows([theirs, held[part]], factor)

    def total() -> Piece:
        stages.finish()
        return held[channel.rank]

    stages.attempt(split)
    for place, stage in enumerate(schedule):
        incoming = stages.swap(
            Kind.PUSH,
            stage,
            len(stage.sends),
            () if stage.source is None else (stage.source,) * len(stage.receives),
            lambda sent=stage.sends: channel.seal(Kind.PUSH, drafts(sent)),
            max_payload_bytes,
        )
        factor = scale if place == last else 1.0
        stages.attempt(lambda: add(stage.receives, incoming, factor))  # noqa: B023
    return total


def gather(
    rows: SparseRows,
    total: Callable[[], Piece],
    partition: Partition,
    choice: Choice,
    stages: Stages,
    schedule: Sequence[Stage],
    num_owners: int,
) -> SparseRows:
    """Bring the totals of the owners, who are the first ranks, to all along a schedule; the whole sum, ids sorted."""
    channel = stages.channel
    messages = all_gather(
        stages,
        schedule,
        Kind.PULL,
        lambda: pieces.draft(choice, partition.parts[channel.rank], rows, *total()),
        _limit(rows, partition),
        num_owners,
    )
    return point_to_point.joined(messages, rows, partition, channel)


def _limit(rows: SparseRows, partition: Partition) -> int:
    return max(pieces.limit(part, rows.width, rows) for part in partition.parts)
