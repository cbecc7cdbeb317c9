"""What a worker of pytest-xdist died of, in the report of the test that it ran.

That is its signal or exit status, the stacks of its threads, whether memory ran out, and what it ran before: who breaks
memory lives on, and the garbage collector dies of it in another test. xdist itself says "crashed", and what
pytest-timeout prints when it ends a worker is lost.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import subprocess
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest

_SECONDS_TO_END = 10.0  # until a worker that hung up is a process that has ended

_ran: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=40))  # the last test functions of each worker

_stacks: int | None = None  # the file for those of this process, if it is a worker; open as long as it lives


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["stacks"] = str(_stacks_of(node))
    node.workerinput["killed_for_memory"] = _killed_for_memory()


@pytest.hookimpl(trylast=True)  # pytest's own plugin writes to the worker's standard error, where nobody looks
def pytest_configure(config: pytest.Config) -> None:
    global _stacks
    if hasattr(config, "workerinput"):
        _stacks = os.open(config.workerinput["stacks"], os.O_WRONLY | os.O_CREAT)
        faulthandler.enable(_stacks)


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """The signal of pytest-timeout ends the test; a thread outside of Python ends a worker that does not answer it."""
    if _stacks is not None:
        faulthandler.dump_traceback_later(1.5 * settings.timeout, exit=True, file=_stacks)
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    if _stacks is not None:
        faulthandler.cancel_dump_traceback_later()
    return None


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "teardown" and hasattr(report, "node"):
        ran, function = _ran[report.node.gateway.id], report.nodeid.partition("[")[0]
        if function not in ran:
            ran.append(function)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any, sched: Any) -> None:
    node = report.node
    try:
        status = node.gateway._io.popen.wait(_SECONDS_TO_END)
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    except subprocess.TimeoutExpired:
        how = "it hung up and still runs"
    killed = _killed_for_memory() - node.workerinput["killed_for_memory"]
    stacks = _stacks_of(node)
    report.longrepr = "\n".join(
        [
            report.longrepr,
            f"{how}; {killed} processes killed for want of memory since it started; {_memory()}",
            (stacks.read_text() if stacks.exists() else "") or "(no stacks)",
            "It ran before, in this order:",
            *_ran[node.gateway.id],
        ]
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A log without a failure tells too how near it was to the end of memory."""
    terminalreporter.write_line(_memory())


def _stacks_of(node: Any) -> Path:
    return Path(node.config._tmp_path_factory.getbasetemp()) / f"stacks-{node.gateway.id}"


def _killed_for_memory() -> int:
    """Processes that the kernel has killed so since it started, on the whole machine."""
    return _number("/proc/vmstat", "oom_kill")


def _memory() -> str:
    free, total = (_number("/proc/meminfo", name) // 1024 for name in ("MemAvailable:", "MemTotal:"))
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    return f"memory: {free} MiB available of {total}, the largest process that ended had {largest} MiB"


def _number(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []  # Linux has it
    fields = (line.split() for line in lines)
    return next((int(field[1]) for field in fields if field[0] == name), 0)
