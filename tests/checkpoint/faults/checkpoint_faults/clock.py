"""A wall clock that nobody may rely on."""

from __future__ import annotations

import random
import time

_YEARS_IN_SECONDS = 1e9


def jump() -> None:
    """From now on the wall clock of this process is somewhere else, 30 years back to 30 years ahead, at each look."""
    real = time.time
    jumps = random.Random(0)

    def now() -> float:
        return real() + jumps.uniform(-_YEARS_IN_SECONDS, _YEARS_IN_SECONDS)

    time.time = now
    time.time_ns = lambda: int(now() * 1e9)
