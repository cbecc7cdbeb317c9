"""Pacing of checkpoints: they are sent in the timespans in which training leaves the network idle, as profiled online.

GEMINI (Wang et al., SOSP'23), section 5: timespans are profiled over some iterations, and discounted for how much they
vary. The lane of an attached synchronizer reports when it is busy; the rest of each iteration is idle. Without one
nothing is known of the network, and bytes are paced evenly over the iteration. All seconds are of one machine's clock.
"""

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, pstdev

from thinwire.checkpoint.holder.store import Changes
from thinwire.checkpoint.pacing.counters import BusySampler, busy_periods
from thinwire.errors import ThinwireError, logger

_SMALL_BYTES = 1_000_000  # that any link takes in a moment
GAMMA = 0.9  # of a timespan is used at most: the paper reports timespans that vary by less than 10 %
PROFILED_ITERATIONS = 20


@dataclass(frozen=True)
class IdleProfile:
    """Idle timespans of an iteration, (start, length) in seconds from its start: medians over the profiled iterations.

    ``variation``: standard deviation of their lengths over their median, all together. ``agreement``: the part of the
    iterations with the most common number of timespans; the others are left out.
    """

    timespans: tuple[tuple[float, float], ...]
    variation: float
    agreement: float

    @property
    def spans(self) -> tuple[float, ...]:
        """Seconds of each timespan."""
        return tuple(length for _, length in self.timespans)

    @property
    def steady(self) -> bool:
        """Whether timespans vary by less than 10 %, as in the paper."""
        return self.variation < 1 - GAMMA and self.agreement > GAMMA

    @property
    def gamma(self) -> float:
        """The part of each timespan to use: 0.9, or less where they vary by more, and never below 0.1."""
        return max(1 - GAMMA, min(GAMMA, 1 - self.variation) * self.agreement)


def profile(iterations: Sequence[Sequence[tuple[float, float]]]) -> IdleProfile:
    """Return the medians of the network-idle timespans over some iterations (20 in the paper), and their variation.

    ``iterations`` has (start, length) in seconds of the timespans of each, in their order. Raises ValueError if none
    had one.

    Example:
        >>> profile([[(0.0, 1.0)], [(0.0, 1.1)], [(0.0, 1.2)]]).spans
        (1.1,)
    """
    counts = Counter(len(timespans) for timespans in iterations if timespans)
    if not counts:
        raise ValueError(f"{len(iterations)} iterations were profiled, and none had a network-idle timespan")
    most = max(counts.values())
    count = min(count for count, times in counts.items() if times == most)
    columns = list(zip(*(timespans for timespans in iterations if len(timespans) == count), strict=True))
    timespans = tuple((median(start for start, _ in part), median(length for _, length in part)) for part in columns)
    total = sum(length for _, length in timespans)
    deviation = sum(pstdev(length for _, length in column) for column in columns)
    variation = deviation / total if total > 0 else math.inf
    return IdleProfile(timespans, variation, most / len(iterations))


EVEN_GRANTS = 16
MAX_GRANTS = 100_000
LEAST_GAP = 0.05  # of an iteration: shorter pauses of the lane are part of its work
EVEN_SHARE = 0.8  # of an iteration is used for even pacing, so that a version is complete before the next one
DRIFT = 0.2  # of an iteration's length: beyond it the profile is out of date, and a new one is made
_SHOWN_GRANTS = 8
_FEW = 5


@dataclass(frozen=True)
class Grant:
    """Permission to send bytes from this moment on, counted from the end of an optimizer step.

    ``iteration``: number of steps after the step of its version. ``ends``: when its gap does; 0 if it is in none.
    """

    seconds: float
    num_bytes: int
    iteration: int = 0
    ends: float = field(default=0.0, repr=False, compare=False)


