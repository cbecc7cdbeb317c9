"""Bytes between the ranks of a process group: streams, exchanges, and gradients of a device on their way to them.

Contexts in which an error is told to whoever has to hear of it.

Whether what a peer announces fits into memory, asked before it is allocated.

What the threads of a lane wait for, so that a wait that Gloo does not end is seen.

When a connection breaks, Gloo fails what is queued for it, but neither the message that it is receiving nor those that
it is sending (``Pair::signalException`` of its TCP transport; torch 2.13): whoever waits for one of these waits until
the timeout, and Python cannot abort a work. So each wait is noted here, and another thread looks whether its peer is
still connected.

Messages of known sizes, all receives posted early, sent one after the other by a thread of their own.

A swap begins when everything is encoded and ends when everything is there. A stream has no such points: while one
message is on the wire, the next is encoded and an earlier one from a peer is summed, so the link does not wait for
the processor nor the processor for the link.

Moving bytes between the ranks of a group: all that a communication pattern needs of a network.

What the lane knows of the device of the gradients: how they get to the host and back. `thinwire.cuda` does it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.errors import CorruptHeaderError, LostPeerError
from thinwire.observe.step import named


class Telling:
    """A context in which exceptions are told to a function, which may raise another one.

    Without a generator: a small step enters a dozen, and `contextlib.contextmanager` takes three times the calls.
    """

    __slots__ = ("_tell",)

    def __init__(self, tell: Callable[[BaseException], None]) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._tell(error)


UNASKED_BYTES = 256 * 1024 * 1024
"""So little is allocated without asking, which takes 0.1 ms."""


def check_fits(num_bytes: int, where: str) -> None:
    """Raises CorruptHeaderError if so many bytes that peers announce are more than this host has left.

    Where it cannot be asked nothing is refused: then the allocation fails, which reaches all ranks too.
    """
    if num_bytes <= UNASKED_BYTES:
        return
    available = _available_bytes()
    if available is not None and num_bytes > available:
        raise CorruptHeaderError(
            f"{where}: {num_bytes} bytes are announced, and this host has {available} bytes of memory left"
        )


def _available_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


EVERYONE = -1
"""In place of a rank: of a collective, which needs all of them."""
LOOKS = 3
"""A wait that was there in so many looks in a row is one of a thread that stands still: what a peer sent before it hung
up is read within that time."""
COLLECTIVE_LOOKS = 8
"""A rank may have its result, and be gone, while the last messages of others are still on their way."""


_Wait = tuple[int, int]
"""The rank, and the number of the wait: not its work, since who holds one holds the group, beyond its end."""


class Waits:
    """The works that threads wait for now."""

    def __init__(self) -> None:
        self._now: dict[int, _Wait] = {}  # of each thread
        self._looks: dict[_Wait, int] = {}
        self._numbers = count()

    def wait(self, work: dist.Work | None, rank: int = EVERYONE) -> None:
        """Wait for a work with this rank of the group."""
        assert work is not None, "an exchange is only for ranks of the group"
        thread = threading.get_ident()
        self._now[thread] = rank, next(self._numbers)
        try:
            work.wait()
        finally:
            del self._now[thread]

    def look(self) -> set[int]:
        """The ranks that some thread has waited for since the last looks, for one and the same work."""
        self._looks = {wait: self._looks.get(wait, 0) + 1 for wait in list(self._now.values())}
        return {
            rank
            for (rank, _), looks in self._looks.items()
            if looks >= (COLLECTIVE_LOOKS if rank == EVERYONE else LOOKS)
        }


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


@dataclass
class Traffic:
    """Bytes that a rank handed over for other ranks, and got from them. What stays on the rank is not counted."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_between_hosts_bytes: int = 0
    """Those of ``sent_bytes`` that went to ranks on another host, as far as `Exchange.hosts` knows."""


