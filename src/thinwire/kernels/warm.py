"""Compile every kernel, or load it, before it is needed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import torch

from thinwire.kernels import dispatch
from thinwire.kernels.dispatch import NICENESS

_logger = logging.getLogger("thinwire")


def warm_up(wait: bool = True) -> float:
    """Compile all kernels for all dtypes, or load them from the cache; return the seconds spent.

    Compiling costs 11 seconds of a processor, once a machine and version; loading costs half a second, most of it the
    import of numba. Of processes that call it at the same time one compiles and the others wait. It does nothing if
    numba is missing or ``THINWIRE_KERNELS=reference``.

    Args:
        wait: whether to wait until all are ready; else this imports numba only, a process in the background compiles
            what is not in the cache, and each kernel is loaded at its first call.

    Example:
        >>> from thinwire import kernels
        >>> seconds = kernels.warm_up()
    """
    started = time.perf_counter()
    if dispatch.mode() != "reference" and dispatch.has_numba():
        if wait:
            _compile_or_load()
        else:
            _prepare()
    return time.perf_counter() - started


def _prepare() -> None:
    """Import the compiled twins, and start to compile what is not in the cache."""
    once = dispatch.compilation()
    if once is not None and dispatch.mode() == "auto":
        once.start()
    for kernel in dispatch.compiled_kernels():
        kernel.on_cpu()


def _compile_or_load() -> None:
    once = dispatch.compilation()
    if once is None or once.is_complete():
        _call_all(lambda name: None)
        return
    started = time.perf_counter()
    _logger.info("compiling %d kernels, once a machine: some 10 seconds", len(dispatch.compiled_kernels()))
    once.compile_here(_call_all)
    _logger.info("compiled in %.1f seconds", time.perf_counter() - started)


def compile_beside_training() -> None:
    """Compile all kernels in this process, which `thinwire.kernels.dispatch.Once` started and gave the lock."""
    torch.set_num_threads(1)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    once = dispatch.compilation()
    if once is not None:  # as in the process that started this one
        once.compile_with_lock(_call_all)


def _call_all(done: Callable[[str], None]) -> None:
    for kernel in dispatch.compiled_kernels():
        for sample in kernel.samples():
            sample.call(kernel.on_cpu())
        done(kernel.name)
