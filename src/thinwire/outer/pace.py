"""When rounds in the background begin."""

import atexit
import threading
import time
from weakref import WeakSet

SHARE = 0.01
"""Part of the processor time of a process that its rounds take at most, unless the user says how often they begin: on a
fast link they would otherwise eat the cores that training needs."""
BYTE_SECONDS = 3e-9
"""Processor time of Gloo's threads and the kernel for a byte sent or received: 50 ms for the 16 MB of a round of the
gpt job on 8 emulated hosts, whose lane took 12 ms."""
LEAST_PATIENCE, STEPS_OF_PATIENCE = 1.0, 4
"""A rank that makes no step takes part in a round after so many of its last steps, and at least so many seconds."""


class RoundPace:
    """When rounds begin. It knows no model, so that one can be freed while the lane waits here.

    A round begins once this rank has made a step since the last one; or after some seconds without a step, as in an
    evaluation, so that others need not wait for it.

    Args:
        every_seconds: least seconds between the beginnings of two rounds; 0 for as often as `SHARE` allows.
        timeout_seconds: how long the other ranks wait for this one.
    """

    def __init__(self, every_seconds: float, timeout_seconds: float) -> None:
        self.changed = threading.Condition()  # guards all that training and the background share
        self.steps = 0
        self.seen = 0  # steps at the last snapshot
        self.is_ending = False
        self.is_dropped = False
        self._hurry = threading.Event()
        self._every, self._longest = every_seconds, timeout_seconds / 4
        self._begun, self._used = time.perf_counter(), time.process_time()
        self._cost = 0.0
        self._stepped, self._step_seconds = self._begun, 0.0
        _paces.add(self)

    @property
    def patience(self) -> float:
        """Longest wait for a step of this rank."""
        return min(self._longest, max(LEAST_PATIENCE, STEPS_OF_PATIENCE * self._step_seconds))

    def step(self) -> None:
        """Count a step; inside of ``changed``."""
        now = time.perf_counter()
        self._stepped, self._step_seconds = now, now - self._stepped
        self.steps += 1
        self.changed.notify_all()

    def wait(self) -> None:
        """Wait until the next round begins; on the thread of the lane, before each job of a round."""
        elapsed, used = time.perf_counter() - self._begun, time.process_time() - self._used
        starved = min(16.0, max(1.0, elapsed / max(used, 1e-9)))  # a process that gets half a core counts half
        pause = self._every - elapsed if self._every else min(self._longest, self._cost * starved / SHARE)
        self._hurry.wait(max(1e-3, pause))  # another thread may want the lock of a round
        with self.changed:
            self.changed.wait_for(lambda: self.steps > self.seen or self._hurry.is_set(), self.patience)
        self._begun, self._used = time.perf_counter(), time.process_time()

    def end_round(self, cpu_seconds: float) -> None:
        """Record the processor time that a round took."""
        self._cost = cpu_seconds

    def hurry(self, is_ending: bool) -> None:
        """Begin rounds without a pause, to end them; or return to the usual pace."""
        with self.changed:
            self.is_ending = is_ending
            self._hurry.set() if is_ending or self.is_dropped else self._hurry.clear()
            self.changed.notify_all()

    def drop(self) -> None:
        """Let the lane go on: there will be no more rounds."""
        self.is_dropped = True
        self.hurry(self.is_ending)


_paces: WeakSet[RoundPace] = WeakSet()


@atexit.register
def _drop_all() -> None:
    """Keep no lane waiting in a process that exits; registered later than the end of lanes, so called earlier."""
    for pace in list(_paces):
        pace.drop()
