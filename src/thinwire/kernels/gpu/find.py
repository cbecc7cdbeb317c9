"""Search for non-zero rows, and bitmaps, on a GPU.

A bitmap is int32 words [ceil(size / 32)], least significant bit first: its bytes are as from `pack_bits`. The search
for rows reads the tensor once and writes a bit for each row; then the bits of each block are counted, the counts added
up by ``torch.cumsum``, and the ones listed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.gpu.jit import jit, launch, num_blocks, tiles, tl
from thinwire.kernels.reference.rows import STACK_ALIGNMENT, row_words, stack_starts

_BLOCK_WORDS = 128  # so one program lists the ones among 4096 bits
_BLOCK_IDS = 1024
_TILE_WORDS = 2048  # that a program reads at once; of 4096, rows of 200 bytes took 221 registers, and rows of 6 spilled


def nonzero_rows(dense: Tensor) -> Tensor:
    """Return the non-zero rows as the reference; it waits for their number, which `find_rows` does not."""
    bitmap = _flag_rows((dense,))
    counts = _count(bitmap)
    ends = counts.cumsum(0)
    result = int(ends[-1]) if ends.numel() else 0
    return _list(bitmap, counts, ends, torch.empty(result, dtype=torch.int64, device=dense.device))


def find_rows(dense: Tensor, capacity: int, below: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """Find rows as the reference: one launch for each matrix, and four for all."""
    matrices = (dense, *below)
    return _list_some(_flag_rows(matrices), capacity, stack_starts([matrix.shape[0] for matrix in matrices])[-1])


def pack_bits(positions: Tensor, size: int) -> Tensor:
    """Pack bits as the reference, but skip positions outside of [0, size): raising would require waiting."""
    positions = positions.contiguous()
    words = torch.zeros(num_blocks(size, 32), dtype=torch.int32, device=positions.device)
    programs = num_blocks(positions.numel(), _BLOCK_IDS)
    launch(_set_bits, programs, positions, positions, words, positions.numel(), size, _BLOCK_IDS)
    return words.view(torch.uint8)[: num_blocks(size, 8)]


def find_bits(bitmap: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Find the ones of a bitmap as the reference."""
    words = bitmap
    if any(number % 4 for number in (bitmap.numel(), bitmap.storage_offset(), bitmap.data_ptr())):
        words = torch.zeros(num_blocks(bitmap.numel(), 4) * 4, dtype=torch.uint8, device=bitmap.device)
        words[: bitmap.numel()] = bitmap
    return _list_some(words.view(torch.int32), capacity, 8 * bitmap.numel())


def _count(words: Tensor) -> Tensor:
    """Return the ones of each block of `_BLOCK_WORDS` words."""
    counts = torch.zeros(num_blocks(words.numel(), _BLOCK_WORDS), dtype=torch.int64, device=words.device)
    launch(_count_ones, counts.numel(), words, words, counts, words.numel(), _BLOCK_WORDS)
    return counts


def _flag_rows(matrices: Sequence[Tensor]) -> Tensor:
    """Return the bitmap of rows with a non-zero word, of stacked matrices."""
    *starts, num_rows = stack_starts([matrix.shape[0] for matrix in matrices])
    make = torch.empty if matrices[0].shape[1] else torch.zeros  # in rows without columns nothing is searched
    bitmap = make(num_blocks(num_rows, 32), dtype=torch.int32, device=matrices[0].device)
    for matrix, start in zip(matrices, starts, strict=True):
        if matrix.numel():
            words = row_words(matrix)
            height, width = words.shape
            tile = tiles(width, _TILE_WORDS, most_columns=64)
            tile["ROWS"] = max(32, tile["ROWS"])
            programs = num_blocks(height, tile["ROWS"])
            launch(_flag, programs, words, words, bitmap[start // STACK_ALIGNMENT :], height, width, **tile)
    return bitmap


def _list_some(words: Tensor, capacity: int, padding: int) -> tuple[Tensor, Tensor]:
    """Return the first positions of ones, padded, and the number of all, int64 [1], without waiting for it."""
    counts = _count(words)
    ids = torch.full((capacity,), padding, dtype=torch.int64, device=words.device)
    ends = counts.cumsum(0)
    _list(words, counts, ends, ids)
    return ids, ends[-1:] if ends.numel() else counts.new_zeros(1)


def _list(words: Tensor, counts: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
    launch(_list_ones, counts.numel(), words, words, ends, counts, ids, words.numel(), ids.numel(), _BLOCK_WORDS)
    return ids


@jit("bitmap", "num_rows")
def _flag(words, bitmap, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    row = first_row + tl.arange(0, ROWS)
    result = tl.zeros([ROWS], dtype=tl.int32)
    for first_column in range(0, width, COLUMNS):
        column = first_column + tl.arange(0, COLUMNS)
        index = row[:, None] * width + column[None, :]
        if (first_row + ROWS <= num_rows) & (first_column + COLUMNS <= width):  # without a mask loads are of 128 bits
            result |= tl.max((tl.load(words + index) != 0).to(tl.int32), axis=1)
        else:
            inside = (row[:, None] < num_rows) & (column[None, :] < width)
            result |= tl.max((tl.load(words + index, mask=inside, other=0) != 0).to(tl.int32), axis=1)
    bits = tl.reshape(result, [ROWS // 32, 32]).to(tl.uint32) << tl.arange(0, 32).to(tl.uint32)[None, :]
    word = first_row // 32 + tl.arange(0, ROWS // 32)
    ones = tl.sum(bits, axis=1).to(tl.int32, bitcast=True)  # bits are apart, so their sum is their union
    tl.store(bitmap + word, ones, mask=word * 32 < num_rows)


@jit("ids", "num_ids", "size")
def _set_bits(ids, words, num_ids, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + index, mask=index < num_ids, other=-1)
    bit = (tl.full([BLOCK], 1, tl.uint32) << (id & 31).to(tl.uint32)).to(tl.int32, bitcast=True)
    tl.atomic_or(words + (id >> 5), bit, mask=(id >= 0) & (id < size), sem="relaxed")


@jit("num_words")
def _count_ones(words, counts, num_words, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(words + index, mask=index < num_words, other=0).to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    tl.store(counts + block, tl.sum(((bits * 0x01010101) >> 24).to(tl.int32), axis=0).to(tl.int64))


@jit("num_words", "capacity")
def _list_ones(words, ends, counts, ids, num_words, capacity, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    start = tl.load(ends + block) - tl.load(counts + block)
    index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + index, mask=index < num_words, other=0)
    ones = tl.reshape((word[:, None] >> tl.arange(0, 32)[None, :]) & 1, [BLOCK * 32])
    rank = start + tl.cumsum(ones, axis=0) - 1
    id = block.to(tl.int64) * (BLOCK * 32) + tl.arange(0, BLOCK * 32)
    tl.store(ids + rank, id, mask=(ones == 1) & (rank < capacity))
