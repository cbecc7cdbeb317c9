"""Errors of a training script on its ranks: each is kept in a file, and the first is shown, from the script's line on.

Left to the launcher, the cause is buried: every rank prints a traceback that begins in `runpy`, the ranks that lose
their peer print a longer one, and the launcher adds two lines of its own.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from thinwire.lab.testbed.supervise import is_peer_lost

_EXITED = "it called sys.exit"


@contextmanager
def kept_errors(directory: Path, rank: int, script: str) -> Iterator[None]:
    """Write the error that ends the script to a file of this rank, then end the process with status 1.

    ``sys.exit`` keeps its status, and ends with a line in the file.
    """
    try:
        yield
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else repr(ended.code)
        _file(directory, rank).write_text(f"{_EXITED}({code})")
        sys.exit(ended.code if isinstance(ended.code, int) else 1)
    except Exception as error:
        frames = _from_script(error.__traceback__, script)
        text = "".join(traceback.format_exception(type(error), error, frames))
        _file(directory, rank).write_text(text.strip())
        sys.exit(1)


def describe(directory: Path, script: str, exit_codes: Mapping[int, int]) -> str:
    """Return which rank failed, and the error that it kept, whose last line is the error itself.

    Args:
        exit_codes: of the ranks whose ends the launcher noticed first; some may have lost their peer only.
    """
    for rank, code in exit_codes.items():
        if code < 0 and code != -signal.SIGTERM:  # the launcher's own
            return f"{script}: rank {rank} was killed by {signal.Signals(-code).name}"
    kept = {rank: text for rank in exit_codes if (text := _read(directory, rank))}
    causes = [rank for rank, text in kept.items() if not is_peer_lost(text)]
    if not causes and len(kept) < len(exit_codes):
        rank, code = next((rank, code) for rank, code in exit_codes.items() if rank not in kept)
        return f"{script} ended with exit status {code} on rank {rank}: does it call os._exit or exec?"
    rank = next(iter(causes or kept))
    if kept[rank].startswith(_EXITED):
        return f"{script} ended on rank {rank}: {kept[rank]}. It must run under torchrun; try that first"
    return f"{script} failed on rank {rank} (it must run under torchrun; try that first):\n{kept[rank]}"


@contextmanager
def quiet_launcher() -> Iterator[None]:
    """Silence what the launcher logs about ranks that end."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _from_script(frames: TracebackType | None, script: str) -> TracebackType | None:
    """Return the frames from the script's own on; all of them, if it has none."""
    at = frames
    while at is not None and at.tb_frame.f_code.co_filename != script:
        at = at.tb_next
    return at or frames


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.error"


def _read(directory: Path, rank: int) -> str:
    file = _file(directory, rank)
    return file.read_text() if file.exists() else ""
