"""When things happen in a step: gradients become ready, jobs of the lane run, the last mean is there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

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
        started: when the forward of the model had ended, so the loss is in it; without one, at the first gradient.
        ready: when each gradient was there: by name of the parameter, or of the bucket under DDP.
        ended: when the last mean was there.
    """

    started: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)
    jobs: list[JobTimes] = field(default_factory=list)
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """From the start of backward until the last mean was there."""
        return self.ended - self.started

    def ready_seconds(self, name: str) -> float:
        """From the start of backward; one that was not used is ready when the last of the others is."""
        return self.ready.get(name, max(self.ready.values(), default=self.started)) - self.started


class Clock:
    """Writes down the running step, `time.perf_counter`. Jobs write into the step that submitted them."""

    def __init__(self) -> None:
        self._step = StepTimes()
        self._running: JobTimes | None = None

    def start(self) -> None:
        """The forward of the model has ended."""
        if not self._step.ready:
            self._step.started = time.perf_counter()

    def ready(self, name: str) -> None:
        now = time.perf_counter()
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
        done.ended = time.perf_counter()
        return done

    def reset(self) -> None:
        """Forget a step that did not come to its end."""
        self._step = StepTimes()
