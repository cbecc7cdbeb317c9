"""Hashing and dealing of ids on the CPU, compiled by numba; twins of `reference.rows`."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from thinwire.kernels.cpu.memory import as_tensor
from thinwire.kernels.jit import Int64, njit

_UINT32_MASK = 0xFFFFFFFF
_EXACT_FLOAT = 1 << 52  # quotients of smaller ids are right to within one when computed in float64


def mix(ids: Tensor, seed: int) -> Tensor:
    hashed = np.empty(ids.numel(), dtype=np.int64)
    _mix_all(ids.numpy(), *_halves(seed), hashed)
    return as_tensor(hashed)


def owner_by_hash(ids: Tensor, world_size: int, seed: int) -> Tensor:
    owners = np.empty(ids.numel(), dtype=np.int64)
    _own_all(ids.numpy(), world_size, *_halves(seed), owners)
    return as_tensor(owners)


def _halves(seed: int) -> tuple[int, int]:
    return seed & _UINT32_MASK, (seed >> 32) & _UINT32_MASK


@njit
def _finalize(word: int) -> int:
    word = word ^ (word >> 16)
    word = (word * 0x85EBCA6B) & 0xFFFFFFFF
    word = word ^ (word >> 13)
    word = (word * 0xC2B2AE35) & 0xFFFFFFFF
    return word ^ (word >> 16)


@njit
def _mix(id: int, low: int, high: int) -> int:
    return _finalize(_finalize((id ^ low) & 0xFFFFFFFF) ^ ((id >> 32) & 0xFFFFFFFF) ^ high)


@njit
def _mix_all(ids: np.ndarray, low: int, high: int, hashed: np.ndarray) -> None:
    for place in range(ids.size):
        hashed[place] = _mix(ids[place], low, high)


@njit
def _own_all(ids: np.ndarray, world_size: int, low: int, high: int, owners: np.ndarray) -> None:
    for place in range(ids.size):
        owners[place] = (_mix(ids[place], low, high) * world_size) >> 32


def deal(ids: Tensor, world_size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    owners = np.empty(ids.numel(), dtype=np.uint16)
    counts = np.zeros(world_size, dtype=np.int64)
    positions, places = np.empty(ids.numel(), dtype=np.int64), np.empty(ids.numel(), dtype=np.int64)
    array = ids.numpy()
    inverse = 1.0 / world_size if not ids.numel() or int(ids[-1]) < _EXACT_FLOAT else 0.0
    _deal_owners(array, world_size, inverse, *_halves(seed), owners, counts)
    ends = counts.cumsum()
    _deal_places(array, world_size, inverse, owners, ends - counts, positions, places)
    return _cut(as_tensor(positions), as_tensor(places), counts.tolist())


def _cut(positions: Tensor, places: Tensor, counts: list[int]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(positions.split(counts), places.split(counts), strict=True))


@njit
def _quotient(id: int, divisor: int, inverse: float) -> Int64:
    """Return id // divisor; a 64-bit division costs ten times this product and its correction."""
    if inverse == 0.0:
        return id // divisor
    quotient = np.int64(id * inverse)
    rest = id - quotient * divisor
    return quotient - np.int64(rest < 0) + np.int64(rest >= divisor)


@njit
def _deal_owners(
    ids: np.ndarray, world_size: int, inverse: float, low: int, high: int, owners: np.ndarray, counts: np.ndarray
) -> None:
    for place in range(ids.size):
        group = int(_quotient(ids[place], world_size, inverse))
        rotation = (_mix(group, low, high) * world_size) >> 32
        owner = ids[place] - group * world_size + rotation
        owner -= world_size * np.int64(owner >= world_size)
        owners[place] = owner
    for place in range(ids.size):
        counts[owners[place]] += 1


@njit
def _deal_places(
    ids: np.ndarray, world_size: int, inverse: float, owners: np.ndarray, starts: np.ndarray, positions: np.ndarray,
    places: np.ndarray,
) -> None:  # fmt: skip
    for place in range(ids.size):
        owner = owners[place]
        at = starts[owner]
        starts[owner] = at + 1
        positions[at] = _quotient(ids[place], world_size, inverse)
        places[at] = place


