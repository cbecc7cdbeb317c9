"""Patterns in stages: rings, halving and doubling, gathering.

Under centralization without merging, the rows of all ranks reach every rank, which adds them up itself. Under
parallelism parts are added up on their way to their owners, and the sums return, along schedules.

In recursive doubling every rank exchanges messages in stage i with the rank whose number differs in bit i. With
incremental aggregation the partners add up what both hold, which is SparCML's SSAR_Recursive_double and ZEN's
hierarchical centralization; with one-shot aggregation they only collect (AGsparse over a hierarchy). If the world size
is not a power of two, the ranks beyond the largest power first hand their rows to a partner, and get the result from
it at the end.
"""

from collections.abc import Callable, Sequence

from thinwire import kernels
from thinwire.comm.channel import Channel, Draft
from thinwire.rows.formats import FormatChoice, Kind, Message, Whole
from thinwire.rows.partition import Partition, core_size
from thinwire.rows.sparse import SparseRows
from thinwire.sums import direct, schedules
from thinwire.sums.direct import Piece
from thinwire.sums.schedules import Stage, Stages, all_gather
from thinwire.sums.scheme import Communication, Scheme


def gather_and_add(rows: SparseRows, scheme: Scheme, channel: Channel, scale: float) -> SparseRows:
    """Gather the rows of all ranks along a schedule, and add them up in rank order; after `Channel.open`."""
    whole = Whole(rows.num_rows)
    messages = all_gather(
        Stages(channel),
        GATHER_SCHEDULES[scheme.communication](channel.rank, channel.world_size),
        Kind.GATHER,
        lambda: direct.draft(scheme.push_choice, whole, rows, channel, (rows.ids, rows.values)),
        direct.limit(whole, rows.width, rows),
    )
    return SparseRows.trusted(*direct.total(messages, whole, rows.width, rows, channel, scale), rows.num_rows)


def doubling_schedule(rank: int, world_size: int) -> list[Stage]:
    """Return the stages of one rank in recursive doubling, equally many on all ranks.

    A stage that hands out the result names all ranks.

    Example:
        >>> doubling_schedule(2, 3)
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
    What would be sent dense becomes dense before it is added, at every stage and on every rank, sent or not: so
    partners add the same rows, and ranks that hold the same rows keep holding the same.
    """
    whole, stages = Whole(rows.num_rows), Stages(channel)
    held: Piece = rows.ids, rows.values
    plan = doubling_schedule(channel.rank, channel.world_size)
    last_sum = max((index for index, stage in enumerate(plan) if stage.source is not None and stage.sends), default=-1)

    def messages() -> list[Message]:
        return channel.seal(Kind.GATHER, [direct.draft(choice, whole, rows, channel, held)])

    for index, stage in enumerate(plan):
        held = stages.attempt(lambda: direct.as_sent(choice, whole, held)) or held  # noqa: B023
        origins = () if stage.source is None else (stage.source,)
        num_sent = int(stage.target is not None)
        incoming = stages.swap(Kind.GATHER, stage, num_sent, origins, messages, direct.limit(whole, rows.width, rows))
        if incoming:
            factor = scale if index == last_sum else 1.0
            held = stages.attempt(lambda: _merged(held, incoming[0], stage, factor, rows, channel)) or held  # noqa: B023
    stages.finish()
    return SparseRows.trusted(*held, rows.num_rows)


def _group(rank: int, bit: int, core: int, world_size: int) -> tuple[int, ...]:
    """Return the ranks whose contributions a rank of the core holds before the stage of a bit."""
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
"""Functions from rank and world size to the stages in which parts travel to their owners."""

GATHER_SCHEDULES = {Communication.RING: schedules.ring_gather_schedule, Communication.HIERARCHY: doubling_schedule}
"""Functions from rank and world size to the stages in which the message of each rank travels to all."""


def reduce_scatter(
    rows: SparseRows, partition: Partition, scheme: Scheme, stages: Stages, scale: float
) -> Callable[[], Piece]:
    """Add up parts along a schedule; return a function that returns the total of this rank's own part.

    That function raises the failure of any stage.

    Partial sums travel in the dtype of the rows, so that sixteen-bit values are rounded at every stage, and can
    overflow where their mean does not. One rank computes the sum of a part, so all ranks get the same bits.
    """
    channel = stages.channel
    schedule = REDUCE_SCHEDULES[scheme.communication](channel.rank, channel.world_size)
    held: list[Piece] = []
    max_payload_bytes = _limit(rows, partition)
    last = max((index for index, stage in enumerate(schedule) if channel.rank in stage.receives), default=-1)

    def split() -> None:
        held.extend((positions, rows.values.index_select(0, order)) for positions, order in partition.split(rows.ids))

    def drafts(sent: tuple[int, ...]) -> list[Draft]:
        return [direct.draft(scheme.push_choice, partition.parts[part], rows, channel, held[part]) for part in sent]

    def add(received: tuple[int, ...], messages: Sequence[Message], factor: float) -> None:
        for part, message in zip(received, messages, strict=True):
            theirs = direct.decode(message, partition.parts[part], rows.width, rows, channel)
            held[part] = kernels.sum_rows([theirs, held[part]], factor)

    def total() -> Piece:
        stages.finish()
        return held[channel.rank]

    stages.attempt(split)
    for index, stage in enumerate(schedule):
        incoming = stages.swap(
            Kind.PUSH,
            stage,
            len(stage.sends),
            () if stage.source is None else (stage.source,) * len(stage.receives),
            lambda sent=stage.sends: channel.seal(Kind.PUSH, drafts(sent)),
            max_payload_bytes,
        )
        factor = scale if index == last else 1.0
        stages.attempt(lambda: add(stage.receives, incoming, factor))  # noqa: B023
    return total


def gather(
    rows: SparseRows, total: Callable[[], Piece], partition: Partition, scheme: Scheme, stages: Stages
) -> SparseRows:
    """Gather the totals of the owners, the first ranks, along a schedule; return the whole sum, ids sorted."""
    channel = stages.channel
    messages = all_gather(
        stages,
        GATHER_SCHEDULES[scheme.pull_by](channel.rank, channel.world_size),
        Kind.PULL,
        lambda: direct.draft(scheme.pull_choice, partition.parts[channel.rank], rows, channel, total()),
        _limit(rows, partition),
        scheme.num_owners(channel.world_size),
    )
    return direct.joined(messages, rows, partition, channel)


def _limit(rows: SparseRows, partition: Partition) -> int:
    return max(direct.limit(part, rows.width, rows) for part in partition.parts)
