"""Bitmaps on a GPU, which the search for non-zeros and the union of ids use too.

A bitmap is int32 words [ceil(size / 32)], least significant bit first: its bytes are those of `pack_bits`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.gpu.jit import jit, launch, num_blocks, popcount, tl

BLOCK_WORDS = 128  # so one program lists the ones among 4096 bits
BLOCK_IDS = 1024


def pack_bits(positions: Tensor, size: int) -> Tensor:
    """Pack bits as the reference, but skip positions outside of [0, size): raising would require waiting."""
    return set_bits([positions], size).view(torch.uint8)[: (size + 7) // 8]


def unpack_bits(bitmap: Tensor) -> Tensor:
    """Unpack bits as the reference, after waiting for the number of ones."""
    words = as_words(bitmap)
    return list_ones(words, count_ones(words))


def as_words(bitmap: Tensor) -> Tensor:
    """Copy a uint8 bitmap, of any length and address, into int32 words."""
    padded = torch.zeros(num_blocks(bitmap.numel(), 4) * 4, dtype=torch.uint8, device=bitmap.device)
    padded[: bitmap.numel()] = bitmap
    return padded.view(torch.int32)


def set_bits(pieces: list[Tensor], size: int) -> Tensor:
    """Return the bitmap of all ids int64 in the pieces."""
    words = torch.zeros(num_blocks(size, 32), dtype=torch.int32, device=pieces[0].device)
    for ids in pieces:
        ids = ids.contiguous()
        launch(_set_bits, num_blocks(ids.numel(), BLOCK_IDS), ids, ids, words, ids.numel(), size, BLOCK_IDS)
    return words


def count_ones(words: Tensor) -> Tensor:
    """Count the ones of each block of `BLOCK_WORDS` words, int64."""
    counts = torch.empty(num_blocks(words.numel(), BLOCK_WORDS), dtype=torch.int64, device=words.device)
    launch(_count_ones, counts.numel(), words, words, counts, words.numel(), BLOCK_WORDS)
    return counts


def list_ones(words: Tensor, counts: Tensor) -> Tensor:
    """Return the positions int64 of the ones, increasing; ``counts`` is from `count_ones`; waits for their number."""
    ends = counts.cumsum(0)
    ids = torch.empty(int(ends[-1]) if ends.numel() else 0, dtype=torch.int64, device=words.device)
    _launch_list_ones(words, counts, ends, ids)
    return ids


def list_ones_into(words: Tensor, counts: Tensor, ids: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Write the first positions of ones to ``ids`` [capacity], without waiting.

    ``count`` int64 [2] receives how many fit, and how many do not, the overflow flag.
    """
    ends = counts.cumsum(0)
    _launch_list_ones(words, counts, ends, ids)
    total = ends[-1:] if ends.numel() else torch.zeros(1, dtype=torch.int64, device=words.device)
    capacity = ids.numel()
    count.copy_(torch.cat([total.clamp(max=capacity), (total - capacity).clamp(min=0)]))
    return ids, count


def _launch_list_ones(words: Tensor, counts: Tensor, ends: Tensor, ids: Tensor) -> None:
    launch(_list_ones, counts.numel(), words, words, ends, counts, ids, words.numel(), ids.numel(), BLOCK_WORDS)


@jit
def _set_bits(ids, words, num_ids, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + place, mask=place < num_ids, other=-1)
    bit = (tl.full([BLOCK], 1, tl.uint32) << (id & 31).to(tl.uint32)).to(tl.int32, bitcast=True)
    tl.atomic_or(words + (id >> 5), bit, mask=(id >= 0) & (id < size), sem="relaxed")


@jit
def _count_ones(words, counts, num_words, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + place, mask=place < num_words, other=0)
    tl.store(counts + block, tl.sum(popcount(word), axis=0).to(tl.int64))


@jit
def _list_ones(words, ends, counts, ids, num_words, capacity, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    start = tl.load(ends + block) - tl.load(counts + block)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + place, mask=place < num_words, other=0)
    ones = tl.reshape((word[:, None] >> tl.arange(0, 32)[None, :]) & 1, [BLOCK * 32])
    rank = start + tl.cumsum(ones, axis=0) - 1
    id = block.to(tl.int64) * (BLOCK * 32) + tl.arange(0, BLOCK * 32)
    tl.store(ids + rank, id, mask=(ones == 1) & (rank < capacity))
