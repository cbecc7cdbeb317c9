"""Run pytest with these arguments, and what failed once more, alone: what passes then is flaky, and the end says so.

    python tools/suite.py -n 4 --dist worksteal -m "not slow"

The exit status is 0 if each test passed, at once or alone. A flaky test is a defect of the product or of the test
(CONTRIBUTING.md). A red run ends with the name of each failure and the first line of its error, in at most 20 lines.

Nothing is left behind: temporary files are in one folder, which is removed at the end, or by the next run if this one
is killed; and processes that outlive pytest, such as holders, are named and killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MOST_AGAIN = 20  # of more failures a second run says nothing new
MOST_LINES = 20
TESTS_FAILED = 1  # exit status of pytest
GRACE_SECONDS = 5.0  # for servers of pytest's workers, which end when these have ended
PREFIX = "tw-"  # short: paths of sockets have at most 107 characters
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


def main(arguments: list[str]) -> int:
    """Run the suite and return its exit status."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through the clean-up, as Ctrl-C goes
    status, failures = run(arguments)
    if status != TESTS_FAILED or not failures:
        return status
    flaky: list[str] = []
    if len(failures) <= MOST_AGAIN:
        print(f"::: once more, alone: {len(failures)} that failed", flush=True)
        os.environ.pop("THINWIRE_DURATIONS", None)  # they are written, of all tests
        status, again = run(["-p", "no:xdist", "--continue-on-collection-errors", *failures])
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
    with temporary_folder() as folder:
        file = folder / "failures.json"
        cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # of torch, for the next run too
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), **os.environ, "TMPDIR": str(folder)}
        try:
            command = [sys.executable, "-m", "pytest", *arguments]
            environment |= {"THINWIRE_FAILURES": str(file)}
            status = _status(subprocess.Popen(command, env=environment, preexec_fn=_die_with_parent))
        finally:
            for command_line in end_orphans():
                print(f"left running, and killed: {command_line}", flush=True)
        return status, json.loads(file.read_text()) if file.exists() else {}


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make the folder of this run, named after its process, and remove it; and those of runs that were killed."""
    place = Path(tempfile.gettempdir())
    for old in place.glob(f"{PREFIX}[0-9]*"):
        try:
            os.kill(int(old.name.removeprefix(PREFIX)), 0)
        except ProcessLookupError:
            shutil.rmtree(old, ignore_errors=True)
        except (ValueError, PermissionError):  # not one of these folders, or a run of somebody else
            continue
    folder = place / f"{PREFIX}{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def adopt_orphans() -> None:
    """Become the parent of what tests start and leave behind, also in a session of its own. (On Linux.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _die_with_parent() -> None:
    """Have pytest end with this process in any way; its workers and ranks end with it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _status(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process, and for each orphan that ends before it, as init does: a test may wait until one is gone."""
    try:
        while True:
            ended, status = os.waitpid(-1, 0)
            if ended == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode
    except BaseException:  # Ctrl-C, or the end of this process by SIGTERM
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.25)  # Ctrl-C has reached pytest too
        process.kill()
        process.wait()
        raise


def end_orphans() -> list[str]:
    """Wait for processes that are about to end, kill the others, and return the command lines of these."""
    killed: dict[int, str] = {}
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return list(killed.values())
        if time.monotonic() > deadline:
            for child in _children():
                killed.setdefault(child, _command_line(child))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.05)


def _children() -> list[int]:
    return [int(child) for file in Path("/proc/self/task").glob("*/children") for child in file.read_text().split()]


def _command_line(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ").strip()[:200]
    except OSError:
        return f"process {process}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
