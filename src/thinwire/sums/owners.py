"""Owners that add in rank order: what every rank has of a piece goes to the owner, and the sum from there to all.

A piece is cut into segments. While one is on the wire, the thread that sends encodes the next, and the thread that
called decodes and adds an earlier one. What travels is up to a `SegmentCode`: floats by a code that loses nothing, or
columns of rows. Every rank gets the same bits, in each run.

Nobody knows the size of a frame before it comes. So receives are posted for the most bytes that it can have, which is
memory only as far as they are filled. A failure in the middle ends the conversations of these ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from thinwire.comm.channel import Channel
from thinwire.comm.frames import Frames
from thinwire.errors import CorruptHeaderError, CorruptMessageError
from thinwire.rows.formats import Kind

POSTED_BYTES, POSTED_ROUNDS = 64 * 1024 * 1024, 2
"""Bytes up to which receives are posted ahead, and frames of each peer. To post all took 8 ranks on two cores 10 ms."""

_LEAST_POSTED = 8

Arriving = Iterable[tuple[int, Callable[[], Tensor]]]
"""Ranks in order, each with a function that waits for the content of its frame, uint8 [k]; called once, in order."""


class SegmentCode(Protocol):
    """What travels to owners and back, in segments that are numbered from 0 for each owner.

    `push` and `pull` are called on the thread that sends. Frames that can have no bytes are not sent.
    """

    @property
    def segments(self) -> Sequence[int]:
        """Number of segments of each owner."""

    def most_pushed(self, source: int, owner: int, number: int) -> int:
        """Return the most bytes that a rank pushes of a segment of an owner."""

    def most_pulled(self, owner: int, number: int) -> int:
        """Return the most bytes of the sum of a segment."""

    def push(self, owner: int, number: int) -> Tensor:
        """Return this rank's part of a segment, as uint8 [k]."""

    def add(self, number: int, arriving: Arriving) -> Any:
        """Return the sum of a segment of this rank: its own part and the parts of the others, added in rank order."""

    def pull(self, number: int, total: Any) -> Tensor:
        """Return the sum of a segment of this rank, as uint8 [k]."""

    def take(self, owner: int, number: int, receive: Callable[[], Tensor]) -> None:
        """Store the sum of a segment of another rank."""


class _Expected(NamedTuple):
    """A frame to come."""

    source: int
    kind: Kind
    number: int
    most_bytes: int


class OwnerSum:
    """One sum, as a context manager, which holds its stream.

    Args:
        has_pulls: whether the sums go to all ranks; else owners keep them.
    """

    def __init__(self, channel: Channel, code: SegmentCode, has_pulls: bool = True) -> None:
        self._channel, self._code, self._has_pulls = channel, code, has_pulls
        self._others = [(channel.rank + step) % channel.world_size for step in range(1, channel.world_size)]
        self._stack = ExitStack()
        self._expected = self._frames_to_come()
        self._posted: deque[tuple[_Expected, Callable[[], Tensor]]] = deque()
        self._room = POSTED_BYTES
        self._last = channel.rank

    def __enter__(self) -> OwnerSum:
        self.frames = Frames(self._channel, self._stack.enter_context(self._channel.stream()))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def push(self, numbers: Iterable[int]) -> None:
        """Queue the pushes of segments of these numbers, the first of every owner first."""
        rank, code = self._channel.rank, self._code
        for number in numbers:
            for owner in self._others:
                if number < code.segments[owner] and code.most_pushed(rank, owner, number):
                    self.frames.send((owner,), Kind.PUSH, number, partial(code.push, owner, number))

    def post(self) -> None:
        """Post receives of the frames that come next. A sender cannot begin before it knows that one is posted."""
        most = max(_LEAST_POSTED, POSTED_ROUNDS * len(self._others))
        while self._room > 0 and len(self._posted) < most and self._post_next():
            pass

    def pushed(self, number: int) -> Arriving:
        """Yield what the others push of a segment of this rank, to be received in this order."""
        for source in sorted(self._others):
            if self._code.most_pushed(source, self._channel.rank, number):
                yield source, self._receive

    def again(self, source: int, content: Tensor) -> Tensor:
        """Return the content of a frame that came before; an error about it names its sender."""
        self._last = source
        return content

    def finish(self) -> None:
        """Add up the segments of this rank, send the sums to all others, and take theirs."""
        rank, code = self._channel.rank, self._code
        for number in range(code.segments[rank]):
            if code.most_pulled(rank, number):
                total = self.naming(partial(code.add, number, self.pushed(number)))
                if self._has_pulls:
                    self.frames.send(self._others, Kind.PULL, number, partial(code.pull, number, total))
        while self._posted or self._post_next():
            expected = self._posted[0][0]
            self.naming(partial(code.take, expected.source, expected.number, self._receive))

    def _post_next(self) -> bool:
        """Post the receive of the next frame; return whether there is one."""
        expected = next(self._expected, None)
        if expected is not None:
            self._room -= expected.most_bytes
            self._posted.append((expected, self.frames.receive(*expected)))
        return expected is not None

    def _receive(self) -> Tensor:
        """Return the content of the frame that comes next."""
        if not self._posted:
            self._post_next()
        expected, receive = self._posted.popleft()
        self._last = expected.source
        content = receive()
        self._room += expected.most_bytes
        self.post()
        return content

    def _frames_to_come(self) -> Iterator[_Expected]:
        """Yield the frames that come; each rank sends its own in this order."""
        rank, code = self._channel.rank, self._code
        for number in range(code.segments[rank]):
            for source in sorted(self._others):
                if most := code.most_pushed(source, rank, number):
                    yield _Expected(source, Kind.PUSH, number, most)
        for number in range(max(code.segments) if self._has_pulls else 0):
            for owner in reversed(self._others):
                if number < code.segments[owner] and (most := code.most_pulled(owner, number)):
                    yield _Expected(owner, Kind.PULL, number, most)

    def naming(self, work: Callable[[], Any], source: int | None = None) -> Any:
        """Return what ``work`` returns; an error names the source of what it is about, by default what arrived last."""
        try:
            return work()
        except CorruptHeaderError:
            raise
        except CorruptMessageError as error:
            where = self._channel.where(self._last if source is None else source)
            raise CorruptMessageError(f"{where}: {error}") from error


def begin(code: SegmentCode, channel: Channel, has_pulls: bool = True) -> Callable[[], int]:
    """Queue all pushes and post receives; return a function that completes the sum, and returns the bytes sent.

    That function is to be called once. It waits for what `Channel.begin_open` began.
    """
    run = OwnerSum(channel, code, has_pulls)
    with ExitStack() as entered:
        entered.enter_context(run)
        run.push(range(max(code.segments)))
        run.post()
        stack = entered.pop_all()

    def finish() -> int:
        with stack:
            channel.settle()
            run.finish()
        return run.frames.sent_bytes

    return finish
