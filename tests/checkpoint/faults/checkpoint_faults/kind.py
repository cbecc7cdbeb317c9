"""A kind of fault: what is done, how the restart after it has to end, and how it did."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Ended = Literal["restored", "fresh", "refused"]


class WrongRestore(Exception):
    """What was restored is not, to the bit, what was saved at that step: the one thing that must never be."""


@dataclass(frozen=True)
class Outcome:
    """How a restart ended.

    Args:
        ended: ``restored``, every byte compared with what was saved; ``fresh``, a start from step 0 with the initial
            state; or ``refused``, on all ranks.
        source: of what was restored: ``memory`` of each rank's own host, a ``peer`` for at least one rank, or ``disk``.
        step: that was restored.
        says: the error of a refusal, or the warning before a fresh start.
    """

    ended: Ended
    source: str = ""
    step: int = 0
    says: str = ""

    def __str__(self) -> str:
        return f"restored from {self.source}, step {self.step}" if self.ended == "restored" else self.ended


@dataclass(frozen=True)
class Expected:
    """The end that a kind of fault must have; ``source`` may be several, as in ``memory|peer``; ``says`` is a regular
    expression."""

    ended: Ended
    source: str = ""
    at_least: int = 0
    at_most: int = 0
    says: str = ""

    def allows(self, outcome: Outcome) -> bool:
        return (
            outcome.ended == self.ended
            and outcome.source in self.source.split("|")
            and self.at_least <= outcome.step <= self.at_most
            and re.search(self.says, outcome.says) is not None
        )


@dataclass(frozen=True)
class Kind:
    """One row of the campaign. ``run`` does it in an empty directory; ``slow`` ones take seconds."""

    name: str
    group: str
    what: str
    run: Callable[[Path], Outcome]
    expected: Expected
    slow: bool = False


def restored(source: str, at_least: int, at_most: int | None = None) -> Expected:
    """At this step, or at one of these."""
    return Expected("restored", source, at_least, at_least if at_most is None else at_most)


def refused(says: str) -> Expected:
    return Expected("refused", says=says)
