"""The exceptions of thinwire. Messages name the rank, what was being synchronized, and the reason.

::

    ThinwireError(RuntimeError)
        MismatchError               ranks disagree: call `attach` alike on all of them
        CorruptMessageError         a message was truncated or altered
            CorruptHeaderError      likewise its header, so that the connection is lost too
        PeerError                   another rank failed; the message has its error
            LostPeerError           another rank, or a holder, died or did not answer in time
        MissingPackageError(ImportError)    an optional package is not installed

Wrong arguments are a ``ValueError`` or ``TypeError``, as in torch.
"""

import contextlib
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

T = TypeVar("T")

logger = logging.getLogger("thinwire")
"""What all of thinwire logs to."""

__all__ = [
    "CorruptHeaderError",
    "CorruptMessageError",
    "LostPeerError",
    "MismatchError",
    "MissingPackageError",
    "PeerError",
    "ThinwireError",
]


class ThinwireError(RuntimeError):
    """Base of thinwire's exceptions: catch it to catch all of them."""


class MismatchError(ThinwireError):
    """Disagreement of ranks about what is synchronized: shape, dtype, scheme, seed, or the order of calls."""


class CorruptMessageError(ThinwireError):
    """Arrival of a message that is truncated, altered, or from another conversation; nothing of it was used."""


class PeerError(ThinwireError):
    """Failure of another rank, which reported it, died, or did not answer within the timeout."""


class CorruptHeaderError(CorruptMessageError):
    """Arrival of an altered header, after which lengths are unknown and the conversation cannot go on."""


class LostPeerError(PeerError):
    """Loss of a peer, which died, gave up after a failure of its own, or did not answer within the timeout.

    ``rank`` is the rank that the failure began with, of the default process group; None if nobody knows. All survivors
    name the same one.
    """

    rank: int | None = None


class MissingPackageError(ThinwireError, ImportError):
    """Absence of an optional package; the message has the command that installs it."""


def unknown(what: str, given: str, legal: Iterable[str], more: str = "") -> ValueError:
    """Return the error that nothing has the name ``given``: the legal names, ``more`` that is legal, and the nearest.

    Example:
        >>> str(unknown("scheme", "zeen", ["auto", "zen"], ", or a Scheme"))
        "unknown scheme 'zeen'; legal are auto, zen, or a Scheme. Did you mean 'zen'?"
    """
    from difflib import get_close_matches

    names = [str(name) for name in legal]
    near = get_close_matches(given.lower().replace("-", "_"), names, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {what} {given!r}; legal are {', '.join(names)}{more}{hint}")


def told(error: Exception, num_ranks: int) -> Exception:
    """Mark an error as raised by ``num_ranks`` ranks at the same point, so that they are still in step; return it."""
    error.__dict__["_ranks_told"] = num_ranks
    return error


def ranks_told(error: BaseException) -> int:
    """Return the number of ranks that raise the error at the same point; 0 if only this rank knows of it."""
    return error.__dict__.get("_ranks_told", 0)


def in_exchange(error: BaseException) -> BaseException:
    """Mark an error as one that broke an exchange in the middle, so that peers cannot learn of it; return it."""
    error.__dict__["_in_exchange"] = True
    return error


def can_be_told(error: BaseException) -> bool:
    """Return whether the conversation can go on, so that peers learn of the error in place of the next message."""
    return not isinstance(error, (LostPeerError, CorruptHeaderError)) and not error.__dict__.get("_in_exchange")


def deferred(work: Callable[[], T]) -> Callable[[], T]:
    """Do the work now; return a function that returns its result or, if peers can learn of it, raises its failure."""
    try:
        result = work()
    except Exception as error:
        if not can_be_told(error):
            raise  # the lane hangs up
        return raising(error)
    return lambda: result


def warn(text: str, stacklevel: int = 2) -> None:
    """Log a warning, which is one of Python too; ``stacklevel`` counts from the caller."""
    logger.warning("%s", text)
    warnings.warn(text, stacklevel=stacklevel + 1)


def is_of_a_peer(error: BaseException | None) -> bool:
    """Return whether an error is ours of a lost peer, or torch's of a connection, or caused by such an error."""
    while error is not None and not isinstance(error, LostPeerError):
        if isinstance(error, RuntimeError) and ("/gloo/" in str(error) or "NCCL" in str(error)):
            return True
        error = error.__cause__
    return error is not None


def raising(error: BaseException) -> Callable[[], NoReturn]:
    """Return a function that raises an error: called where a message is prepared, it tells the peers."""

    def fail() -> NoReturn:
        raise error

    return fail


def forget_locals(error: BaseException) -> None:
    """Clear the local variables of thinwire's and torch's frames in the tracebacks of an error and its causes.

    A reference to an error keeps these frames alive, and they hold groups, works, and gradients. Where somebody sits
    before the interpreter (``python -i``, a notebook) they stay: ``pdb.pm()`` shows them.
    """
    seen: set[int] = set()
    waiting = [] if sys.flags.interactive or hasattr(sys, "ps1") else [error]
    while waiting:
        link = waiting.pop()
        seen.add(id(link))
        waiting += [each for each in (link.__cause__, link.__context__) if each is not None and id(each) not in seen]
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if frame.f_globals.get("__name__", "").split(".")[0] in ("thinwire", "torch"):
                with contextlib.suppress(RuntimeError):  # it is still running
                    frame.clear()
