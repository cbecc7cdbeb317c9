"""Run pytest with these arguments, and what failed once more, alone: what passes then is flaky, and the end says so.

    python tools/suite.py -n 4 --dist worksteal -m "not slow"

The exit status is 0 if each test passed, at once or alone. A flaky test is a defect of the product or of the test
(CONTRIBUTING.md). A red run ends with the name of each failure and the first line of its error, in at most 20 lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MOST_AGAIN = 20  # of more failures a second run says nothing new
MOST_LINES = 20
TESTS_FAILED = 1  # exit status of pytest


def main(arguments: list[str]) -> int:
    """Run the suite and return its exit status."""
    status, failures = run(arguments)
    if status != TESTS_FAILED or not failures:
        return status
    flaky: list[str] = []
    if len(failures) <= MOST_AGAIN:
        print(f"::: once more, alone: {len(failures)} that failed", flush=True)
        status, again = run(["-p", "no:xdist", *failures])
        flaky = [name for name in failures if name not in again]
        failures = again
    print("\n".join(summary(failures, flaky)), flush=True)
    return status


def summary(failures: dict[str, str], flaky: list[str]) -> list[str]:
    """Return the last lines of a run in which tests failed."""
    lines = [line for name, error in failures.items() for line in (f"failed: {name}", f"  {error}")]
    if len(lines) > MOST_LINES:
        shown = (MOST_LINES - 2) // 2
        lines = [*lines[: 2 * shown], f"and {len(failures) - shown} more"]
    return lines + [f"flaky: {name}" for name in flaky]


def run(arguments: list[str]) -> tuple[int, dict[str, str]]:
    """Run pytest; return its exit status and the first line of the error of each test that failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "failures.json"
        command = [sys.executable, "-m", "pytest", *arguments]
        status = subprocess.call(command, env={**os.environ, "THINWIRE_FAILURES": str(file)})
        return status, json.loads(file.read_text()) if file.exists() else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
