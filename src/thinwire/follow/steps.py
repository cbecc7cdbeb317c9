"""The end of a step: statistics, traces and decisions that are due then.

A trace holds measured steps as events of the same form as those that a plan predicts.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from torch import nn

from thinwire.comm.lane import Lane
from thinwire.follow.dense import DenseChoice
from thinwire.follow.describe import first_step
from thinwire.follow.execution import Execution
from thinwire.fuse.timeline import CHANNEL, COMPUTE
from thinwire.gradients.buckets import Pending
from thinwire.gradients.collective import CollectiveTables
from thinwire.gradients.compressed import CompressedSync
from thinwire.gradients.ddp import Plug, is_joining
from thinwire.gradients.exact import GradientSync, NativeAllReduce
from thinwire.gradients.lossless import LosslessSync
from thinwire.observe.step import Clock, JobTimes, Phase, StepTimes
from thinwire.observe.trace import Event, chrome_trace

PHASES = "phases"
"""Name of the track below the channel's, which shows encoding, sending and decoding apart."""

_NAMES = {Phase.COMPRESS: "encode", Phase.EXCHANGE: "wire", Phase.DECOMPRESS: "decode"}


class Trace:
    """The recorded events of one rank over some steps, see `thinwire.Synchronizer.trace`.

    Times count from the start of the first step's backward, which is the end of the model's forward.

    Args:
        stop: ends the recording.
        steps: largest number of steps; None for all until `stop`.
        predicted: returns the predicted events of a step, if they are known; called when the trace is saved.
    """

    def __init__(self, stop: Callable[[], None], steps: int | None, predicted: Callable[[], Sequence[Event]]) -> None:
        self._stop, self._left, self._predicted = stop, steps, predicted
        self.steps: list[tuple[Event, ...]] = []
        self._origin: float | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """Events of all steps."""
        return tuple(event for step in self.steps for event in step)

    def add(self, step: StepTimes) -> None:
        """Record a step that has ended."""
        if self._origin is None:
            self._origin = step.started
        self.steps.append(tuple(events_of(step, self._origin)))
        if self._left is not None and len(self.steps) >= self._left:
            self._stop()

    def stop(self) -> None:
        """Record no further steps."""
        self._stop()

    def save(self, path: str | Path, predicted: Sequence[Event] | None = None) -> None:
        """Write a Chrome trace, which opens in https://ui.perfetto.dev: predicted and measured steps side by side.

        Args:
            predicted: predicted events; None for those of the synchronizer, if it has measured a profile.
        """
        expected = self._predicted() if predicted is None else predicted
        processes = {"predicted": expected} if expected else {}
        Path(path).write_text(json.dumps(chrome_trace({**processes, "measured": self.events})), encoding="utf-8")

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def events_of(step: StepTimes, origin: float = 0.0) -> Iterator[Event]:
    """Yield backward of each gradient on the compute track, each job on the channel's, and its phases below."""
    before = step.started
    for name, ready in step.ready.items():
        yield Event(f"backward {name}", COMPUTE, before - origin, ready - before)
        before = ready
    if step.ended > before:
        yield Event("wait for synchronization", COMPUTE, before - origin, step.ended - before)
    for job in step.jobs:
        if job.ended:
            yield Event(f"communicate {job.load.name}", CHANNEL, job.started - origin, job.seconds, _about(job))
            for phase, started, ended in job.phases:
                yield Event(_NAMES[phase], PHASES, started - origin, ended - started)


def _about(job: JobTimes) -> dict[str, float]:
    return {
        "bytes": job.load.size_bytes,
        "compressed tensors": job.load.num_compressed,
        "waited seconds": max(0.0, job.started - job.submitted),
    }


logger = logging.getLogger("thinwire")


class Steps:
    """The statistics and traces of a model's steps, which hooks of the model hold; it does not keep the model alive.

    Args:
        num_parameters: number of parameters of the model, for the log.
        lanes: that of all ranks first; that of gradients, or of FSDP's shards, last.
    """

    def __init__(
        self, model: nn.Module, num_parameters: int, lanes: Sequence[Lane], gradients: GradientSync, clock: Clock
    ) -> None:
        self._model, self._num_parameters = weakref.ref(model), num_parameters
        self._lanes, self._gradients, self._clock = lanes, gradients, clock
        self.compressed: CompressedSync | None = None
        self.execution: Execution | None = None
        self.lossless: LosslessSync | None = None
        self.choice: DenseChoice | None = None
        self.trace: Trace | None = None
        self.plug: Plug | None = None
        self.native: NativeAllReduce | None = None
        self.collective: CollectiveTables | None = None
        self.after_first: Callable[[], None] | None = None  # called once
        self.in_flight: list[Pending] = []
        self.exposed_seconds = 0.0
        self.count = 0

    def finish(self, counts: bool = True) -> None:
        """End a step when backward has nothing left to compute: all waiting in here is exposed communication."""
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
            self.native.finish_step(self._lanes[-1])
        if self.collective is not None:
            self.collective.finish_step()
        self._gradients.finish_step()
        if self.compressed is not None:
            self.compressed.finish_step()
        self.count += counts
        if self.after_first is not None and not is_joining(self._model()):
            after_first, self.after_first = self.after_first, None
            after_first()
        if counts and self.count == 1 and self._lanes[0].rank == 0:
            logger.info("%s", self._first_step())
        if self.trace is not None:
            self.trace.add(times)
        if self.execution is not None and not is_joining(self._model()):
            self.execution.finish_step(times)
        if self.choice is not None and counts and not is_joining(self._model()):
            self.choice.finish_step()

    def start_trace(self, steps: int | None) -> Trace:
        """Record this number of steps, or until the trace is stopped; see `thinwire.Synchronizer.trace`."""
        if self.trace is not None:
            raise ValueError("a trace is being recorded already: stop() it first")
        self.trace = trace = Trace(self._stop_trace, steps, self._predicted_events)
        if self.compressed is not None:
            self.compressed.stopwatch.listener = self._clock.phase
        if self.lossless is not None:
            self.lossless.listener = self._clock.phase
        return trace

    def _stop_trace(self) -> None:
        self.trace = None
        if self.compressed is not None:
            self.compressed.stopwatch.listener = None
        if self.lossless is not None:
            self.lossless.listener = None

    def _predicted_events(self) -> Sequence[Event]:
        return () if self.execution is None else self.execution.predicted_events()

    def _first_step(self) -> str:
        records = list(self._gradients.records.values())
        sent = sum(lane.exchange.traffic.sent_bytes for lane in self._lanes)
        return first_step(records, self._num_parameters, sent, self._lanes[0].world_size)
