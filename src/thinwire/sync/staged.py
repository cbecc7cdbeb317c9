"""Patterns in stages: rings, halving and doubling, gathering.

Centralization without merging on the way: the rows of all ranks reach every rank, which adds them up itself.

Recursive doubling: in stage i every rank talks to the rank whose number differs in bit i.

With incremental aggregation the partners add up what both have, which is SparCML's SSAR_Recursive_double and ZEN's
hierarchical centralization; with one-shot aggregation they only collect (AGsparse over a hierarchy). World sizes
that are not powers of two: the ranks beyond the largest power first hand theirs to a partner, and get the result
from it at the end.

Parallelism in stages: parts are added up on their way to their owners, and the sums come back, along schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thinwire import kernels
from thinwire.comm.channel import Channel, Draft
from thinwire.partition import Partition, Whole, core_size
from thinwire.sparse import SparseRows
from thinwire.sync import direct, schedules
from thinwire.sync.direct import Piece
from thinwire.sync.schedules import Stage, Stages, all_gather
from thinwire.sync.scheme import Communication
from thinwire.wire import FormatChoice, Kind, Message


def gather_and_add(
    rows: SparseRows, choice: FormatChoice, channel: Channel, scale: float, schedule: Sequence[Stage]
) -> SparseRows:
    """Collect the rows of all ranks along a schedule, and add them up in rank order; after `Channel.open`."""
    whole = Whole(rows.num_rows)
    limit = direct.limit(whole, rows.width, rows)
    messages = all_gather(
        Stages(channel),
        schedule,
        Kind.GATHER,
        lambda: direct.draft(choice, whole, rows, rows.ids, rows.values),
        limit,
    )
    return SparseRows.trusted(*direct.total(messages, whole, rows.width, rows, channel, scale), rows.num_rows)


def doubling_schedule(rank: int, world_size: int) -> list[Stage]:
    """The stages of one rank; all ranks have equally many. Stages that hand out the result send all ranks.

    Example:
        >>> schedule(2, 3)
        [Stage(target=0, sends=(2,), source=None, receives=()), Stage(target=None, sends=(), source=None, \
receives=()), Stage(target=None, sends=(), source=0, receives=(0, 1, 2))]
    """
    core = core_size(world_size)
    extra = rank + core if rank + core < world_size else None
    everyone = tuple(range(world_size))
    stages = []
    for bit in range(core.bit_length() - 1):
        partner = rank ^ (1 << bit)
        mine, theirs = _group(rank, bit, core, world_size), _group(partner, bit, core, world_size)
        stages.append(Stage(partner, mine, partner, theirs) if rank < core else Stage())
    if core == world_size:
        return stages
    if rank >= core:
        return [Stage(target=rank - core, sends=(rank,)), *stages, Stage(source=rank - core, receives=everyone)]
    if extra is None:
        return [Stage(), *stages, Stage()]
    return [Stage(source=extra, receives=(extra,)), *stages, Stage(target=extra, sends=everyone)]


def recursive_doubling(rows: SparseRows, choice: FormatChoice, channel: Channel, scale: float) -> SparseRows:
    """Sum rows over all ranks, adding at every stage; after `Channel.open`.

    Partial sums travel in the dtype of the rows, so that sixteen-bit values are rounded at every stage, and can
    overflow where their mean does not. The sum of two is the same from either side, so all ranks get the same bits.
    What would travel dense becomes dense before it is added, at every stage and on every rank, sent or not: so
    partners add the same rows, and ranks that hold the same rows go on holding the same.
    """
    whole, stages = Whole(rows.num_rows), Stages(channel)
    held: Piece = rows.ids, rows.values
    plan = doubling_schedule(channel.rank, channel.world_size)
    last_sum = max((place for place, stage in enumerate(plan) if stage.source is not None and stage.sends), default=-1)

    def messages() -> list[Message]:
        return channel.seal(Kind.GATHER, [direct.draft(choice, whole, rows, *held)])

    for place, stage in enumerate(plan):
        held = stages.attempt(lambda: direct.as_sent(choice, whole, held)) or held  # noqa: B023
        origins = () if stage.source is None else (stage.source,)
        num_sent = int(stage.target is not None)
        incoming = stages.swap(Kind.GATHER, stage, num_sent, origins, messages, direct.limit(whole, rows.width, rows))
        if incoming:
            factor = scale if place == last_sum else 1.0
            held = stages.attempt(lambda: _merged(held, incoming[0], stage, factor, rows, channel)) or held  # noqa: B023
    stages.finish()
    return SparseRows.trusted(*held, rows.num_rows)


def _group(rank: int, bit: int, core: int, world_size: int) -> tuple[int, ...]:
    """The ranks whose contributions a rank of the core has before the stage of a bit."""
    first = rank >> bit << bit
    members = range(first, first + (1 << bit))
    return (*members, *(member + core for member in members if member + core < world_size))


def _merged(mine: Piece, message: Message, stage: Stage, scale: float, rows: SparseRows, channel: Channel) -> Piece:
    theirs = direct.decode(message, Whole(rows.num_rows), rows.width, rows, channel)
    if len(stage.receives) == channel.world_size:
        return theirs  # the result
    assert stage.source is not None, "nothing comes in a stage without a source"
    lower_first = [mine, theirs] if channel.rank < stage.source else [theirs, mine]
    return kernels.sum_rows(lower_first, scale)


REDUCE_SCHEDULES = {
    Communication.RING: schedules.ring_reduce_schedule,
    Communication.HIERARCHY: schedules.halving_schedule,
}
"""(rank, world size) -> stages in which parts travel to their owners."""

GATHER_SCHEDULES = {Communication.RING: schedules.ring_gather_schedule, Communication.HIERARCHY: doubling_schedule}
"""(rank, world size) -> stages in which what each rank began with travels to all."""


def reduce_scatter(
    rows: SparseRows,
    partition: Partition,
    choice: FormatChoice,
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
        return [direct.draft(choice, partition.parts[part], rows, *held[part]) for part in sent]

    def add(received: tuple[int, ...], messages: Sequence[Message], factor: float) -> None:
        for part, message in zip(received, messages, strict=True):
            theirs = direct.decode(message, partition.parts[part], rows.width, rows, channel)
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
    choice: FormatChoice,
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
        lambda: direct.draft(choice, partition.parts[channel.rank], rows, *total()),
        _limit(rows, partition),
        num_owners,
    )
    return direct.joined(messages, rows, partition, channel)


def _limit(rows: SparseRows, partition: Partition) -> int:
    return max(direct.limit(part, rows.width, rows) for part in partition.parts)
