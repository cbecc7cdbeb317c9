"""Compilation of kernels by numba: serial, without the GIL, once per machine.

Kernels run on the thread that calls them: numba's own thread pool kills forked DataLoader workers (OpenMP layer) or
aborts when two threads enter it (workqueue layer). Modules that define kernels import numba through this one, and
only `thinwire.kernels.dispatch` imports those modules, when the first kernel is called.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")
Int64 = int | np.int64
"""Type of an integer in a kernel: int64 if compiled; where kernels run as Python, some are numpy's."""

_logger = logging.getLogger("thinwire")


def njit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile at the first call for the types of its arguments, and keep the machine code on disk.

    The cache is ``__pycache__`` beside the source, or the user's cache directory where that is read-only, or
    ``NUMBA_CACHE_DIR``; without any of them every process compiles again, which a log line says. Integers wrap
    around and ``/`` does not raise, as in numpy. With ``NUMBA_DISABLE_JIT=1`` the function runs as Python.
    """
    import numba
    from numba.core import config

    if config.DISABLE_JIT:  # pyrefly: ignore [missing-attribute]
        return np.errstate(over="ignore", invalid="ignore")(function)  # numpy's scalars do the same, but warn
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # no directory can be written to
        _log_uncached()
        return numba.njit(nogil=True, error_model="numpy")(function)


def cache_directory(kernel: object) -> Path | None:
    """Return the cache directory of a kernel made by `njit`; None if it is not cached, or not compiled."""
    path = getattr(getattr(kernel, "_cache", None), "cache_path", None)
    return None if path is None else Path(path)


def describe_target() -> tuple[str, ...]:
    """Return the compiler and the processor, on which machine code depends."""
    import llvmlite
    import numba
    from numba.core.registry import cpu_target

    processor = cpu_target.target_context.codegen().magic_tuple()  # pyrefly: ignore [missing-attribute]
    return numba.__version__, llvmlite.__version__, *processor


def make_popcount() -> Callable[[Int64], int]:
    """Return a function that counts the ones of an int64: one instruction, for which numba has no function."""
    from numba.core import config

    if config.DISABLE_JIT:  # pyrefly: ignore [missing-attribute]
        return lambda word: (int(word) & (2**64 - 1)).bit_count()

    from numba.extending import intrinsic

    @intrinsic
    def popcount(context, word):
        return word(word), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])

    return popcount  # pyrefly: ignore [bad-return]


def make_array_at() -> Callable[[Int64, Int64, np.ndarray], np.ndarray]:
    """Return a function that makes an array [size], of the dtype of another one, from the memory at an address.

    So a kernel accepts any number of tensors, as an array of their addresses.
    """
    import numba
    from numba.core import cgutils, config, types
    from numba.extending import intrinsic

    if config.DISABLE_JIT:  # pyrefly: ignore [missing-attribute]
        return _view_memory

    @intrinsic
    def pointer(context, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], cgutils.voidptr_t)

        return types.voidptr(address), generate

    @numba.njit
    def array_at(address, size, like):
        return numba.carray(pointer(address), (size,), like.dtype)  # pyrefly: ignore [missing-argument]

    return array_at  # pyrefly: ignore [bad-return]


def _view_memory(address: Int64, size: Int64, like: np.ndarray) -> np.ndarray:
    memory = (ctypes.c_uint8 * (int(size) * like.itemsize)).from_address(int(address))
    return np.ctypeslib.as_array(memory).view(like.dtype)


@cache
def _log_uncached() -> None:
    """Log one line, although it holds for every kernel."""
    _logger.info("compiled kernels cannot be kept, so each process compiles them anew; set NUMBA_CACHE_DIR")
