"""Transport of bytes between the ranks of a process group: exchanges, streams, and staging of gradients on a device.

An `Exchange` is all that a communication pattern needs of a network. A swap begins when everything is encoded and ends
when everything has arrived. A stream has no such points: its receives are posted early, and while one message is on
the wire, the next is encoded and an earlier one from a peer is summed, so the link does not wait for the processor nor
the processor for the link.

When a connection breaks, Gloo fails what is queued for it, but neither the message that it is receiving nor those that
it is sending (``Pair::signalException`` of its TCP transport; torch 2.13): a thread that waits for one of these waits
until the timeout, and Python cannot abort a work. So `Waits` records each wait, and another thread checks whether its
peer is still connected.

`Staging` is the lane's view of the device of the gradients; `thinwire.comm.cuda` implements it for GPUs.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.comm.c10d import back_end_of
from thinwire.errors import CorruptHeaderError, LostPeerError
from thinwire.observe.step import named
from thinwire.rows.formats import ring_all_reduce_bytes


def reduce_scatter_bytes(tensor_bytes: int, world_size: int, device: torch.device) -> int:
    """Return the bytes that a rank sends where torch leaves each its part of a sum: Gloo makes the whole one (2.13)."""
    whole = ring_all_reduce_bytes(tensor_bytes, world_size)
    return whole if device.type == "cpu" else whole // 2


class Telling:
    """A context that passes exceptions to a function, which may raise another one.

    It is not a generator: a small step enters a dozen, and `contextlib.contextmanager` costs three times the calls.
    """

    __slots__ = ("_tell",)

    def __init__(self, tell: Callable[[BaseException], None]) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._tell(error)


UNASKED_BYTES = 256 * 1024 * 1024
"""Most bytes that are allocated without asking the system for its free memory, which costs 0.1 ms."""


def check_fits(num_bytes: int, where: Callable[[], str]) -> None:
    """Raise CorruptHeaderError if peers announce more bytes than this host has memory left.

    Nothing is refused if the free memory is unknown: then the allocation fails, which reaches all ranks too.
    """
    if num_bytes <= UNASKED_BYTES:
        return
    available = _available_bytes()
    if available is not None and num_bytes > available:
        raise CorruptHeaderError(
            f"{where()}: {num_bytes} bytes are announced, and this host has {available} bytes of memory left"
        )


def _available_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


EVERYONE = -1
"""Stand-in for a rank in the wait for a collective, which needs all ranks."""
LOOKS = 3
"""Number of looks in a row after which a wait counts as stuck: what a peer sent before it hung up is read by then."""
COLLECTIVE_LOOKS = 8
"""Number of looks for a collective: a rank may be done and gone while messages of others are still on their way."""


_Wait = tuple[int, int, float]
"""The rank, the number and the beginning of a wait; not its work, a reference to which would keep the group alive."""


class Waits:
    """The waits of all threads for works of a group."""

    def __init__(self) -> None:
        self._now: dict[int, _Wait] = {}  # the wait of each thread
        self._looks: dict[_Wait, int] = {}
        self._numbers = count()
        self.failed: tuple[int, float] | None = None  # the rank for which the last wait that failed was, and seconds

    def wait(self, work: dist.Work | None, rank: int = EVERYONE) -> None:
        """Wait for a work whose peer is this rank of the group."""
        assert work is not None, "an exchange is only for ranks of the group"
        thread, began = threading.get_ident(), time.monotonic()
        self._now[thread] = rank, next(self._numbers), began
        try:
            work.wait()
        except RuntimeError:
            self.failed = rank, time.monotonic() - began
            raise
        finally:
            del self._now[thread]

    def look(self) -> set[int]:
        """Return the ranks for which some thread is stuck: it has waited for the same work during the last looks."""
        self._looks = {wait: self._looks.get(wait, 0) + 1 for wait in list(self._now.values())}
        return {
            rank
            for (rank, *_), looks in self._looks.items()
            if looks >= (COLLECTIVE_LOOKS if rank == EVERYONE else LOOKS)
        }


SENDS_IN_FLIGHT = 2
_ADDRESS = re.compile(r"\[[0-9a-fA-F.:]+\]:[0-9]+")
peers_at: dict[str, int] = {}
"""The global rank at the other end of a connection, by the address that Gloo writes in errors."""
SMALL_BYTES = 16 * 1024


class HangUp(Protocol):
    """A function that hangs up, see `thinwire.comm.lane.Lane.break_off`."""

    def __call__(self, reason: str, error: BaseException | None = None) -> None:
        """Hang up for a reason, or because of an error."""


Receive = Callable[[], Tensor]
"""Waits for the message of a posted receive, and returns its bytes, uint8 [k], which the caller owns."""


class Stream:
    """One rank's end of a stream of messages, over Gloo, as a context manager.

    Leaving it waits for all sends, and raises what failed in one; leaving it by an exception does not wait, because no
    peer can learn of it: the rank has to hang up. Messages from one rank to another arrive in the order of sending.

    Args:
        exchange: the ranks of the stream. Its group carries the messages point to point, in the order of the calls; it
            hangs up when sending fails, so that no rank waits for what will not come.
        tag: number of the stream, the same on all ranks: messages of streams with other tags do not mix with its own.
    """

    def __init__(self, exchange: Exchange, tag: int) -> None:
        self._exchange, self._tag, self._ranks, self._waits = exchange, tag, exchange._ranks, exchange.waits
        self._group, self._hang_up = exchange.process_group, exchange.hang_up  # which it loses when it is closed
        self._jobs: queue.SimpleQueue[tuple[int, Callable[[], Tensor]] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._send_in_turn, name="thinwire-stream", daemon=True)

    def receive(self, source: int, most_bytes: int, size: Callable[[Tensor], int]) -> Receive:
        """Post a receive of at most ``most_bytes``, of which ``size`` reads in what arrived how many bytes it has.

        Raises:
            LostPeerError: raised here or by that function: a peer died or did not take part, or this rank failed to
                send.
        """
        buffer = torch.empty(most_bytes, dtype=torch.uint8)
        peer = self._ranks[source]
        try:
            work = dist.irecv(buffer, group=self._group, group_src=peer, tag=self._tag)
        except RuntimeError as error:
            self._fail(error)

        def wait() -> Tensor:
            try:
                with named("exchange"):
                    self._waits.wait(work, peer)
            except RuntimeError as error:
                self._fail(error)
            message = buffer[: size(buffer)]
            self._exchange._count_received(source, message.numel())
            return message

        return wait

    def send(self, target: int, make: Callable[[], Tensor]) -> None:
        """Queue a message, uint8 [k]; ``make`` is called, on another thread, when its turn comes."""
        self._jobs.put((target, make))

    def fail(self, error: Exception) -> None:
        """Have leaving the stream raise an error of a message, of which the message itself informs its receivers."""
        self._failure = self._failure or error

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._abandoned = error is not None
        self._jobs.put(None)
        if error is None:  # else the thread may wait for a peer that waits for this rank: it ends when that hangs up
            self._thread.join()
            if self._failure is not None:
                raise self._failure

    def _send_in_turn(self) -> None:
        """Send as many messages at a time as there are peers, one of whom may not be ready; more small ones."""
        try:
            in_flight: deque[tuple[dist.Work | None, int, int]] = deque()
            while (job := self._jobs.get()) is not None and not self._abandoned:
                target, make = job
                peer = self._ranks[target]
                with named("pack"):
                    data = make()
                work = dist.isend(data, group=self._group, group_dst=peer, tag=self._tag)
                in_flight.append((work, peer, data.numel()))
                self._exchange._count_sent(target, data.numel())
                while len(in_flight) >= len(self._ranks) and sum(size for *_, size in in_flight) > SMALL_BYTES:
                    self._waits.wait(*in_flight.popleft()[:2])
            for work, peer, _ in in_flight:
                self._waits.wait(work, peer)
        except BaseException as error:
            self._failure = self._failure or self._exchange._lost(error)
            self._hang_up(str(self._failure), self._failure)

    def _fail(self, error: BaseException) -> NoReturn:
        """Raise what failed here before the peers hung up, without what torch says of that as its cause; else that."""
        if self._failure is not None:
            raise self._failure
        raise self._exchange._lost(error) from error


def lost_peer(error: BaseException, rank: int, world_size: int) -> LostPeerError:
    """Return the error to raise after torch failed to move bytes; ``rank`` is the global one."""
    cause = str(error).split("This is typically")[0].split("] ", 1)[-1].strip().rstrip(".")
    for address in _ADDRESS.findall(cause):
        if address in peers_at:
            cause = cause.replace(address, f"rank {peers_at[address]}")
    order = ", or several attached models ran backward in another order" if "Timed out" in cause else ""
    return LostPeerError(
        f"rank {rank}: the exchange with the other {world_size - 1} ranks broke off, because a peer died, gave up or"
        f" did not take part within the timeout{order}: {cause}"
    )


@dataclass
class Traffic:
    """Bytes that a rank sent to other ranks and received from them; what stays on the rank is not counted."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_between_hosts_bytes: int = 0
    """Share of ``sent_bytes`` that went to ranks on other hosts, according to `Exchange.hosts`."""


