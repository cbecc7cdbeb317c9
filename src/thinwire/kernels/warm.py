"""Compile every kernel before the first training step."""

from __future__ import annotations

import time

import torch

from thinwire.kernels import dispatch

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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
