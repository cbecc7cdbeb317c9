"""Union of several lists of ids on a GPU, by a bitmap and the number of ones before each of its words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.gpu.bits import BLOCK_IDS, BLOCK_WORDS, count_ones, list_ones_into, set_bits
from thinwire.kernels.gpu.jit import jit, launch, num_blocks, popcount, tl
from thinwire.kernels.reference import rows as reference

BITS_PER_ID = 512  # a bitmap of more bits an id would be more memory than the ids; the reference sorts them


def union_places(pieces: Sequence[Tensor], size: int) -> tuple[Tensor, list[Tensor]]:
    """Return the union as the reference; it waits for its size, which `union_places_into` does not.

    Raises:
        IndexError: an id is not in [0, size).
    """
    num_ids = sum(piece.numel() for piece in pieces)
    if size > BITS_PER_ID * num_ids:
        return reference.union_places(pieces, size)
    union = pieces[0].new_empty(min(size, num_ids))
    union, count, places = union_places_into(pieces, size, union, union.new_empty(2))
    outside = sum(((piece < 0) | (piece >= size)).sum() for piece in pieces)
    found, num_outside = torch.stack([count[0], torch.as_tensor(outside, device=count.device)]).tolist()
    if num_outside:
        raise IndexError(f"{num_outside} ids are not in [0, {size})")
    return union[:found], places


def union_places_into(
    pieces: Sequence[Tensor], size: int, union: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return (union, count, indices) of `union_places`, on the device, by a bitmap of ``size`` bits, without waiting.

    Indices are right even if the union does not fit. Ids outside of [0, size) are skipped; their indices are -1.

    Args:
        union: int64 [capacity]: receives the first ids; later entries keep their values.
        count: int64 [2]: receives how many ids were written, and how many did not fit, the overflow flag.
    """
    words = set_bits(list(pieces), size)
    counts = count_ones(words)
    list_ones_into(words, counts, union, count)
    before = torch.empty(words.numel(), dtype=torch.int64, device=words.device)
    launch(_count_before, counts.numel(), words, words, counts.cumsum(0), counts, before, words.numel(), BLOCK_WORDS)
    return union, count, [_find_places(piece.contiguous(), words, before, size) for piece in pieces]


def _find_places(ids: Tensor, words: Tensor, before: Tensor, size: int) -> Tensor:
    places = torch.empty_like(ids)
    programs = num_blocks(ids.numel(), BLOCK_IDS)
    launch(_rank_ids, programs, ids, ids, words, before, places, ids.numel(), size, BLOCK_IDS)
    return places


@jit
def _count_before(words, ends, counts, before, num_words, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    start = tl.load(ends + block) - tl.load(counts + block)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ones = popcount(tl.load(words + place, mask=place < num_words, other=0))
    tl.store(before + place, start + tl.cumsum(ones, axis=0) - ones, mask=place < num_words)


@jit
def _rank_ids(ids, words, before, places, num_ids, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + place, mask=place < num_ids, other=-1)
    inside = (id >= 0) & (id < size)
    below = (tl.full([BLOCK], 1, tl.uint32) << (id & 31).to(tl.uint32)) - 1
    word = tl.load(words + (id >> 5), mask=inside, other=0) & below.to(tl.int32, bitcast=True)
    rank = tl.load(before + (id >> 5), mask=inside, other=-1) + popcount(word)
    tl.store(places + place, rank, mask=place < num_ids)
