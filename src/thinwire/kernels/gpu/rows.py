"""Gather, scatter and sum of rows on a GPU; pieces are summed one by one in the given order.

Indices out of range are neither read nor written; gathered, their rows are zeros. Raising, as on a CPU, would require
waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from thinwire.kernels.gpu.jit import jit, launch, next_power_of_two, num_blocks, tl
from thinwire.kernels.gpu.union import union_places
from thinwire.kernels.reference import rows as reference

_TILE = 2048  # elements that a program reads at once
_MAX_COLUMNS = 128
_ACCUMULATORS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


def gather_rows(values: Tensor, places: Tensor, out: Tensor | None = None) -> Tensor:
    """Gather rows as the reference."""
    gathered = values.new_empty(places.numel(), values.shape[1]) if out is None else out
    if not _alike(gathered, values, places):
        return reference.gather_rows(values, places, out)
    _copy(_gather, gathered, values, places)
    return gathered


def scatter_rows(dense: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Scatter rows as the reference."""
    if not _alike(values, dense, ids):
        return reference.scatter_rows(dense, ids, values)
    _copy(_scatter, dense, values, ids)
    return dense


def sum_rows(pieces: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Sum rows as the reference, after waiting for the size of the union and for which pieces need sorting."""
    values = pieces[0][1]
    ends = torch.stack([ids.max() for ids, _ in pieces if ids.numel()] or [torch.zeros((), dtype=torch.int64)])
    rising = torch.stack([(ids[1:] >= ids[:-1]).all() for ids, _ in pieces]).tolist()
    ordered = [piece if sorted_ else _sort_rows(*piece) for piece, sorted_ in zip(pieces, rising, strict=True)]
    ids, places = union_places([ids for ids, _ in ordered], int(ends.max()) + 1)
    placed = zip(places, (values for _, values in ordered), strict=True)
    return ids, sum_rows_at(placed, ids.numel(), values.shape[1], values.dtype, scale)


def sum_rows_at(
    pieces: Iterable[tuple[Tensor, Tensor]], num_rows: int, width: int, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Sum rows as the reference, without waiting: a launch for each piece, in their order, on the current stream.

    Runs of equal indices are added in their order by one thread. A piece whose indices decrease is summed by one
    program, row after row: right, and slow; `sum_rows` sorts such a piece first.
    """
    total = None
    for places, values in pieces:
        if total is None:
            total = torch.zeros(num_rows, width, dtype=_ACCUMULATORS.get(dtype, dtype), device=values.device)
        _add_piece(total, places, values)
    if total is None:
        return torch.zeros(num_rows, width, dtype=dtype)
    if scale != 1.0:
        total.mul_(scale)
    return total.to(dtype)


def _add_piece(total: Tensor, places: Tensor, values: Tensor) -> None:
    if values.dtype not in _ACCUMULATORS or total.dtype not in _ACCUMULATORS:
        total.index_add_(0, places, values.to(total.dtype))
        return
    places, values = places.contiguous(), values.contiguous()
    falling = (places[1:] < places[:-1]).any().to(torch.int32)
    num_places, width = values.shape
    _launch_tiles(_add_rows, values, values, total, places, falling, num_places, total.shape[0], width)
    columns = min(_MAX_COLUMNS, next_power_of_two(width))
    launch(
        _add_rows_one_by_one, num_blocks(width, columns) if num_places else 0, total,
        values, total, places, falling, num_places, total.shape[0], width, COLUMNS=columns,
    )  # fmt: skip


def _sort_rows(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    ids, order = ids.sort(stable=True)
    return ids, values[order]


def _alike(some: Tensor, all_rows: Tensor, places: Tensor) -> bool:
    """Return whether rows can be moved as integers; other tensors go to the reference."""
    same = some.dtype == all_rows.dtype and some.shape == (places.numel(), *all_rows.shape[1:])
    return same and places.dtype == torch.int64 and some.is_contiguous() and all_rows.is_contiguous()


def _copy(kernel: object, target: Tensor, source: Tensor, places: Tensor) -> None:
    """Copy rows as the widest integers that divide them and both addresses."""
    if not target.numel() or not source.numel():
        if kernel is _gather:
            target.zero_()
        return
    words = [reference.row_words(target), reference.row_words(source)]
    word = min((each.dtype for each in words), key=lambda dtype: dtype.itemsize)
    target, source = (matrix.view(-1).view(word).view(matrix.shape[0], -1) for matrix in (target, source))
    rows = target.shape[0] if kernel is _scatter else source.shape[0]
    some = source if kernel is _scatter else target
    _launch_tiles(kernel, some, source, target, places.contiguous(), places.numel(), rows, some.shape[1])


def _launch_tiles(kernel: object, tiled: Tensor, *args: object) -> None:
    num_rows, width = tiled.shape
    columns = min(_MAX_COLUMNS, next_power_of_two(width))
    rows = max(1, _TILE // columns)
    launch(kernel, num_blocks(num_rows, rows) if width else 0, tiled, *args, ROWS=rows, COLUMNS=columns)


@jit
def _gather(source, target, places, num_places, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.load(places + row, mask=row < num_places, other=-1)
    there = (place >= 0) & (place < num_rows)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        inside = (row < num_places)[:, None] & (column < width)
        word = tl.load(source + place[:, None] * width + column, mask=inside & there[:, None], other=0)
        tl.store(target + row[:, None] * width + column, word, mask=inside)


@jit
def _scatter(source, target, places, num_places, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.load(places + row, mask=row < num_places, other=-1)
    there = (place >= 0) & (place < num_rows)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        inside = there[:, None] & (column < width)
        word = tl.load(source + row[:, None] * width + column, mask=inside, other=0)
        tl.store(target + place[:, None] * width + column, word, mask=inside)


@jit
def _add_rows(values, total, places, falling, num_places, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up each run of equal indices in the program of its first row; do nothing if indices decrease."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_places * (1 - tl.load(falling))
    place = tl.load(places + row, mask=inside, other=-1)
    before = tl.load(places + row - 1, mask=inside & (row > 0), other=-1)
    first_of_run = inside & (place != before) & (place >= 0) & (place < num_rows)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        target = total + place[:, None] * width + column
        writes = first_of_run[:, None] & (column < width)
        added = tl.load(target, mask=writes, other=0)
        running = first_of_run
        current = row
        while tl.max(running.to(tl.int32), axis=0) > 0:
            mask = running[:, None] & (column < width)
            value = tl.load(values + current[:, None] * width + column, mask=mask, other=0)
            added = tl.where(mask, added + value.to(total.dtype.element_ty), added)
            current += 1
            following = tl.load(places + current, mask=running & (current < num_places), other=-1)
            running = running & (following == place)
        tl.store(target, added, mask=writes)


@jit
def _add_rows_one_by_one(values, total, places, falling, num_places, num_rows, width, COLUMNS: tl.constexpr):
    """Add a piece whose indices decrease, which `_add_rows` skips, by a program for each range of columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.load(falling) != 0:
        for _ in range(num_places):
            place = tl.load(places)
            row = tl.zeros([COLUMNS], tl.int64) + place
            mask = (column < width) & (row >= 0) & (row < num_rows)
            target = total + place * width + column
            value = tl.load(values + column, mask=mask, other=0)
            added = tl.load(target, mask=mask, other=0) + value.to(total.dtype.element_ty)
            tl.store(target, added, mask=mask)
            places += 1
            values += width
