"""Write results of benchmarks as benchmarks/results keeps them: a row a line, six digits, and curves only of the first
seed of results of which tests draw the report.

    python tools/results.py benchmarks/results/*.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CURVES = ("curve_steps", "seconds_curve", "loss_curve")
DRAWN = ("train-digits-4xloopback", "train-lstm-8x100mbit")
"""Results of which tests draw the report."""


def kept(name: str, result: Any) -> str:
    """Return the text that is kept of a result."""
    return "\n".join(_lines(_short(result, name in DRAWN))) + "\n"


def _short(value: Any, drawn: bool) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_short(entry, drawn) for entry in value]
    if not isinstance(value, dict):
        return value
    drop = () if drawn and value.get("seed", 0) == 0 else CURVES
    return {key: _short(entry, drawn) for key, entry in value.items() if key not in drop}


def _lines(result: Any) -> Iterator[str]:
    """Yield JSON with a line for each entry of the result, and for each row of a list of rows."""
    if isinstance(result, list):
        yield from _rows("[", result, "]")
        return
    yield "{"
    for number, (key, entry) in enumerate(result.items(), 1):
        end = "," if number < len(result) else ""
        if isinstance(entry, list) and entry and isinstance(entry[0], dict):
            yield from _rows(f"{json.dumps(key)}: [", entry, f"]{end}")
        else:
            yield f"{json.dumps(key)}: {json.dumps(entry)}{end}"
    yield "}"


def _rows(start: str, rows: list[Any], end: str) -> Iterator[str]:
    yield start
    for number, row in enumerate(rows, 1):
        yield json.dumps(row) + ("," if number < len(rows) else "")
    yield end


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(kept(path.stem, json.loads(path.read_text())))


if __name__ == "__main__":
    main()