def idle_timespans(
    busy: Sequence[tuple[float, float]], started: float, ended: float, least_gap: float = LEAST_GAP
) -> list[tuple[float, float]]:
    """Return (start, length) of the gaps between the busy periods of an iteration, counted from its start.

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


def even_grants(
    num_bytes: int, iteration_seconds: float, count: int = EVEN_GRANTS, past_seconds: float = 0.0
) -> list[Grant]:
    """Return grants of all bytes in ``count`` equal parts over the rest of an iteration.

    Example:
        >>> even_grants(100, 10.0, count=2)
        [Grant(seconds=0.0, num_bytes=50, iteration=0), Grant(seconds=4.0, num_bytes=50, iteration=0)]
    """
    bounds = [num_bytes * part // count for part in range(count + 1)]
    step_seconds = max(0.0, EVEN_SHARE * iteration_seconds - past_seconds) / count
    return [Grant(past_seconds + part * step_seconds, bounds[part + 1] - bounds[part]) for part in range(count)]


def gap_grants(
    result: IdleProfile, num_bytes: int, bytes_per_second: float, latency_seconds: float = 0.0, first: int = 0
) -> list[Grant]:
    """Return grants for each gap, over the iterations needed: Algorithm 2.

    Sending n bytes takes ``latency_seconds + n / bytes_per_second``: the pieces of a gap follow each other without
    waiting, so they have one latency together. ``first`` is the number of the first gap, over all iterations.

    Raises ValueError if the network is never idle, or for bytes that need more than 100,000 grants.

    Example:
        >>> gap_grants(profile([[(0.5, 1.0)]]), num_bytes=150, bytes_per_second=100.0)
        [Grant(seconds=0.5, num_bytes=90, iteration=0), Grant(seconds=0.5, num_bytes=60, iteration=1)]
    """
    sending = [max(0.0, result.gamma * span - latency_seconds) for span in result.spans]
    rooms = [math.floor(min(num_bytes, seconds * bytes_per_second)) for seconds in sending]
    if num_bytes * len(rooms) > MAX_GRANTS * sum(rooms):
        raise ValueError(f"{num_bytes:,} bytes in idle timespans for {sum(rooms):,}: the network is never idle")
    grants: list[Grant] = []
    for index in itertools.count(first):
        if not num_bytes:
            break
        iteration, number = divmod(index, len(rooms))
        (start, seconds), length = result.timespans[number], min(rooms[number], num_bytes)
        if length:
            grants.append(Grant(start, length, iteration, start + seconds))
        num_bytes -= length
    return grants


class Pacer:
    """A thread that issues grants at their time, by ``grant(num_bytes)``; an error of the holder ends them.

    ``every``: iterations between two offers. ``watched``: whether `note_busy` will be called with the times of the
    lane's jobs; if not, ``sampler`` is the source of the busy times. ``revoke``, called when a gap ends, withdraws what
    was granted and not sent, and returns the bytes of the offer that are left, which later gaps get.
    """

    def __init__(
        self,
        grant: Callable[[int], None],
        every: int,
        watched: bool,
        revoke: Callable[[], int] | None = None,
        sampler: BusySampler | None = None,
    ) -> None:
        self._grant, self._every, self._watched = grant, every, watched
        self._revoke, self._sampler = revoke, sampler
        self._link = 0.0, 0.0  # of the last offer: bytes/s, seconds of latency
        self._changed = Changes()
        self._grants: list[Grant] = []
        self._planned_grants: list[Grant] = []
        self._iteration, self._origin = 0, 0.0  # its number, and its start
        self._offered = 0  # iteration of the last offer
        self._closed = False
        self._busy: list[tuple[float, float]] = []
        self._profiled: list[list[tuple[float, float]]] = []
        self._profiled_seconds = 0.0  # of an iteration, when the profile was made
        self._lengths: list[float] = []
        self.profile: IdleProfile | None = None
        self.iterations_needed = 1
        self._most_needed = every  # largest so far: a larger one is warned of
        self._sent_at = 0.0  # when the offered bytes should have been sent, by `time.perf_counter`
        self._thread = threading.Thread(target=self._run, name="thinwire-pacer", daemon=True)
        self._thread.start()

    @property
    def how(self) -> str:
        """Text for people: how bytes are granted now."""
        if not self._watched and self._sampler is None:
            return "evenly: no synchronizer is attached, so the idle times of the network are not known"
        by = self._sampler.counters.name if self._sampler is not None else "the lane of the synchronizer"
        if self.profile is None:
            return f"evenly: {len(self._profiled)} of {PROFILED_ITERATIONS} iterations profiled, by {by}"
        steady = "" if self.profile.steady else ", which vary by more than 10 %"
        again = "; profiled again now, because iterations take another time than they did" if self._is_stale else ""
        return f"in {len(self.profile.spans)} idle timespans of each iteration{steady}, by {by}{again}"

    @property
    def schedule(self) -> str:
        """Text for people: which bytes of the last version were granted when (Algorithm 2)."""
        grants = self._planned_grants
        texts = [
            f"{each.num_bytes / 1e6:.3g} MB at {1e3 * each.seconds:.3g} ms"
            + (f" of iteration {each.iteration + 1}" if each.iteration else "")
            for each in grants[:_SHOWN_GRANTS]
        ]
        return ", ".join(texts) + (f", and {len(grants) - _SHOWN_GRANTS} more" if len(grants) > _SHOWN_GRANTS else "")

    @property
    def iteration_seconds(self) -> float:
        """Median of the last 20 iterations, or the shortest of fewer than 5 (the first ones are slow); 0 before any."""
        return (median if len(self._lengths) >= _FEW else min)(self._lengths) if self._lengths else 0.0

    @property
    def idle_seconds(self) -> float:
        """Seconds of an iteration in which the network is idle, as far as known; a profile may be of longer ones."""
        known = self.iteration_seconds if self.profile is None else sum(self.profile.spans)
        return min(known, self.iteration_seconds)

    def note_busy(self, started: float, ended: float) -> None:
        """Record that a job of the lane ran from ``started`` to ``ended`` (`time.perf_counter`)."""
        with self._changed:
            self._busy.append((started, ended))

    @property
    def is_profiling(self) -> bool:
        """Whether the busy times of the network are being recorded, in iterations without a checkpoint's bytes."""
        return self._sampler is not None and self._is_stale

    def note_step(self, loaded: bool = False) -> float | None:
        """Record the end of an optimizer step, which begins a new iteration, and return the length of the last one.

        ``loaded``: whether a checkpoint was on its way in it.
        """
        now = time.perf_counter()
        with self._changed:
            started, self._origin = self._origin, now
            busy, self._busy = self._busy, []
            self._iteration += 1
            self._changed.notify_all()
            if self._iteration == 1:
                return None
            self._lengths = [*self._lengths[1 - PROFILED_ITERATIONS :], now - started]
            if self._sampler is not None:
                samples = self._sampler.take()
                busy = busy_periods(samples)
                loaded = loaded or not samples or samples[0][0] - started > LEAST_GAP * (now - started)
            if self._is_stale and (self._watched or (self._sampler is not None and not loaded)):
                self._profile(idle_timespans(busy, started, now))
            if self._sampler is not None:
                self._sampler.switch(self.is_profiling)
            return now - started

    @property
    def _is_stale(self) -> bool:
        """Whether there is no profile, or iterations differ in length from the profiled ones, or are being profiled."""
        moved = abs(self.iteration_seconds - self._profiled_seconds) > DRIFT * self._profiled_seconds
        return self.profile is None or bool(self._profiled) or moved

    def _profile(self, timespans: list[tuple[float, float]]) -> None:
        """Add an iteration, and make the profile once there are enough. Until then an old one stays in use."""
        self._profiled.append(timespans)
        if len(self._profiled) < PROFILED_ITERATIONS:
            return
        try:
            self.profile = profile(self._profiled)
        except ValueError:  # never idle: go on evenly, and profile again
            self.profile = None
        self._profiled, self._profiled_seconds = [], self.iteration_seconds
        logger.info("checkpoints: bytes are granted %s", self.how)

    def offer(self, num_bytes: int, bytes_per_second: float | None, latency_seconds: float = 0.0) -> None:
        """Grant that many bytes from now on, on a link of that speed and latency; an earlier offer is void."""
        self._link = bytes_per_second or 0.0, latency_seconds
        grants, needed = self._plan(num_bytes, bytes_per_second)
        if needed > self._most_needed:
            self._most_needed = needed
            logger.log(
                logging.INFO if num_bytes < _SMALL_BYTES else logging.WARNING,  # such iterations are short
                "a checkpoint of %.3g MB, for all peers together, takes %s iterations to send beside the training, and"
                " one is made every %s: what does not fit is spread over them, and versions in between are skipped",
                num_bytes / 1e6, needed, self._every,
            )  # fmt: skip
        with self._changed.change():
            if num_bytes:
                self.iterations_needed = needed
            self._offered = self._iteration
            self._grants, self._planned_grants = [*grants], grants or self._planned_grants
            self._sent_at = self._end_of(grants, bytes_per_second)

    def _end_of(self, grants: list[Grant], bytes_per_second: float | None) -> float:
        if not grants or grants[-1].iteration > 0:
            return math.inf if grants else 0.0
        sending = grants[-1].num_bytes / bytes_per_second if bytes_per_second else 0.0
        return self._origin + grants[-1].seconds + sending

    @property
    def seconds_left(self) -> float:
        """Seconds until the offered bytes should have been sent; infinite if that is in a later iteration."""
        return max(0.0, self._sent_at - time.perf_counter())

    def _end_gap(self, ended: Grant) -> None:
        """Withdraw what the gap did not send, and grant what is left in the gaps after it."""
        left = self._revoke() if self._revoke is not None else 0
        with self._changed:
            result, (speed, latency) = self.profile, self._link
            if result is None or self._grants[:1] != [ended]:  # there is another offer meanwhile
                return
            ends = [start + length for start, length in result.timespans]
            position = ended.iteration * len(ends) + (ends.index(ended.seconds) + 1 if ended.seconds in ends else 0)
            grants: list[Grant] = []
            with contextlib.suppress(ValueError):
                grants = gap_grants(result, left, speed, latency, position)
            self._grants, self._sent_at = grants, self._end_of(grants, speed)

    def _plan(self, num_bytes: int, bytes_per_second: float | None) -> tuple[list[Grant], int]:
        """Grants, and the number of iterations that they span."""
        seconds = self.iteration_seconds
        if num_bytes <= 0:
            return [], 1
        if self.profile is not None and bytes_per_second:
            with contextlib.suppress(ValueError):
                grants = gap_grants(self.profile, num_bytes, *self._link)
                return grants, grants[-1].iteration + 1
        needed = math.ceil(num_bytes / bytes_per_second / (EVEN_SHARE * seconds)) if bytes_per_second and seconds else 1
        with self._changed:
            past = time.perf_counter() - self._origin if self._iteration else 0.0
        return even_grants(num_bytes, seconds * self._every, past_seconds=past), needed

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._grants or self._closed)
                if self._closed:
                    return
                if (due := self._due(self._grants[0])) is None or due > 0:
                    self._changed.wait(due)
                    continue
                now = self._grants[0]
                if now.num_bytes:  # and behind it the end of its gap, a grant of 0 bytes, which `_end_gap` replaces
                    ends_gap = now.ends and self._revoke is not None
                    self._grants[:1] = [Grant(now.ends, 0, now.iteration)] if ends_gap else []
            try:
                if now.num_bytes:
                    self._grant(now.num_bytes)
                else:
                    self._end_gap(now)
            except (ThinwireError, ValueError, OSError):  # a ValueError of a holder where this rank has no shard yet
                with self._changed:
                    self._grants = []

    def _due(self, grant: Grant) -> float | None:
        """Seconds until a grant; None if it is not in this iteration."""
        ahead = self._offered + grant.iteration - self._iteration
        if ahead > 0:
            return None
        return self._origin + grant.seconds - time.perf_counter() if ahead == 0 else 0.0

    def close(self) -> None:
        with self._changed.change():
            self._closed = True
        self._thread.join()
        if self._sampler is not None:
            self._sampler.close()
