"""What tests have instead of a clock: time that passes when they say so, and work counted in calls.

Beside other processes everything takes longer, and a thread may not run for seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType

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
