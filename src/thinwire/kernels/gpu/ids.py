"""Owners of ids under the dealt permutation, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.gpu.jit import jit, launch, num_blocks, tl

_BLOCK = 1024
_LOW_WORD = 0xFFFFFFFF


def dealt_ids(owner: int, positions: Tensor, world_size: int, seed: int) -> Tensor:
    """Return the ids of an owner as the reference."""
    positions = positions.contiguous()
    ids = torch.empty_like(positions)
    programs = num_blocks(ids.numel(), _BLOCK)
    launch(_dealt_ids, programs, ids, positions, ids, ids.numel(), owner, *_words(seed), world_size, BLOCK=_BLOCK)
    return ids


def deal_rows(ids: Tensor, num_rows: int, world_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Deal ids as the reference, without waiting: a launch computes owners, and a stable sort of these groups ids."""
    ids = ids.contiguous()
    owners = torch.empty(ids.numel(), dtype=torch.int16 if world_size < 1 << 15 else torch.int32, device=ids.device)
    counts = torch.zeros(world_size, dtype=torch.int64, device=ids.device)
    programs = num_blocks(ids.numel(), _BLOCK)
    launch(_owners, programs, ids, ids, owners, counts, ids.numel(), num_rows, *_words(seed), world_size, BLOCK=_BLOCK)
    positions = owners.sort(stable=True)[1]  # padding has the owner ``world_size``, and so is last
    return ids[positions], positions, counts


def _words(seed: int) -> tuple[int, int]:
    return seed & _LOW_WORD, (seed >> 32) & _LOW_WORD


@jit()
def _finalize(word):
    word = word ^ (word >> 16)
    word = word * 0x85EBCA6B
    word = word ^ (word >> 13)
    word = word * 0xC2B2AE35
    return word ^ (word >> 16)


@jit()
def _rotation(groups, seed_low, seed_high, world_size):
    """Return `owner_by_hash` of the reference, by arithmetic of 32 bits until the last product."""
    hashed = _finalize((groups ^ seed_low).to(tl.uint32))
    hashed = _finalize(hashed ^ ((groups >> 32) ^ seed_high).to(tl.uint32))
    return (hashed.to(tl.int64) * world_size) >> 32


@jit("positions", "num_ids", "owner", "seed_low", "seed_high", "world_size")
def _dealt_ids(positions, ids, num_ids, owner, seed_low, seed_high, world_size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + index, mask=index < num_ids, other=0)
    rest = (owner + world_size - _rotation(position, seed_low, seed_high, world_size)) % world_size
    tl.store(ids + index, position * world_size + rest, mask=index < num_ids)


@jit("ids", "num_ids", "num_rows", "seed_low", "seed_high", "world_size")
def _owners(ids, owners, counts, num_ids, num_rows, seed_low, seed_high, world_size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + index, mask=index < num_ids, other=-1)
    inside = (id >= 0) & (id < num_rows)
    group = id // world_size
    owner = id - group * world_size + _rotation(group, seed_low, seed_high, world_size)
    owner = tl.where(owner >= world_size, owner - world_size, owner)
    tl.store(owners + index, tl.where(inside, owner, world_size).to(owners.dtype.element_ty), mask=index < num_ids)
    tl.atomic_add(counts + owner, tl.full([BLOCK], 1, tl.int64), mask=inside, sem="relaxed")
