"""The end of a step: statistics, traces and decisions that are due then.

A trace holds measured steps as events of the same form as those that a plan predicts.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from thinwire.comm.lane import Lane
from thinwire.errors import logger, warn
from thinwire.gradients.buckets import Sums
from thinwire.gradients.ddp import Plug, is_joining
from thinwire.gradients.steps.dense import DenseChoice
from thinwire.gradients.steps.describe import first_step
from thinwire.gradients.steps.execution import Execution
from thinwire.gradients.steps.trials import RowsChoice
from thinwire.observe.step import Clock, JobTimes, Phase, StepTimes
from thinwire.observe.trace import Event, chrome_trace
from thinwire.plan.timeline import CHANNEL, COMPUTE

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
            predicted: predicted events; None for the events of the synchronizer, if it has measured a profile.
        """
        expected = self._predicted() if predicted is None else predicted
        processes = {"predicted": expected} if expected else {}
        Path(path).write_text(json.dumps(chrome_trace({**processes, "measured": self.events})), encoding="utf-8")

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *error: object) -> None:
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


class Decisions(NamedTuple):
    """What is decided at the end of a step; None for what is fixed."""

    execution: Execution | None = None
    choice: DenseChoice | None = None
    rows: RowsChoice | None = None


class StepLoop:
    """The statistics and traces of a model's steps, which hooks of the model hold; it does not keep the model alive.

    Args:
        num_parameters: number of parameters of the model, for the log.
        lanes: that of all ranks first; that of gradients, or of FSDP's shards, last.
        sums: what sums the gradients.
        plug: the connection to the model.
        adopt: adopts the tables that the first step shows, and returns the choice of their schemes, given the one
            before; None where there can be no such tables.
        decisions: what is decided at the end of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        num_parameters: int,
        lanes: Sequence[Lane],
        clock: Clock,
        sums: Sums,
        plug: Plug,
        adopt: Callable[[RowsChoice | None], RowsChoice | None] | None,
        decisions: Decisions,
    ) -> None:
        self._model, self._num_parameters = weakref.ref(model), num_parameters
        self._lanes, self._clock, self._sums, self._plug = lanes, clock, sums, plug
        self._adopt, self.decisions = adopt, decisions
        self._trace: Trace | None = None
        self.exposed_seconds = 0.0
        self.count = 0
        self._has_warned = False

    def finish(self, counts: bool = True, began: float = 0.0) -> None:
        """End a step when backward has nothing left to compute: all waiting in here is exposed communication.

        A model that is left to DDP has waited since it ``began`` (`time.perf_counter`).
        """
        times, waited = None, self._plug.finish_left(began)
        if waited is None:
            self._plug.book()
            started = self._plug.finish()
            for pending in self._plug.take_in_flight():
                pending.wait()
            times = self._clock.finish()
            waited = times.ended - started
            self._plug.deliver()
            self._sums.finish_step(self._lanes[-1])
        self.exposed_seconds += waited
        self.count += counts
        asks = not (self._lanes[0].is_closed or is_joining(self._model()))  # else another rank may not come
        if self._adopt is not None and asks:
            adopt, self._adopt = self._adopt, None
            self.decisions = self.decisions._replace(rows=adopt(self.decisions.rows))
        is_deciding = any(self.decisions)
        if is_deciding or times is not None:
            self._check_mode()
        if counts and self.count == 1:
            self._plug.book()
            if self._lanes[0].rank == 0:
                records = list(self._sums.gradients.records.values())
                sent = sum(lane.exchange.traffic.sent_bytes for lane in self._lanes)
                logger.info("%s", first_step(records, self._num_parameters, sent, self._lanes[0].world_size))
        if self._trace is not None and times is not None:
            self._trace.add(times)
        execution, choice, rows = self.decisions
        if not (is_deciding and asks):
            return
        codes = choice is not None and choice.trial.is_timed  # one at a time: the others' seconds would be of its arms
        if execution is not None and times is not None and not codes:
            execution.finish_step(times)
        if rows is not None and counts and not codes:
            rows.finish_step(waited)
        other = rows or execution
        if choice is not None and counts and not (other is not None and other.trial.is_timed):
            choice.finish_step(waited)

    def _check_mode(self) -> None:
        """Warn once if deterministic algorithms came after `attach`, and something is decided by the clock."""
        gradients = self._sums.gradients
        decides = (gradients.choices or any(self.decisions[:2])) and not (gradients.in_rank_order or self._has_warned)
        if decides and torch.are_deterministic_algorithms_enabled():
            self._has_warned = True
            warn(
                "torch.use_deterministic_algorithms(True) came after attach, so measured times still decide how"
                " gradients are summed, and two runs may differ in their last bits: call it before attach"
            )

    def start_trace(self, steps: int | None) -> Trace:
        """Record this number of steps, or until the trace is stopped; see `thinwire.Synchronizer.trace`."""
        if self._trace is not None:
            raise ValueError("a trace is being recorded already: stop() it first")
        self._plug.observe("a trace", True)
        self._trace = trace = Trace(self._stop_trace, steps, self._predicted_events)
        self._sums.listen(self._clock.phase)
        return trace

    def _stop_trace(self) -> None:
        self._trace = None
        self._plug.observe("a trace", False)
        self._sums.listen(None)

    def _predicted_events(self) -> Sequence[Event]:
        execution = self.decisions.execution
        return () if execution is None else execution.predicted_events()
