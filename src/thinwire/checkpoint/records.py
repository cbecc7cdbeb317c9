"""Records of the costs of checkpoints, and notices of their failures."""

import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from thinwire.errors import logger

_KEPT = 1000


@dataclass(frozen=True)
class VersionRecord:
    """Costs of one checkpoint on this rank. ``skipped`` is the reason why there is none, or empty.

    ``blocking_seconds`` is the time for which training stood still: in `Checkpointer.step`, and in the next
    ``optimizer.step`` if that had to wait. ``copy_seconds`` is the time to copy the state, beside the training or not.
    ``coded_bytes`` of the ``num_bytes`` are kept and sent, after ``coding_seconds`` beside the training.
    """

    step: int
    num_bytes: int = 0
    copy_seconds: float = 0.0
    blocking_seconds: float = 0.0
    skipped: str = ""
    coded_bytes: int = 0
    coding_seconds: float = 0.0


class Records:
    """Records of the last 1,000 checkpoints, and counts of all."""

    def __init__(self) -> None:
        self._kept: deque[VersionRecord] = deque(maxlen=_KEPT)
        self.versions, self.skipped = 0, 0

    def add(self, record: VersionRecord) -> None:
        self._kept.append(record)
        self._count(record, 1)

    def amend(self, step: int, blocking_seconds: float = 0.0, **known: Any) -> None:
        """Complete the record of a step by what is known now, and by more time for which training stood still."""
        index = next((i for i in reversed(range(len(self._kept))) if self._kept[i].step == step), None)
        if index is not None:
            was = self._kept[index]
            self._kept[index] = replace(was, blocking_seconds=was.blocking_seconds + blocking_seconds, **known)
            self._count(was, -1)
            self._count(self._kept[index], 1)

    def _count(self, record: VersionRecord, times: int) -> None:
        self.versions += 0 if record.skipped else times
        self.skipped += times if record.skipped else 0

    def all(self) -> list[VersionRecord]:
        return list(self._kept)

    @property
    def coded_bytes(self) -> int:
        """Bytes that are kept and sent of the newest version that is coded or needs no coding; 0 before."""
        return next((record.coded_bytes for record in reversed(self._kept) if record.coded_bytes), 0)

    @property
    def newest_step(self) -> int | None:
        """Step of the newest version, or None before the first one."""
        return next((record.step for record in reversed(self._kept) if not record.skipped), None)

    @property
    def last_reason(self) -> str:
        """Reason of the last checkpoint that was skipped."""
        return next((record.skipped for record in reversed(self._kept) if record.skipped), "replicas are behind")

    def stats(self) -> dict[str, float]:
        """Return counts, and medians over the checkpoints that were written."""
        written = [record for record in self._kept if not record.skipped]
        return {
            "checkpoint/versions": float(self.versions),
            "checkpoint/skipped": float(self.skipped),
            "checkpoint/bytes": float(written[-1].num_bytes if written else 0),
            "checkpoint/coded_bytes": float(self.coded_bytes),
            "checkpoint/coding_seconds": median(r.coding_seconds for r in written) if written else 0.0,
            "checkpoint/blocking_seconds": median(r.blocking_seconds for r in written) if written else 0.0,
            "checkpoint/copy_seconds": median(r.copy_seconds for r in written) if written else 0.0,
        }


class AgeAlarm:
    """An alarm when the newest checkpoint that all ranks have is old: more than a minute, 20 checkpoints that were due,
    and 4 times the iterations over which one is spread. It repeats each time the age has doubled.
    """

    def __init__(self, every: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._newest, self._since, self._times = -1, clock(), 1

    def check(self, step: int, newest: int, iterations_needed: float) -> str:
        """Return how old the ``newest`` checkpoint is, when that is to be said."""
        if newest != self._newest:
            self._newest, self._since, self._times = newest, self._clock(), 1
        seconds, steps = self._clock() - self._since, max(20 * self._every, 4 * min(iterations_needed, 250))
        if seconds <= 60 * self._times or step - newest <= steps * self._times:
            return ""
        self._times *= 2
        return f"the newest checkpoint that all ranks have is {step - newest} steps and {seconds:.0f} s old"


class Notices:
    """Notices for people: logged at once, and warned of once for each text, when `deliver` is called.

    Warnings are deferred because a warning may be an error, and the ranks may be in the middle of agreeing on
    something.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: set[str] = set()
        self._pending: deque[str] = deque()
        self.last = ""

    def add(self, text: str) -> None:
        """Log a notice and keep it for `deliver`; from any thread."""
        logger.warning("rank %s: %s", self._rank, text)
        self.last = text
        if text not in self._known:
            self._known.add(text)
            self._pending.append(text)

    def deliver(self, stacklevel: int) -> None:
        while self._pending:
            warnings.warn(f"rank {self._rank}: {self._pending.popleft()}", stacklevel=stacklevel + 1)
