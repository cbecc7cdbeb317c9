"""Recursive doubling: in stage i every rank talks to the rank whose number differs in bit i.

With incremental aggregation the partners add up what both have, which is SparCML's SSAR_Recursive_double and ZEN's
hierarchical centralization; with one-shot aggregation they only collect (AGsparse over a hierarchy). World sizes
that are not powers of two: the ranks beyond the largest power first hand theirs to a partner, and get the result
from it at the end.
"""

from __future__ import annotations

from thinwire import kernels
from thinwire.sparse import SparseRows
from thinwire.sync.channel import Channel
from thinwire.sync.partition import Whole, core_size
from thinwire.sync.patterns import pieces
from thinwire.sync.patterns.pieces import Piece
from thinwire.sync.stages import Stage, Stages
from thinwire.wire import Choice, Kind, Message


def schedule(rank: int, world_size: int) -> list[Stage]:
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


def all_reduce(rows: SparseRows, choice: Choice, channel: Channel, scale: float) -> SparseRows:
    """Sum rows over all ranks, adding at every stage; after `Channel.open`.

    Partial sums travel in the dtype of the rows, so that sixteen-bit values are rounded at every stage, and can
    overflow where their mean does not. The sum of two is the same from either side, so all ranks get the same bits.
    What would travel dense becomes dense before it is added, at every stage and on every rank, sent or not: so
    partners add the same rows, and ranks that hold the same rows go on holding the same.
    """
    whole, stages = Whole(rows.num_rows), Stages(channel)
    held: Piece = rows.ids, rows.values
    plan = schedule(channel.rank, channel.world_size)
    last_sum = max((place for place, stage in enumerate(plan) if stage.source is not None and stage.sends), default=-1)

    def messages() -> list[Message]:
        return channel.seal(Kind.GATHER, [pieces.draft(choice, whole, rows, *held)])

    for place, stage in enumerate(plan):
        held = stages.attempt(lambda: pieces.as_sent(choice, whole, held)) or held  # noqa: B023
        origins = () if stage.source is None else (stage.source,)
        num_sent = int(stage.target is not None)
        incoming = stages.swap(Kind.GATHER, stage, num_sent, origins, messages, pieces.limit(whole, rows.width, rows))
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
    theirs = pieces.decode(message, Whole(rows.num_rows), rows.width, rows, channel)
    if len(stage.receives) == channel.world_size:
        return theirs  # the result
    assert stage.source is not None, "nothing comes in a stage without a source"
    lower_first = [mine, theirs] if channel.rank < stage.source else [theirs, mine]
    return kernels.sum_rows(lower_first, scale)
