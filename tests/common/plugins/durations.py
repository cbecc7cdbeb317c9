"""What each test costs in seconds of processor: its own process, its ranks, its commands.

Seconds of a clock on a shared machine say who else was busy; seconds of processor add up, and divided by the cores they
are the least time that a run can take. The total is in the last lines of every log. With THINWIRE_DURATIONS=FILE the
functions of tests that take half a second are written there: seconds of processor, of the clock, items. Those of
`make test` are kept: `THINWIRE_DURATIONS=tests/durations.txt make test`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DEAR_SECONDS = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Cost:
    items: int = 0
    processor: float = 0.0
    wall: float = 0.0


_costs: dict[str, Cost] = defaultdict(Cost)  # by function, in the process that gets the reports
_started = (0.0, 0.0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol() -> None:
    """Not where reports are gathered: to ask there for the seconds of all workers and ranks cost 50 s of a run."""
    global _started
    _started = (processor_seconds(), time.monotonic())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: Any) -> None:
    for name, value in report.user_properties if report.when == "teardown" else ():
        if name == "cost":
            cost = _costs[report.nodeid.partition("[")[0]]
            cost.items, cost.processor, cost.wall = cost.items + 1, cost.processor + value[0], cost.wall + value[1]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "teardown":  # before the report copies the properties
        spent = max(0.0, processor_seconds() - _started[0])  # who left its parent takes its seconds along
        item.user_properties.append(("cost", (spent, time.monotonic() - _started[1])))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    total = Cost(*(sum(getattr(cost, name) for cost in _costs.values()) for name in ("items", "processor", "wall")))
    terminalreporter.write_line(
        f"{total.items} tests took {total.processor:.0f} s of processor without their collection, "
        f"{total.wall:.0f} s of their workers' clocks"
    )
    if path := os.environ.get("THINWIRE_DURATIONS"):
        dear = [entry for entry in _costs.items() if entry[1].processor >= DEAR_SECONDS]
        dearest = sorted(dear, key=lambda entry: -entry[1].processor)
        lines = [f"{cost.processor:9.2f} {cost.wall:9.2f} {cost.items:6d} {name}\n" for name, cost in dearest]
        Path(path).write_text("".join(lines))


def processor_seconds() -> float:
    """Those of this process, of its children that ended, and of all that descend from it and live."""
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system + sum(map(_with_ended, _descendants()))


def _descendants() -> list[int]:
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        children = [int(child) for task in _read(waiting.pop(), "task/*/children") for child in task.split()]
        found += children
        waiting += children
    return found


def _with_ended(process: int) -> float:
    return sum(sum(map(int, stat.rpartition(")")[2].split()[11:15])) for stat in _read(process, "stat")) / _TICKS


def _read(process: int, pattern: str) -> list[str]:
    """Files of /proc, without those that end meanwhile; none where the system is not Linux."""
    texts = []
    with contextlib.suppress(OSError):  # of the glob: the process may end between two of its steps
        for path in Path(f"/proc/{process}").glob(pattern):
            with contextlib.suppress(OSError):
                texts.append(path.read_text())
    return texts
