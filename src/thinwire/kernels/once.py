"""Kernels are compiled once a machine, by one process in the background; until one is there, its reference runs.

numba takes 11 s of a processor for all kernels and holds the GIL meanwhile. When each rank did that in its first
backward pass, the ranks of a host all compiled the same, on the cores that train: for minutes.

Beside numba's cache lies the list of the kernels that are in it, and a lock, which whoever compiles holds. It ends with
the process that holds it, so another one takes over from one that was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import IO

from thinwire.kernels.jit import cache_directory, describe_target

try:
    import fcntl
except ImportError:  # on Windows, where processes that start together may compile the same
    fcntl = None

NICENESS = 2
"""Of the process in the background. Its work has an end, and all ranks are faster then: at 5 it took 86 s, not 57."""
LOOK_SECONDS = 0.2
_COMMAND = "from thinwire.kernels.warm import compile_beside_training; compile_beside_training()"

_logger = logging.getLogger("thinwire")


class Once:
    """The compilation of the kernels ``names``, for all processes that share the ``directory`` of a cache."""

    def __init__(self, directory: Path, names: Set[str]) -> None:
        stem = f"thinwire-{_fingerprint()}"
        self._names = frozenset(names)
        self._list = directory / f"{stem}.kernels"
        self._lock = directory / f"{stem}.lock"
        self._compiled: frozenset[str] = frozenset()
        self._child: subprocess.Popen[bytes] | None = None
        self._looking = threading.Lock()
        self._look_again = 0.0

    def has(self, name: str) -> bool:
        """Whether a kernel is compiled. If not, looks now and then, and starts to compile where nobody does."""
        if name not in self._compiled and time.monotonic() >= self._look_again:
            self.start()
        return name in self._compiled

    def start(self) -> None:
        """Compile in the background, unless that was done or somebody does it."""
        if self._looking.acquire(blocking=False):
            try:
                self._look()
            except OSError as error:
                self._give_up(str(error))
            finally:
                self._looking.release()

    def is_complete(self) -> bool:
        self._compiled |= self._read()
        return self._compiled >= self._names

    def is_busy(self) -> bool:
        """Whether a process compiles right now."""
        if self.is_complete():
            return False
        try:
            lock = self._take_lock()
        except OSError:
            return False
        if lock is not None:
            lock.close()
        return lock is None

    def compile_here(self, compile_all: Callable[[Callable[[str], None]], None]) -> None:
        """Compile in this process, after waiting for one that is already at it. A terminal shows how far it is.

        Args:
            compile_all: calls every kernel, and its argument with the name of each that is compiled.
        """
        with _terminal_line() as show:
            lock = self._take_lock()
            while lock is None:
                show(f"{len(self._read())} of {len(self._names)}")
                time.sleep(LOOK_SECONDS)
                lock = self._take_lock()
            with lock:
                self._compile(compile_all, show)

    def compile_with_lock(self, compile_all: Callable[[Callable[[str], None]], None]) -> None:
        """In the process in the background, which was given the lock."""
        self._compile(compile_all, lambda text: None)

    def _compile(self, compile_all: Callable[[Callable[[str], None]], None], show: Callable[[str], None]) -> None:
        written = set(self._read())
        with open(self._list, "a", buffering=1) as names:
            names.write("\n")  # ends a line that a killed process left unfinished

            def done(name: str) -> None:
                if name not in written:
                    written.add(name)
                    names.write(f"{name}\n")
                show(f"{len(written)} of {len(self._names)}")

            compile_all(done)

    def _look(self) -> None:
        if self.is_complete():
            if self._child is not None:
                _logger.info("all kernels are compiled")
        elif self._child is None:
            self._start_child()
        elif self._child.poll() is not None:
            self._give_up(f"the process that compiled them ended with {self._child.returncode}, see {self._lock}")
        self._look_again = time.monotonic() + LOOK_SECONDS

    def _start_child(self) -> None:
        """Unless somebody compiles. What the child has to say goes to the lock file: so it holds the lock."""
        lock = self._take_lock()
        if lock is None:
            return
        with lock:
            lock.truncate(0)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            command, nothing = [sys.executable, "-P", "-c", _COMMAND], subprocess.DEVNULL
            self._child = subprocess.Popen(command, env=environment, stdin=nothing, stdout=nothing, stderr=lock)
        threading.Thread(target=self._child.wait, name="thinwire-compiles", daemon=True).start()
        _logger.info(
            "process %d compiles %d kernels, once a machine; until one is there, plain torch does its work",
            self._child.pid,
            len(self._names),
        )

    def _give_up(self, reason: str) -> None:
        _logger.warning("kernels are compiled by each process at their first calls: %s", reason)
        self._compiled = self._names

    def _take_lock(self) -> IO[bytes] | None:
        """Closing it, here and in a child that it was given to, gives it back; None while another process has it."""
        lock = open(self._lock, "ab")  # noqa: SIM115
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        except OSError:  # a file system without locks: whoever comes compiles
            pass
        return lock

    def _read(self) -> frozenset[str]:
        """The kernels in the list; its last line counts when it is written to its end."""
        try:
            text = self._list.read_text()
        except OSError:
            return frozenset()
        return self._names.intersection(text[: text.rfind("\n") + 1].splitlines())


def shared(kernel: object, names: Set[str]) -> Once | None:
    """The compilation of ``names``, one of which is ``kernel``; None where nothing is compiled, or nothing is kept."""
    directory = cache_directory(kernel)
    return None if directory is None else Once(directory, names)


def _fingerprint() -> str:
    """Of all that machine code depends on: the processor, the versions, the sources."""
    folder = Path(__file__).parent
    sources = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(repr((describe_target(), sys.version, sources)).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _terminal_line() -> Iterator[Callable[[str], None]]:
    """What shows a text on the terminal, over the one before; nowhere if there is none."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    try:
        yield lambda text: print(f"\rcompiling kernels, once a machine: {text}", end="", file=sys.stderr, flush=True)
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
