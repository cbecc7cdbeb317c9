"""Errors of a training script on its ranks: each is kept in a file, and the first is shown, from the script's line on.

Left to the launcher, the cause is buried: every rank prints a traceback that begins in `runpy`, the ranks that lose
their peer print a longer one, and the launcher adds two lines of its own.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from thinwire.lab.testbed.supervise import is_peer_lost


@contextmanager
def kept_errors(directory: Path, rank: int, script: str) -> Iterator[None]:
    """Write the error that ends the script to a file of this rank, then end the process with status 1.

    ``sys.exit`` keeps its status, and ends with a line in the file.
    """
    try:
        yield
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else repr(ended.code)
        _file(directory, rank).write_text(f"it called sys.exit({code})")
        sys.exit(ended.code if isinstance(ended.code, int) else 1)
    except Exception as error:
        frames = _from_script(error.__traceback__, script)
        text = "".join(traceback.format_exception(type(error), error, frames))
        _file(directory, rank).write_text(text.strip())
        sys.exit(1)


def describe(directory: Path, script: str, ranks: int, first: int, exit_code: int) -> str:
    """Return which rank failed, and the error that it kept, whose last line is the error itself.

    Args:
        first: the rank whose end the launcher noticed first, with its exit code; it may have lost its peer only.
    """
    if exit_code < 0:
        return f"{script}: rank {first} was killed by {signal.Signals(-exit_code).name}"
    files = {rank: _file(directory, rank) for rank in range(ranks)}
    kept = {rank: file.read_text() for rank, file in files.items() if file.exists()}
    if first not in kept and all(is_peer_lost(text) for text in kept.values()):
        return f"{script} ended with exit status {exit_code} on rank {first}: does it call os._exit or exec?"
    rank = min(kept, key=lambda rank: (is_peer_lost(kept[rank]), files[rank].stat().st_mtime_ns))
    if kept[rank].startswith("it called"):
        return f"{script} ended on rank {rank}: {kept[rank]}. It must run under torchrun; try that first"
    return f"{script} failed on rank {rank} (it must run under torchrun; try that first):\n{kept[rank]}"


@contextmanager
def quiet_launcher() -> Iterator[None]:
    """Silence what the launcher logs about ranks that end."""
    logger = logging.getLogger("torch.distributed.elastic")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _from_script(frames: TracebackType | None, script: str) -> TracebackType | None:
    """Return the frames from the script's own on; all of them, if it has none."""
    at = frames
    while at is not None and at.tb_frame.f_code.co_filename != script:
        at = at.tb_next
    return at or frames


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.error"
