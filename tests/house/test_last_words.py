"""A worker of pytest-xdist that dies leaves in the report of its test what it died of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import ctypes, os, pytest, signal, time
@pytest.mark.parametrize("number", [1, 2])
def test_before(number): pass
def test_that_takes_long(): time.sleep(100)
def test_that_hangs(): signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(100)
def test_that_reads_nowhere(): ctypes.string_at(0)
def test_that_is_killed(): os.kill(os.getpid(), signal.SIGKILL)
def test_that_leaves(): os._exit(3)
def test_that_passes(): pass
"""
TIMEOUT = ("--timeout", "2", "--timeout-method", "signal")
IT_RAN = "It ran before, in this order:\ntest_of_deaths.py::test_before\n"
SAID = {
    "test_that_hangs": ("exit status 1;", "Timeout (0:00:03)!", "test_of_deaths.py", IT_RAN),
    "test_that_reads_nowhere": ("killed by SIGSEGV;", "Segmentation fault", "test_of_deaths.py"),
    "test_that_is_killed": ("killed by SIGKILL;", "MiB available of", "(no stacks)"),
    "test_that_leaves": ("exit status 3;", "MiB available of", "(no stacks)"),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is printed of each test that fails."""
    directory = tmp_path_factory.mktemp("deaths")
    (directory / "test_of_deaths.py").write_text(TESTS)
    (directory / "pytest.ini").write_text("[pytest]\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "-p", "last_words", "-p", "no:cacheprovider", *TIMEOUT],
        cwd=directory,
        env={"PYTHONPATH": str(Path(__file__).parents[1] / "common" / "plugins"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert "5 failed, 3 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "Failed: Timeout" in ran.stdout, "the test ends, and its worker goes on"
    parts = ran.stdout.partition("= FAILURES =")[2].partition("= short test summary info =")[0].split("crashed while")
    return {part.partition("::")[2].partition("'")[0]: part for part in parts[1:]}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_the_report_of_a_worker_that_died(name: str, reports: dict[str, str]) -> None:
    assert [said for said in SAID[name] if said not in reports[name]] == []
