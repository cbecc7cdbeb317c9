"""Steps that were measured, as events of the same form as those that a plan predicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from thinwire.hooks.clock import JobTimes, StepTimes
from thinwire.observe.trace import Event, chrome_trace
from thinwire.plan.timeline import CHANNEL, COMPUTE
from thinwire.ranges import Phase

PHASES = "phases"
"""The track below the channel's, on which encoding, sending and decoding are told apart."""

_NAMES = {Phase.COMPRESS: "encode", Phase.EXCHANGE: "wire", Phase.DECOMPRESS: "decode"}


class Trace:
    """What one rank did in some steps, see `thinwire.Synchronizer.trace`.

    Times count from the start of the first step's backward, which is the end of the model's forward.

    Args:
        stop: ends the recording.
        steps: at most so many; None for all until then.
        predicted: what the step was expected to look like, if that is known; asked when the trace is saved.
    """

    def __init__(self, stop: Callable[[], None], steps: int | None, predicted: Callable[[], Sequence[Event]]) -> None:
        self._stop, self._left, self._predicted = stop, steps, predicted
        self.steps: list[tuple[Event, ...]] = []
        self._origin: float | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """Of all steps."""
        return tuple(event for step in self.steps for event in step)

    def add(self, step: StepTimes) -> None:
        """A step has ended."""
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
            predicted: None for what the synchronizer expected, if it has measured a profile.
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
    """Backward of each gradient on the compute track, each job on that of the channel, its phases below."""
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
