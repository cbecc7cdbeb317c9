"""Patterns in stages that add on the way: rings, halving and doubling.

Under parallelism parts are added up on their way to their owners, along schedules.

In recursive doubling every rank exchanges messages in stage i with the rank whose number differs in bit i. With
incremental aggregation the partners add up what both hold, which is SparCML's SSAR_Recursive_double and ZEN's
hierarchical centralization; with one-shot aggregation they only collect (AGsparse over a hierarchy). If the world size
is not a power of two, the ranks beyond the largest power first hand their rows to a partner, and get the result from
it at the end.
"""

from collections.abc import Callable, Sequence
from functools import partial

from thinwire import kernels
from thinwire.comm.channel import Channel
from thinwire.rows.formats import FormatChoice, Kind, Message, Whole
from thinwire.rows.partition import Partition
from thinwire.rows.sparse import SparseRows
from thinwire.sums import direct
from thinwire.sums.direct import Piece
from thinwire.sums.schedules import REDUCE_SCHEDULES, Stage, Stages, doubling_schedule
from thinwire.sums.scheme import Scheme


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
        incoming = stages.swap(Kind.GATHER, stage, num_sent, origins, messages, direct.limit(rows, whole))
        if incoming:
            factor = scale if index == last_sum else 1.0
            held = stages.attempt(lambda: _merged(held, incoming[0], stage, factor, rows, channel)) or held  # noqa: B023
    stages.finish()
    return SparseRows.trusted(*held, rows.num_rows)


def _merged(mine: Piece, message: Message, stage: Stage, scale: float, rows: SparseRows, channel: Channel) -> Piece:
    theirs = direct.decode(message, Whole(rows.num_rows), rows, channel)
    if len(stage.receives) == channel.world_size:
        return theirs  # the result
    assert stage.source is not None, "nothing comes in a stage without a source"
    lower_first = [mine, theirs] if channel.rank < stage.source else [theirs, mine]
    return kernels.sum_rows(lower_first, scale)


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
    most = direct.limit(rows, *partition.parts)
    last = max((index for index, stage in enumerate(schedule) if channel.rank in stage.receives), default=-1)

    def split() -> None:
        held.extend((positions, rows.values.index_select(0, order)) for positions, order in partition.split(rows.ids))

    def messages(sent: tuple[int, ...]) -> list[Message]:
        drafts = [direct.draft(scheme.push_choice, partition.parts[part], rows, channel, held[part]) for part in sent]
        return channel.seal(Kind.PUSH, drafts)

    def add(received: tuple[int, ...], incoming: Sequence[Message], factor: float) -> None:
        for part, message in zip(received, incoming, strict=True):
            theirs = direct.decode(message, partition.parts[part], rows, channel)
            held[part] = kernels.sum_rows([theirs, held[part]], factor)

    def total() -> Piece:
        stages.finish()
        return held[channel.rank]

    stages.attempt(split)
    for index, stage in enumerate(schedule):
        origins = () if stage.source is None else (stage.source,) * len(stage.receives)
        prepare = partial(messages, stage.sends)
        incoming = stages.swap(Kind.PUSH, stage, len(stage.sends), origins, prepare, most)
        factor = scale if index == last else 1.0
        stages.attempt(lambda: add(stage.receives, incoming, factor))  # noqa: B023
    return total
