"""What tests have instead of a clock: time that passes when they say so, and work counted in calls.

Beside other processes everything takes longer, and a thread may not run for seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any, ClassVar

from torch.futures import Future

PATIENCE = 60.0
"""Seconds that a test waits for what must come to be."""


class FakeClock:
    """In the place of the module ``time``, for what asks for moments and does not sleep."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def wait_until(holds: Callable[[], object], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.01)


class SlowRange(nullcontext[None]):
    """In the place of `torch.profiler.record_function`: a range that ends with a future needs time to end."""

    seen: ClassVar[list[str]] = []
    not_ended: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _call_end_callbacks_on_future(self, future: Future[Any]) -> Future[Any]:
        def end(done: Future[Any]) -> Any:
            time.sleep(0.1)  # as long as a thread may wait for a processor
            self.not_ended.remove(self._name)
            return done.value()

        self.seen.append(self._name)
        self.not_ended.append(self._name)
        return future.then(end)


def calls_of(work: Callable[[], object]) -> int:
    """How many functions are called, those in C too: the same number on every machine, however busy."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
