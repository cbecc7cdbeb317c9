"""Moving bytes between the ranks of a group: all that a communication pattern needs of a network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import LostPeerError
from thinwire.sync.stream import SENDS_IN_FLIGHT, ProcessGroupStream, Stream, lost_peer
from thinwire.sync.waits import Waits


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
