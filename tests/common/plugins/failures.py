"""Write what failed to the file THINWIRE_FAILURES, for `tools/suite.py`: names, and the first line of each error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

_failures: dict[str, str] = {}  # in the process that gets the reports


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        _failures.setdefault(report.nodeid, _first_line(report.longrepr))


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _failures.setdefault(report.nodeid, _first_line(report.longrepr))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if (path := os.environ.get("THINWIRE_FAILURES")) and not hasattr(session.config, "workerinput"):
        Path(path).write_text(json.dumps(_failures))


def _first_line(longrepr: Any) -> str:
    crash = getattr(longrepr, "reprcrash", None)
    lines = str(longrepr if crash is None else crash.message).strip().splitlines() or ["no error was recorded"]
    return lines[0][:200]
