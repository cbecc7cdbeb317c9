"""Errors of a training script on its ranks: the first is shown, from the script's line on.

Left to the launcher, the cause is buried: every rank prints a traceback that begins in `runpy`, the ranks that lose
their peer print a longer one, and the launcher adds two lines of its own.
"""

import math
import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

from thinwire.lab.testbed.launch import Outcome, RanksFailed
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
def naming_script(script: Path) -> Iterator[None]:
    """Turn the failure of ranks that run a script into `ScriptFailed`, whose text is what the user must see of it."""
    try:
        yield
    except RanksFailed as failed:
        raise ScriptFailed(describe(script.name, failed)) from failed


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


def leaving_on_error(leave: Callable[..., object], script: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose errors end a rank before its script sees them, since what it would save then is no real
    run's; ``leave`` is that of its `RankContext`."""

    @wraps(function)
    def run(*args: Any, **settings: Any) -> Any:
        try:
            with raised_by_script(script):
                return function(*args, **settings)
        except ScriptError as error:
            return leave(partial(_fail, error))

    return run


def _fail(error: ScriptError) -> NoReturn:
    raise error


def first_error(failed: RanksFailed) -> tuple[int, str] | None:
    """Return rank and text of the `ScriptError` that came before others, or None if there is none."""
    mark = f"{ScriptError.__module__}.{ScriptError.__name__}: "
    texts = [(outcome.rank, (outcome.error or "").partition(mark)[2].strip()) for outcome in _failed(failed)]
    kept = [(rank, text) for rank, text in texts if text]
    return next((entry for entry in kept if not is_peer_lost(entry[1])), kept[0] if kept else None)


def describe_error(script: str, rank: int, error: str) -> str:
    """Return what the user sees of the text of an error, whose last line is the error itself."""
    if error.startswith(f"{script} "):
        return error
    if error.startswith(_EXITED):
        return f"{script} ended on rank {rank}: {error}. It must run under torchrun; try that first"
    hint = "a file of a package is -m PACKAGE.MODULE" if "no known parent package" in error else "try that first"
    return f"{script} failed on rank {rank} (it must run under torchrun; {hint}):\n{error}"


def describe(script: str, failed: RanksFailed) -> str:
    """Return which rank was the first cause, and its error, whose last line is the error itself.

    An error beats an exit without one, and that beats a signal: a rank that ends makes others abort in C++. Those that
    say that they lost a peer come last.
    """
    error = first_error(failed)
    if error is not None and not is_peer_lost(error[1]):
        return describe_error(script, *error)
    unexplained = [(one.rank, one.exit_code or 0) for one in _failed(failed) if one.error is None]
    for rank, code in sorted(unexplained, key=lambda entry: entry[1] < 0):
        if code >= 0:
            return f"{script} ended with exit status {code} on rank {rank}: does it call os._exit or exec?"
        return f"{script}: rank {rank} was killed by {signal.Signals(-code).name}"
    return f"{script} failed:\n{failed}" if error is None else describe_error(script, *error)


def _failed(failed: RanksFailed) -> list[Outcome]:
    """Return the outcomes of ranks that failed, the first one first."""
    return sorted((one for one in failed.outcomes if one.failed_at < math.inf), key=lambda one: one.failed_at)


def _text_of(error: Exception, script: str) -> str:
    """Return the traceback with the frames of the user's files. Without any, a typo or a missing module has none and no
    cause, other errors have all."""
    shown = traceback.TracebackException.from_exception(error)
    theirs = [frame for frame in shown.stack if frame.filename == script or not frame.filename.startswith(_LIBRARIES)]
    if theirs or isinstance(error, (SyntaxError, ImportError)):
        shown.stack = traceback.StackSummary.from_list(theirs)
    return "".join(shown.format(chain=bool(theirs) or not isinstance(error, ImportError))).strip()
