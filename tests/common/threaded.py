"""A plain module with its hooks on a few ranks that are threads: all that `attach` composes, without sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from loopback import LoopbackExchange, run_ranks
from thinwire.comm.channel import Channel, Subject
from thinwire.compress.assign import Dense, assign
from thinwire.compress.base import Parameter
from thinwire.gradients.buckets import Buckets, Sums
from thinwire.gradients.compressed import CompressedSync, Statistics
from thinwire.gradients.compression import planned
from thinwire.gradients.exact import GradientSync
from thinwire.gradients.parameters import ParameterHooks, indices_of, trained_parameters
from thinwire.gradients.tables import LookupRows, tables_of
from thinwire.observe.step import Clock

GroupsByName = Sequence[Sequence[str]]


@dataclass
class LoopbackLane:
    """What hooks use of a `thinwire.comm.lane.Lane`; runs a job when it is submitted."""

    exchange: LoopbackExchange
    sequence: int = 0
    is_forked: bool = False
    is_closed: bool = False

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def world_size(self) -> int:
        return self.exchange.world_size

    @property
    def global_rank(self) -> int:
        return self.exchange.rank

    def check(self, what: str) -> None: ...

    def setting_up(self) -> AbstractContextManager[None]:
        return nullcontext()

    def channel(self, subject: Subject) -> Channel:
        self.sequence += 1
        return Channel(self.exchange, subject, self.sequence)

    def agree(self, what: str, numbers: Sequence[float]) -> list[list[float]]:
        return self.channel(Subject(what, "")).gather_numbers(numbers)

    def submit(self, job: Callable[..., Any], begin: Callable[[Any], Any] | None = None) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(job(self) if begin is None else job(self, begin(self)))
        return future


class Network(nn.Module):
    """Matrices of different sizes, biases, and a layer with small gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 64)
        self.middle = nn.Linear(64, 33)
        self.quiet = nn.Linear(33, 40)
        self.last = nn.Linear(33, 40)


ALONE = tuple((name,) for name, _ in reversed(list(Network().named_parameters())))
ONE = (tuple(name for (name,) in ALONE),)
PAIRS = (ALONE[0] + ALONE[1], ALONE[2] + ALONE[3] + ALONE[4], ALONE[5] + ALONE[6] + ALONE[7])


@dataclass
class Rank:
    """One rank of a training without an optimizer: gradients in, means out."""

    exchange: LoopbackExchange
    dense: Dense = "native"
    groups: GroupsByName | None = None
    module: nn.Module = field(default_factory=Network)
    loudness: float = 1.0

    def __post_init__(self) -> None:
        self.lane: Any = LoopbackLane(self.exchange)
        self.clock = Clock()
        gradients = GradientSync("auto")
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self.sync: CompressedSync | None = None
        tables = {id(table) for table in tables_of(self.module)}
        named = [(name, entry) for name, entry in self.module.named_parameters() if id(entry) not in tables]
        self.names = tuple(name for name, _ in named)
        parameters = [Parameter(name, tuple(entry.shape), entry.dtype) for name, entry in named]
        plans = planned(assign(self.dense, parameters), parameters, self.exchange.world_size)
        if plans:
            self.sync = CompressedSync(plans, self.lane, Statistics(gradients.records, self.exchange.world_size))
        lookups = LookupRows(self.module, {id(entry) for _, entry in named}, is_called=True)
        self.buckets = Buckets(Sums(gradients, compressed=self.sync), lookups, names, self.lane, clock=self.clock)
        trained = trained_parameters(self.module, lookups, names)
        groups = None if self.groups is None else indices_of(trained, self.groups)
        self.hooks = ParameterHooks(trained, self.buckets, lookups, self.lane, lambda: True, self.clock, groups)

    def regroup(self, groups: GroupsByName | None) -> None:
        self.hooks.regroup(None if groups is None else indices_of(self.hooks.trained, groups))

    def local(self, step: int) -> dict[str, Tensor]:
        """What backward gives on this rank, unsynchronized."""
        with self.hooks.no_sync():
            self._backward(step)
        return self._taken()

    def step(self, step: int) -> dict[str, Tensor]:
        """The means."""
        self.clock.start()
        self._backward(step)
        self.hooks.finish()
        self.hooks.take_in_flight()
        self.times = self.clock.finish()
        self.hooks.deliver()
        if self.sync is not None:
            self.sync.finish_step()
        return self._taken()

    def _backward(self, step: int) -> None:
        """Drawn gradients, in the reverse order of registration. (Those of a matrix product depend on the alignment of
        its memory, in the last bit.)"""
        data = torch.Generator().manual_seed(1000 * step + self.exchange.rank)
        loss = torch.zeros((), dtype=torch.float64)
        for name, parameter in self.module.named_parameters():
            scale = 1e-3 if name.startswith("quiet") else 1.0
            gradient = torch.randn(parameter.shape, generator=data, dtype=parameter.dtype) * scale * self.loudness
            loss = loss + (parameter * gradient).sum().double()
        loss.backward()

    def _taken(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.module.named_parameters():
            assert parameter.grad is not None
            found[name], parameter.grad = parameter.grad.clone(), None
        return found


def on_ranks(world_size: int, function: Callable[[LoopbackExchange], Any]) -> list[Any]:
    """The results of all ranks, whose modules are drawn alike."""

    def seeded(exchange: LoopbackExchange) -> Any:
        torch.manual_seed(0)
        return (function(exchange),)

    return [outcome.get()[0] for outcome in run_ranks(world_size, seeded)]
