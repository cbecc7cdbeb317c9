"""Statistics of a step: bytes of each parameter, times of jobs and gradients, and ranges for `torch.profiler`.

Ranges name the parts of a synchronization, and cost next to nothing while nobody profiles: ``thinwire::find`` selects
non-zero rows, ``::pack`` turns rows into bytes, ``::exchange`` waits for the network, ``::sum`` adds pieces of several
ranks, ``::scatter`` writes a sum into the gradient. They are on the thread of the lane, or on the one that begins a job
while another runs. Torch's profiler sees the lane only when it is asked for all threads:

    from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

    with profile(activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)):
        loss.backward()
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any, Literal, ParamSpec, TypeVar

from torch.autograd import profiler
from torch.futures import Future

P = ParamSpec("P")
R = TypeVar("R")
Name = Literal["find", "pack", "exchange", "sum", "scatter"]

_NOTHING: AbstractContextManager[None] = nullcontext()


class Phase(StrEnum):
    """The phases of a compressed synchronization; their values are names of its `torch.profiler` ranges."""

    COMPRESS = "thinwire::compress"
    EXCHANGE = "thinwire::exchange"
    DECOMPRESS = "thinwire::decompress"


def enabled() -> bool:
    """Return whether any thread of this process profiles, in 0.07 us; a range that nobody records costs 18 us."""
    return getattr(profiler, "_is_profiler_enabled", True)


def named(name: Name) -> AbstractContextManager[object]:
    """Return a profiler range for a block of code."""
    return profiler.record_function(f"thinwire::{name}") if enabled() else _NOTHING


def ranged(name: Name) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that puts a profiler range around every call of a function.

    Example:
        >>> @ranged("sum")
        ... def add(a, b):
        ...     return a + b
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with named(name):
                return function(*args, **kwargs)

        return call

    return decorate


def show(name: Callable[[], str]) -> Callable[[], None]:
    """Show a profiler range on this thread from now on; return a function that ends it, on whichever thread.

    A profile has only ranges of the threads that it was started on or for, so it would not show the lane's.

    Call the function before the training thread can learn that the work is done, and once more where that thread waits
    for the work itself: every call returns after the end. torch (2.13) writes the end of a range into memory that its
    profile frees when it ends; of 200 profiles with ranges that ended beside theirs, some broke the heap.
    """
    if not (enabled() and hasattr(profiler.record_function, "_call_end_callbacks_on_future")):
        return lambda: None
    over: Future[None] = Future()
    ending = threading.Lock()
    shown = profiler.record_function(f"thinwire::{name()}")
    shown.__enter__()
    shown._call_end_callbacks_on_future(over)

    def end() -> None:
        with ending:
            if enabled() and not over.done():  # a backward that failed may have left its profile before
                over.set_result(None)

    return end


Prediction = float | Callable[[], float]
"""Predicted bytes, or a function that computes them: only the last step's are ever needed."""


@dataclass
class ParameterRecord:
    """The statistics of one parameter, or of all that are all-reduced together.

    ``step_*`` fields are of the last finished step, ``total_*`` fields sums over all steps; densities, scheme,
    formats and ``fused`` are of the last synchronization. Bytes of a synchronization of several parameters
    are shared out, so that sums over records are the bytes sent.
    """

    name: str
    kind: str = ""  # "sparse gradient", "dense gradient, rows known" or "... scanned", "all-reduce"
    scheme: str = ""
    formats: str = ""
    density: float = 1.0
    density_after: float = 1.0
    reason: str = ""  # of the choice of the next step's scheme
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
        """Predicted bytes of the last finished step, computed on access."""
        return sum(entry() if callable(entry) else entry for entry in self._step_predicted)

    def add(self, sent_bytes: int, predicted_bytes: Prediction, dense_bytes: int) -> None:
        """Add to the running step: bytes sent, bytes predicted, and bytes that stock DDP would send."""
        self._sent += sent_bytes
        self._predicted.append(predicted_bytes)
        self._dense += dense_bytes

    def leave(self, scheme: str) -> None:
        """Note that from the next step on the parameter is left to another all-reduce, by this scheme."""
        self.scheme, self.formats, self.fused = scheme, "", 1

    def finish_step(self, steps: int = 1) -> None:
        """Make the running step the last one, or so many that were alike, if anything was synchronized in it."""
        predicted, self._predicted = self._predicted, []
        if self._dense == 0 and self._sent == 0:
            return
        self.step_bytes, self.step_dense_bytes = self._sent // steps, self._dense // steps
        self._step_predicted = predicted
        self.total_bytes += self._sent
        self.total_dense_bytes += self._dense
        self.steps += steps
        self._sent, self._dense = 0, 0

    def row(self) -> dict[str, str | int | float]:
        """Return one row of `Synchronizer.table`; bytes are those that this rank sent in the last step."""
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


