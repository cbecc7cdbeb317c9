"""What the threads of a lane wait for, so that a wait that Gloo does not end is seen.

When a connection breaks, Gloo fails what is queued for it, but neither the message that it is receiving nor those that
it is sending (``Pair::signalException`` of its TCP transport; torch 2.13): whoever waits for one of these waits until
the timeout, and Python cannot abort a work. So each wait is noted here, and another thread looks whether its peer is
still connected.
"""

from __future__ import annotations

import threading
from itertools import count

import torch.distributed as dist

EVERYONE = -1
"""In place of a rank: of a collective, which needs all of them."""
LOOKS = 3
"""A wait that was there in so many looks in a row is one of a thread that stands still: what a peer sent before it hung
up is read within that time."""
COLLECTIVE_LOOKS = 8
"""A rank may have its result, and be gone, while the last messages of others are still on their way."""


_Wait = tuple[int, int]
"""The rank, and the number of the wait: not its work, since who holds one holds the group, beyond its end."""


class Waits:
    """The works that threads wait for now."""

    def __init__(self) -> None:
        self._now: dict[int, _Wait] = {}  # of each thread
        self._looks: dict[_Wait, int] = {}
        self._numbers = count()

    def wait(self, work: dist.Work | None, rank: int = EVERYONE) -> None:
        """Wait for a work with this rank of the group."""
        assert work is not None, "an exchange is only for ranks of the group"
        thread = threading.get_ident()
        self._now[thread] = rank, next(self._numbers)
        try:
            work.wait()
        finally:
            del self._now[thread]

    def look(self) -> set[int]:
        """The ranks that some thread has waited for since the last looks, for one and the same work."""
        self._looks = {wait: self._looks.get(wait, 0) + 1 for wait in list(self._now.values())}
        return {
            rank
            for (rank, _), looks in self._looks.items()
            if looks >= (COLLECTIVE_LOOKS if rank == EVERYONE else LOOKS)
        }
