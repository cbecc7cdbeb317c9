"""Moving bytes between the ranks of a group: all that a communication pattern needs of a network."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import LostPeerError

SENDS_IN_FLIGHT = 2


@dataclass
class Traffic:
    """Bytes that a rank handed over for other ranks, and got from them. What stays on the rank is not counted."""

    sent_bytes: int = 0
    received_bytes: int = 0


class Exchange(Protocol):
    """A group of ranks that can swap bytes. Calls are collective: all ranks make the same ones in the same order."""

    rank: int
    world_size: int
    traffic: Traffic

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

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place, by the group's own algorithm."""
        ...

    def close(self) -> None:
        """Let go of the group. Nothing can be exchanged afterwards."""
        ...


class ProcessGroupExchange:
    """An `Exchange` over a torch process group of CPU tensors."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group: dist.ProcessGroup | None = process_group
        self.rank = process_group.rank()
        self.world_size = process_group.size()
        self.traffic = Traffic()

    def swap_records(self, outgoing: Sequence[Tensor]) -> list[Tensor]:
        sent = torch.stack(list(outgoing))
        received = torch.empty_like(sent)
        if self.world_size == 1:
            return [outgoing[0]]
        with self._losing_peers():
            dist.all_to_all_single(received, sent, group=self.process_group)
        moved = (self.world_size - 1) * sent.shape[1]
        self._count(moved, moved)
        return list(received)

    def swap(self, outgoing: Sequence[Tensor], receive_bytes: Sequence[int]) -> list[Tensor]:
        """Every receive is posted before any send, and sends go round the ranks, two at a time.

        Gloo announces a posted receive on the connection that carries the data the other way, so a receive that
        is posted late waits behind that data and the pair runs half-duplex. And when all sends start together,
        receivers get bursts from several senders while others idle. Over the wire time, on 8 hosts at 100 Mbit/s
        with 112 kB (1 MB) for each peer: all_to_all_single 1.41 (1.45), all sends at once 1.37 (1.05), two at a
        time 1.09 (1.02); benchmarks/bench_exchange.py.
        """
        others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        incoming = [
            own if rank == self.rank else torch.empty(receive_bytes[rank], dtype=torch.uint8)
            for rank, own in enumerate(outgoing)
        ]
        with self._losing_peers():
            receives = [
                dist.irecv(incoming[rank], group=self.process_group, group_src=rank)
                for rank in reversed(others)
                if incoming[rank].numel()
            ]
            sends: deque[dist.Work | None] = deque()
            for rank in others:
                if outgoing[rank].numel():
                    sends.append(dist.isend(outgoing[rank], group=self.process_group, group_dst=rank))
                if len(sends) == SENDS_IN_FLIGHT:
                    _wait(sends.popleft())
            for work in (*sends, *receives):
                _wait(work)
        self._count(sum(outgoing[rank].numel() for rank in others), sum(receive_bytes[rank] for rank in others))
        return incoming

    def swap_with(self, target: int | None, outgoing: Tensor, source: int | None, receive_bytes: int) -> Tensor:
        """The receive is posted before the send, as in `swap`."""
        incoming = torch.empty(receive_bytes, dtype=torch.uint8)
        works = []
        with self._losing_peers():
            if source is not None and receive_bytes:
                works.append(dist.irecv(incoming, group=self.process_group, group_src=source))
            if target is not None and outgoing.numel():
                works.append(dist.isend(outgoing, group=self.process_group, group_dst=target))
            for work in works:
                if work is not None:
                    work.wait()
        self._count(outgoing.numel(), receive_bytes)
        return incoming

    def all_reduce(self, tensor: Tensor) -> None:
        if self.world_size == 1:
            return
        with self._losing_peers():
            dist.all_reduce(tensor, group=self.process_group)
        moved = ring_all_reduce_bytes(tensor.numel() * tensor.element_size(), self.world_size)
        self._count(moved, moved)

    def close(self) -> None:
        self.process_group = None

    def _count(self, sent_bytes: int, received_bytes: int) -> None:
        self.traffic.sent_bytes += sent_bytes
        self.traffic.received_bytes += received_bytes

    @contextmanager
    def _losing_peers(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            cause = str(error).split("This is typically")[0].split("] ", 1)[-1].strip().rstrip(".")
            raise LostPeerError(
                f"rank {self.rank}: the exchange with the other {self.world_size - 1} ranks broke off, because a"
                f" peer died or did not take part within the timeout: {cause}"
            ) from error


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def ring_all_reduce_bytes(tensor_bytes: int, world_size: int) -> int:
    """Bytes that a rank sends in a ring all-reduce: 2 (n - 1) / n of the tensor, rounded up to whole bytes."""
    return -(-2 * (world_size - 1) * tensor_bytes // world_size)
