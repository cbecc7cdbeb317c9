"""Comparison of a benchmark's rows with an earlier run's, read from its JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Compared:
    """Median seconds of one method before and now; None where only one of the runs has it."""

    name: str
    before: float | None
    now: float | None

    @property
    def ratio(self) -> float | None:
        """Seconds now over seconds before: below 1 is faster."""
        return None if self.before is None or self.now is None else self.now / self.before


def load_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a result that ``--json`` wrote.

    Raises:
        ValueError: no such file, or another content.
    """
    try:
        rows = json.loads(path.read_text())["rows"]
    except OSError as error:
        raise ValueError(f"{path} is no result of a benchmark: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of a benchmark: give a file that --json of one wrote") from error
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise ValueError(f"{path} has no rows: give a file that --json wrote")
    return rows


def compare(
    rows: Sequence[dict[str, Any]], earlier: Sequence[dict[str, Any]], same: Sequence[str], name: str, seconds: str
) -> list[Compared]:
    """Compare the rows that agree in the fields ``same``, by the median of ``seconds`` for each ``name``.

    Raises:
        ValueError: no row of the earlier run is comparable; the message says in which fields.
    """
    before, now = _medians(earlier, same, name, seconds), _medians(rows, same, name, seconds)
    if not before.keys() & now.keys():
        fields = ", ".join((*same, name))
        raise ValueError(f"the earlier run has no row that is the same in {fields}")
    names = list(now) + [key for key in before if key not in now]
    sizes = len({key[:-1] for key in names}) > 1
    return [Compared(", ".join(map(str, key if sizes else key[-1:])), before.get(key), now.get(key)) for key in names]


def _medians(
    rows: Sequence[dict[str, Any]], same: Sequence[str], name: str, seconds: str
) -> dict[tuple[Any, ...], float]:
    values: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        key = tuple(row.get(field) for field in (*same, name))
        if isinstance(row.get(seconds), (int, float)):
            values.setdefault(key, []).append(row[seconds])
    return {key: statistics.median(each) for key, each in values.items()}
