"""Moving bytes between the ranks of a group: all that a communication pattern needs of a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import LostPeerError


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

    def swap(self, outgoing: Sequence[Tensor], receive_bytes: Sequence[int]) -> list[Tensor]:
        """Send ``outgoing[r]`` (uint8) to each rank r and return what each rank sent here.

        ``receive_bytes[r]`` must be the length that rank r sends. The entry of the own rank is returned as it
        is, without a copy. The returned tensors are the caller's.

        Raises:
            LostPeerError: a peer died, or did not take part within the timeout.
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

    def swap(self, outgoing: Sequence[Tensor], receive_bytes: Sequence[int]) -> list[Tensor]:
        own = outgoing[self.rank]
        send_sizes = [0 if rank == self.rank else part.numel() for rank, part in enumerate(outgoing)]
        receive_sizes = [0 if rank == self.rank else size for rank, size in enumerate(receive_bytes)]
        sent = torch.cat([part for rank, part in enumerate(outgoing) if rank != self.rank] or [own[:0]])
        received = torch.empty(sum(receive_sizes), dtype=torch.uint8)
        self._run(lambda: dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=self.process_group))
        self._count(sum(send_sizes), sum(receive_sizes))
        incoming = list(received.split(receive_sizes))
        incoming[self.rank] = own
        return incoming

    def all_reduce(self, tensor: Tensor) -> None:
        self._run(lambda: dist.all_reduce(tensor, group=self.process_group))
        moved = ring_all_reduce_bytes(tensor.numel() * tensor.element_size(), self.world_size)
        self._count(moved, moved)

    def close(self) -> None:
        self.process_group = None

    def _count(self, sent_bytes: int, received_bytes: int) -> None:
        self.traffic.sent_bytes += sent_bytes
        self.traffic.received_bytes += received_bytes

    def _run(self, collective: Callable[[], object]) -> None:
        if self.world_size == 1:
            return
        try:
            collective()
        except RuntimeError as error:
            cause = str(error).split("This is typically")[0].split("] ", 1)[-1].strip().rstrip(".")
            raise LostPeerError(
                f"rank {self.rank}: the exchange with the other {self.world_size - 1} ranks broke off, because a"
                f" peer died or did not take part within the timeout: {cause}"
            ) from error


def ring_all_reduce_bytes(tensor_bytes: int, world_size: int) -> int:
    """Bytes that a rank sends in a ring all-reduce: 2 (n - 1) / n of the tensor, rounded up to whole bytes."""
    return -(-2 * (world_size - 1) * tensor_bytes // world_size)
