"""What checkpoints took, and what went wrong with them."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from dataclasses import dataclass, replace
from statistics import median

logger = logging.getLogger("thinwire")

_KEPT = 1000


@dataclass(frozen=True)
class VersionRecord:
    """What one checkpoint took on this rank. ``skipped`` says why there is none, or is empty.

    ``blocking_seconds`` is for how long training stood still: in `Checkpointer.step`, and in the next
    ``optimizer.step`` if that had to wait. ``copy_seconds`` is what copying the state took, beside the training or not.
    """

    step: int
    num_bytes: int = 0
    copy_seconds: float = 0.0
    blocking_seconds: float = 0.0
    skipped: str = ""


class Records:
    """Of the last 1,000 checkpoints, and counts of all."""

    def __init__(self) -> None:
        self._kept: deque[VersionRecord] = deque(maxlen=_KEPT)
        self.versions, self.skipped = 0, 0

    def add(self, record: VersionRecord) -> None:
        self._kept.append(record)
        self._count(record, 1)

    def amend(self, copy_seconds: float, blocking_seconds: float, skipped: str) -> None:
        """Of the last one: what copying it took, for how much longer training stood still, and what became of it."""
        last = self._kept.pop()
        self._count(last, -1)
        blocking_seconds += last.blocking_seconds
        self.add(replace(last, copy_seconds=copy_seconds, blocking_seconds=blocking_seconds, skipped=skipped))

    def _count(self, record: VersionRecord, times: int) -> None:
        self.versions += 0 if record.skipped else times
        self.skipped += times if record.skipped else 0

    def all(self) -> list[VersionRecord]:
        return list(self._kept)

    @property
    def num_bytes(self) -> int:
        """Of the newest version."""
        return next((record.num_bytes for record in reversed(self._kept) if not record.skipped), 0)

    @property
    def newest_step(self) -> int | None:
        """Of the newest version."""
        return next((record.step for record in reversed(self._kept) if not record.skipped), None)

    @property
    def last_reason(self) -> str:
        """Why the last one was skipped that was."""
        return next((record.skipped for record in reversed(self._kept) if record.skipped), "replicas are behind")

    def stats(self) -> dict[str, float]:
        """Counts, and medians over those that were written."""
        written = [record for record in self._kept if not record.skipped]
        return {
            "checkpoint/versions": float(self.versions),
            "checkpoint/skipped": float(self.skipped),
            "checkpoint/bytes": float(self.num_bytes),
            "checkpoint/blocking_seconds": median(r.blocking_seconds for r in written) if written else 0.0,
            "checkpoint/copy_seconds": median(r.copy_seconds for r in written) if written else 0.0,
        }


class Notices:
    """What people have to know: logged at once, and warned of once for each text, when `deliver` is called.

    Not at once: a warning may be an error, and the ranks may be in the middle of agreeing on something.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: set[str] = set()
        self._pending: deque[str] = deque()
        self.last = ""

    def add(self, text: str) -> None:
        """From any thread."""
        logger.warning("rank %s: %s", self._rank, text)
        self.last = text
        if text not in self._known:
            self._known.add(text)
            self._pending.append(text)

    def deliver(self, stacklevel: int) -> None:
        while self._pending:
            warnings.warn(f"rank {self._rank}: {self._pending.popleft()}", stacklevel=stacklevel + 1)