_PointToPoint = tuple[dist.Work | None, int]
"""A send or a receive, and the rank of the group at the other end."""


class Exchange:
    """A group of ranks that swap bytes in collective calls: all ranks make the same calls in the same order.

    Args:
        process_group: a Gloo group that nothing else uses.
        ranks: the ranks of the group that take part, in this order; None for all of them.
        traffic: the count of bytes; None makes a new one.

    ``hang_up`` is called with the reason when a thread of a stream fails, and ``waits`` records the waits; a lane
    replaces both by its own.
    """

    hang_up: HangUp
    waits: Waits
    hosts: Sequence[int]
    """Host number of each rank; each rank has a host of its own until hosts are discovered."""
    global_ranks: Sequence[int]
    """Rank of each rank in the default process group, which is the one that logs have: messages name these.

    In a group that torch has not registered they are those that its options say."""

    def __init__(
        self, process_group: dist.ProcessGroup, ranks: Sequence[int] | None = None, traffic: Traffic | None = None
    ) -> None:
        self.process_group: dist.ProcessGroup | None = process_group
        self._is_whole = ranks is None
        self._ranks = tuple(range(process_group.size())) if ranks is None else tuple(ranks)
        self.rank = self._ranks.index(process_group.rank())
        self.world_size = len(self._ranks)
        self.hosts = range(self.world_size)
        global_ranks = _global_ranks_of(process_group)
        self.global_ranks = [global_ranks[rank] for rank in self._ranks]
        self.traffic = traffic or Traffic()
        self.hang_up = _nothing
        self.waits = Waits()

    def subset(self, ranks: Sequence[int]) -> Exchange:
        """Return the exchange of some of the ranks, including this one, over the same connections and traffic count.

        Ranks of the subset are numbered in the given order. It does not communicate. The subset has no `all_reduce`.
        """
        assert self.process_group is not None
        inner = Exchange(self.process_group, [self._ranks[rank] for rank in ranks], self.traffic)
        inner.hosts = [self.hosts[rank] for rank in ranks]
        inner.hang_up, inner.waits = self.hang_up, self.waits
        return inner

    def swap_records(self, outgoing: Sequence[Tensor]) -> list[Tensor]:
        """Send record ``outgoing[r]`` to each rank r and return what each rank sent here, in rank order.

        All records (uint8), on all ranks, have the same small length.

        Raises:
            LostPeerError: a peer died, or did not take part within the timeout.
        """
        return self.begin_records(outgoing)()

    def begin_records(self, outgoing: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin `swap_records`; return a function that completes it, before the next collective call."""
        num_bytes = outgoing[0].numel()
        if not self._is_whole or self.world_size == 1:
            return partial(self.swap, outgoing, [num_bytes] * self.world_size)
        sent = torch.stack(list(outgoing))
        received = torch.empty_like(sent)
        with Telling(self._tell):
            work = _of(self.process_group).alltoall_base(received, sent, [], [])
        return partial(self._complete_records, work, received)  # no closure: tracebacks would keep it, and so the group

    def _complete_records(self, work: dist.Work, received: Tensor) -> list[Tensor]:
        with Telling(self._tell):
            self.waits.wait(work)
        for rank in self._others():
            self._count_sent(rank, received.shape[1])
            self._count_received(rank, received.shape[1])
        return list(received)

    def swap(self, outgoing: Sequence[Tensor], receive_bytes: Sequence[int]) -> list[Tensor]:
        """Send ``outgoing[r]`` (uint8, any length) to each rank r and return what each rank sent here.

        ``receive_bytes[r]`` must be the length that rank r sends. This rank's own entry is returned without a
        copy. ``outgoing`` may be overwritten after the return; the caller owns the result.

        Every receive is posted before any send, then it sends to the ranks in turn, two at a time. Gloo announces a
        posted receive on the connection that carries the data the other way, so a receive that is posted late waits
        behind that data and the pair runs half-duplex. And when all sends start together, receivers get bursts from
        several senders while others idle. Over the wire time, on 8 hosts at 100 Mbit/s with 112 kB (1 MB) for each
        peer: all_to_all_single 1.41 (1.45), all sends at once 1.37 (1.05), two at a time 1.09 (1.02);
        benchmarks/bench_exchange.py.

        Raises:
            LostPeerError: as for `swap_records`.
        """
        others = self._others()
        incoming = [
            own if rank == self.rank else torch.empty(receive_bytes[rank], dtype=torch.uint8)
            for rank, own in enumerate(outgoing)
        ]
        self._move([(rank, outgoing[rank]) for rank in others], [(rank, incoming[rank]) for rank in reversed(others)])
        return incoming

    def swap_with(self, target: int | None, outgoing: Tensor, source: int | None, receive_bytes: int) -> Tensor:
        """Send ``outgoing`` (uint8) to one other rank and return the ``receive_bytes`` that another sends here.

        None means no peer; then ``outgoing`` or the result is empty. A rank with neither peer must call it too.

        Raises:
            LostPeerError: as for `swap_records`.
        """
        incoming = torch.empty(receive_bytes, dtype=torch.uint8)
        self._move([] if target is None else [(target, outgoing)], [] if source is None else [(source, incoming)])
        return incoming

    def _move(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive in this order, see `swap`; what is empty is not on the wire."""
        with Telling(self._tell):
            receives = [self._receive(rank, data) for rank, data in incoming if data.numel()]
            sends: deque[_PointToPoint] = deque()
            for rank, data in outgoing:
                if data.numel():
                    sends.append(self._send(rank, data))
                if len(sends) == SENDS_IN_FLIGHT:
                    self.waits.wait(*sends.popleft())
            for work, rank in (*sends, *receives):
                self.waits.wait(work, rank)
        for rank, data in outgoing:
            self._count_sent(rank, data.numel())
        for rank, data in incoming:
            self._count_received(rank, data.numel())

    def stream(self, tag: int) -> Stream:
        """Open a stream of messages, on all ranks; those that are open at once have different tags."""
        return Stream(self, tag)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a contiguous or sparse tensor over the ranks, in place, by the group's own algorithm.

        The bytes of a sparse one depend on the rows of all ranks, and are left to `count_all_reduce`.
        """
        if self.world_size == 1:
            return
        assert self._is_whole, "the native all-reduce is of the whole group"
        with Telling(self._tell):
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            self.waits.wait(_of(self.process_group).allreduce([real]))
        if not tensor.is_sparse:
            self.count_all_reduce(ring_all_reduce_bytes(tensor.numel() * tensor.element_size(), self.world_size))

    def count_all_reduce(self, moved_bytes: int) -> None:
        """Count an all-reduce in which each rank sent ``moved_bytes`` to the next one of a ring."""
        self._count_sent((self.rank + 1) % self.world_size, moved_bytes)
        self._count_received((self.rank - 1) % self.world_size, moved_bytes)

    def close(self) -> None:
        """Drop the group; nothing can be exchanged afterwards."""
        self.process_group, self.hang_up = None, _nothing

    def _others(self) -> list[int]:
        """Return all other ranks, the next one first, so that not all ranks begin with the same one."""
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

    def _lost(self, error: BaseException) -> LostPeerError:
        return lost_peer(error, self.global_ranks[self.rank], self.world_size)

    def _tell(self, error: BaseException) -> None:
        """Raise LostPeerError for an error of torch's."""
        if isinstance(error, RuntimeError):
            raise self._lost(error) from error


def _of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, whose methods work where it is not registered: functions of torch look it up to log errors."""
    assert process_group is not None, "an exchange that was closed"
    return process_group


def _global_ranks_of(process_group: dist.ProcessGroup) -> list[int]:
    with contextlib.suppress(KeyError):  # torch has not registered it
        return dist.get_process_group_ranks(process_group)
    return list(back_end_of(process_group).options.global_ranks_in_group)


def _nothing(reason: str, error: BaseException | None = None) -> None:
    del reason, error


_SPARSE_METADATA_BYTES = 9 * 8  # gathered by ProcessGroupGloo before a sparse tensor: sizes and nnz, int64


def sparse_all_reduce_bytes(held: Sequence[int], rank: int, row_bytes: int, num_tensors: int = 1) -> int:
    """Return the bytes that a rank sends in torch's own all-reduce of sparse tensors; rank r holds ``held[r]`` rows.

    Gloo gathers ids and values in a ring: a rank passes on what all but the next one hold.
    """
    if len(held) < 2:
        return 0
    passed_on = sum(held) - held[(rank + 1) % len(held)]
    return num_tensors * (len(held) - 1) * _SPARSE_METADATA_BYTES + passed_on * (8 + row_bytes)


DeviceEvent = torch.cuda.Event
"""A recorded point in the work of a device stream."""


@dataclass(frozen=True, eq=False)
class Handover:
    """Tensors whose values are complete once ``event`` is reached."""

    tensors: tuple[Tensor, ...]
    event: DeviceEvent | None = None


class Staging:
    """Transfer of tensors between the device of the gradients and the lane; here the CPU, which needs none."""

    is_host = True

    def future(self) -> Future[Any]:
        """Return a future that can be completed with a tensor of the device."""
        return Future()

    def hand_over(self, tensors: Sequence[Tensor]) -> Handover:
        """Record that the tensors were written; call it on the thread and the stream that wrote them."""
        return Handover(tuple(tensors))

    def taking(self, handover: Handover) -> AbstractContextManager[object]:
        """Return the context of a job of the lane, in which the tensors may be used and results are written."""
        return nullcontext()

    def working(self) -> AbstractContextManager[object]:
        """Return a context in which any thread may use the tensors of the job that runs."""
        return nullcontext()

    def to_host(self, *tensors: Tensor) -> list[Tensor]:
        """Return copies on the host, valid until the job ends; the lane's thread waits for them."""
        return list(tensors)

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        """Return copies on the device, for later work on the lane's stream; no thread waits for them."""
        return list(tensors)

    def all_reduce(self, tensor: Tensor, all_reduce: Callable[[Tensor], None], world_size: int) -> None:
        """Sum a contiguous tensor of the device over the ranks, in place, by ``all_reduce`` on the host."""
        all_reduce(tensor)

    def selected(self) -> AbstractContextManager[object]:
        """Return a context in which the device of the gradients is the current one of this thread."""
        return nullcontext()

    def completing(self) -> AbstractContextManager[object]:
        """Return a context, inside of `taking`, to wait for other works in, and to complete futures behind them."""
        return nullcontext()

    def stats(self) -> dict[str, float]:
        """Return the statistics of the transfers, for `Synchronizer.stats`."""
        return {}


class StagedExchange(Exchange):
    """A `Exchange` over Gloo whose all-reduce accepts dense gradients on their device."""

    def __init__(self, process_group: dist.ProcessGroup, staging: Staging) -> None:
        super().__init__(process_group)
        self._staging = staging

    def all_reduce(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu":
            super().all_reduce(tensor)
        elif self.world_size > 1:
            self._staging.all_reduce(tensor, super().all_reduce, self.world_size)
