"""How a process ends that had a process group: threads and `atexit` as Python ends them, and nothing behind them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from thinwire.lab import leave as module

ENDS = """
import atexit, sys, threading, time
from thinwire.lab.leave import end_now, leave

class Late:
    def __del__(self):
        print("destructor", flush=True)

late = Late()
late.itself = late  # which only the last part of the interpreter frees
done = threading.Event()
atexit.register(print, "atexit")
threading.Thread(target=lambda: (done.wait(), print("thread"))).start()
try:
    print("before")
    sys.stderr.write("an error")
    done.set() if {how!r} == "leave" else None
    {how}(7)
except BaseException:
    print("handler")
finally:
    print("finally")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "expected"), [("leave", ["before", "thread", "atexit"]), ("end_now", ["before"])])
def test_what_runs_at_the_end(how: str, expected: list[str]) -> None:
    """What was printed arrives, in pipes too; and a thread that never ends is waited for by `leave` alone."""
    ended = subprocess.run([sys.executable, "-c", ENDS.format(how=how)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 7
    assert ended.stdout.split() == expected
    assert ended.stderr == "an error"


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.mark.parametrize("stream", [None, "closed"])
def test_streams_that_are_gone_do_not_keep_a_process(monkeypatch: pytest.MonkeyPatch, stream: str | None) -> None:
    class Closed:
        def flush(self) -> None:
            raise ValueError("I/O operation on closed file")

    def ends(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(module.os, "_exit", ends)
    monkeypatch.setattr(module.sys, "stdout", Closed() if stream else None)
    with pytest.raises(Ended, match="3"):
        module.end_now(3)
