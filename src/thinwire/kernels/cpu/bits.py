"""Bits of machine words: setting and finding ones, shared by several kernels."""

import numpy as np

from thinwire.kernels.jit import Int64, make_popcount, njit

ROOM = 4
"""Number of spare entries that `append_ones` may write behind the last position."""

popcount = make_popcount()


@njit
def set_ones(positions: np.ndarray, size: int, words: np.ndarray) -> bool:
    """Set the bit of each position, least significant first; return False at one that is not in [0, size)."""
    for index in range(positions.size):
        position = positions[index]
        if position < 0 or position >= size:
            return False
        words[position >> 6] |= np.int64(1) << (position & 63)
    return True


@njit
def append_ones(word: Int64, base: int, positions: np.ndarray, count: int) -> int:
    """Write base + bit for each one of the 64 bits of ``word`` to positions[count:]; return the new count.

    It writes four at a time, needed or not, so that the processor seldom mispredicts the end of the loop: 4 ns a word
    with three ones, 11 ns one by one.
    """
    end = count + popcount(word)
    while count < end:
        for step in range(ROOM):
            lowest = word & -word
            positions[count + step] = base + popcount(lowest - np.int64(1))
            word ^= lowest
        count += ROOM
    return end


@njit
def list_ones(words: np.ndarray, positions: np.ndarray) -> None:
    """Write the positions of all ones, least significant first; ``positions`` has `ROOM` more entries than ones."""
    count = 0
    for word in range(words.size):
        count = append_ones(words[word], 64 * word, positions, count)


@njit
def count_ones(words: np.ndarray) -> int:
    total = 0
    for word in range(words.size):
        total += popcount(words[word])
    return total
