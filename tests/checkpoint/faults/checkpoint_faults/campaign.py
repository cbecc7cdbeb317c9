"""All kinds of faults, one after the other: how each ended, and whether it ended as it must."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoint_faults.kind import Kind, Outcome, WrongRestore
from checkpoint_faults.kinds import (
    disk,
    flips,
    hosts,
    kill,
    network,
    restart,
    slots,
    wire,
)

KINDS: tuple[Kind, ...] = (
    *kill.KINDS,
    *restart.KINDS,
    *hosts.KINDS,
    *network.KINDS,
    *slots.KINDS,
    *wire.KINDS,
    *disk.KINDS,
    *flips.KINDS,
)


@dataclass(frozen=True)
class Result:
    """``outcome`` is None where the restore was wrong, or something else went wrong: ``problem`` says what."""

    kind: Kind
    outcome: Outcome | None
    problem: str
    wrong_restore: bool
    seconds: float

    @property
    def as_expected(self) -> bool:
        return self.outcome is not None and self.kind.expected.allows(self.outcome)

    def to_json(self) -> dict[str, Any]:
        outcome = self.outcome or Outcome("refused")
        return {
            "kind": self.kind.name,
            "group": self.kind.group,
            "what": self.kind.what,
            "ended": outcome.ended if self.outcome else "problem",
            "source": outcome.source,
            "step": outcome.step,
            "says": self.problem or outcome.says,
            "as_expected": self.as_expected,
            "wrong_restore": self.wrong_restore,
            "seconds": round(self.seconds, 2),
        }


def run_kind(kind: Kind) -> Result:
    """In a directory of its own. Whatever goes wrong is in the result."""
    started = time.perf_counter()
    outcome, problem, wrong = None, "", False
    with tempfile.TemporaryDirectory(prefix="thinwire-faults-") as directory:
        try:
            outcome = kind.run(Path(directory))
            outcome = replace(outcome, says=outcome.says.replace(directory, "DIRECTORY"))
        except WrongRestore as error:
            problem, wrong = f"wrong restore: {error}", True
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    return Result(kind, outcome, problem, wrong, time.perf_counter() - started)


def run_all(kinds: Iterable[Kind] = KINDS, on_result: Callable[[Result], None] = lambda _: None) -> list[Result]:
    """Each of them once; ``on_result`` is told of each as it ends."""
    results = []
    for kind in kinds:
        results.append(run_kind(kind))
        on_result(results[-1])
    return results
