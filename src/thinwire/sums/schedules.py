"""Schedules of patterns in stages: each stage pairs a rank with a target and a source.

In a stage only two ranks communicate. So a rank that fails takes part to the end, sends its reason in place of its
messages, and raises after the last stage; a rank that receives a reason passes it on. A rank that no reason reaches
has a right sum; the lane of the rank that raises hangs up, so that rank fails at its next job at the latest.

In a ring every rank sends to the next one and receives from the one before it. Parts are added up on their way to
their owner (reduce-scatter), and the sums go round once more (all-gather): with dense parts this is the classical ring
all-reduce. One-shot aggregation under centralization only gathers, which is AGsparse as Gloo and NCCL do it.

In recursive halving a rank keeps half of its parts in every stage, and gives the other half away. Partners add up what
they keep, so that in the end each has the sum of one part: a reduce-scatter in log2 n stages. With the all-gather of
`doubling_schedule`, dense formats and contiguous parts, that is the classical halving-doubling all-reduce
(Rabenseifner, ICCS 2004). If the world size is not a power of two, the ranks beyond the largest power first hand their
parts to a partner, own nothing, and get the result at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from thinwire.comm.channel import Channel, Draft
from thinwire.rows.formats import Kind, Message
from thinwire.rows.partition import core_size
from thinwire.sums.scheme import Communication, Scheme

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """The sends and receives of one rank in one stage; as data, so that its cost is known without running it.

    Args:
        target, source: the ranks that are sent to and received from; None for no rank.
        sends, receives: identities of the messages, in order: the ranks whose rows they hold if rows are gathered,
            the owners of the parts if parts are summed.
    """

    target: int | None = None
    sends: tuple[int, ...] = ()
    source: int | None = None
    receives: tuple[int, ...] = ()


class Attempts:
    """Work that goes on after a failure of this rank, which the others are told later."""

    failure: Exception | None = None

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return what ``work`` returns; None if it raises, or if something failed before."""
        if self.failure is None:
            try:
                return work()
            except Exception as error:
                self.failure = error
        return None


