"""Compilation of kernels by numba: serial, without the GIL, once per machine.

Kernels run on the thread that calls them: numba's own thread pool kills forked DataLoader workers (OpenMP layer) or
aborts when two threads enter it (workqueue layer). Modules that define kernels import numba through this one, and
only `thinwire.kernels.dispatch` imports those modules, when the first kernel is called.
"""

import ctypes
import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

import numpy as np

try:
    import fcntl
except ImportError:  # on Windows, where processes that start together may compile the same
    fcntl = None

P = ParamSpec("P")
R = TypeVar("R")
Int64 = int | np.int64
"""Type of an integer in a kernel: int64 if compiled; where kernels run as Python, some are numpy's."""

_FOLDER = Path(__file__).parent
_PACKAGE = "thinwire.kernels."
_CODE_DIRECTORY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
KEPT_DAYS = 30
_SETTINGS = ("BOUNDSCHECK", "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT", "ENABLE_AVX")
_logger = logging.getLogger("thinwire")


def njit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile at the first call for the types of its arguments, and keep the machine code in `code_directory`.

    Where that is None every process compiles again. Integers wrap around and ``/`` does not raise, as in numpy. With
    ``NUMBA_DISABLE_JIT=1`` the function runs as Python.
    """
    import numba
    from numba.core import config

    if config.DISABLE_JIT:  # pyrefly: ignore [missing-attribute]
        return np.errstate(over="ignore", invalid="ignore")(function)  # numpy's scalars do the same, but warn
    compiled = numba.njit(nogil=True, error_model="numpy")(function)
    directory = code_directory()
    if directory is not None and function.__module__.startswith(_PACKAGE):  # whose sources the directory is for
        name = f"{function.__module__.removeprefix(_PACKAGE)}.{function.__qualname__}"
        compiled._cache = MachineCode(name, directory)  # pyrefly: ignore [missing-attribute]
    return compiled  # pyrefly: ignore [bad-return]


class MachineCode:
    """The machine code of a function on disk, in a file for each combination of types; numba calls the methods.

    numba's own cache (0.68) knows a change of the function's file alone, although callees and constants of other files
    are compiled into it. It also numbers the files in an index: of two processes that compiled one function for
    different types, the code of one could stay under the types of the other. Here a file has the name of its types,
    and a directory is for one version of everything, so processes need no lock.
    """

    lost = 0
    """How often machine code could not be kept, in this process."""

    def __init__(self, name: str, directory: Path) -> None:
        self.cache_path, self._name = str(directory), name
        self._is_current = _is_current(name.rpartition(".")[0])

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return what was compiled for a signature, or None: also for a file that a crash left behind, broken."""
        from numba.cloudpickle import loads  # with which numba reads its own cache, of this user as this one
        from numba.core.compiler import CompileResult

        target_context.refresh()
        if not self._is_current:
            return None
        try:
            result, code = loads(self._path(signature).read_bytes())
            return CompileResult._rebuild(target_context, *code) if result == signature else None
        except Exception as error:
            if not isinstance(error, FileNotFoundError):
                _logger.info("%s is compiled again: %s: %s", self._name, type(error).__name__, error)
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep what was compiled, unless the sources have changed since this process started."""
        from numba.core.serialize import dumps

        path = self._path(signature)
        try:
            if result.library.has_dynamic_globals or result.lifted:
                raise OSError(f"{self._name} holds addresses of this process")
            if hash_sources() != SOURCES:
                raise OSError("the sources have changed since this process started")
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            try:
                unfinished.write_bytes(dumps((signature, result._reduce())))
                os.replace(unfinished, path)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError as error:  # no space left, for example
            MachineCode.lost += 1
            _log_uncached(str(error))

    def _path(self, signature: Any) -> Path:
        types = hashlib.sha256(repr(signature).encode()).hexdigest()[:24]
        return Path(self.cache_path) / f"{self._name}-{types}.code"


@cache
def code_directory() -> Path | None:
    """Return the directory of machine code of these sources, for this processor, compiler and Python; None without.

    It is below ``NUMBA_CACHE_DIR`` if that is set, else in the user's cache, where all installations of the same
    sources share it, or in ``__pycache__`` beside this file where there is no home or it cannot be written. While this
    process runs `remove_old` does not remove it.
    """
    from numba.core import config

    if config.DISABLE_JIT:  # pyrefly: ignore [missing-attribute]
        return None
    bases = [Path(__file__).parent / "__pycache__"]
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(user):  # it is not where the user has no home, as in some containers
        bases.insert(0, Path(user) / "thinwire" / "kernels")
    chosen: str = config.CACHE_DIR  # pyrefly: ignore
    if chosen:
        bases.insert(0, Path(chosen) / "thinwire")
    problem: OSError | None = None
    for base in bases:
        directory = base / f"{SOURCES}-{_hash_target()}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=directory).close()
            with open(directory / "in-use", "ab") as used:
                if fcntl is not None:
                    with suppress(OSError):  # of a file system without locks
                        fcntl.flock(used, fcntl.LOCK_SH)
                os.utime(used.fileno())
                _in_use.append(os.dup(used.fileno()))
            return directory
        except OSError as error:
            problem = problem or error
    _log_uncached(str(problem))
    return None


_in_use: list[int] = []
"""Descriptors that this process has open as long as it runs."""


def remove_old(directory: Path) -> None:
    """Remove the machine code of other sources beside a directory of `code_directory` that nobody uses any more.

    That is what no process uses and none has begun to use for `KEPT_DAYS`: other installations share the folder. That
    of other processors and versions stays, since machines may share it too.
    """
    for other in directory.parent.glob("*-*"):
        if not _CODE_DIRECTORY.fullmatch(other.name) or other.name.startswith(SOURCES):
            continue
        with suppress(OSError):
            if time.time() - (other / "in-use").stat().st_mtime < KEPT_DAYS * 24 * 3600:
                continue
        lock = take_lock(other / "in-use")
        if lock is not None and fcntl is not None:
            with lock:
                shutil.rmtree(other, ignore_errors=True)


def take_lock(path: Path, exclusive: bool = True) -> IO[bytes] | None:
    """Return an open file with a lock, or None while another process holds it; closing it releases the lock.

    A file system or a system without locks gives the file without one.

    Raises:
        OSError: the file cannot be written.
    """
    lock = open(path, "ab")  # noqa: SIM115
    if fcntl is None:
        return lock
    try:
        fcntl.flock(lock, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError:
        pass
    return lock


def release_lock(lock: IO[bytes]) -> None:
    """Release a lock at once, also where a child that was forked meanwhile has its file open."""
    with lock, suppress(OSError):
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)


def hash_sources(folder: Path = _FOLDER) -> str:
    """Return a hash of all that is compiled into machine code: kernels, their helpers, constants, flags and samples."""
    paths = [folder / name for name in ("jit.py", "registry.py", "samples.py")]
    paths += sorted(path for part in ("cpu", "reference") for path in (folder / part).glob("*.py"))
    state = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        state.update(f"{path.name} {len(content)}\n".encode() + content)
    return state.hexdigest()[:16]


SOURCES = hash_sources()
"""Hash of the sources that this process imports; taken before the kernels are imported."""


@cache
def _is_current(module: str) -> bool:
    """Return whether the sources are still those of `SOURCES` when a module is imported; else it may be a newer one."""
    return hash_sources() == SOURCES


def _hash_target() -> str:
    """Return a hash of the compiler, its settings, the processor and Python, on which machine code depends."""
    import llvmlite
    import numba
    from numba.core import config
    from numba.core.registry import cpu_target

    processor = cpu_target.target_context.codegen().magic_tuple()  # pyrefly: ignore [missing-attribute]
    settings = [(name, getattr(config, name, None)) for name in _SETTINGS]
    target = (sys.version, np.__version__, numba.__version__, llvmlite.__version__, processor, settings)
    return hashlib.sha256(repr(target).encode()).hexdigest()[:16]


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
def _log_uncached(reason: str) -> None:
    """Log one line, although it holds for every kernel."""
    _logger.info("compiled kernels cannot be kept (%s), so each process compiles them; set NUMBA_CACHE_DIR", reason)


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

    def address(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.ir.IntType(64).as_pointer())

    @intrinsic
    def load(context, data, at):
        def generate(context, builder, signature, arguments):
            return builder.load(address(context, builder, signature, arguments), align=1)

        return types.uint64(data, at), generate

    @intrinsic
    def store(context, data, at, word):
        def generate(context, builder, signature, arguments):
            builder.store(arguments[2], address(context, builder, signature, arguments), align=1)
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
