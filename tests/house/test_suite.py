"""The command that runs the suite: it leaves nothing behind, whatever its tests leave, and whoever kills it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clocks import wait_until

SUITE = Path(__file__).parents[2] / "tools" / "suite.py"
LEAVES = """
import subprocess, sys, tempfile, time

def test() -> None:
    tempfile.mkdtemp()
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)", "a holder of {folder}"]
    subprocess.Popen(sleeper, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while {forever}:
        time.sleep(1)
"""


def start(folder: Path, forever: bool) -> subprocess.Popen[str]:
    (folder / "test_leaves.py").write_text(LEAVES.format(folder=folder, forever=forever))
    (folder / "temporary").mkdir(exist_ok=True)
    command = [sys.executable, str(SUITE), "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
    environment = os.environ | {"TMPDIR": str(folder / "temporary")}
    return subprocess.Popen([*command, str(folder)], env=environment, stdout=subprocess.PIPE, text=True)


def living(folder: Path) -> list[int]:
    """The processes that the test of this folder has left."""
    return with_words(f"a holder of {folder}")


def pytest_of(folder: Path) -> list[int]:
    return with_words(f"--rootdir\0{folder}")


def with_words(words: str) -> list[int]:
    """The processes whose command line has these words."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if words in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:  # it ended
            continue
    return found


@pytest.mark.slow
def test_a_run_leaves_no_file_and_no_process(tmp_path: Path) -> None:
    with start(tmp_path, forever=False) as suite:
        said, _ = suite.communicate(timeout=60)
    assert suite.returncode == 0, said
    assert f"left running, and killed: {sys.executable}" in said
    assert list((tmp_path / "temporary").iterdir()) == []
    assert living(tmp_path) == []


@pytest.mark.slow
def test_what_a_killed_run_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    with start(tmp_path, forever=True) as suite:
        wait_until(lambda: bool(living(tmp_path)))
        killed = living(tmp_path)
        suite.kill()
    wait_until(lambda: not pytest_of(tmp_path))
    assert [each.name for each in (tmp_path / "temporary").iterdir()] == [f"tw-{suite.pid}"]
    try:
        with start(tmp_path, forever=False) as suite:
            said, _ = suite.communicate(timeout=60)
        assert suite.returncode == 0, said
        assert list((tmp_path / "temporary").iterdir()) == []
    finally:
        for process in killed:
            os.kill(process, signal.SIGKILL)


ORPHANS = """
import os, subprocess, sys, time

def test() -> None:
    orphan = "import os, subprocess; print(subprocess.Popen(['sleep', '1']).pid)"
    pid = int(subprocess.run([sys.executable, "-c", orphan], capture_output=True, check=True).stdout)
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.01)
"""


@pytest.mark.slow
def test_an_orphan_that_has_ended_is_gone_for_tests(tmp_path: Path) -> None:
    (tmp_path / "test_orphans.py").write_text(ORPHANS)
    command = [sys.executable, str(SUITE), "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    suite = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert suite.returncode == 0, suite.stdout
