"""The way in which a process of ours ends that has a process group, or had one."""

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End this process as Python does, threads and `atexit` included, but without its last part and C++ destructors.

    There a thread of Gloo that lets go of its last work asks for the interpreter, which ends the thread, and C++ the
    process: 10 of 160 that had done everything right (torch 2.13). Ranks of the testbed need no such call, because what
    a fork server forks ends by ``os._exit``.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    end_now(status)


def end_now(status: int) -> NoReturn:
    """End this process without a word to the code that runs: no handler, no ``finally``, no function of `atexit`."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or its reader is gone
            stream.flush()
    os._exit(status)
