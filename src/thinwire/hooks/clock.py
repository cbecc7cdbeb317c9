"""When things happen in a step: gradients become ready, jobs of the lane run, the last mean is there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.ranges import Phase


@dataclass(frozen=True)
class Load:
    """What a job synchronizes, without tables of embeddings.

    Args:
        name: of its groups, or buckets.
        exact_bytes: of gradients that are summed.
        compressed_bytes: of gradients that are compressed, before that.
        num_compressed: how many these are.
    """

    name: str = ""
    exact_bytes: int = 0
    compressed_bytes: int = 0
    num_compressed: int = 0

    @property
    def size_bytes(self) -> int:
        return self.exact_bytes + self.compressed_bytes

    def __add__(self, other: Load) -> Load:
        return Load(
            f"{self.name}, {other.name}",
            self.exact_bytes + other.exact_bytes,
            self.compressed_bytes + other.compressed_bytes,
            self.num_compressed + other.num_compressed,
        )


@dataclass(eq=False)
class JobTimes:
    """One job of the lane.

    Args:
        load: what it synchronized.
        submitted: when all of that was ready.
        started: when the lane began with it, tables of embeddings of the same job being done.
        phases: what it did of encoding, sending and decoding, where it tells.
    """

    load: Load
    submitted: float
    started: float = 0.0
    ended: float = 0.0
    phases: list[tuple[Phase, float, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.ended - self.started


@dataclass(eq=False)
class StepTimes:
    """One synchronized backward pass.

    Args:
        began: when the forward of the model began, where that is noted.
        started: when the forward of the model had ended, so the loss is in it; without one, at the first gradient.
        ready: when each gradient was there: by name of the parameter, or of the bucket under DDP.
        ended: when the last mean was there.
    """

    began: float = 0.0
    started: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)
    jobs: list[JobTimes] = field(default_factory=list)
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """From the start of backward until the last mean was there."""
        return self.ended - self.started

    def ready_seconds(self, name: str) -> float:
        """From the start of backward until the gradient was there."""
        return self.moment(name) - self.started

    def moment(self, name: str) -> float:
        """When a gradient was there; one that was not used is ready when the last of the others is."""
        return self.ready.get(name, max(self.ready.values(), default=self.started))


class Clock:
    """Writes down the running step, `time.perf_counter`. Jobs write into the step that submitted them.

    Args:
        device: that computes. The moments of a step are those of a GPU's stream; None for those of the host, which do
            not wait for a GPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._events = device is not None and device.type == "cuda"
        self._now: Callable[[], Any] = _record if self._events else time.perf_counter
        self._step = StepTimes()
        self._running: JobTimes | None = None

    def begin(self) -> None:
        """The forward of the model begins, and with it another step."""
        self._step = StepTimes(began=self._now())

    def start(self) -> None:
        """The forward of the model has ended."""
        if not self._step.ready:
            self._step.started = self._now()

    def ready(self, name: str) -> None:
        """A gradient is there."""
        now = self._now()
        if not self._step.ready and not self._step.started:
            self._step.started = now
        self._step.ready[name] = now

    def submit(self, load: Load) -> JobTimes:
        """A job that is about to be handed to the lane."""
        job = JobTimes(load, time.perf_counter())
        self._step.jobs.append(job)
        return job

    def run(self, job: JobTimes) -> None:
        """The lane begins with a job."""
        self._running, job.started = job, time.perf_counter()

    def end(self, job: JobTimes) -> None:
        self._running, job.ended = None, time.perf_counter()

    def phase(self, phase: Phase, started: float, ended: float) -> None:
        """For `Stopwatch.listener`: part of the job that runs."""
        if self._running is not None:
            self._running.phases.append((phase, started, ended))

    def finish(self) -> StepTimes:
        """All means are there."""
        done, self._step = self._step, StepTimes()
        done.ended = self._now()
        return _settled(done) if self._events else done

    def reset(self) -> None:
        """Forget a step that did not come to its end."""
        self._step = StepTimes()


def median_of_slowest(told: Sequence[Sequence[float]], count: int) -> list[float]:
    """The median step, in which each moment is that of the slowest rank: a gradient is summed when all ranks have it.

    Args:
        told: for each rank its moments, step by step, in seconds.
        count: moments of a step.
    """
    slowest = [max(moments) for moments in zip(*told, strict=True)]
    return [statistics.median(slowest[place::count]) for place in range(count)]


def differences(moments: Sequence[float], start: float = 0.0) -> tuple[float, ...]:
    """From each moment to the next, at least 0: medians of two gradients can be out of order by a little."""
    found = []
    for moment in moments:
        found.append(max(0.0, moment - start))
        start = max(start, moment)
    return tuple(found)


def _record() -> Any:
    """An event in the stream of the GPU."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _settled(step: StepTimes) -> StepTimes:
    """The moments of events in seconds, when all of them have come; the first one is 0."""
    torch.cuda.synchronize()
    first: Any = step.began or step.started

    def seconds(event: Any) -> float:
        return first.elapsed_time(event) * 1e-3 if event else 0.0

    ready = {name: seconds(event) for name, event in step.ready.items()}
    return StepTimes(0.0, seconds(step.started), ready, step.jobs, seconds(step.ended))