def dealt_ids(owner: int, positions: Tensor, world_size: int, seed: int) -> Tensor:
    ids = np.empty(positions.numel(), dtype=np.int64)
    _undeal(positions.numpy(), owner, world_size, *_halves(seed), ids)
    return as_tensor(ids)


@njit
def _undeal(positions: np.ndarray, owner: int, world_size: int, low: int, high: int, ids: np.ndarray) -> None:
    for place in range(positions.size):
        group = positions[place]
        rest = owner - ((_mix(group, low, high) * world_size) >> 32)
        ids[place] = group * world_size + rest + world_size * np.int64(rest < 0)


def group_by_owner(owners: Tensor, world_size: int) -> list[Tensor]:
    counts = np.zeros(world_size, dtype=np.int64)
    array, places = owners.numpy(), np.empty(owners.numel(), dtype=np.int64)
    if not _count_owners(array, counts):
        raise IndexError(f"an owner is not in [0, {world_size}): {owners.min()} to {owners.max()}")
    _group(array, counts.cumsum() - counts, places)
    return list(as_tensor(places).split(counts.tolist()))


@njit
def _count_owners(owners: np.ndarray, counts: np.ndarray) -> bool:
    for place in range(owners.size):
        if owners[place] < 0 or owners[place] >= counts.size:
            return False
        counts[owners[place]] += 1
    return True


@njit
def _group(owners: np.ndarray, starts: np.ndarray, places: np.ndarray) -> None:
    for place in range(owners.size):
        at = starts[owners[place]]
        starts[owners[place]] = at + 1
        places[at] = place


def hierarchical_hash(
    ids: Tensor, world_size: int, seed: int, *, hashes: int = 3, parallel_slots: int, serial_slots: int
) -> list[Tensor]:
    slots = max(1, parallel_slots // world_size)
    memory = np.full(world_size * slots, -1, dtype=np.int64)  # holds indices into ids
    won = np.zeros(memory.size, dtype=np.uint8)
    owners = owner_by_hash(ids, world_size, seed).numpy()
    homeless, chosen = np.arange(ids.numel()), np.empty(ids.numel(), dtype=np.int64)
    count, array = ids.numel(), ids.numpy()
    for level in range(1, hashes + 1):
        low, high = _halves(seed + level)
        count = _hash_round(array, owners, homeless[:count], chosen, slots, low, high, memory, won)
    filled, counts = np.empty(ids.numel(), dtype=np.int64), np.zeros(world_size, dtype=np.int64)
    _collect(array, owners, memory, slots, homeless[:count], filled, counts)
    return list(as_tensor(filled).split(counts.tolist()))


@njit
def _hash_round(
    ids: np.ndarray, owners: np.ndarray, homeless: np.ndarray, chosen: np.ndarray, slots: int, low: int, high: int,
    memory: np.ndarray, won: np.ndarray,
) -> int:  # fmt: skip
    """Write all ids to slots that are still free, then read them back; losers come first in ``homeless``."""
    for turn in range(homeless.size):
        place = homeless[turn]
        slot = owners[place] * slots + _mix(ids[place], low, high) % slots
        chosen[turn] = slot
        if won[slot] == 0:
            memory[slot] = place
    count = 0
    for turn in range(homeless.size):
        place, slot = homeless[turn], chosen[turn]
        if memory[slot] == place:
            won[slot] = 1
        else:
            homeless[count] = place
            count += 1
    return count


@njit
def _collect(
    ids: np.ndarray, owners: np.ndarray, memory: np.ndarray, slots: int, homeless: np.ndarray, filled: np.ndarray,
    counts: np.ndarray,
) -> None:  # fmt: skip
    """Collect the ids of each owner: those in its parallel memory by slot, then those without a slot."""
    for place in range(owners.size):
        counts[owners[place]] += 1
    serial = np.zeros(counts.size, dtype=np.int64)  # index of the next id of an owner
    start = 0
    for owner in range(counts.size):
        at = start
        for slot in range(owner * slots, (owner + 1) * slots):
            if memory[slot] >= 0:
                filled[at] = ids[memory[slot]]
                at += 1
        serial[owner] = at
        start += counts[owner]
    for turn in range(homeless.size):
        place = homeless[turn]
        filled[serial[owners[place]]] = ids[place]
        serial[owners[place]] += 1
