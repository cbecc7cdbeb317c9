"""When checkpoints are sent: in the timespans in which training leaves the network idle, as profiled online.

GEMINI (Wang et al., SOSP'23), section 5.2. The lane of an attached synchronizer says when it is busy; what is left of
each iteration is idle. Without one nothing is known of the network, and bytes are paced evenly over the iteration.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from thinwire.checkpoint.schedule import PROFILED_ITERATIONS, Budget, Profile, profile, spread
from thinwire.errors import ThinwireError

EVEN_GRANTS = 16
LEAST_GAP = 0.05  # of an iteration: shorter pauses of the lane are part of its work
EVEN_SHARE = 0.8  # of an iteration is used for even pacing, so that a version is complete before the next one


@dataclass(frozen=True)
class Grant:
    """Bytes that may be sent from this moment on, counted from the end of an optimizer step."""

    seconds: float
    num_bytes: int


def idle_timespans(
    busy: Sequence[tuple[float, float]], started: float, ended: float, least_gap: float = LEAST_GAP
) -> list[tuple[float, float]]:
    """(start, length) of the gaps between the busy periods of an iteration, counted from its start.

    Example:
        >>> idle_timespans([(1.0, 2.0), (2.01, 3.0)], started=0.0, ended=4.0)
        [(0.0, 1.0), (3.0, 1.0)]
    """
    edges = [started]
    for start, end in sorted(busy):
        edges += [min(max(start, edges[-1]), ended), min(max(end, edges[-1]), ended)]
    edges.append(ended)
    gaps = list(pairwise(edges))[::2]
    return [(start - started, end - start) for start, end in gaps if end - start > least_gap * (ended - started)]


def even_grants(num_bytes: int, iteration_seconds: float, count: int = EVEN_GRANTS) -> list[Grant]:
    """All bytes in ``count`` equal parts over an iteration.

    Example:
        >>> even_grants(100, 10.0, count=2)
        [Grant(seconds=0.0, num_bytes=50), Grant(seconds=4.0, num_bytes=50)]
    """
    bounds = [num_bytes * part // count for part in range(count + 1)]
    step_seconds = EVEN_SHARE * iteration_seconds / count
    return [Grant(part * step_seconds, bounds[part + 1] - bounds[part]) for part in range(count)]


def gap_grants(found: Profile, num_bytes: int, bytes_per_second: float, iteration_seconds: float) -> list[Grant]:
    """Bytes for each gap, over as many iterations as it takes (Algorithm 2). ValueError if the network is never idle.

    Example:
        >>> gap_grants(profile([[(0.5, 1.0)]]), num_bytes=150, bytes_per_second=100.0, iteration_seconds=2.0)
        [Grant(seconds=0.5, num_bytes=90), Grant(seconds=2.5, num_bytes=60)]
    """
    plan = spread(found.spans, num_bytes, 2, Budget(bytes_per_second, gamma=found.gamma))
    starts = [
        iteration * iteration_seconds + timespan.start_seconds
        for iteration in range(plan.iterations)
        for timespan in found.timespans
    ]
    sums = [sum(chunk.length for chunk in chunks) for chunks in plan.spans]
    return [Grant(start, length) for start, length in zip(starts, sums, strict=True) if length]


class Pacer:
    """Gives grants at their time, on a thread of its own.

    Args:
        grant: what takes the bytes; a ThinwireError of it ends the grants of this version.
        every: iterations between two offers.
        watched: whether `note_busy` will be called with the times of the lane's jobs.
    """

    def __init__(self, grant: Callable[[int], None], every: int, watched: bool) -> None:
        self._grant, self._every, self._watched = grant, every, watched
        self._changed = threading.Condition()
        self._grants: list[Grant] = []
        self._origin: float | None = None  # of the iteration
        self._offered, self._closed = 0.0, False
        self._busy: list[tuple[float, float]] = []
        self._profiled: list[list[tuple[float, float]]] = []
        self._lengths: list[float] = []
        self.profile: Profile | None = None
        self.iterations_needed = 0.0
        self._thread = threading.Thread(target=self._run, name="thinwire-pacer", daemon=True)
        self._thread.start()

    @property
    def how(self) -> str:
        """For people: how bytes are granted now."""
        if not self._watched:
            return "evenly: no synchronizer is attached, so the idle times of the network are not known"
        if self.profile is None:
            return f"evenly: {len(self._profiled)} of {PROFILED_ITERATIONS} iterations profiled"
        steady = "" if self.profile.steady else ", which vary by more than 10 %"
        return f"in {len(self.profile.spans)} idle timespans of each iteration{steady}"

    @property
    def iteration_seconds(self) -> float:
        """Median of the last iterations; 0 before the second step."""
        return median(self._lengths) if self._lengths else 0.0

    @property
    def idle_seconds(self) -> float:
        """Of an iteration, in which the network is idle, as far as is known."""
        return sum(self.profile.spans) if self.profile is not None else self.iteration_seconds

    def note_busy(self, started: float, ended: float) -> None:
        """A job of the lane ran from then to then (`time.perf_counter`)."""
        with self._changed:
            self._busy.append((started, ended))

    def note_step(self) -> None:
        """An optimizer step has ended: a new iteration begins."""
        now = time.perf_counter()
        with self._changed:
            started, self._origin = self._origin, now
            busy, self._busy = self._busy, []
            if started is None:
                return
            self._lengths = [*self._lengths[1 - PROFILED_ITERATIONS :], now - started]
            if not self._watched or self.profile is not None:
                return
            self._profiled.append(idle_timespans(busy, started, now))
            if len(self._profiled) >= PROFILED_ITERATIONS:
                with contextlib.suppress(ValueError):  # never idle: go on evenly, and profile again
                    self.profile = profile(self._profiled)
                self._profiled = []

    def offer(self, num_bytes: int, bytes_per_second: float | None) -> None:
        """Grant so many bytes from now on; what is left of an earlier offer is void."""
        grants = self._planned(num_bytes, bytes_per_second)
        with self._changed:
            self._offered = time.perf_counter()
            self._grants = grants
            self._changed.notify_all()

    def _planned(self, num_bytes: int, bytes_per_second: float | None) -> list[Grant]:
        seconds = self.iteration_seconds
        self.iterations_needed = 1.0
        if num_bytes <= 0:
            return []
        if self.profile is not None and bytes_per_second:
            with contextlib.suppress(ValueError):
                grants = gap_grants(self.profile, num_bytes, bytes_per_second, seconds)
                self.iterations_needed = 1.0 + (grants[-1].seconds // seconds if seconds else 0)
                return grants
        return even_grants(num_bytes, seconds * self._every)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._grants or self._closed)
                if self._closed:
                    return
                due = self._offered + self._grants[0].seconds - time.perf_counter()
                if due > 0:
                    self._changed.wait(due)
                    continue
                num_bytes = self._grants.pop(0).num_bytes
            try:
                self._grant(num_bytes)
            except (ThinwireError, OSError):
                with self._changed:
                    self._grants = []

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
