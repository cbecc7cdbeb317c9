"""`Collectives` of ranks that are threads of one process, over a `loopback.Hub`, with faults on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from loopback import LoopbackExchange, run_ranks
from thinwire.comm.collectives import Collectives
from thinwire.comm.process_group import Traffic

T = TypeVar("T")
Tamper = Callable[[str, int, Tensor], None]
"""(name of a collective, number of the call, what this rank receives), which it may write to."""


class LoopbackCollectives(Collectives):
    """One rank's end; holds callers to the contract of the collectives of torch."""

    def __init__(self, exchange: LoopbackExchange, tamper: Tamper | None = None) -> None:
        self._meet, self._tamper = exchange._meet, tamper
        self.rank, self.world_size = exchange.rank, exchange.world_size
        self.global_ranks = self.hosts = range(self.world_size)
        self.traffic, self.host_waits = Traffic(), 0
        self.calls: list[str] = []

    def _all_to_all(self, incoming: Tensor, outgoing: Tensor, receive_sizes: list[int], send_sizes: list[int]) -> None:
        assert outgoing.dim() == incoming.dim() == 1
        assert outgoing.dtype == incoming.dtype == torch.uint8
        assert outgoing.is_contiguous()
        assert sum(send_sizes) == outgoing.numel()
        posted = self._posted("all_to_all", (outgoing.clone(), send_sizes))
        pieces = [data.split(sizes)[self.rank] for data, sizes in posted]
        assert [piece.numel() for piece in pieces] == receive_sizes, "a rank sends other sizes than are received"
        self._arrived(incoming, torch.cat(pieces))

    def _all_gather(self, incoming: Tensor, outgoing: Tensor) -> None:
        posted = self._posted("all_gather", outgoing.clone())
        assert {piece.numel() for piece in posted} == {outgoing.numel()}, "an all-gather is of equal sizes"
        self._arrived(incoming, torch.cat(posted))

    def _all_reduce(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        posted = self._posted("all_reduce", tensor.clone())
        total = posted[0].clone()
        for piece in posted[1:]:
            total += piece
        tensor.copy_(total)

    def _posted(self, name: str, item: T) -> list[T]:
        self.calls.append(name)
        posted = self._meet((name, item))
        assert {other for other, _ in posted} == {name}, "ranks call different collectives"
        return [piece for _, piece in posted]

    def _arrived(self, incoming: Tensor, data: Tensor) -> None:
        incoming.copy_(data)
        if self._tamper is not None:
            self._tamper(self.calls[-1], len(self.calls) - 1, incoming)


def run_collectives(
    world_size: int, function: Callable[[LoopbackCollectives], T], tamper: Callable[[int], Tamper] | None = None
) -> list[T | Exception]:
    """What each rank's function returned or raised; a rank leaves after a failure that not all raise at one point."""

    def run(exchange: LoopbackExchange) -> Any:
        return (function(LoopbackCollectives(exchange, tamper and tamper(exchange.rank))),)

    return [outcome.error or outcome.get()[0] for outcome in run_ranks(world_size, run)]


def results(outcomes: Sequence[T | Exception]) -> list[T]:
    """The results of all ranks; raises the first error."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return list(outcomes)  # type: ignore[arg-type]
