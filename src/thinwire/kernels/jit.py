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


def make_word_access() -> tuple[Callable[..., np.uint64], Callable[..., None], Callable[..., int]]:
    """Return functions for 8 bytes at any address, and one that counts the zeros below the lowest one of a uint64.

    ``load(data, at)`` reads a uint64 from an array of bytes, and ``store(data, at, word)`` writes one. Nobody checks
    that the array has these bytes, but with ``NUMBA_DISABLE_JIT`` or ``NUMBA_BOUNDSCHECK``, for tests.
    """
    import numba
    from numba.core import cgutils, config, types
    from numba.extending import intrinsic

    if config.DISABLE_JIT:  # pyrefly: ignore [missing-attribute]
        return _load_bytes, _store_bytes, _count_zeros

    def place(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.ir.IntType(64).as_pointer())

    @intrinsic
    def load(context, data, at):
        def generate(context, builder, signature, arguments):
            return builder.load(place(context, builder, signature, arguments), align=1)

        return types.uint64(data, at), generate

    @intrinsic
    def store(context, data, at, word):
        def generate(context, builder, signature, arguments):
            builder.store(arguments[2], place(context, builder, signature, arguments), align=1)
            return context.get_dummy_value()

        return types.void(data, at, types.uint64), generate

    @intrinsic
    def count_zeros(context, word):
        def generate(context, builder, signature, arguments):
            return builder.cttz(arguments[0], cgutils.true_bit)

        return types.int64(types.uint64), generate

    if config.BOUNDSCHECK:  # pyrefly: ignore [missing-attribute]
        load, store = numba.njit(_load_bytes), numba.njit(_store_bytes)
    return load, store, count_zeros  # pyrefly: ignore [bad-return]


def _load_bytes(data: np.ndarray, at: Int64) -> np.uint64:
    word = np.uint64(0)
    for byte in range(8):
        word |= np.uint64(data[at + byte]) << np.uint64(8 * byte)
    return word


def _store_bytes(data: np.ndarray, at: Int64, word: np.uint64) -> None:
    for byte in range(8):
        data[at + byte] = (word >> np.uint64(8 * byte)) & np.uint64(0xFF)


def _count_zeros(word: Int64) -> int:
    return (int(word) & -int(word)).bit_length() - 1
