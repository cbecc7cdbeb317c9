"""Signs of life: each process counts in a store, so that others tell one that is gone from one that is busy.

A connection that ends says little: who lost a peer hangs up on all others, and a process that was stopped keeps its
connections. A thread of its own counts while another one computes, and stops with its process.
"""

import threading
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

BEAT_SECONDS = 0.2
GONE_SECONDS = 1.0
"""Silence after which a process whose connection has ended is gone."""
SILENT_SECONDS = 2.0
"""Silence after which any other process counts as gone once one is lost."""
FROZEN_SECONDS = 5.0
"""Silence after which a process counts as gone that was not missed otherwise."""
_MOST_WATCHED = 16


class Heart:
    """The beats of this process, and those that it hears.

    Args:
        store: a connection of its own.
        members: returns the token of this process and, by rank, the tokens of all that take part.
        on_frozen: called with the rank of one that is silent for long, at each beat.
    """

    def __init__(
        self, store: dist.Store, members: Callable[[], tuple[str, Mapping[int, str]]], on_frozen: Callable[[int], None]
    ) -> None:
        self._store, self._members, self._on_frozen = store, members, on_frozen
        self._heard: dict[str, tuple[int, float]] = {}  # the last count of a token, and seconds of silence since then
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="thinwire-heart", daemon=True).start()

    def silence(self, token: str) -> float:
        """Return for how many seconds a process gave no sign; 0 if nobody listened."""
        return self._heard.get(token, (0, 0.0))[1]

    def stop(self) -> None:
        """Give no more signs."""
        self._ended.set()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(BEAT_SECONDS):
            now = time.monotonic()
            passed, before = min(now - before, 2 * BEAT_SECONDS), now  # what was longer stopped this process too
            try:
                self._beat(passed)
            except RuntimeError:  # the store is gone: whoever needs it says so
                return

    def _beat(self, passed: float) -> None:
        token, members = self._members()
        self._store.add(f"heart/{token}", 1)
        around = list(members.items())
        at = list(members.values()).index(token) if token in members.values() else len(around)
        for rank, other in [*around[at + 1 :], *around[:at]][:_MOST_WATCHED]:
            count = self._store.add(f"heart/{other}", 0)
            last, silence = self._heard.get(other, (-1, 0.0))
            self._heard[other] = count, 0.0 if count != last else silence + passed
            if self._heard[other][1] > FROZEN_SECONDS:
                self._on_frozen(rank)