class Exchange(Protocol):
    """A group of ranks that can swap bytes. Calls are collective: all ranks make the same ones in the same order."""

    rank: int
    world_size: int
    hosts: Sequence[int]
    """For each rank the number of its host; a host of its own for each where nobody has asked."""
    traffic: Traffic

    def subset(self, ranks: Sequence[int]) -> Exchange:
        """The exchange of some of the ranks, this one among them, over the same connections and traffic count.

        Ranks of the subset are numbered in the order given. No communication. It has no `all_reduce`.
        """
        ...

    def swap_records(self, outgoing: Sequence[Tensor]) -> list[Tensor]:
        """Send record ``outgoing[r]`` to each rank r; all records, on all ranks, have the same few bytes (uint8).

        Returns what each rank sent here, in rank order.

        Raises:
            LostPeerError: a peer died, or did not take part within the timeout.
        """
        ...

    def swap(self, outgoing: Sequence[Tensor], receive_bytes: Sequence[int]) -> list[Tensor]:
        """Send ``outgoing[r]`` (uint8, any length) to each rank r and return what each rank sent here.

        ``receive_bytes[r]`` must be the length that rank r sends. The entry of the own rank is returned as it
        is, without a copy. ``outgoing`` may be written to again when this returns; the result is the caller's.

        Raises:
            LostPeerError: as for `swap_records`.
        """
        ...

    def swap_with(self, target: int | None, outgoing: Tensor, source: int | None, receive_bytes: int) -> Tensor:
        """Send ``outgoing`` (uint8) to one other rank and return the ``receive_bytes`` that another sends here.

        None stands for nobody; then ``outgoing`` or the result is empty. A rank with neither calls it all the same.

        Raises:
            LostPeerError: as for `swap_records`.
        """
        ...

    def stream(self) -> Stream:
        """Begin messages whose sizes are known; all ranks enter and leave their streams in the same order."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place, by the group's own algorithm."""
        ...

    def count_all_reduce(self, moved_bytes: int) -> None:
        """Count an all-reduce in which each rank sent ``moved_bytes`` to the next one of a ring."""
        ...

    def close(self) -> None:
        """Let go of the group. Nothing can be exchanged afterwards."""
        ...


_PointToPoint = tuple[dist.Work | None, int]
"""A send or a receive, and the rank of the group at the other end."""


