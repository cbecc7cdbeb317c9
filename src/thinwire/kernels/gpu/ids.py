"""Hashes of ids, and their owners under the dealt permutation, on a GPU; ids are split by owner without a sort.

Every block of ids counts those of each owner; the counts of an owner are added up over the blocks; then every block
writes its ids behind those of earlier blocks. So ids of an owner keep their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.gpu.jit import jit, launch, num_blocks, tl
from thinwire.kernels.reference import rows as reference

MAX_OWNERS = 64  # a block reads its ids once for each owner; beyond, the reference sorts
_BLOCK = 1024
_LOW_WORD = 0xFFFFFFFF


def mix(ids: Tensor, seed: int) -> Tensor:
    """Hash ids as the reference."""
    return _hash(ids, 0, seed)


def owner_by_hash(ids: Tensor, world_size: int, seed: int) -> Tensor:
    """Return the owners of ids as the reference."""
    return _hash(ids, world_size, seed)


def _hash(ids: Tensor, world_size: int, seed: int) -> Tensor:
    ids = ids.contiguous()
    hashed = torch.empty_like(ids)
    launch(
        _hash_ids, num_blocks(ids.numel(), _BLOCK), ids,
        ids, hashed, ids.numel(), *_words(seed), WORLD_SIZE=world_size, BLOCK=_BLOCK,
    )  # fmt: skip
    return hashed


def dealt_ids(owner: int, positions: Tensor, world_size: int, seed: int) -> Tensor:
    """Return the ids of an owner as the reference."""
    positions = positions.contiguous()
    ids = torch.empty_like(positions)
    launch(
        _dealt_ids, num_blocks(ids.numel(), _BLOCK), ids,
        positions, ids, ids.numel(), owner, *_words(seed), WORLD_SIZE=world_size, BLOCK=_BLOCK,
    )  # fmt: skip
    return ids


def deal(ids: Tensor, world_size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Deal ids as the reference; it waits for the sizes of the parts."""
    if world_size > MAX_OWNERS:
        return reference.deal(ids, world_size, seed)
    positions, places = torch.empty_like(ids), torch.empty_like(ids)
    sizes = _split(ids, world_size, seed, positions, places)
    return list(zip(positions.split(sizes), places.split(sizes), strict=True))


def group_by_owner(owners: Tensor, world_size: int) -> list[Tensor]:
    """Group indices by owner as the reference, after waiting for the sizes of the groups.

    Raises:
        IndexError: an owner is not in [0, world_size).
    """
    if world_size > MAX_OWNERS:
        return reference.group_by_owner(owners, world_size)
    places = torch.empty_like(owners)
    sizes = _split(owners, world_size, None, None, places)
    if sum(sizes) != owners.numel():
        raise IndexError(f"an owner is not in [0, {world_size})")
    return list(places.split(sizes))


def _split(ids: Tensor, world_size: int, seed: int | None, positions: Tensor | None, places: Tensor) -> list[int]:
    """Write the indices (and positions) of all owners one after the other; return their numbers."""
    ids = ids.contiguous()
    blocks, settings = num_blocks(ids.numel(), _BLOCK), {"WORLD_SIZE": world_size, "DEALT": seed is not None}
    counts = torch.empty(world_size, blocks, dtype=torch.int64, device=ids.device)
    words = _words(seed or 0)
    launch(_count_owners, blocks, ids, ids, ids.numel(), counts, blocks, *words, **settings, BLOCK=_BLOCK)
    before, totals = counts.cumsum(1) - counts, counts.sum(1)
    launch(
        _scatter_owners, blocks, ids, ids, ids.numel(), before, totals.cumsum(0) - totals,
        places if positions is None else positions, places, blocks, *words, **settings, BLOCK=_BLOCK,
    )  # fmt: skip
    return totals.tolist()


def _words(seed: int) -> tuple[int, int]:
    return seed & _LOW_WORD, (seed >> 32) & _LOW_WORD


@jit
def mixed(ids, seed_low, seed_high):
    """Hash as `thinwire.kernels.reference.rows.mix`, in uint32."""
    hashed = _finalize((ids ^ seed_low).to(tl.uint32))
    return _finalize(hashed ^ ((ids >> 32) ^ seed_high).to(tl.uint32))


@jit
def _finalize(word):
    word = word ^ (word >> 16)
    word = word * 0x85EBCA6B
    word = word ^ (word >> 13)
    word = word * 0xC2B2AE35
    return word ^ (word >> 16)


@jit
def hashed_owner(ids, seed_low, seed_high, WORLD_SIZE: tl.constexpr):
    return (mixed(ids, seed_low, seed_high).to(tl.int64) * WORLD_SIZE) >> 32


@jit
def _hash_ids(ids, hashed, num_ids, seed_low, seed_high, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + place, mask=place < num_ids, other=0)
    if WORLD_SIZE == 0:
        tl.store(hashed + place, mixed(id, seed_low, seed_high).to(tl.int64), mask=place < num_ids)
    else:
        tl.store(hashed + place, hashed_owner(id, seed_low, seed_high, WORLD_SIZE), mask=place < num_ids)


@jit
def _dealt_ids(positions, ids, num_ids, owner, seed_low, seed_high, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + place, mask=place < num_ids, other=0)
    rest = (owner + WORLD_SIZE - hashed_owner(position, seed_low, seed_high, WORLD_SIZE)) % WORLD_SIZE
    tl.store(ids + place, position * WORLD_SIZE + rest, mask=place < num_ids)


@jit
def _owners(ids, num_ids, seed_low, seed_high, WORLD_SIZE: tl.constexpr, DEALT: tl.constexpr, BLOCK: tl.constexpr):
    """Return indices, positions and owners of a block of ids, or of owners themselves; owners are -1 behind the end."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_ids
    id = tl.load(ids + place, mask=inside, other=-1)
    position = id
    owner = id
    if DEALT:
        position = id // WORLD_SIZE
        owner = (id + hashed_owner(position, seed_low, seed_high, WORLD_SIZE)) % WORLD_SIZE
    return place, position, tl.where(inside, owner, -1)


@jit
def _count_owners(
    ids, num_ids, counts, num_blocks, seed_low, seed_high,
    WORLD_SIZE: tl.constexpr, DEALT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _, _, owners = _owners(ids, num_ids, seed_low, seed_high, WORLD_SIZE, DEALT, BLOCK)
    for owner in range(WORLD_SIZE):
        number = tl.sum((owners == owner).to(tl.int32), axis=0)
        tl.store(counts + owner * num_blocks + tl.program_id(0), number.to(tl.int64))


@jit
def _scatter_owners(
    ids, num_ids, before, first, positions, places, num_blocks, seed_low, seed_high,
    WORLD_SIZE: tl.constexpr, DEALT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, position, owners = _owners(ids, num_ids, seed_low, seed_high, WORLD_SIZE, DEALT, BLOCK)
    for owner in range(WORLD_SIZE):
        mine = owners == owner
        rank = tl.load(before + owner * num_blocks + tl.program_id(0)) + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        target = tl.load(first + owner) + rank
        tl.store(places + target, place, mask=mine)
        if DEALT:
            tl.store(positions + target, position, mask=mine)
