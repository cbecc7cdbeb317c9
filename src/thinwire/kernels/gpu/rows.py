"""Gather, scatter and sum of rows on a GPU.

Indices out of range are neither read nor written; gathered, their rows are zeros. Raising, as `gather_rows` and
`scatter_rows` do on a CPU, would require waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.gpu.jit import jit, launch, num_blocks, tiles, tl
from thinwire.kernels.reference import rows as reference

_TILE = 2048  # elements that a program reads at once
_SUM_TILE = 128  # sums of a program, which is one warp
_BLOCK_IDS = 1024
_AHEAD = 16  # rows that it reads before it adds the first
_ACCUMULATORS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


def gather_rows(values: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
    """Gather rows as the reference."""
    gathered = values.new_empty(positions.numel(), values.shape[1]) if out is None else out
    if not _alike(gathered, values, positions):
        return reference.gather_rows(values, positions, out)
    _copy(_gather, gathered, values, positions)
    return gathered


def scatter_rows(dense: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Scatter rows as the reference."""
    if not _alike(values, dense, ids):
        return reference.scatter_rows(dense, ids, values)
    _copy(_scatter, dense, values, ids)
    return dense


def take_rows(values: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
    """Gather rows as the reference."""
    values = values.contiguous()
    taken = values.new_empty(positions.numel(), values.shape[1]) if out is None else out
    if not _alike(taken, values, positions):
        return reference.take_rows(values, positions, out)
    _copy(_gather, taken, values, positions, keeps=out is not None)
    return taken


def put_rows(dense: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Write rows as the reference."""
    values = values.contiguous()
    if not _alike(values, dense, ids):
        return reference.put_rows(dense, ids, values)
    _copy(_scatter, dense, values, ids)
    return dense


def sum_rows(pieces: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Sum rows as the reference; it waits for the size of the union."""
    ids, values = pieces[0] if len(pieces) == 1 else (torch.cat(each) for each in zip(*pieces, strict=True))
    ids, order, ranks = _ranked(ids)
    union, firsts, count = _runs(ids, ranks, int(ranks[-1]) if ids.numel() else 0, torch.iinfo(ids.dtype).max)
    return union, _sum(order, firsts, count, values, pieces[0][1].dtype, scale)


def merge_rows(
    ids: Tensor, values: Tensor, num_rows: int, capacity: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum rows as the reference, without waiting."""
    largest = torch.iinfo(ids.dtype).max
    ids, order, ranks = _ranked((ids & largest).clamp(max=num_rows))  # without its sign a negative id is a large one
    union, firsts, count = _runs(ids, ranks, capacity, num_rows)
    return union, _sum(order, firsts, count, values, values.dtype, scale), count


def _ranked(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids increasing, the indices that they had, increasing for equal ids, and of each the rank of its run."""
    ids, order = ids.sort(stable=True)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[1:], ids[:-1], out=is_first[1:])
    return ids, order, is_first.cumsum(0)


def _runs(ids: Tensor, ranks: Tensor, capacity: int, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids of the first runs, padded, where they start, int64 [capacity + 1], and the number of all, [1].

    Behind the last run, the number of ids. A run of ``padding``, which is the last, does not count.
    """
    union = torch.full((capacity,), padding, dtype=torch.int64, device=ids.device)
    firsts = torch.full((capacity + 1,), ids.numel(), dtype=torch.int64, device=ids.device)
    count = (torch.empty if ids.numel() else torch.zeros)(1, dtype=torch.int64, device=ids.device)
    programs = num_blocks(ids.numel(), _BLOCK_IDS)
    launch(
        _note_runs, programs, ids, ids, ranks, union, firsts, count, ids.numel(), capacity, padding, BLOCK=_BLOCK_IDS
    )
    return union, firsts, count


def _sum(order: Tensor, firsts: Tensor, count: Tensor, values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Sum the rows ``values[order[firsts[i] : firsts[i + 1]]]`` for each i, zero from ``count`` [1] on, in this order.

    Float additions in another order give other bits, so the rows of a sum are added by one thread for each column. It
    reads `_AHEAD` of them at once, so a run of 5,000 rows takes some 300 times the latency of two reads of which one
    needs the other, not 5,000 times.
    """
    num_sums, width = firsts.numel() - 1, values.shape[1]
    total = torch.empty(num_sums, width, dtype=_ACCUMULATORS.get(dtype, dtype), device=values.device)
    tile = tiles(width, _SUM_TILE)
    programs = num_blocks(num_sums, tile["ROWS"]) * num_blocks(width, tile["COLUMNS"])
    launch(
        _add_runs, programs, total, values.contiguous(), order, firsts, count, total, num_sums, width,
        **tile, AHEAD=_AHEAD, num_warps=1,
    )  # fmt: skip
    if scale != 1.0:
        total.mul_(scale)
    return total.to(dtype)


def _alike(some: Tensor, all_rows: Tensor, positions: Tensor) -> bool:
    """Return whether rows can be moved as integers; other tensors go to the reference."""
    same = some.dtype == all_rows.dtype and some.shape == (positions.numel(), *all_rows.shape[1:])
    return same and positions.dtype == torch.int64 and some.is_contiguous() and all_rows.is_contiguous()


def _copy(kernel: object, target: Tensor, source: Tensor, positions: Tensor, keeps: bool = False) -> None:
    """Copy rows as the widest integers that divide them and both addresses; without ``keeps``, gather zeros, too."""
    if not target.numel() or not source.numel():
        if kernel is _gather and not keeps:
            target.zero_()
        return
    words = [reference.row_words(target), reference.row_words(source)]
    word = min((each.dtype for each in words), key=lambda dtype: dtype.itemsize)
    target, source = (matrix.view(-1).view(word).view(matrix.shape[0], -1) for matrix in (target, source))
    rows, some = (target.shape[0], source) if kernel is _scatter else (source.shape[0], target)
    num_positions, width = some.shape
    tile = tiles(width, _TILE) | ({"KEEPS": keeps} if kernel is _gather else {})
    programs = num_blocks(num_positions, tile["ROWS"])
    launch(kernel, programs, some, source, target, positions.contiguous(), num_positions, rows, width, **tile)


@jit("positions", "num_positions", "num_rows")
def _gather(
    source, target, positions, num_positions, num_rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = tl.load(positions + row, mask=row < num_positions, other=-1)
    there = (index >= 0) & (index < num_rows)
    written = (row < num_positions) & there if KEEPS else row < num_positions
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        inside = written[:, None] & (column < width)
        word = tl.load(source + index[:, None] * width + column, mask=inside & there[:, None], other=0)
        tl.store(target + row[:, None] * width + column, word, mask=inside)


@jit("positions", "num_positions", "num_rows")
def _scatter(source, target, positions, num_positions, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = tl.load(positions + row, mask=row < num_positions, other=-1)
    there = (index >= 0) & (index < num_rows)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        inside = there[:, None] & (column < width)
        word = tl.load(source + row[:, None] * width + column, mask=inside, other=0)
        tl.store(target + index[:, None] * width + column, word, mask=inside)


@jit("num_ids", "capacity", "padding")
def _note_runs(ids, ranks, union, firsts, count, num_ids, capacity, padding, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_ids
    id = tl.load(ids + index, mask=inside, other=0)
    run = tl.load(ranks + index, mask=inside, other=0) - 1
    before = tl.load(ranks + index - 1, mask=inside & (index > 0), other=0) - 1
    is_first = inside & (run != before)
    tl.store(firsts + run, index, mask=is_first & (run <= capacity))
    tl.store(union + run, id, mask=is_first & (run < capacity))
    tl.store(count + index * 0, run + (id < padding), mask=index == num_ids - 1)


@jit("count", "num_sums")
def _add_runs(
    values, order, firsts, count, total, num_sums, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    blocks = (width + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    is_run = row < tl.minimum(tl.load(count), num_sums)
    first = tl.load(firsts + row, mask=is_run, other=0)
    end = tl.load(firsts + row + 1, mask=is_run, other=0)
    added = tl.zeros([ROWS, COLUMNS], dtype=total.dtype.element_ty)
    for done in range(0, tl.max(end - first, axis=0), AHEAD):
        for ahead in tl.static_range(AHEAD):
            at = first + done + ahead
            index = tl.load(order + at, mask=at < end, other=0)
            mask = (at < end)[:, None] & (column < width)
            value = tl.load(values + index[:, None] * width + column, mask=mask, other=0)
            added = tl.where(mask, added + value.to(total.dtype.element_ty), added)
    tl.store(total + row[:, None] * width + column, added, mask=(row < num_sums)[:, None] & (column < width))
