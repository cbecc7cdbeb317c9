"""What a test leaves running meets the next one: a thread calls what is being patched, a socket is collected open."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clocks import PATIENCE, wait_until


@pytest.fixture(autouse=True)
def nothing_outlives_its_test() -> Iterator[None]:
    """No thread and no socket, once everything has had the time to end."""
    before = running()
    yield
    for seconds in (1.0, PATIENCE):  # to collect garbage takes half a second of a worker
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not running() - before, seconds)
            return
        gc.collect()
    assert running() <= before, f"still running: {sorted(running() - before)}"


def running() -> set[str]:
    """The threads and the open sockets of this process, those of C++ too."""
    found = {f"thread {thread.ident} {thread.name}" for thread in threading.enumerate()}
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the folder itself is closed by now
            found.add(os.readlink(file))
    return {name for name in found if name.startswith(("thread ", "socket:"))}
