"""Union of several lists of ids on the CPU, compiled by numba; twin of `reference.rows.union_positions`."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from thinwire.kernels.cpu.bits import ROOM, list_ones, popcount, set_ones
from thinwire.kernels.cpu.memory import as_tensor
from thinwire.kernels.jit import njit
from thinwire.kernels.reference import rows as reference

_BITS_PER_ID = 512  # a bitmap of this many bits an id costs the same as a merge of 8 pieces, 23 ns an id
_MAX_MERGED = 16  # a merge compares the heads of all pieces for each id


def union_positions(pieces: Sequence[Tensor], size: int) -> tuple[Tensor, list[Tensor]]:
    arrays, count = [piece.contiguous().numpy() for piece in pieces], sum(piece.numel() for piece in pieces)
    united = None
    if size <= _BITS_PER_ID * count:
        united = _by_bitmap(arrays, size)
    elif len(pieces) <= _MAX_MERGED:
        united = _by_merge(arrays)
    if united is None:
        return reference.union_positions(pieces, size)
    union, positions = united
    return as_tensor(union), [as_tensor(piece) for piece in positions]


def _by_bitmap(pieces: Sequence[np.ndarray], size: int) -> tuple[np.ndarray, list[np.ndarray]]:
    words = np.zeros((size + 63) // 64, dtype=np.int64)
    for ids in pieces:
        if not set_ones(ids, size, words):
            raise IndexError(f"an id is not in [0, {size}): {ids.min()} to {ids.max()}")
    before = np.empty(words.size, dtype=np.int64)
    count = _count_before(words, before)
    union = np.empty(count + ROOM, dtype=np.int64)
    list_ones(words, union)
    positions = [np.empty(ids.size, dtype=np.int64) for ids in pieces]
    for ids, result in zip(pieces, positions, strict=True):
        _find_positions(ids, words, before, result)
    return union[:count], positions


@njit
def _count_before(words: np.ndarray, before: np.ndarray) -> int:
    total = 0
    for word in range(words.size):
        before[word] = total
        total += popcount(words[word])
    return total


@njit
def _find_positions(ids: np.ndarray, words: np.ndarray, before: np.ndarray, positions: np.ndarray) -> None:
    for index in range(ids.size):
        id = ids[index]
        below = (np.int64(1) << (id & 63)) - np.int64(1)
        positions[index] = before[id >> 6] + popcount(words[id >> 6] & below)


def _by_merge(pieces: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]] | None:
    ends = np.cumsum(np.array([ids.size for ids in pieces]))
    ids = np.concatenate(pieces)
    union, positions = np.empty(ids.size, dtype=np.int64), np.empty(ids.size, dtype=np.int64)
    count = _merge(ids, np.concatenate([[0], ends[:-1]]), ends, union, positions)
    return (union[:count], np.split(positions, ends[:-1])) if count >= 0 else None


@njit
def _merge(ids: np.ndarray, heads: np.ndarray, ends: np.ndarray, union: np.ndarray, positions: np.ndarray) -> int:
    """Unite pieces ids[heads[i] : ends[i]] and return the size of the union; -1 if one of them does not increase."""
    nothing = np.int64(9223372036854775807)
    smallest = np.full(heads.size, nothing)
    for piece in range(heads.size):
        if heads[piece] < ends[piece]:
            smallest[piece] = ids[heads[piece]]
    count = 0
    while True:
        id = nothing
        for piece in range(heads.size):
            id = min(id, smallest[piece])
        if id == nothing:
            return count
        for piece in range(heads.size):
            if smallest[piece] == id:
                head = heads[piece]
                positions[head] = count
                heads[piece] = head + 1
                smallest[piece] = ids[head + 1] if head + 1 < ends[piece] else nothing
                if smallest[piece] <= id:
                    return -1
        union[count] = id
        count += 1
