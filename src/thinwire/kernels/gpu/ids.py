"""Hashes of ids, and their owners under the dealt permutation, on a GPU; ids are split by owner without a sort.

Every block of ids counts those of each owner; the counts of an owner are added up over the blocks; then every block
writes its ids behind those of earlier blocks. So ids of an owner keep their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.gpu.bits import write_count
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
    """Deal ids as the reference; it waits for the sizes of the parts, which `deal_into` does not."""
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


def deal_into(
    ids: Tensor, count: Tensor, seed: int, positions: Tensor, places: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Deal ids to messages of fixed capacity, without waiting for their sizes.

    Args:
        ids: int64 [n], of which the first ``count[0]`` are dealt: output of `nonzero_rows_into`, with its ``count``.
        positions: int64 [world_size, capacity]: receives the positions of each owner's ids, increasing.
        places: int64 [world_size, capacity]: receives the indices of these in ``ids``. Later entries of both are kept.
        counts: int64 [world_size, 2]: receives how many ids were written for an owner, and how many did not fit, the
            overflow flag.

    Returns:
        (positions, places, counts), on the device. Ids that did not fit ``ids`` are counted in ``count[1]`` only.

    Raises:
        ValueError: there are more owners than `MAX_OWNERS`, or outputs are strided or have other shapes.
    """
    world_size, capacity = positions.shape
    if world_size > MAX_OWNERS:
        raise ValueError(f"{world_size} owners: deal_into splits among at most {MAX_OWNERS}; use deal")
    fits = positions.shape == places.shape and counts.shape == (world_size, 2)
    if not fits or not (positions.is_contiguous() and places.is_contiguous()):
        raise ValueError("positions and places must be contiguous [world_size, capacity], counts [world_size, 2]")
    before, totals = _count_before(ids, count, world_size, seed)
    first = torch.arange(world_size, device=ids.device) * capacity
    _scatter(ids, count, world_size, seed, before, first, capacity, positions, places)
    write_count(totals, capacity, counts)
    return positions, places, counts


def _split(ids: Tensor, world_size: int, seed: int | None, positions: Tensor | None, places: Tensor) -> list[int]:
    """Write the indices (and positions) of all owners one after the other; return their numbers."""
    ids = ids.contiguous()
    count = torch.full((1,), ids.numel(), dtype=torch.int64, device=ids.device)
    before, totals = _count_before(ids, count, world_size, seed)
    _scatter(ids, count, world_size, seed, before, totals.cumsum(0) - totals, ids.numel(), positions, places)
    return totals.tolist()


def _count_before(ids: Tensor, count: Tensor, world_size: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """Return how many ids of an owner are before each block [world_size, blocks], and in all [world_size]."""
    counts = torch.empty(world_size, num_blocks(ids.numel(), _BLOCK), dtype=torch.int64, device=ids.device)
    launch(
        _count_owners, counts.shape[1], ids, ids, count, counts, counts.shape[1], *_words(seed or 0),
        WORLD_SIZE=world_size, DEALT=seed is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    ends = counts.cumsum(1)
    return ends - counts, counts.sum(1)


def _scatter(
    ids: Tensor, count: Tensor, world_size: int, seed: int | None,
    before: Tensor, first: Tensor, capacity: int, positions: Tensor | None, places: Tensor,
) -> None:  # fmt: skip
    launch(
        _scatter_owners, before.shape[1], ids, ids, count, before, first, places if positions is None else positions,
        places, before.shape[1], capacity, *_words(seed or 0),
        WORLD_SIZE=world_size, DEALT=seed is not None, BLOCK=_BLOCK,
    )  # fmt: skip


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
def _owners(ids, count, seed_low, seed_high, WORLD_SIZE: tl.constexpr, DEALT: tl.constexpr, BLOCK: tl.constexpr):
    """Return indices, positions and owners of a block of ids, or of owners themselves; owners are -1 behind the end."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < tl.load(count)
    id = tl.load(ids + place, mask=inside, other=-1)
    position = id
    owner = id
    if DEALT:
        position = id // WORLD_SIZE
        owner = (id + hashed_owner(position, seed_low, seed_high, WORLD_SIZE)) % WORLD_SIZE
    return place, position, tl.where(inside, owner, -1)


@jit
def _count_owners(
    ids, count, counts, num_blocks, seed_low, seed_high,
    WORLD_SIZE: tl.constexpr, DEALT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _, _, owners = _owners(ids, count, seed_low, seed_high, WORLD_SIZE, DEALT, BLOCK)
    for owner in range(WORLD_SIZE):
        number = tl.sum((owners == owner).to(tl.int32), axis=0)
        tl.store(counts + owner * num_blocks + tl.program_id(0), number.to(tl.int64))


@jit
def _scatter_owners(
    ids, count, before, first, positions, places, num_blocks, capacity, seed_low, seed_high,
    WORLD_SIZE: tl.constexpr, DEALT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, position, owners = _owners(ids, count, seed_low, seed_high, WORLD_SIZE, DEALT, BLOCK)
    for owner in range(WORLD_SIZE):
        mine = owners == owner
        rank = tl.load(before + owner * num_blocks + tl.program_id(0)) + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        target = tl.load(first + owner) + rank
        tl.store(places + target, place, mask=mine & (rank < capacity))
        if DEALT:
            tl.store(positions + target, position, mask=mine & (rank < capacity))