class ProcessGroupExchange:
    """An `Exchange` over a torch process group of CPU tensors.

    Args:
        process_group: a Gloo group that nothing else uses.
        ranks: the ranks of the group that take part, in this order; None for all of them.
        traffic: where bytes are counted; None makes a new count.

    ``hang_up`` is called with the reason when a thread of a stream fails, and ``waits`` knows what is waited for; a
    lane puts in its own.
    """

    hang_up: Callable[[str], None]
    waits: Waits

    def __init__(
        self, process_group: dist.ProcessGroup, ranks: Sequence[int] | None = None, traffic: Traffic | None = None
    ) -> None:
        self.process_group: dist.ProcessGroup | None = process_group
        self._is_whole = ranks is None
        self._ranks = tuple(range(process_group.size())) if ranks is None else tuple(ranks)
        self.rank = self._ranks.index(process_group.rank())
        self.world_size = len(self._ranks)
        self.hosts: Sequence[int] = range(self.world_size)
        self.traffic = traffic or Traffic()
        self.hang_up = _nothing
        self.waits = Waits()

    def subset(self, ranks: Sequence[int]) -> ProcessGroupExchange:
        assert self.process_group is not None
        inner = ProcessGroupExchange(self.process_group, [self._ranks[rank] for rank in ranks], self.traffic)
        inner.hosts = [self.hosts[rank] for rank in ranks]
        inner.hang_up, inner.waits = self.hang_up, self.waits
        return inner

    def swap_records(self, outgoing: Sequence[Tensor]) -> list[Tensor]:
        num_bytes = outgoing[0].numel()
        if not self._is_whole or self.world_size == 1:
            return self.swap(outgoing, [num_bytes] * self.world_size)
        sent = torch.stack(list(outgoing))
        received = torch.empty_like(sent)
        try:
            self.waits.wait(dist.all_to_all_single(received, sent, group=self.process_group, async_op=True))
        except RuntimeError as error:
            raise self._lost(error) from error
        for rank in self._others():
            self._count_sent(rank, num_bytes)
            self._count_received(rank, num_bytes)
        return list(received)

    def swap(self, outgoing: Sequence[Tensor], receive_bytes: Sequence[int]) -> list[Tensor]:
        """Every receive is posted before any send, and sends go round the ranks, two at a time.

        Gloo announces a posted receive on the connection that carries the data the other way, so a receive that
        is posted late waits behind that data and the pair runs half-duplex. And when all sends start together,
        receivers get bursts from several senders while others idle. Over the wire time, on 8 hosts at 100 Mbit/s
        with 112 kB (1 MB) for each peer: all_to_all_single 1.41 (1.45), all sends at once 1.37 (1.05), two at a
        time 1.09 (1.02); benchmarks/bench_exchange.py.
        """
        others = self._others()
        incoming = [
            own if rank == self.rank else torch.empty(receive_bytes[rank], dtype=torch.uint8)
            for rank, own in enumerate(outgoing)
        ]
        try:
            receives = [self._receive(rank, incoming[rank]) for rank in reversed(others) if incoming[rank].numel()]
            sends: deque[_PointToPoint] = deque()
            for rank in others:
                if outgoing[rank].numel():
                    sends.append(self._send(rank, outgoing[rank]))
                if len(sends) == SENDS_IN_FLIGHT:
                    self.waits.wait(*sends.popleft())
            for work, rank in (*sends, *receives):
                self.waits.wait(work, rank)
        except RuntimeError as error:
            raise self._lost(error) from error
        for rank in others:
            self._count_sent(rank, outgoing[rank].numel())
            self._count_received(rank, receive_bytes[rank])
        return incoming

    def swap_with(self, target: int | None, outgoing: Tensor, source: int | None, receive_bytes: int) -> Tensor:
        """The receive is posted before the send, as in `swap`."""
        incoming = torch.empty(receive_bytes, dtype=torch.uint8)
        works = []
        try:
            if source is not None and receive_bytes:
                works.append(self._receive(source, incoming))
            if target is not None and outgoing.numel():
                works.append(self._send(target, outgoing))
            for work, rank in works:
                self.waits.wait(work, rank)
        except RuntimeError as error:
            raise self._lost(error) from error
        if target is not None:
            self._count_sent(target, outgoing.numel())
        if source is not None:
            self._count_received(source, receive_bytes)
        return incoming

    def stream(self) -> ProcessGroupStream:
        count = self._count_sent, self._count_received
        return ProcessGroupStream(self.process_group, self.rank, self._ranks, *count, self.hang_up, self.waits)

    def all_reduce(self, tensor: Tensor) -> None:
        if self.world_size == 1:
            return
        assert self._is_whole, "the native all-reduce is of the whole group"
        try:
            self.waits.wait(dist.all_reduce(tensor, group=self.process_group, async_op=True))
        except RuntimeError as error:
            raise self._lost(error) from error
        self.count_all_reduce(ring_all_reduce_bytes(tensor.numel() * tensor.element_size(), self.world_size))

    def count_all_reduce(self, moved_bytes: int) -> None:
        self._count_sent((self.rank + 1) % self.world_size, moved_bytes)
        self._count_received((self.rank - 1) % self.world_size, moved_bytes)

    def close(self) -> None:
        self.process_group, self.hang_up = None, _nothing

    def _others(self) -> list[int]:
        """All other ranks, the next one first, so that not all ranks begin with the same one."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def _send(self, rank: int, data: Tensor) -> _PointToPoint:
        peer = self._ranks[rank]
        return dist.isend(data, group=self.process_group, group_dst=peer), peer

    def _receive(self, rank: int, data: Tensor) -> _PointToPoint:
        peer = self._ranks[rank]
        return dist.irecv(data, group=self.process_group, group_src=peer), peer

    def _count_sent(self, rank: int, num_bytes: int) -> None:
        self.traffic.sent_bytes += num_bytes
        if self.hosts[rank] != self.hosts[self.rank]:
            self.traffic.sent_between_hosts_bytes += num_bytes

    def _count_received(self, rank: int, num_bytes: int) -> None:
        self.traffic.received_bytes += num_bytes

    def _lost(self, error: RuntimeError) -> LostPeerError:
        return lost_peer(error, self.rank, self.world_size)


def _nothing(reason: str) -> None:
    del reason


_SPARSE_METADATA_BYTES = 9 * 8  # what ProcessGroupGloo gathers before a sparse tensor: sizes and nnz, int64


def sparse_all_reduce_bytes(held: Sequence[int], rank: int, row_bytes: int, num_tensors: int = 1) -> int:
    """Bytes that a rank sends in torch's own all-reduce of sparse tensors, of which each rank holds so many rows.

    Gloo gathers ids and values in a ring: a rank passes on what all but the next one hold.
    """
    if len(held) < 2:
        return 0
    passed_on = sum(held) - held[(rank + 1) % len(held)]
    return num_tensors * (len(held) - 1) * _SPARSE_METADATA_BYTES + passed_on * (8 + row_bytes)


def ring_all_reduce_bytes(tensor_bytes: int, world_size: int) -> int:
    """Bytes that a rank sends in a ring all-reduce: 2 (n - 1) / n of the tensor, rounded up to whole bytes."""
    return -(-2 * (world_size - 1) * tensor_bytes // world_size)


class DeviceEvent(Protocol):
    """A point in the work of a stream."""


@dataclass(frozen=True, eq=False)
class Handover:
    """Tensors that are written once ``event`` is reached."""

    tensors: tuple[Tensor, ...]
    event: DeviceEvent | None = None


class Staging(Protocol):
    """Between the device of the gradients and the lane."""

    is_host: bool

    def future(self) -> Future[Tensor]:
        """One that can be completed with a tensor of the device."""
        ...

    def hand_over(self, tensors: Sequence[Tensor]) -> Handover:
        """Called where the tensors were written, on the thread and the stream that did so."""
        ...

    def taking(self, handover: Handover) -> AbstractContextManager[object]:
        """Around a job of the lane: inside, the tensors may be used, and results are written and handed back."""
        ...

    def to_host(self, *tensors: Tensor) -> list[Tensor]:
        """Copies on the host, until the job ends. The lane's thread waits for them."""
        ...

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        """Copies on the device, for work that follows on the lane's stream. Nobody waits."""
        ...

    def all_reduce(self, tensor: Tensor, all_reduce: Callable[[Tensor], None], world_size: int) -> None:
        """Have ``all_reduce`` sum a contiguous tensor of the device over the ranks, in place, on the host."""
        ...

    def stats(self) -> dict[str, float]:
        """For `Synchronizer.stats`."""
        ...


class HostStaging:
    """For gradients on the CPU: there is nothing to do."""

    is_host = True

    def future(self) -> Future[Tensor]:
        return Future()

    def hand_over(self, tensors: Sequence[Tensor]) -> Handover:
        return Handover(tuple(tensors))

    def taking(self, handover: Handover) -> AbstractContextManager[object]:
        return nullcontext()

    def to_host(self, *tensors: Tensor) -> list[Tensor]:
        return list(tensors)

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        return list(tensors)

    def all_reduce(self, tensor: Tensor, all_reduce: Callable[[Tensor], None], world_size: int) -> None:
        all_reduce(tensor)

    def stats(self) -> dict[str, float]:
        return {}


class StagedExchange(ProcessGroupExchange):
    """A `ProcessGroupExchange` over Gloo whose all-reduce takes dense gradients where they are."""

    def __init__(self, process_group: dist.ProcessGroup, staging: Staging) -> None:
        super().__init__(process_group)
        self._staging = staging

    def all_reduce(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu":
            super().all_reduce(tensor)
        elif self.world_size > 1:
            self._staging.all_reduce(tensor, super().all_reduce, self.world_size)