class ParameterRecords(dict[str, ParameterRecord]):
    """The statistics of a model's parameters, by name."""

    def named(self, name: str) -> ParameterRecord:
        """Return the record of this name, a new one if there is none."""
        return self.setdefault(name, ParameterRecord(name))

    def book(
        self,
        name: str,
        kind: str,
        scheme: str,
        formats: str,
        density: float = 1.0,
        density_after: float = 1.0,
        fused: int = 1,
    ) -> ParameterRecord:
        """Return the record of this name after a synchronization, to which its bytes are added.

        Args:
            name, kind, scheme, formats: columns of `Synchronizer.table`.
            density: fraction of rows or elements that this rank sent.
            density_after: fraction of rows or elements in the sum.
            fused: number of parameters that were synchronized together.
        """
        record = self.named(name)
        record.kind, record.scheme, record.formats, record.fused = kind, scheme, formats, fused
        record.density, record.density_after = density, density_after
        return record


@dataclass(frozen=True)
class Load:
    """The gradients that a job synchronizes, without embedding tables.

    Args:
        name: name of its groups, or buckets.
        exact_bytes: bytes of gradients that are summed.
        compressed_bytes: bytes of gradients that are compressed, before compression.
        num_compressed: number of gradients that are compressed.
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
    """The times of one job of the lane.

    Args:
        load: the gradients that it synchronized.
        submitted: time when all of them were ready.
        started: time when the lane began with them, after the embedding tables of the same job.
        phases: phase, start and end of encoding, sending and decoding, if they are recorded.
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
    """The times of one synchronized backward pass.

    Args:
        began: start of the model's forward, if it is recorded.
        started: end of the model's forward, so backward includes the loss; without a forward, the first gradient.
        ready: time when each gradient was ready, by name of the parameter, or of the bucket under DDP.
        ended: time when the last mean was known.
    """

    began: float = 0.0
    started: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)
    jobs: list[JobTimes] = field(default_factory=list)
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from the start of backward until the last mean was known."""
        return self.ended - self.started

    def moment(self, name: str) -> float:
        """Return the time when a gradient was ready; for one that was not used, when the last of the others was."""
        return self.ready.get(name, max(self.ready.values(), default=self.started))


class Clock:
    """A recorder of the running step in `time.perf_counter`; jobs write into the step that submitted them.

    Args:
        now: returns the time of an event; that of the host does not wait for a GPU.
    """

    def __init__(self, now: Callable[[], Any] = time.perf_counter) -> None:
        self._now = now
        self._step = StepTimes()
        self._running: JobTimes | None = None

    def begin(self) -> None:
        """Record that the forward of the model begins, and with it another step."""
        self._step = StepTimes(began=self._now())

    def start(self) -> None:
        """Record that the forward of the model has ended."""
        if not self._step.ready:
            self._step.started = self._now()

    def ready(self, name: str) -> None:
        """Record that a gradient is ready."""
        now = self._now()
        if not self._step.ready and not self._step.started:
            self._step.started = now
        self._step.ready[name] = now

    def submit(self, load: Load) -> JobTimes:
        """Record a job that is about to be handed to the lane."""
        job = JobTimes(load, time.perf_counter())
        self._step.jobs.append(job)
        return job

    def run(self, job: JobTimes) -> None:
        """Record that the lane begins with a job."""
        self._running, job.started = job, time.perf_counter()

    def end(self, job: JobTimes) -> None:
        self._running, job.ended = None, time.perf_counter()

    def phase(self, phase: Phase, started: float, ended: float) -> None:
        """Record a phase of the running job; for `Stopwatch.listener`."""
        if self._running is not None:
            self._running.phases.append((phase, started, ended))

    def finish(self) -> StepTimes:
        """Record that all means are known, and return the step."""
        done, self._step = self._step, StepTimes()
        done.ended = self._now()
        return done

    def reset(self) -> None:
        """Forget a step that was not completed."""
        self._step = StepTimes()


def median_of_slowest(gathered: Sequence[Sequence[float]], count: int) -> list[float]:
    """Return the median step, with times of the slowest rank: a gradient is summed when all ranks have it.

    Args:
        gathered: moments of each rank, step by step, in seconds.
        count: number of moments of a step.
    """
    slowest = [max(moments) for moments in zip(*gathered, strict=True)]
    return [statistics.median(slowest[index::count]) for index in range(count)]


def differences(moments: Sequence[float], start: float = 0.0) -> tuple[float, ...]:
    """Return the time from each moment to the next, at least 0: medians of two gradients can be out of order."""
    return tuple(after - before for before, after in pairwise(accumulate(moments, max, initial=start)))
