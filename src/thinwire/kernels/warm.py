"""Compile every kernel, or load it, before it is needed."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from thinwire.kernels import dispatch
from thinwire.kernels.jit import MachineCode
from thinwire.kernels.samples import floats, gpu_rows, rows

_logger = logging.getLogger("thinwire")


def warm_up(wait: bool = True) -> float:
    """Compile all kernels for all dtypes, or load them from the cache; return the seconds spent.

    Compiling costs 33 seconds of a processor, once a machine and version; loading costs half a second, most of it the
    import of numba. Processes that call it at the same time share the work. It does nothing if numba is missing or
    ``THINWIRE_KERNELS=reference``.

    A process that uses CUDA compiles Triton's kernels too, for the current device, float32 and bfloat16, and usual
    widths of rows: 9 seconds of a processor, once a machine, of which the ranks of a host each start with another part.
    It launches nothing. Other widths are compiled at the first step with such a table.

    Args:
        wait: whether to wait until all are ready; else this imports numba only, a process in the background compiles
            what is not in the cache, and each kernel is loaded at its first call.

    Example:
        >>> from thinwire import kernels
        >>> seconds = kernels.warm_up()
    """
    started = time.perf_counter()
    if dispatch.mode() != "reference":
        for_gpu = _start_for_gpu()
        if dispatch.has_numba():
            if wait:
                _compile_or_load()
            else:
                _prepare()
        if wait and for_gpu is not None:
            for_gpu.join()
    return time.perf_counter() - started


def _start_for_gpu() -> threading.Thread | None:
    """Compile Triton's kernels in a thread of their own; None if this process does not use CUDA."""
    if not (torch.backends.cuda.is_built() and torch.cuda.is_initialized()):
        return None
    device = torch.cuda.current_device()
    thread = threading.Thread(target=_compile_for_gpu, args=(device,), name="thinwire-compiles-triton", daemon=True)
    thread.start()
    return thread


def _compile_for_gpu(device: int) -> None:
    calls = [
        (kernel, make, inputs)
        for kernel in dispatch.KERNELS.values()
        if kernel.gpu and kernel.over is not floats  # which no step of a training codes on a GPU yet
        for make in kernel.makes
        for inputs in (gpu_rows() if kernel.over is rows else kernel.over())
    ]
    turn = len(calls) * int(os.environ.get("LOCAL_RANK", 0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    try:
        torch.cuda.set_device(device)  # for Triton, which asks for the device of this thread
        from thinwire.kernels.gpu.jit import compiling_only

        with compiling_only():
            for kernel, make, inputs in calls[turn:] + calls[:turn]:
                make(*inputs).call(kernel.on_gpu())
    except Exception as error:  # the first launch says what follows from it
        _logger.info("Triton compiled nothing ahead: %s", " ".join(f"{type(error).__name__}: {error}".split()))


def _prepare() -> None:
    """Import the compiled twins, and start to compile what is not in the cache."""
    once = dispatch.compilation()
    if once is not None and dispatch.mode() == "auto":
        once.start()
    for kernel in dispatch.compiled_kernels():
        kernel.on_cpu()


def _compile_or_load() -> None:
    once = dispatch.compilation()
    if once is not None and not once.is_complete():
        started = time.perf_counter()
        _logger.info("compiling %d kernels, once a machine", len(once.names) - len(once.compiled()))
        try:
            with _terminal_line(len(once.names)) as show:
                once.compile_here(compile_kernel, show)
        except OSError as error:  # as of a full disk
            _logger.warning("kernels are compiled by this process alone: %s", error)
        _logger.info("compiled in %.1f seconds", time.perf_counter() - started)
    for kernel in dispatch.compiled_kernels():
        compile_kernel(kernel.name)


def compile_alone(directory: str, names: Iterable[str]) -> None:
    """Compile the named kernels in this process, which was started for it; others may do the same at the same time."""
    torch.set_num_threads(1)
    dispatch.only(names)
    once = dispatch.compilation()
    if once is None or str(once.directory) != directory:
        sys.exit("the sources of the kernels have changed since the process started that needs them")
    once.compile_here(compile_kernel, lambda done: None)


def compile_kernel(name: str) -> bool:
    """Compile a kernel for the types of its samples, or load it; return whether the machine code was kept."""
    lost, kernel = MachineCode.lost, dispatch.KERNELS[name]
    for sample in kernel.samples():
        sample.call(kernel.on_cpu())
    return MachineCode.lost == lost


@contextmanager
def _terminal_line(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows on the terminal how many are done; it does nothing without a terminal."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return

    def show(done: int) -> None:
        print(f"\rcompiling kernels, once a machine: {done} of {total}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
