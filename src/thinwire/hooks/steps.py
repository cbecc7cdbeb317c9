"""What is due when a synchronized backward pass has ended, and how many of them there were."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

from torch import nn

from thinwire.hooks.buckets import Pending
from thinwire.hooks.clock import Clock
from thinwire.hooks.compressed import CompressedSync
from thinwire.hooks.describe import first_step
from thinwire.hooks.execution import Execution
from thinwire.hooks.gradients import GradientSync
from thinwire.hooks.native import NativeAllReduce
from thinwire.hooks.plug import Plug, is_joining
from thinwire.hooks.tracing import Trace
from thinwire.lane import Lane
from thinwire.observe.trace import Event

logger = logging.getLogger("thinwire")


class Steps:
    """The steps of a model, which it does not keep alive: hooks of the model hold this object.

    Args:
        num_parameters: of the model, for the log.
    """

    def __init__(
        self, model: nn.Module, num_parameters: int, lane: Lane, gradients: GradientSync, clock: Clock
    ) -> None:
        self._model, self._num_parameters = weakref.ref(model), num_parameters
        self._lane, self._gradients, self._clock = lane, gradients, clock
        self.compressed: CompressedSync | None = None
        self.execution: Execution | None = None
        self.trace: Trace | None = None
        self.plug: Plug | None = None
        self.native: NativeAllReduce | None = None
        self.in_flight: list[Pending] = []
        self.exposed_seconds = 0.0
        self.count = 0

    def finish(self, counts: bool = True) -> None:
        """Runs when backward has nothing left to compute: what is waited for here is exposed communication."""
        assert self.plug is not None
        started = self.plug.finish()
        in_flight = self.in_flight.copy()
        self.in_flight.clear()
        for pending in in_flight:
            pending.wait()
        times = self._clock.finish()
        self.exposed_seconds += times.ended - started
        self.plug.deliver()
        if self.native is not None:
            self.native.finish_step(self._lane)
        self._gradients.finish_step()
        if self.compressed is not None:
            self.compressed.finish_step()
        self.count += counts
        if counts and self.count == 1 and self._lane.rank == 0:
            logger.info("%s", self._first_step())
        if self.trace is not None:
            self.trace.add(times)
        if self.execution is not None and not is_joining(self._model()):
            self.execution.finish_step(times)

    def start_trace(self, steps: int | None) -> Trace:
        """Record so many steps, or until it is stopped; see `thinwire.Synchronizer.trace`."""
        if self.trace is not None:
            raise ValueError("a trace is being recorded already: stop() it first")
        self.trace = trace = Trace(self._stop_trace, steps, self._predicted_events)
        if self.compressed is not None:
            self.compressed.stopwatch.listener = self._clock.phase
        return trace

    def _stop_trace(self) -> None:
        self.trace = None
        if self.compressed is not None:
            self.compressed.stopwatch.listener = None

    def _predicted_events(self) -> Sequence[Event]:
        return () if self.execution is None else self.execution.predicted_events()

    def _first_step(self) -> str:
        records = list(self._gradients.records.values())
        sent = self._lane.exchange.traffic.sent_bytes
        return first_step(records, self._num_parameters, sent, self._lane.world_size)
