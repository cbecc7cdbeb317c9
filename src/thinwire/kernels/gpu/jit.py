"""Compilation and launch of kernels for a GPU by Triton, which comes with torch on CUDA.

Only `thinwire.kernels.dispatch` imports the modules that define such kernels, when the first CUDA tensor arrives. With
``TRITON_INTERPRET=1`` in the environment, set before triton is imported, they run in numpy on tensors of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def _import_triton() -> tuple[ModuleType, ModuleType]:
    import triton  # pyrefly: ignore [missing-import]
    import triton.language  # pyrefly: ignore [missing-import]

    return triton, triton.language


triton, tl = _import_triton()


def jit(function: Callable[..., Any]) -> Any:
    """Compile at the first launch for the types of its arguments; Triton keeps the machine code on disk.

    Names of a module that kernels read must be ``tl.constexpr``. Functions that a kernel calls need this decorator too.
    """
    return triton.jit(function)


def launch(kernel: Any, num_programs: int, on: Tensor, *args: Any, **constants: Any) -> None:
    """Enqueue a kernel on the current stream of the device of ``on``; with no programs nothing is launched."""
    if num_programs:
        with torch.cuda.device(on.device) if on.is_cuda else nullcontext():
            kernel[(num_programs,)](*args, **constants)


def num_blocks(size: int, block: int) -> int:
    return -(-size // block)


def next_power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


@jit
def popcount(words):
    """Count the ones in each int32; Triton has no function for it that its interpreter supports too."""
    bits = words.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)
