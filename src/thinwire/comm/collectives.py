"""`Collectives`: exchanges of tensors on their device, by the collectives of the model's own process group.

A communicator of NCCL takes calls from one thread, in the same order on all ranks: the thread that issues the buckets
of DDP. So there are no streams, no headers and no lane here: each call is one collective on the current stream, and
the host learns nothing before it asks (`Collectives.numbers`). The same calls run over Gloo with CPU tensors.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.hosts import host_identity, numbered
from thinwire.comm.process_group import Traffic, lost_peer, ring_all_reduce_bytes
from thinwire.errors import LostPeerError, in_exchange
from thinwire.observe.step import named

MOST_PADDING = 1.25
"""Largest ratio of padded to exact bytes of an all-gather. A ring passes each payload on and crosses the link of a host
once, where direct sends cross it once for each rank there; but it needs equal sizes, and so memory for the padding."""


def is_padded(sizes: Sequence[int]) -> bool:
    """Return whether `Collectives.all_gather` pads payloads of these bytes to equal size, instead of sending directly.

    Example:
        >>> is_padded([8, 10]), is_padded([0, 100])
        (True, False)
    """
    return len(sizes) * max(sizes) <= MOST_PADDING * sum(sizes)


def gathered_bytes(sizes: Sequence[int], rank: int) -> int:
    """Return the bytes that a rank sends in `Collectives.all_gather`, where rank r has ``sizes[r]`` bytes."""
    return (len(sizes) - 1) * (max(sizes) if is_padded(sizes) else sizes[rank])


def _taken(like: Tensor, num_bytes: int, room: Tensor | None) -> Tensor:
    """Return memory of some bytes: of ``room``, if it has as many, or else new memory."""
    return room[:num_bytes] if room is not None and room.numel() >= num_bytes else like.new_empty(num_bytes)


class Numbers(NamedTuple):
    """Records int64 [world_size, k] that this rank sent to each rank and received from each, on the host."""

    sent: Tensor
    received: Tensor
    on_device: Tensor
    """``received``, on the device."""


class Collectives:
    """The ranks of a process group, which make the same calls in the same order, from the thread that issues buckets.

    Args:
        process_group: the group of the model: NCCL with CUDA tensors, or Gloo with CPU tensors.
        traffic: the count of bytes; None makes a new one.

    Attributes:
        hosts: the host number of each rank; each rank has a host of its own until somebody says otherwise.
        host_waits: how often the host has waited for the device: once in each `numbers`.
        lost: called with torch's error of a lost peer; returns the error that all ranks raise, if it is known.

    All methods raise LostPeerError if torch says that a peer died or did not take part within the timeout. NCCL says
    so later, from its watchdog.

    Example:
        >>> exchange = Collectives(dist.group.WORLD)                                      # doctest: +SKIP
        >>> exchange.numbers(torch.zeros(exchange.world_size, 3, dtype=torch.int64)).received  # doctest: +SKIP
    """

    hosts: Sequence[int]

    def __init__(self, process_group: dist.ProcessGroup, traffic: Traffic | None = None) -> None:
        self._group = weakref.ref(process_group)  # a group that its owner has destroyed is not kept alive
        self.rank, self.world_size = process_group.rank(), process_group.size()
        self.global_ranks: Sequence[int] = dist.get_process_group_ranks(process_group)
        self.hosts = range(self.world_size)
        self.traffic = traffic or Traffic()
        self.host_waits = 0
        self.lost: Callable[[BaseException], LostPeerError | None] = lambda error: None

    def numbers(self, mine: Tensor) -> Numbers:
        """Send row ``mine[r]`` to each rank r; the host waits for the one copy of what was sent and received.

        Args:
            mine: int64 [world_size, k], contiguous, on the device; k is the same on all ranks.
        """
        sizes = [mine[0].nbytes] * self.world_size
        received = self.all_to_all(mine.view(-1).view(torch.uint8), sizes, sizes).view(torch.int64)
        self.host_waits += 1
        both = torch.cat([mine.view(-1), received]).cpu().view(2, *mine.shape)
        return Numbers(both[0], both[1], received.view(mine.shape))

    def all_to_all(
        self, outgoing: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], room: Tensor | None = None
    ) -> Tensor:
        """Send ``send_sizes[r]`` bytes of ``outgoing`` (uint8, in rank order) to each rank r.

        Args:
            receive_sizes: the bytes that each rank sends here, which must be its ``send_sizes`` for this rank.
            room: uint8, memory for what arrives, which is used if it has the size.

        Returns:
            uint8 [sum(receive_sizes)], in rank order, on the device of ``outgoing``.
        """
        if self.world_size == 1:
            return outgoing
        incoming = _taken(outgoing, sum(receive_sizes), room)
        self._run(self._all_to_all, incoming, outgoing, list(receive_sizes), list(send_sizes))
        for peer in range(self.world_size):
            if peer != self.rank:
                self._count(peer, send_sizes[peer], receive_sizes[peer])
        return incoming

    def all_gather(self, outgoing: Tensor, sizes: Sequence[int], room: Tensor | None = None) -> list[Tensor]:
        """Send ``outgoing`` (uint8 [sizes[rank]]) to all ranks; return what each rank sent, in rank order.

        Sizes of about the same bytes are padded to the largest and gathered in a ring, others are sent directly: see
        `is_padded`. All ranks know all sizes, so they decide alike.
        """
        if self.world_size == 1 or not sum(sizes):
            return [outgoing] * self.world_size
        if not is_padded(sizes):
            own, copies = [sizes[self.rank]] * self.world_size, outgoing.repeat(self.world_size)
            return list(self.all_to_all(copies, own, sizes, room).split(list(sizes)))
        largest = max(sizes)
        padded = outgoing
        if outgoing.numel() < largest:
            padded = outgoing.new_empty(largest)  # nobody reads the padding
            padded[: outgoing.numel()] = outgoing
        incoming = _taken(outgoing, self.world_size * largest, room)
        self._run(self._all_gather, incoming, padded)
        moved = (self.world_size - 1) * largest
        self._count((self.rank + 1) % self.world_size, moved, moved)
        return [piece[:size] for piece, size in zip(incoming.split(largest), sizes, strict=True)]

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a contiguous dense tensor over the ranks, in place, by the group's own algorithm."""
        if self.world_size > 1 and tensor.numel():
            self._run(self._all_reduce, tensor)
            moved = ring_all_reduce_bytes(tensor.nbytes, self.world_size)
            self._count((self.rank + 1) % self.world_size, moved, moved)

    def texts(self, text: str, device: torch.device, most: int = 4096) -> list[str]:
        """Return the text of each rank, cut to some bytes; the host waits. For errors, whose bytes are not counted.

        Example:
            >>> exchange.texts("out of memory", torch.device("cuda"))  # doctest: +SKIP
            ['', 'out of memory']
        """
        mine = torch.frombuffer(bytearray(text.encode()[:most].ljust(most, b"\0")), dtype=torch.uint8)
        outgoing = mine.to(device)
        incoming = outgoing.new_empty(self.world_size * most)
        self._run(self._all_gather, incoming, outgoing)
        data = incoming.cpu().numpy().tobytes()
        return [data[at : at + most].rstrip(b"\0").decode(errors="replace") for at in range(0, len(data), most)]

    def find_hosts(self, device: torch.device) -> None:
        """Set ``hosts`` to the hosts that ranks say they are on; the host waits."""
        self.hosts = numbered(self.texts(host_identity(), device))

    # What a test replaces.

    def _all_to_all(self, incoming: Tensor, outgoing: Tensor, receive_sizes: list[int], send_sizes: list[int]) -> None:
        dist.all_to_all_single(incoming, outgoing, receive_sizes, send_sizes, group=self._group())

    def _all_gather(self, incoming: Tensor, outgoing: Tensor) -> None:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(incoming, outgoing, group=self._group())

    def _all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group())

    def _run(self, collective: Callable[..., None], *args: object) -> None:
        try:
            with named("exchange"):
                collective(*args)
        except RuntimeError as error:
            lost = self.lost(error) or lost_peer(error, self.global_ranks[self.rank], self.world_size)
            raise in_exchange(lost) from error

    def _count(self, peer: int, sent: int, received: int) -> None:
        self.traffic.sent_bytes += sent
        self.traffic.received_bytes += received
        if self.hosts[peer] != self.hosts[self.rank]:
            self.traffic.sent_between_hosts_bytes += sent
