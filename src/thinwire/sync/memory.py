"""Whether what a peer announces fits into memory, asked before it is allocated."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from thinwire.errors import CorruptHeaderError

UNASKED_BYTES = 256 * 1024 * 1024
"""So little is allocated without asking, which takes 0.1 ms."""


def check_fits(num_bytes: int, where: str) -> None:
    """Raises CorruptHeaderError if so many bytes that peers announce are more than this host has left.

    Where it cannot be asked nothing is refused: then the allocation fails, which reaches all ranks too.
    """
    if num_bytes <= UNASKED_BYTES:
        return
    available = _available_bytes()
    if available is not None and num_bytes > available:
        raise CorruptHeaderError(
            f"{where}: {num_bytes} bytes are announced, and this host has {available} bytes of memory left"
        )


def _available_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
