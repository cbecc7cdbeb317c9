"""Messages of known sizes, all receives posted early, sent one after the other by a thread of their own.

A swap begins when everything is encoded and ends when everything is there. A stream has no such points: while one
message is on the wire, the next is encoded and an earlier one from a peer is summed, so the link does not wait for
the processor nor the processor for the link.
"""

from __future__ import annotations

import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import LostPeerError
from thinwire.ranges import named
from thinwire.sync.waits import Waits

SENDS_IN_FLIGHT = 2
_ADDRESS = re.compile(r"\[[0-9a-fA-F.:]+\]:[0-9]+")
peers_at: dict[str, int] = {}
"""The rank at the other end of a connection, by the address that Gloo writes in errors."""
SMALL_BYTES = 16 * 1024


class Receive(Protocol):
    """A posted receive."""

    def __call__(self, num_bytes: int | None = None) -> Tensor:
        """Wait for the message, uint8, the caller's; ``num_bytes`` if it is shorter than what was posted."""
        ...


class Stream(Protocol):
    """One rank's end of a stream; a context manager. Leaving it waits for all sends, and raises what failed in one;
    an exception that leaves it does not wait, because nobody can be told of it: the rank has to hang up.

    Messages from one rank to another arrive in the order in which they were sent; both sides know their sizes.
    """

    def receive(self, source: int, num_bytes: int) -> Receive:
        """Post a receive of at most ``num_bytes``; the function that is returned waits for it.

        Raises:
            LostPeerError: here or in that function: a peer died or did not take part, or sending failed on this rank.
        """
        ...

    def send(self, target: int, num_bytes: int, make: Callable[[], Tensor]) -> None:
        """Queue a message; ``make`` is called, on another thread, when its turn comes.

        If it raises, zeros are sent in its place, so that no rank waits, and leaving the stream raises it.
        """
        ...

    def __enter__(self) -> Stream: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ProcessGroupStream:
    """A `Stream` over Gloo.

    Args:
        process_group: whose point-to-point messages are used, in the order of the calls.
        rank: this rank, in the stream.
        ranks: the rank in the group of each rank of the stream.
        on_sent, on_received: called with the peer and the bytes of each message.
        hang_up: called with the reason when sending fails, so that nobody waits for what will not come.
        waits: knows what the threads of the stream wait for.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        rank: int,
        ranks: Sequence[int],
        on_sent: Callable[[int, int], None],
        on_received: Callable[[int, int], None],
        hang_up: Callable[[str], None],
        waits: Waits,
    ) -> None:
        self._group, self._rank, self._ranks = process_group, rank, ranks
        self._on_sent, self._on_received, self._hang_up, self._waits = on_sent, on_received, hang_up, waits
        self._jobs: queue.SimpleQueue[tuple[int, int, Callable[[], Tensor]] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._send_in_turn, name="thinwire-stream", daemon=True)

    def receive(self, source: int, num_bytes: int) -> Receive:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        peer = self._ranks[source]
        try:
            work = dist.irecv(buffer, group=self._group, group_src=peer)
        except RuntimeError as error:
            raise (self._failure or self._lost(error)) from error

        def wait(num_bytes: int | None = None) -> Tensor:
            message = buffer if num_bytes is None else buffer[:num_bytes]
            try:
                with named("exchange"):
                    self._waits.wait(work, peer)
            except RuntimeError as error:
                raise (self._failure or self._lost(error)) from error
            self._on_received(source, message.numel())
            return message

        return wait

    def send(self, target: int, num_bytes: int, make: Callable[[], Tensor]) -> None:
        self._jobs.put((target, num_bytes, make))

    def __enter__(self) -> ProcessGroupStream:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandoned = error is not None
        self._jobs.put(None)
        if error is None:  # else the thread may wait for a peer that waits for this rank: it ends when that hangs up
            self._thread.join()
            if self._failure is not None:
                raise self._failure

    def _send_in_turn(self) -> None:
        """Two at a time, as in `ProcessGroupExchange.swap`; small ones, which fill nobody's link, all together."""
        try:
            in_flight: deque[tuple[dist.Work | None, int, int]] = deque()
            while (job := self._jobs.get()) is not None and not self._abandoned:
                target, num_bytes, make = job
                data, peer = self._made(num_bytes, make), self._ranks[target]
                in_flight.append((dist.isend(data, group=self._group, group_dst=peer), peer, num_bytes))
                self._on_sent(target, data.numel())
                while len(in_flight) >= SENDS_IN_FLIGHT and sum(size for *_, size in in_flight) > SMALL_BYTES:
                    self._waits.wait(*in_flight.popleft()[:2])
            for work, peer, _ in in_flight:
                self._waits.wait(work, peer)
        except BaseException as error:
            self._failure = self._failure or self._lost(error)
            self._hang_up(str(self._failure))

    def _made(self, num_bytes: int, make: Callable[[], Tensor]) -> Tensor:
        try:
            with named("pack"):
                data = make()
            assert data.numel() == num_bytes, f"a message of {data.numel()} bytes, {num_bytes} were announced"
        except Exception as error:
            self._failure = self._failure or error
            return torch.zeros(num_bytes, dtype=torch.uint8)
        return data

    def _lost(self, error: BaseException) -> LostPeerError:
        return lost_peer(error, self._rank, len(self._ranks))


def lost_peer(error: BaseException, rank: int, world_size: int) -> LostPeerError:
    """What to raise where torch failed to move bytes."""
    cause = str(error).split("This is typically")[0].split("] ", 1)[-1].strip().rstrip(".")
    for address in _ADDRESS.findall(cause):
        if address in peers_at:
            cause = cause.replace(address, f"rank {peers_at[address]}")
    return LostPeerError(
        f"rank {rank}: the exchange with the other {world_size - 1} ranks broke off, because a peer died, gave up or"
        f" did not take part within the timeout: {cause}"
    )
