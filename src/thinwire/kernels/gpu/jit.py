"""Compilation and launch of kernels for a GPU by Triton, which comes with torch on CUDA.

Only `thinwire.kernels.dispatch` imports the modules that define such kernels, when the first CUDA tensor arrives. With
``TRITON_INTERPRET=1`` in the environment, set before triton is imported, they run in numpy on tensors of the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def _import_triton() -> tuple[ModuleType, ModuleType]:
    import triton  # pyrefly: ignore [missing-import]
    import triton.language  # pyrefly: ignore [missing-import]

    return triton, triton.language


triton, tl = _import_triton()
_thread = threading.local()


def jit(*varying: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a kernel at its first launch for the types of its arguments; Triton keeps the machine code on disk.

    Triton compiles a variant of a kernel for integers that are 1, one for multiples of 16, and one for others, and for
    addresses that are multiples of 16 or not: 0.05 to 0.5 s each. For arguments that vary from step to step, as numbers
    of ids and slices of lists do, such a variant would first be needed in the middle of a training.

    Names of a module that kernels read must be ``tl.constexpr``. Functions that a kernel calls need this decorator too.

    Args:
        varying: the arguments for which there is one variant only.
    """
    return triton.jit(do_not_specialize=list(varying))


def launch(kernel: Any, num_programs: int, on: Tensor, *args: Any, **constants: Any) -> None:
    """Enqueue a kernel on the current stream of the device of ``on``; with no programs nothing is launched.

    Products and sums are never fused, which would change bits; without this, versions of Triton differ.
    """
    if getattr(_thread, "compiles_only", False):
        kernel.warmup(*args, grid=(num_programs,), enable_fp_fusion=False, **constants)
    elif num_programs:
        with torch.cuda.device(on.device) if on.is_cuda else nullcontext():
            kernel[(num_programs,)](*args, enable_fp_fusion=False, **constants)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Compile in this thread what is launched, for the current device, and launch nothing: results are undefined.

    So the tensors may be on the CPU, and the device is not used.
    """
    _thread.compiles_only = True
    try:
        yield
    finally:
        _thread.compiles_only = False


def num_blocks(size: int, block: int) -> int:
    return -(-size // block)


def next_power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def tiles(width: int, elements: int, most_columns: int = 128) -> dict[str, int]:
    """Return ``ROWS`` and ``COLUMNS``, powers of two, of tiles of rows, about ``elements`` large.

    Example:
        >>> tiles(48, 2048)
        {'ROWS': 32, 'COLUMNS': 64}
    """
    columns = min(most_columns, next_power_of_two(width))
    return {"ROWS": max(1, elements // columns), "COLUMNS": columns}
