"""Hierarchical hashing as published by ZEN (OSDI'25, Algorithm 1), on a GPU, for comparison with the permutation.

A slot goes to the id of the largest key, by one atomic maximum: earlier rounds have larger keys, and in a round later
ids do. The next launch reads which id won, so that no thread can see its own id and lose it afterwards, and the outcome
is the reference's, whichever thread came first. Compare-and-swap would close that race too, but the winner would be
random, and Triton's has no mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.gpu.find import nonzero_rows
from thinwire.kernels.gpu.ids import group_by_owner, hashed_owner, mixed, owner_by_hash
from thinwire.kernels.gpu.jit import jit, launch, num_blocks, tl

_BLOCK = 1024
_PLACE_BITS = 40  # bits of a key, so that a tensor has at most 2^40 ids
_LOW_WORD = 0xFFFFFFFF


def hierarchical_hash(
    ids: Tensor, world_size: int, seed: int, *, hashes: int = 3, parallel_slots: int, serial_slots: int
) -> list[Tensor]:
    """Partition ids as the reference, in the same order; ``serial_slots`` grows as needed, so nothing depends on it."""
    ids = ids.contiguous()
    slots = max(1, parallel_slots // world_size)
    keys = torch.zeros(world_size * slots, dtype=torch.int64, device=ids.device)
    slot = torch.empty_like(ids)
    homeless = torch.ones(ids.numel(), dtype=torch.int32, device=ids.device)
    for level in range(1, hashes + 2):  # the last one only checks which ids won before
        _launch_round(ids, keys, slot, homeless, world_size, slots, seed, level, hashes)
    filled = nonzero_rows(keys.view(-1, 1))
    parallel = ids[(keys[filled] & ((1 << _PLACE_BITS) - 1)) - 1]
    overflow = ids[nonzero_rows(homeless.view(-1, 1))]
    serial = group_by_owner(owner_by_hash(overflow, world_size, seed), world_size)
    in_parallel = torch.bincount(filled // slots, minlength=world_size).tolist()
    return [torch.cat([row, overflow[rest]]) for row, rest in zip(parallel.split(in_parallel), serial, strict=True)]


def _launch_round(
    ids: Tensor, keys: Tensor, slot: Tensor, homeless: Tensor,
    world_size: int, slots: int, seed: int, level: int, hashes: int,
) -> None:  # fmt: skip
    launch(
        _try_slots, num_blocks(ids.numel(), _BLOCK), ids, ids, keys, slot, homeless, ids.numel(), slots,
        seed & _LOW_WORD, (seed >> 32) & _LOW_WORD, (seed + level) & _LOW_WORD, ((seed + level) >> 32) & _LOW_WORD,
        hashes + 1 - level, WORLD_SIZE=world_size, FIRST=level == 1, LAST=level > hashes,
        PLACE_BITS=_PLACE_BITS, BLOCK=_BLOCK,
    )  # fmt: skip


@jit
def _try_slots(
    ids, keys, slots_tried, homeless, num_ids, slots,
    seed_low, seed_high, level_seed_low, level_seed_high, rounds_left,
    WORLD_SIZE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, PLACE_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Check which ids won the round before, and let the others try a slot in this one."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    trying = (place < num_ids) & (tl.load(homeless + place, mask=place < num_ids, other=0) != 0)
    one = tl.full([BLOCK], 1, tl.int64)
    if not FIRST:
        before = tl.load(slots_tried + place, mask=trying, other=0)
        key = ((one * rounds_left + 1) << PLACE_BITS) + place + 1
        trying = trying & (tl.load(keys + before, mask=trying, other=0) != key)
        tl.store(homeless + place, trying.to(tl.int32), mask=place < num_ids)
    if not LAST:
        id = tl.load(ids + place, mask=trying, other=0)
        owner = hashed_owner(id, seed_low, seed_high, WORLD_SIZE)
        slot = owner * slots + mixed(id, level_seed_low, level_seed_high).to(tl.int64) % slots
        tl.store(slots_tried + place, slot, mask=trying)
        tl.atomic_max(keys + slot, ((one * rounds_left) << PLACE_BITS) + place + 1, mask=trying, sem="relaxed")
