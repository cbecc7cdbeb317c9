"""Compile every kernel before the first training step."""

from __future__ import annotations

import time

import torch

from thinwire.kernels import dispatch

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WORKING_DTYPES = (torch.float32, torch.float64)  # in which gradients are corrected and compressed


def warm_up() -> float:
    """Compile all kernels for all dtypes, or load them from the cache; returns the seconds that took.

    Compiling takes some 10 seconds, once a machine and version; loading takes half a second, most of it the import
    of numba. Without this every kernel does it at its first call. Does nothing where numba is missing or
    ``THINWIRE_KERNELS=reference``.

    Example:
        >>> from thinwire import kernels
        >>> seconds = kernels.warm_up()
    """
    started = time.perf_counter()
    if dispatch.mode() != "reference" and dispatch.available():
        with dispatch.using("numba"):
            _call_id_kernels()
            for dtype in _DTYPES:
                _call_row_kernels(dtype)
            for dtype in _WORKING_DTYPES:
                _call_select_kernels(dtype)
                _call_quantizers(dtype)
    return time.perf_counter() - started


def _call_id_kernels() -> None:
    ids = torch.tensor([0, 3, 4])
    dispatch.mix(ids, 0)
    dispatch.owner_by_hash(ids, 2, 0)
    dispatch.hierarchical_hash(ids, 2, 0, parallel_slots=6, serial_slots=1)
    dispatch.deal(ids, 2, 0)
    dispatch.dealt_ids(0, ids, 2, 0)
    dispatch.group_by_owner(ids, 5)
    dispatch.union_places([ids, ids], 5)  # by a bitmap
    dispatch.union_places([ids, ids], 1 << 40)  # by a merge
    dispatch.unpack_bits(dispatch.pack_bits(ids, 5))
    dispatch.elias_fano_decode(dispatch.elias_fano_encode(ids, 100), 3, 100)
    dispatch.checksum(torch.zeros(8, dtype=torch.uint8))


def _call_row_kernels(dtype: torch.dtype) -> None:
    ids = torch.tensor([0, 2])
    for width in (1, 2, 4, 8):  # rows of each word size
        dense = torch.ones(3, width, dtype=dtype)
        dispatch.nonzero_rows(dense)
        rows = dispatch.gather_rows(dense, ids)
        dispatch.scatter_rows(dense, ids, rows)
    dispatch.sum_rows([(ids, rows), (ids, rows)])
    dispatch.sum_rows_at([(ids, rows)], 3, 8, dtype)


def _call_quantizers(dtype: torch.dtype) -> None:
    values, steps = torch.ones(9, dtype=dtype), torch.ones(2, dtype=dtype)
    dispatch.largest_of_blocks(values, 8)
    dispatch.mean_of_blocks(values, 8)
    dispatch.add_signs(dispatch.pack_signs(values, 0), steps, 8, values)
    for bits, seed in ((8, None), (4, 0)):
        dispatch.add_quantized(dispatch.quantize(values, steps, 8, 7, bits, seed), steps, 8, 7, bits, values)
    dispatch.add_from_table(dispatch.round_to_powers(values, 1, 0), torch.ones(256, dtype=dtype), steps, 8, values)


def _call_select_kernels(dtype: torch.dtype) -> None:
    values = torch.arange(1000, dtype=dtype)
    dispatch.magnitude_moments(values)
    dispatch.sum_log_magnitudes(values)
    dispatch.count_at_least(values, 2.0)
    dispatch.select_at_least(values, 2.0)
    dispatch.leading_magnitudes(values, 10)
    dispatch.top_magnitudes(values, 10)
    dispatch.top_magnitudes(values, 1)  # in two passes
