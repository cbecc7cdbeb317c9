"""What happens in a step: bytes of each parameter, times of each job, and ranges for `torch.profiler`.

Ranges for `torch.profiler`: what a synchronization does, by name, and nothing at all while nobody profiles.

``thinwire::find`` rows that are not zero, ``::pack`` rows into bytes, ``::exchange`` waiting for the network, ``::sum``
pieces of several ranks, ``::scatter`` a sum into the gradient. They are on the thread of the lane, which torch's
profiler sees only when it is asked for all threads:

    from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile
    with profile(activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)):
        loss.backward()

What was synchronized and what it cost: one line a parameter, and totals.

When things happen in a step: gradients become ready, jobs of the lane run, the last mean is there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch.autograd import profiler

P = ParamSpec("P")
R = TypeVar("R")
Name = Literal["find", "pack", "exchange", "sum", "scatter"]

_NOTHING: AbstractContextManager[None] = nullcontext()


class Phase(StrEnum):
    """What a compressed synchronization spends time on; the names of its `torch.profiler` ranges."""

    COMPRESS = "thinwire::compress"
    EXCHANGE = "thinwire::exchange"
    DECOMPRESS = "thinwire::decompress"


def enabled() -> bool:
    """Whether any thread of this process profiles: 0.07 us, where a range that nobody records takes 18 us."""
    return getattr(profiler, "_is_profiler_enabled", True)


def named(name: Name) -> AbstractContextManager[object]:
    """A range of the profiler around a block of code."""
    return profiler.record_function(f"thinwire::{name}") if enabled() else _NOTHING


def ranged(name: Name) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The same around every call of a function.

    Example:
        >>> @ranged("sum")
        ... def add(a, b):
        ...     return a + b
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not enabled():
                return function(*args, **kwargs)
            with profiler.record_function(f"thinwire::{name}"):
                return function(*args, **kwargs)

        return call

    return decorate


Prediction = float | Callable[[], float]
"""Bytes, or what works them out: only the last step is ever asked for."""


@dataclass
class ParameterRecord:
    """The account of one parameter, or of all that are all-reduced together.

    ``step_*`` fields are of the last finished step, ``total_*`` fields sums over all steps; densities, scheme
    formats and ``fused`` are those of the last synchronization. Bytes of a synchronization of several parameters
    are shared out, so that sums over records are what was sent.
    """

    name: str
    kind: str = ""  # "sparse gradient", "dense gradient, rows known" or "... scanned", "all-reduce"
    scheme: str = ""
    formats: str = ""
    density: float = 1.0
    density_after: float = 1.0
    reason: str = ""  # of the scheme of the next step, where it was chosen
    fused: int = 1  # parameters in the synchronization that this one was part of
    step_bytes: int = 0
    step_dense_bytes: int = 0
    total_bytes: int = 0
    total_dense_bytes: int = 0
    steps: int = 0
    _sent: int = field(default=0, repr=False)
    _predicted: list[Prediction] = field(default_factory=list, repr=False)
    _step_predicted: list[Prediction] = field(default_factory=list, repr=False)
    _dense: int = field(default=0, repr=False)

    @property
    def step_predicted_bytes(self) -> float:
        """Worked out only when somebody asks."""
        return sum(entry() if callable(entry) else entry for entry in self._step_predicted)

    def add(self, sent_bytes: int, predicted_bytes: Prediction, dense_bytes: int) -> None:
        """Add one piece of the running step: bytes sent, predicted, and what stock DDP would send."""
        self._sent += sent_bytes
        self._predicted.append(predicted_bytes)
        self._dense += dense_bytes

    def leave(self, scheme: str) -> None:
        """From the next step on it is synchronized in its bucket, or counted when that is over."""
        self.scheme, self.formats, self.fused = scheme, "", 1

    def finish_step(self) -> None:
        """The running step becomes the last one, if anything was synchronized in it."""
        predicted, self._predicted = self._predicted, []
        if self._dense == 0 and self._sent == 0:
            return
        self.step_bytes, self._step_predicted, self.step_dense_bytes = self._sent, predicted, self._dense
        self.total_bytes += self._sent
        self.total_dense_bytes += self._dense
        self.steps += 1
        self._sent, self._dense = 0, 0

    def row(self) -> dict[str, str | int | float]:
        """One row of `Synchronizer.table`; bytes are those that this rank sent in the last step."""
        return {
            "name": self.name,
            "kind": self.kind,
            "density": self.density,
            "density_after": self.density_after,
            "scheme": self.scheme,
            "formats": self.formats,
            "fused": self.fused,
            "reason": self.reason,
            "bytes": self.step_bytes,
            "predicted_bytes": round(self.step_predicted_bytes),
            "dense_bytes": self.step_dense_bytes,
            "total_bytes": self.total_bytes,
            "steps": self.steps,
        }


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
