"""Around a ring: every rank sends to the next one and receives from the one before it.

Parts are added up on their way to their owner (reduce-scatter), and the sums go round once more (all-gather): with
dense parts this is the classical ring all-reduce. One-shot aggregation under centralization only gathers, which is
AGsparse as Gloo and NCCL do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thinwire import kernels
from thinwire.sparse import SparseRows
from thinwire.sync.channel import Channel
from thinwire.sync.partition import Partition
from thinwire.sync.patterns import gathered, pieces, point_to_point
from thinwire.sync.patterns.pieces import Piece
from thinwire.sync.stages import Stage, Stages, all_gather
from thinwire.wire import Format, Kind, Message


def gather_schedule(rank: int, world_size: int) -> list[Stage]:
    """In step s a rank passes on what the rank s places before it began with.

    Example:
        >>> gather_schedule(0, 3)[1]
        Stage(target=1, sends=(2,), source=2, receives=(1,))
    """
    return [
        Stage(
            (rank + 1) % world_size,
            ((rank - step) % world_size,),
            (rank - 1) % world_size,
            ((rank - 1 - step) % world_size,),
        )
        for step in range(world_size - 1)
    ]


def summed_on_the_way(rank: int, world_size: int) -> list[tuple[int, tuple[int, ...]]]:
    """For each step, which part a rank sends on, and whose contributions are in it by then.

    A part starts at the rank after its owner and comes to the owner last.
    """
    parts = [(rank - 1 - step) % world_size for step in range(world_size - 1)]
    return [(part, tuple((rank - back) % world_size for back in range(step + 1))) for step, part in enumerate(parts)]


def all_reduce(
    rows: SparseRows,
    partition: Partition,
    push_formats: tuple[Format, ...],
    pull_formats: tuple[Format, ...],
    channel: Channel,
    scale: float,
) -> SparseRows:
    """Sum rows over all ranks, adding at every step of the first round; after `Channel.open`.

    Partial sums travel in the dtype of the rows, so that sixteen-bit values are rounded at every step, and can
    overflow where their mean does not. One rank computes the sum of a part, so all ranks get the same bits.
    """
    stages = Stages(channel)
    held = _reduce_scatter(rows, partition, push_formats, stages, scale)
    mine, max_payload_bytes = channel.rank, _limit(rows, partition)
    messages = all_gather(
        stages,
        gather_schedule(mine, channel.world_size),
        Kind.PULL,
        lambda: pieces.draft(pull_formats, partition.parts[mine], rows, *held[mine]),
        max_payload_bytes,
    )
    return point_to_point.joined(messages, rows, partition, channel)


def all_reduce_at_once(rows: SparseRows, formats: tuple[Format, ...], channel: Channel, scale: float) -> SparseRows:
    """Pass the rows of all ranks round, and add them up in rank order; after `Channel.open`."""
    return gathered.all_reduce(rows, formats, channel, scale, gather_schedule(channel.rank, channel.world_size))


def _reduce_scatter(
    rows: SparseRows, partition: Partition, formats: tuple[Format, ...], stages: Stages, scale: float
) -> list[Piece]:
    """What this rank has of each part in the end; its own part is complete."""
    channel = stages.channel
    rank, world_size = channel.rank, channel.world_size
    held: list[Piece] = []

    def split() -> None:
        held.extend((positions, rows.values.index_select(0, places)) for positions, places in partition.split(rows.ids))

    def sending(part: int) -> Callable[[], Sequence[Message]]:
        return lambda: channel.seal(Kind.PUSH, [pieces.draft(formats, partition.parts[part], rows, *held[part])])

    def add(part: int, message: Message, factor: float) -> None:
        theirs = pieces.decode(message, partition.parts[part], rows.width, rows, channel)
        held[part] = kernels.sum_rows([theirs, held[part]], factor)

    stages.attempt(split)
    ring = Stage(target=(rank + 1) % world_size, source=(rank - 1) % world_size)
    for step, (part, _) in enumerate(summed_on_the_way(rank, world_size)):
        (message,) = stages.swap(Kind.PUSH, ring, (1, 1), sending(part), _limit(rows, partition))
        factor = scale if step == world_size - 2 else 1.0
        stages.attempt(lambda: add((part - 1) % world_size, message, factor))  # noqa: B023
    return held


def _limit(rows: SparseRows, partition: Partition) -> int:
    return max(pieces.limit(part, rows.width, rows) for part in partition.parts)
