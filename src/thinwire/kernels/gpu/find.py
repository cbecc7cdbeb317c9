"""Non-zero rows on a GPU: one pass makes a bitmap and counts its ones, a second lists them.

The first reads the tensor once and writes a bit for each row; the second reads those bits and writes the ids. Between
them the counts are added up by ``torch.cumsum``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.gpu.bits import BLOCK_WORDS, list_ones, list_ones_into
from thinwire.kernels.gpu.jit import jit, launch, next_power_of_two, num_blocks, tl
from thinwire.kernels.reference.rows import row_words

_TILE_WORDS = 4096  # words that a program reads at once
_MAX_COLUMNS = 128
_BLOCK_ROWS = 32 * BLOCK_WORDS


def nonzero_rows(dense: Tensor) -> Tensor:
    """Return the non-zero rows as the reference; it waits for their number, which `nonzero_rows_into` does not."""
    return list_ones(*_flag_rows(dense))


def nonzero_rows_into(dense: Tensor, ids: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Write the ids of the non-zero rows of ``dense`` [num_rows, width], without waiting for their number.

    Args:
        ids: int64 [capacity], on the device: receives the first ids, increasing; later entries keep their values.
        count: int64 [2], on the device: receives the number of ids written, and the number of those that did not fit;
            if that is not zero, ``capacity`` was too small.

    Returns:
        (ids, count), on the device.

    Example:
        >>> ids, count = nonzero_rows_into(gradient, gradient.new_empty(100, dtype=torch.int64), count)
    """
    return list_ones_into(*_flag_rows(dense), ids, count)


def _flag_rows(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bitmap of rows with a non-zero word, and the ones of each block of `BLOCK_WORDS` of its words."""
    words = row_words(dense) if dense.numel() else dense.new_empty(0, 1, dtype=torch.uint8)
    num_rows, width = words.shape
    bitmap = torch.empty(num_blocks(num_rows, 32), dtype=torch.int32, device=words.device)
    counts = torch.zeros(num_blocks(num_rows, _BLOCK_ROWS), dtype=torch.int64, device=words.device)
    columns = min(_MAX_COLUMNS, next_power_of_two(width))
    rows = max(32, min(_BLOCK_ROWS, _TILE_WORDS // columns))
    launch(
        _flag, num_blocks(num_rows, rows), words,
        words, bitmap, counts, num_rows, width, ROWS=rows, COLUMNS=columns, BLOCK_ROWS=_BLOCK_ROWS,
    )  # fmt: skip
    return bitmap, counts


@jit
def _flag(
    words, bitmap, counts, num_rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    row = first_row + tl.arange(0, ROWS)
    found = tl.zeros([ROWS], dtype=tl.int32)
    for first_column in range(0, width, COLUMNS):
        column = first_column + tl.arange(0, COLUMNS)
        place = row[:, None] * width + column[None, :]
        inside = (row[:, None] < num_rows) & (column[None, :] < width)
        found |= tl.max((tl.load(words + place, mask=inside, other=0) != 0).to(tl.int32), axis=1)
    bits = tl.reshape(found, [ROWS // 32, 32]).to(tl.uint32) << tl.arange(0, 32).to(tl.uint32)[None, :]
    word = first_row // 32 + tl.arange(0, ROWS // 32)
    ones = tl.sum(bits, axis=1).to(tl.int32, bitcast=True)  # bits are apart, so their sum is their union
    tl.store(bitmap + word, ones, mask=word * 32 < num_rows)
    tl.atomic_add(counts + first_row // BLOCK_ROWS, tl.sum(found, axis=0).to(tl.int64), sem="relaxed")
