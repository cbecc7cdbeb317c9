"""What dispatch asks of the arguments of a kernel: how large the work is, and whether the compiled twin knows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def elements(tensor: Tensor, *others: object, **settings: object) -> int:
    return tensor.numel()


def ids_of_pieces(pieces: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> int:
    return sum([ids.numel() for ids, _ in pieces])


def indexable(*tensors: Tensor) -> bool:
    """Whether numba can index them as they are."""
    return all(tensor.device.type == "cpu" and tensor.is_contiguous() and _is_aligned(tensor) for tensor in tensors)


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % tensor.element_size() == 0


def nothing(*args: object, **settings: object) -> bool:
    """Where there is no compiled twin."""
    return False


def are_ids(ids: Tensor, *settings: int, **named: int) -> bool:
    return ids.dtype == torch.int64 and ids.dim() == 1 and indexable(ids)


def are_bytes(buffer: Tensor, *sizes: int) -> bool:
    return buffer.dtype == torch.uint8 and indexable(buffer)


def are_words(buffer: Tensor) -> bool:
    return are_bytes(buffer) and buffer.numel() % 8 == 0 and buffer.data_ptr() % 8 == 0


def is_matrix(dense: Tensor) -> bool:
    """Of any strides."""
    return dense.device.type == "cpu" and _is_aligned(dense)


def can_gather(values: Tensor, places: Tensor, out: Tensor | None = None) -> bool:
    alike = out is None or (out.dtype == values.dtype and out.shape == (places.numel(), *values.shape[1:]))
    outs = () if out is None else (out,)
    return alike and are_ids(places) and indexable(values, *outs)


def can_scatter(dense: Tensor, ids: Tensor, values: Tensor) -> bool:
    alike = dense.dtype == values.dtype and values.shape == (ids.numel(), *dense.shape[1:])
    return alike and are_ids(ids) and indexable(dense, values)


def can_sum(pieces: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> bool:
    return all(are_ids(ids) and values.device.type == "cpu" for ids, values in pieces)


def can_sum_at(
    pieces: Iterable[tuple[Tensor, Tensor]], num_rows: int, width: int, dtype: torch.dtype, scale: float = 1.0
) -> bool:
    return dtype != torch.float16  # numba has none on a CPU


def can_unite(pieces: Sequence[Tensor], size: int) -> bool:
    return all(map(are_ids, pieces))


def can_deal(ids: Tensor, world_size: int, seed: int) -> bool:
    return are_ids(ids) and world_size <= 1 << 16


def are_floats(values: Tensor, *others: Tensor) -> bool:
    """Kernels that draw random numbers count in 32 bits."""
    alike = values.dtype in (torch.float32, torch.float64) and values.dim() == 1 and values.numel() < 1 << 32
    return alike and indexable(values, *others)


def have_magnitudes(values: Tensor, *settings: float | None, **named: float | None) -> bool:
    return values.dtype in (torch.float32, torch.float64) and values.dim() == 1 and indexable(values)
