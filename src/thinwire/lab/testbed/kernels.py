"""Kernels of runs whose time is measured: compiled before, on all cores, and loaded where ranks are forked from."""

import os
import tempfile
import time
from collections.abc import Callable, Iterable

from thinwire.errors import logger
from thinwire.kernels import dispatch
from thinwire.kernels.warm import compile_kernel

SECONDS = {"encode_floats": 9.6, "decode_floats": 5.6, "sum_rows": 2.5, "nonzero_rows": 1.9, "estimate_floats": 1.8}
"""What the largest kernels take to compile, of a processor on which all 34 take 33 s."""
OTHER_SECONDS = 0.4
START_SECONDS = 1.5
"""What a process takes to import torch and numba."""
SLOWEST = 2.4
"""Times as long on slow cores, where all kernels took 78 s of a processor."""


def load() -> None:
    """Load all kernels whose machine code is on disk; where it cannot be kept, compile them."""
    if dispatch.mode() != "reference" and dispatch.has_numba():
        once = dispatch.compilation()
        for name in [kernel.name for kernel in dispatch.compiled_kernels()] if once is None else once.compiled():
            compile_kernel(name)


def compile_ahead(
    names: Iterable[str] | None = None, on_progress: Callable[..., None] = lambda *progress: None
) -> None:
    """Compile kernels, all by default, before a training whose time is measured: once a machine, on all cores.

    ``on_progress(description, done, total)`` is called now and then, but not if there is nothing to compile.
    """
    if dispatch.mode() == "reference" or not dispatch.has_numba():
        return
    everything = dispatch.compilation()
    if everything is None:
        return
    once = everything if names is None else dispatch.Once(everything.directory, names)
    missing = set(once.names).difference(once.compiled())
    if not missing:
        return
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # all ranks of a job come here
    processes = max(1, min(len(missing), cores))
    seconds = START_SECONDS + sum(SECONDS.get(name, OTHER_SECONDS) for name in missing) / processes
    on_progress(f"Compiling kernels, once a machine, {seconds:.0f} to {SLOWEST * seconds:.0f} s", 0, 0)
    with tempfile.TemporaryFile() as errors:
        helpers = [
            dispatch.python(dispatch.COMPILE, str(once.directory), *once.names, stderr=errors) for _ in range(processes)
        ]
        try:
            while not once.is_complete() and any(helper.poll() is None for helper in helpers):
                on_progress(None, len(once.compiled()), len(once.names))
                time.sleep(dispatch.LOOK_SECONDS)
            on_progress(None, len(once.compiled()), len(once.names))
        finally:
            for helper in helpers:
                helper.kill()
                helper.wait()
        if not once.is_complete():
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            logger.warning("kernels are compiled while ranks run: %s", said[-1] if said else "compilers were killed")
