"""How a kernel is compiled: by numba, serial, without the GIL, once per machine.

Kernels run on the thread that calls them: numba's own thread pool kills forked DataLoader workers (OpenMP layer) or
aborts when two threads enter it (workqueue layer). Modules that define kernels import numba through this one, and
only `thinwire.kernels.dispatch` imports those modules, when the first kernel is called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

_logger = logging.getLogger("thinwire")


def njit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile at the first call for the types of its arguments, and keep the machine code on disk.

    The cache is ``__pycache__`` beside the source, or the user's cache directory where that is read-only, or
    ``NUMBA_CACHE_DIR``; without any of them every process compiles anew, which a log line says. Integers wrap
    around and ``/`` does not raise, as in numpy. With ``NUMBA_DISABLE_JIT=1`` the function runs as it is.
    """
    import numba

    if numba.config.DISABLE_JIT:
        return np.errstate(over="ignore")(function)  # numpy's scalars wrap around too, but warn
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError as error:  # no directory can be written to
        _log_once(f"compiled kernels are not kept, each process compiles its own: {error}; set NUMBA_CACHE_DIR")
        return numba.njit(**options)(function)


def make_popcount() -> Callable[[int], int]:
    """The number of ones among the 64 bits of an int64: one instruction, for which numba has no function."""
    import numba

    if numba.config.DISABLE_JIT:
        return lambda word: (int(word) & (2**64 - 1)).bit_count()

    from numba.extending import intrinsic

    @intrinsic
    def popcount(context, word):  # noqa: ANN001, ANN202 - numba's protocol
        return word(word), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])

    return popcount


_logged: set[str] = set()


def _log_once(line: str) -> None:
    if line not in _logged:
        _logged.add(line)
        _logger.info(line)
