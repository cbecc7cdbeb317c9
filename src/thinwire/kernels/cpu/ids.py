"""Hashing and dealing of ids on the CPU, compiled by numba; twins of `reference.rows`."""

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
    for index in range(ids.size):
        hashed[index] = _mix(ids[index], low, high)


@njit
def _own_all(ids: np.ndarray, world_size: int, low: int, high: int, owners: np.ndarray) -> None:
    for index in range(ids.size):
        owners[index] = (_mix(ids[index], low, high) * world_size) >> 32


def deal(ids: Tensor, world_size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    owners = np.empty(ids.numel(), dtype=np.uint16)
    counts = np.zeros(world_size, dtype=np.int64)
    positions, indices = np.empty(ids.numel(), dtype=np.int64), np.empty(ids.numel(), dtype=np.int64)
    array = ids.numpy()
    inverse = 1.0 / world_size if not ids.numel() or int(ids[-1]) < _EXACT_FLOAT else 0.0
    _deal_owners(array, world_size, inverse, *_halves(seed), owners, counts)
    ends = counts.cumsum()
    _deal_positions(array, world_size, inverse, owners, ends - counts, positions, indices)
    of_owners = (as_tensor(each).split(counts.tolist()) for each in (positions, indices))
    return list(zip(*of_owners, strict=True))


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
    for index in range(ids.size):
        group = int(_quotient(ids[index], world_size, inverse))
        rotation = (_mix(group, low, high) * world_size) >> 32
        owner = ids[index] - group * world_size + rotation
        owner -= world_size * np.int64(owner >= world_size)
        owners[index] = owner
    for index in range(ids.size):
        counts[owners[index]] += 1


@njit
def _deal_positions(
    ids: np.ndarray, world_size: int, inverse: float, owners: np.ndarray, starts: np.ndarray, positions: np.ndarray,
    indices: np.ndarray,
) -> None:  # fmt: skip
    for index in range(ids.size):
        owner = owners[index]
        at = starts[owner]
        starts[owner] = at + 1
        positions[at] = _quotient(ids[index], world_size, inverse)
        indices[at] = index


def dealt_ids(owner: int, positions: Tensor, world_size: int, seed: int) -> Tensor:
    ids = np.empty(positions.numel(), dtype=np.int64)
    _undeal(positions.numpy(), owner, world_size, *_halves(seed), ids)
    return as_tensor(ids)


@njit
def _undeal(positions: np.ndarray, owner: int, world_size: int, low: int, high: int, ids: np.ndarray) -> None:
    for index in range(positions.size):
        group = positions[index]
        rest = owner - ((_mix(group, low, high) * world_size) >> 32)
        ids[index] = group * world_size + rest + world_size * np.int64(rest < 0)


def group_by_owner(owners: Tensor, world_size: int) -> list[Tensor]:
    counts = np.zeros(world_size, dtype=np.int64)
    array, positions = owners.numpy(), np.empty(owners.numel(), dtype=np.int64)
    if not _count_owners(array, counts):
        raise IndexError(f"an owner is not in [0, {world_size}): {owners.min()} to {owners.max()}")
    _group(array, counts.cumsum() - counts, positions)
    return list(as_tensor(positions).split(counts.tolist()))


@njit
def _count_owners(owners: np.ndarray, counts: np.ndarray) -> bool:
    for index in range(owners.size):
        if owners[index] < 0 or owners[index] >= counts.size:
            return False
        counts[owners[index]] += 1
    return True


@njit
def _group(owners: np.ndarray, starts: np.ndarray, positions: np.ndarray) -> None:
    for index in range(owners.size):
        at = starts[owners[index]]
        starts[owners[index]] = at + 1
        positions[at] = index
