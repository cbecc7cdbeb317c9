"""The steps of workers, as the agent of their host sees them: by those it finds the ones that hang."""

import contextlib
import fcntl
import os
import struct
from pathlib import Path

from thinwire.checkpoint.holder.start import beside

_BEAT = struct.Struct("!QQ")  # process, step


class Heartbeat:
    """A file beside the socket of the holder with this worker's process and step, locked while the worker lives.

    Where it cannot be made or written, as on a full disk, training goes on, and the agent does not see this worker.
    """

    def __init__(self, socket: Path) -> None:
        self._path, self._file = beside(socket, f".step.{os.environ.get('LOCAL_RANK', '0')}"), -1
        with contextlib.suppress(OSError):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def beat(self, step: int) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._file, _BEAT.pack(os.getpid(), step), 0)

    def close(self) -> None:
        """Say that there are no more steps to come."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            os.close(self._file)


class Heartbeats:
    """The heartbeats of the workers of this run on a host."""

    def __init__(self, socket: Path) -> None:
        self._pattern = beside(socket, ".step.*")
        self._seen: dict[Path, tuple[bytes, float]] = {}

    def clear(self) -> None:
        """Forget the workers before, which have ended."""
        self._seen = {}
        for path in self._paths():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def silent(self, now: float) -> list[tuple[float, int, int]]:
        """Return how many seconds ago each worker made its last step, its process, and that step."""
        result = []
        for path in self._paths():
            with contextlib.suppress(OSError), path.open("rb+") as file:
                content = file.read(_BEAT.size)
                if self._seen.get(path, (b"", 0.0))[0] != content:
                    self._seen[path] = content, now
                elif len(content) == _BEAT.size and _is_locked(file.fileno()):
                    result.append((now - self._seen[path][1], *_BEAT.unpack(content)))
        return result

    def _paths(self) -> list[Path]:
        return sorted(self._pattern.parent.glob(self._pattern.name))


def _is_locked(file: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False  # the lock goes as the file is closed