class Stages(Attempts):
    """A run of a staged pattern over a channel that was opened."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._reason: Message | None = None

    def swap(
        self,
        kind: Kind,
        stage: Stage,
        num_sent: int,
        origins: Sequence[int],
        prepare: Callable[[], Sequence[Message]],
        max_payload_bytes: int,
    ) -> list[Message]:
        """Send the prepared messages to the target of a stage; return the messages of its source, verified.

        After a failure on either side the result is useless, and `attempt` skips the work on it.

        Args:
            num_sent: number of messages that are sent.
            origins: the rank that made each message that is received.
        """
        outgoing = self.attempt(prepare) if num_sent else []
        if self.failure is not None:
            self._reason = self._reason or self.channel.seal_error(self.failure)
            outgoing = [self._reason] * num_sent
        assert outgoing is not None
        assert len(outgoing) == num_sent
        incoming = self.channel.swap_with(kind, stage.target, outgoing, stage.source, origins, max_payload_bytes)
        self.attempt(lambda: self._check(incoming))
        return incoming

    def finish(self) -> None:
        """Raise the failure of any stage."""
        if self.failure is not None:
            raise self.failure

    def _check(self, incoming: Sequence[Message]) -> None:
        for message in incoming:
            with self.channel.reading(message):
                pass
        self._reason = next((message for message in incoming if message.header.kind is Kind.ERROR), None)
        self.channel.raise_reported(incoming)


def gathering(schedule: Sequence[Stage], rank: int, num_origins: int) -> list[Stage]:
    """Return a schedule of one rank without needless messages, if only the first ranks begin with one.

    No message goes back to the rank that made it.
    """

    def relevant(stage: Stage) -> Stage:
        sends = tuple(origin for origin in stage.sends if origin < num_origins and origin != stage.target)
        receives = tuple(origin for origin in stage.receives if origin < num_origins and origin != rank)
        return Stage(stage.target if sends else None, sends, stage.source if receives else None, receives)

    return [relevant(stage) for stage in schedule]


def all_gather(stages: Stages, scheme: Scheme, kind: Kind, prepare: Callable[[], Draft], most: int) -> list[Message]:
    """Gather the messages of all ranks, or of those that own a part, in rank order, by the schedule of a scheme.

    They are passed on unchanged, with their sender and checksum.

    Args:
        most: most bytes of a payload.

    Raises:
        PeerError, CorruptMessageError: a stage of ``stages`` failed.
    """
    rank, world_size = stages.channel.rank, stages.channel.world_size
    origins = range(scheme.num_owners(world_size) if scheme.is_parallel else world_size)
    schedule = GATHER_SCHEDULES[scheme.pull_by](rank, world_size)
    held: dict[int, Message] = {}

    def begin() -> None:
        held[rank] = stages.channel.seal(kind, [prepare()])[0]

    if rank in origins:
        stages.attempt(begin)
    for stage in gathering(schedule, rank, len(origins)):
        incoming = stages.swap(
            kind, stage, len(stage.sends), stage.receives, lambda sends=stage.sends: [held[one] for one in sends], most
        )
        held.update(zip(stage.receives, incoming, strict=True))
    stages.finish()
    return [held[origin] for origin in origins]


def ring_gather_schedule(rank: int, world_size: int) -> list[Stage]:
    """Return the stages in which a rank passes on, in step s, the message of the rank s before it.

    Example:
        >>> ring_gather_schedule(0, 3)[1]
        Stage(target=1, sends=(2,), source=2, receives=(1,))
    """
    return _ring(rank, world_size, behind=0)


def ring_reduce_schedule(rank: int, world_size: int) -> list[Stage]:
    """Return the stages in which a rank passes on, in step s, the part of the rank s + 1 before it.

    A part starts at the rank after its owner and reaches the owner last.

    Example:
        >>> ring_reduce_schedule(0, 3)[1]
        Stage(target=1, sends=(1,), source=2, receives=(0,))
    """
    return _ring(rank, world_size, behind=1)


def _ring(rank: int, world_size: int, behind: int) -> list[Stage]:
    """Return the stages in which a rank passes on, in step s, the message of the rank ``behind`` + s before it."""
    following, before = (rank + 1) % world_size, (rank - 1) % world_size
    sends = [(rank - behind - step) % world_size for step in range(world_size)]
    return [Stage(following, (sent,), before, (received,)) for sent, received in pairwise(sends)]


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


def _group(rank: int, bit: int, core: int, world_size: int) -> tuple[int, ...]:
    """Return the ranks whose contributions a rank of the core holds before the stage of a bit."""
    first = rank >> bit << bit
    members = range(first, first + (1 << bit))
    return (*members, *(member + core for member in members if member + core < world_size))


def halving_schedule(rank: int, world_size: int) -> list[Stage]:
    """Return the stages of one rank in recursive halving of parts, owned by the first `core_size` ranks.

    Example:
        >>> halving_schedule(1, 4)
        [Stage(target=3, sends=(2, 3), source=3, receives=(0, 1)), Stage(target=0, sends=(0,), source=0, receives=(1,))]
    """
    core = core_size(world_size)
    everything = tuple(range(core))
    handed_in = [] if core == world_size else [_hand_in(rank, world_size, everything)]
    return handed_in + [_halve(rank, bit, core) for bit in reversed(range(core.bit_length() - 1))]


def _hand_in(rank: int, world_size: int, everything: tuple[int, ...]) -> Stage:
    core = len(everything)
    if rank >= core:
        return Stage(target=rank - core, sends=everything)
    return Stage(source=rank + core, receives=everything) if rank + core < world_size else Stage()


def _halve(rank: int, bit: int, core: int) -> Stage:
    if rank >= core:
        return Stage()
    partner = rank ^ (1 << bit)
    return Stage(partner, _half(partner, bit), partner, _half(rank, bit))


def _half(rank: int, bit: int) -> tuple[int, ...]:
    """Return the owners whose numbers differ from ``rank`` only in the bits below ``bit``."""
    first = rank >> bit << bit
    return tuple(range(first, first + (1 << bit)))


REDUCE_SCHEDULES = {Communication.RING: ring_reduce_schedule, Communication.HIERARCHY: halving_schedule}
"""Functions from rank and world size to the stages in which parts travel to their owners."""

GATHER_SCHEDULES = {Communication.RING: ring_gather_schedule, Communication.HIERARCHY: doubling_schedule}
"""Functions from rank and world size to the stages in which the message of each rank travels to all."""
