"""The interface of a reduction, which averages the compressed gradients of all ranks to the same bits on each."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor
from torch.profiler import record_function

from thinwire.compress.base import Compressor, Parameter, Payload, State
from thinwire.compress.state import salted
from thinwire.compress.wrappers import core_of
from thinwire.observe.step import Phase, enabled

T = TypeVar("T")
Plan = tuple[Compressor, Parameter]


@dataclass
class Stopwatch:
    """A stopwatch of phases. A second counts for the innermost phase only: encoding inside an exchange is encoding.

    ``listener`` is called with the phase, start and end (`time.perf_counter`) of each stretch in one phase.
    """

    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    listener: Callable[[Phase, float, float], None] | None = None
    _running: list[Phase] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Time a phase, and show it to `torch.profiler`."""
        self._book()
        self._running.append(phase)
        try:
            with record_function(phase.value) if enabled() else nullcontext():
                yield
        finally:
            self._book()
            self._running.pop()

    def _book(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
            if self.listener is not None:
                self.listener(self._running[-1], self._since, now)
        self._since = now


class Arrived(Protocol):
    """A message of a rank that is not verified yet."""

    def read(self, parse: Callable[[Tensor], T]) -> T:
        """Verify the bytes (uint8 [k], 8-byte aligned), and return the result of ``parse``.

        Raises:
            CorruptMessageError: bytes that changed on the way, or that ``parse`` refused; it names the sender.
        """


class Peers(Protocol):
    """The ranks, as a reduction sees them. Calls are collective: all ranks make the same ones in the same order.

    A failure while a rank prepares its message is raised there, and as another error on the other ranks.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def hosts(self) -> Sequence[Sequence[int]]:
        """Ranks of each host; every rank is on exactly one."""

    def among(self, ranks: Sequence[int]) -> Peers:
        """Return these ranks, this one among them, numbered in the order given; no `all_reduce`, no `sparse_sum`."""

    def attempt(self, prepare: Callable[[], T]) -> T:
        """Return the result of ``prepare`` before an `all_reduce`, which cannot notify peers of a failure."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a contiguous floating-point tensor [k] over the ranks, in place."""

    def all_gather(self, prepare: Callable[[], Tensor], max_bytes: int) -> Sequence[Arrived]:
        """Gather the message (uint8, a multiple of 8 bytes, at most ``max_bytes``) of each rank, in rank order."""

    def all_to_all(self, prepare: Callable[[], Sequence[Tensor]], max_bytes: int) -> Sequence[Arrived]:
        """Return the message that each rank, in rank order, prepared for this one."""

    def sparse_sum(
        self, prepare: Callable[[], tuple[Tensor, Tensor]], numel: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Add up sparse vectors of ``numel`` elements exactly, by the scheme of the peers, and multiply by ``scale``.

        Both arguments and result are ids (int64 [k], strictly increasing) and values [k].
        """


@dataclass(frozen=True, eq=False)
class Task:
    """One gradient to be averaged.

    Args:
        compressor, parameter: the same on all ranks.
        gradient: a finite, contiguous tensor of ``parameter.shape`` and working dtype; not written to.
        state: the state that `Reduction.init` made; updated in place.
    """

    compressor: Compressor
    parameter: Parameter
    gradient: Tensor
    state: State

    @property
    def plan(self) -> Plan:
        return self.compressor, self.parameter

    def compress(self) -> Payload:
        """Return the payload of this step."""
        return self.compressor.compress(self.gradient, self.parameter, self.state)

    def finish(self, mean: Tensor) -> None:
        """Update the state from the mean, at the end of the step."""
        self.compressor.finish(mean, self.parameter, self.state)


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a task.

    Args:
        mean: mean over the ranks, of the shape and dtype of the gradient; the same bits on every rank.
        payload_bytes: bytes of this rank's payloads, each counted once, without headers of the reduction.
        density: fraction of the elements that this rank sent.
    """

    mean: Tensor
    payload_bytes: int
    density: float = 1.0


class Reduction(ABC):
    """An exchange that averages payloads. Its methods are called on all ranks with the same plans in the same order."""

    name: str
    scheme: object = None
    """The scheme of `thinwire.sums` that adds selected elements up, see `Peers.sparse_sum`."""

    @abstractmethod
    def check(self, compressor: Compressor, parameter: Parameter) -> None:
        """Raise ValueError, saying what to do, if payloads of this compressor cannot be averaged this way."""

    def init(self, compressor: Compressor, parameter: Parameter, rank: int, world_size: int) -> State:
        """Return the state of a parameter before the first step, with ``salt`` entries set to the rank."""
        return salted(compressor.init(parameter), rank)

    @abstractmethod
    def run(self, tasks: Sequence[Task], peers: Peers, stopwatch: Stopwatch) -> list[Result]:
        """Average the gradients of all tasks, with one message to each peer for all of them.

        Raises:
            CorruptMessageError, PeerError: see `Peers`.
        """

    def sent_bytes(self, plans: Sequence[Plan], rank: int, world_size: int) -> int | None:
        """Return the bytes that `run` will send, headers included, or None if they depend on the gradients."""
        return 0 if world_size == 1 else None


class OwnReduction(Reduction):
    """A reduction of one method, which needs it, and which no other method can use."""

    method: type[Compressor]
    title: str  # name of the method in its paper

    def check(self, compressor: Compressor, parameter: Parameter) -> None:
        if not isinstance(core_of(compressor), self.method):
            raise ValueError(
                f"{compressor.name} is not {self.title}, whose exchange this is (parameter {parameter.name!r}): use"
                " it without .by()"
            )
