"""Errors of a training script on its ranks: each is kept in a file, and the first is shown, from the script's line on.

Left to the launcher, the cause is buried: every rank prints a traceback that begins in `runpy`, the ranks that lose
their peer print a longer one, and the launcher adds two lines of its own.
"""

from __future__ import annotations

import atexit
import logging
import signal
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from thinwire.lab.testbed.launch import RanksFailed
from thinwire.lab.testbed.rank import end_now
from thinwire.lab.testbed.supervise import is_peer_lost

_EXITED = "it called sys.exit"
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[2]),
    "<frozen ",
)
"""Folders of files that are no user's: of an error the frames there say nothing to the user."""


class ScriptFailed(RuntimeError):
    """Raised when the training script ended with an error on some rank."""


class ScriptError(Exception):
    """Raised on a rank for an error of its script; the text is all that a user must see of it."""


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
        _end(ended.code if isinstance(ended.code, int) else 1)
    except Exception as error:
        _file(directory, rank).write_text(_text_of(error, script))
        _end(1)


def _end(status: int) -> NoReturn:
    """End this process after the functions of `atexit`, but without the destructors of C++.

    A rank of DDP whose peer was gone died by SIGABRT in 2 of 12 runs of a test, which hid the error. Why is not known.
    """
    atexit._run_exitfuncs()
    end_now(status)


@contextmanager
def raised_by_script(script: str, *passed: type[Exception]) -> Iterator[None]:
    """Raise an error of the script, or its ``sys.exit``, as `ScriptError`, without the frames of libraries.

    Args:
        passed: errors that are raised as they are.
    """
    try:
        yield
    except passed:
        raise
    except ScriptFailed as error:  # ours, about the script
        raise ScriptError(str(error)) from None
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else repr(ended.code)
        raise ScriptError(f"{_EXITED}({code})") from None
    except Exception as error:
        raise ScriptError(_text_of(error, script)) from None


def first_error(failed: RanksFailed) -> tuple[int, str] | None:
    """Return rank and text of the `ScriptError` that came before others, or None if there is none."""
    mark = f"{ScriptError.__module__}.{ScriptError.__name__}: "
    texts = [(outcome.rank, (outcome.error or "").partition(mark)[2].strip()) for outcome in failed.outcomes]
    kept = [(rank, text) for rank, text in texts if text]
    return next((entry for entry in kept if not is_peer_lost(entry[1])), kept[0] if kept else None)


def describe_error(script: str, rank: int, error: str) -> str:
    """Return what the user sees of the text of an error, whose last line is the error itself."""
    if error.startswith(f"{script} "):
        return error
    if error.startswith(_EXITED):
        return f"{script} ended on rank {rank}: {error}. It must run under torchrun; try that first"
    return f"{script} failed on rank {rank} (it must run under torchrun; try that first):\n{error}"


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
    return describe_error(script, rank, kept[rank])


@contextmanager
def quiet_launcher() -> Iterator[None]:
    """Silence what the launcher logs about ranks that end."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _text_of(error: Exception, script: str) -> str:
    """Return the traceback with the frames of the user's files; with all, if there are none and it is no typo."""
    shown = traceback.TracebackException.from_exception(error)
    theirs = [frame for frame in shown.stack if frame.filename == script or not frame.filename.startswith(_LIBRARIES)]
    if theirs or isinstance(error, SyntaxError):
        shown.stack = traceback.StackSummary.from_list(theirs)
    return "".join(shown.format()).strip()


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.error"


def _read(directory: Path, rank: int) -> str:
    file = _file(directory, rank)
    return file.read_text() if file.exists() else ""
