"""Compile every kernel, or load it, before it is needed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from thinwire.kernels import dispatch
from thinwire.kernels.once import NICENESS

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WORKING_DTYPES = (torch.float32, torch.float64)  # in which gradients are corrected and compressed

_logger = logging.getLogger("thinwire")


def warm_up(wait: bool = True) -> float:
    """Compile all kernels for all dtypes, or load them from the cache; returns the seconds that took.

    Compiling takes 11 seconds of a processor, once a machine and version; loading takes half a second, most of it the
    import of numba. Of processes that ask for it at the same time one compiles and the others wait. Does nothing where
    numba is missing or ``THINWIRE_KERNELS=reference``.

    Args:
        wait: until all are there; else this imports numba only, a process in the background compiles what is not in
            the cache, and each kernel is loaded at its first call.

    Example:
        >>> from thinwire import kernels
        >>> seconds = kernels.warm_up()
    """
    started = time.perf_counter()
    compiled = dispatch.compiled_kernels() if dispatch.mode() != "reference" else None
    if compiled is not None and wait:
        _compile_or_load(compiled)
    elif compiled is not None and dispatch.mode() == "auto":
        once = dispatch.compilation()
        if once is not None:
            once.start()
    return time.perf_counter() - started


def _compile_or_load(compiled: ModuleType) -> None:
    once = dispatch.compilation()
    if once is None or once.is_complete():
        _call_all(compiled, lambda name: None)
        return
    started = time.perf_counter()
    _logger.info("compiling %d kernels, once a machine: some 10 seconds", len(CALLS))
    once.compile_here(lambda done: _call_all(compiled, done))
    _logger.info("compiled in %.1f seconds", time.perf_counter() - started)


def compile_beside_training() -> None:
    """Compile all kernels in this process, which `thinwire.kernels.once.Once` started and gave the lock."""
    torch.set_num_threads(1)
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    compiled, once = dispatch.compiled_kernels(), dispatch.compilation()
    if compiled is not None and once is not None:  # as in the process that started this one
        once.compile_with_lock(lambda done: _call_all(compiled, done))


def _call_all(compiled: ModuleType, done: Callable[[str], None]) -> None:
    for name, call in CALLS.items():
        call(compiled)
        done(name)


def _ids() -> Tensor:
    return torch.tensor([0, 3, 4])


def _union_places(compiled: ModuleType) -> None:
    compiled.union_places([_ids(), _ids()], 5)  # by a bitmap
    compiled.union_places([_ids(), _ids()], 1 << 40)  # by a merge


def _of_rows(call: Callable[[ModuleType, Tensor, Tensor], object]) -> Callable[[ModuleType], None]:
    """For rows of each dtype and word size."""

    def of_all(compiled: ModuleType) -> None:
        for dtype in _DTYPES:
            for width in (1, 2, 3, 4, 8):
                call(compiled, torch.ones(3, width, dtype=dtype), torch.tensor([0, 2]))

    return of_all


def _of_values(call: Callable[[ModuleType, Tensor, Tensor], object]) -> Callable[[ModuleType], None]:
    """For 1000 values and the steps of blocks of 8, of each dtype that compressors work in."""

    def of_all(compiled: ModuleType) -> None:
        for dtype in _WORKING_DTYPES:
            call(compiled, torch.arange(1000, dtype=dtype), torch.ones(125, dtype=dtype))

    return of_all


def _largest(compiled: ModuleType, values: Tensor, steps: Tensor) -> None:
    compiled.top_magnitudes(values, 10)
    compiled.top_magnitudes(values, 1)  # in two passes
    compiled.top_magnitudes(steps, 10)  # of equal ones


def _quantize(compiled: ModuleType, values: Tensor, steps: Tensor) -> None:
    for bits, seed in ((8, None), (4, 0)):
        compiled.quantize(values, steps, 8, 7, bits, seed)


def _add_quantized(compiled: ModuleType, values: Tensor, steps: Tensor) -> None:
    for bits in (8, 4):
        compiled.add_quantized(_codes(bits), steps, 8, 7, bits, values)


def _codes(bits: int = 8) -> Tensor:
    return torch.zeros(125 * bits, dtype=torch.uint8)


CALLS: dict[str, Callable[[ModuleType], object]] = {
    "nonzero_rows": _of_rows(lambda compiled, rows, ids: compiled.nonzero_rows(rows)),
    "deal": lambda compiled: compiled.deal(_ids(), 2, 0),
    "checksum": lambda compiled: compiled.checksum(torch.zeros(8, dtype=torch.uint8)),
    "pack_bits": lambda compiled: compiled.pack_bits(_ids(), 5),
    "unpack_bits": lambda compiled: compiled.unpack_bits(torch.ones(1, dtype=torch.uint8)),
    "elias_fano_encode": lambda compiled: compiled.elias_fano_encode(_ids(), 100),
    "elias_fano_decode": lambda compiled: compiled.elias_fano_decode(compiled.elias_fano_encode(_ids(), 100), 3, 100),
    "gather_rows": _of_rows(lambda compiled, rows, ids: compiled.gather_rows(rows, ids)),
    "scatter_rows": _of_rows(lambda compiled, rows, ids: compiled.scatter_rows(rows, ids, rows[:2].clone())),
    "union_places": _union_places,
    "sum_rows_at": _of_rows(
        lambda compiled, rows, ids: compiled.sum_rows_at([(ids, rows[:2])], *rows.shape, rows.dtype)
    ),
    "sum_rows": _of_rows(lambda compiled, rows, ids: compiled.sum_rows([(ids, rows[:2])] * 2)),
    "dealt_ids": lambda compiled: compiled.dealt_ids(0, _ids(), 2, 0),
    "mix": lambda compiled: compiled.mix(_ids(), 0),
    "owner_by_hash": lambda compiled: compiled.owner_by_hash(_ids(), 2, 0),
    "group_by_owner": lambda compiled: compiled.group_by_owner(_ids(), 5),
    "hierarchical_hash": lambda compiled: compiled.hierarchical_hash(_ids(), 2, 0, parallel_slots=6, serial_slots=1),
    "top_magnitudes": _of_values(_largest),
    "leading_magnitudes": _of_values(lambda compiled, values, steps: compiled.leading_magnitudes(values, 10)),
    "select_at_least": _of_values(lambda compiled, values, steps: compiled.select_at_least(values, 2.0)),
    "count_at_least": _of_values(lambda compiled, values, steps: compiled.count_at_least(values, 2.0)),
    "magnitude_moments": _of_values(lambda compiled, values, steps: compiled.magnitude_moments(values)),
    "sum_log_magnitudes": _of_values(lambda compiled, values, steps: compiled.sum_log_magnitudes(values)),
    "largest_of_blocks": _of_values(lambda compiled, values, steps: compiled.largest_of_blocks(values, 8)),
    "quantize": _of_values(_quantize),
    "add_quantized": _of_values(_add_quantized),
    "pack_signs": _of_values(lambda compiled, values, steps: compiled.pack_signs(values, 0)),
    "add_signs": _of_values(lambda compiled, values, steps: compiled.add_signs(_codes(1), steps, 8, values)),
    "mean_of_blocks": _of_values(lambda compiled, values, steps: compiled.mean_of_blocks(values, 8)),
    "round_to_powers": _of_values(lambda compiled, values, steps: compiled.round_to_powers(values, 1, 0)),
    "add_from_table": _of_values(
        lambda compiled, values, steps: compiled.add_from_table(_codes(), values[:256].clone(), steps, 8, values)
    ),
}
"""A call of each compiled kernel with all types that it takes; first what an exact sum needs."""
