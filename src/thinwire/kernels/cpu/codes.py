"""Bitmaps, Elias-Fano coding and the checksum on the CPU, compiled by numba; twins of `reference.codes`."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.bits import ROOM, count_ones, list_ones, set_ones
from thinwire.kernels.cpu.memory import as_tensor
from thinwire.kernels.jit import njit
from thinwire.kernels.reference import codes as reference_codes
from thinwire.kernels.reference.codes import elias_fano_high_bits, elias_fano_low_bits

_CHUNK_WORDS = reference_codes.CHECKSUM_CHUNK_WORDS
_SHIFT, _WEIGHTS = np.uint64(reference_codes.CHECKSUM_SHIFT), reference_codes.CHECKSUM_WEIGHTS


def checksum(buffer: Tensor) -> int:
    words = buffer.numpy().view(np.uint64)
    return int(_checksum(words)) if words.size else 0


@njit
def _checksum(words: np.ndarray) -> np.uint64:
    while words.size > 1:
        combined = np.empty((words.size + _CHUNK_WORDS - 1) // _CHUNK_WORDS, dtype=np.uint64)
        for chunk in range(combined.size):
            combined[chunk] = _combine(words[chunk * _CHUNK_WORDS : (chunk + 1) * _CHUNK_WORDS])
        words = combined
    return words[0]


@njit
def _combine(chunk: np.ndarray) -> np.uint64:
    total = np.uint64(0)
    for index in range(chunk.size):
        total += (chunk[index] ^ (chunk[index] >> _SHIFT)) * _WEIGHTS[index]
    return total


def pack_bits(positions: Tensor, size: int) -> Tensor:
    words = np.zeros((size + 63) // 64, dtype=np.int64)
    if not set_ones(positions.numpy(), size, words):
        raise IndexError(f"a position is not in [0, {size}): {positions.min()} to {positions.max()}")
    return as_tensor(words.view(np.uint8)[: (size + 7) // 8])


def unpack_bits(bitmap: Tensor) -> Tensor:
    words = _words(bitmap)
    return as_tensor(_ones(words, count_ones(words)))


def _words(bitmap: Tensor) -> np.ndarray:
    """Return a copy as int64, aligned and padded with zeros: a bitmap in a payload may have any address."""
    words = np.zeros((bitmap.numel() + 7) // 8, dtype=np.int64)
    words.view(np.uint8)[: bitmap.numel()] = bitmap.numpy()
    return words


def _ones(words: np.ndarray, count: int) -> np.ndarray:
    positions = np.empty(count + ROOM, dtype=np.int64)
    list_ones(words, positions)
    return positions[:count]


def elias_fano_encode(positions: Tensor, size: int) -> Tensor:
    count = positions.numel()
    if count == 0:
        return torch.empty(0, dtype=torch.uint8)
    low_bits = elias_fano_low_bits(count, size)
    high_bits = elias_fano_high_bits(count, size, low_bits)
    low_bytes = (count * low_bits + 7) // 8
    data = np.zeros(low_bytes + (high_bits + 7) // 8, dtype=np.uint8)
    array = positions.numpy()
    if not _encode_high(array, low_bits, high_bits, data[low_bytes:]):
        raise IndexError(f"positions are not increasing and below {size}")
    _encode_low(array, low_bits, data[:low_bytes])
    return as_tensor(data)


@njit
def _encode_high(positions: np.ndarray, low_bits: int, high_bits: int, high: np.ndarray) -> bool:
    for index in range(positions.size):
        bit = ((positions[index] - index) >> low_bits) + index
        if bit < 0 or bit >= high_bits:
            return False
        high[bit >> 3] |= np.uint8(1 << (bit & 7))
    return True


@njit
def _encode_low(positions: np.ndarray, low_bits: int, low: np.ndarray) -> None:
    """Write the low bits % 8 of eight gaps into bits % 8 bytes, then the whole bytes above, gap after gap."""
    whole, rest = low_bits >> 3, low_bits & 7
    stream = (positions.size * rest + 7) >> 3
    mask = (1 << rest) - 1
    for group in range(0, positions.size, 8):
        word = np.int64(0)
        for index in range(group, min(group + 8, positions.size)):
            word |= ((positions[index] - index) & mask) << (rest * (index - group))
        first = (group >> 3) * rest
        for byte in range(first, min(first + rest, stream)):
            low[byte] = (word >> (8 * (byte - first))) & 0xFF
    for index in range(positions.size):
        above = (positions[index] - index) >> rest
        for byte in range(whole):
            low[stream + index * whole + byte] = (above >> (8 * byte)) & 0xFF


def elias_fano_decode(data: Tensor, count: int, size: int) -> Tensor:
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    low_bits = elias_fano_low_bits(count, size)
    low_bytes = (count * low_bits + 7) // 8
    if data.numel() < low_bytes:
        return reference_codes.elias_fano_decode(data, count, size)
    low, high = data[:low_bytes].numpy(), _words(data[low_bytes:])
    if count_ones(high) != count or not _spare_is_zero(low, count, low_bits):
        return torch.empty(0, dtype=torch.int64)
    positions = _ones(high, count)
    _decode(low, low_bits, positions)
    return as_tensor(positions)


@njit
def _spare_is_zero(low: np.ndarray, count: int, low_bits: int) -> bool:
    """Return whether the bits that round the stream up to a byte are zeros, so that ids have one encoding."""
    used = count * (low_bits & 7)
    return used & 7 == 0 or low[used >> 3] >> (used & 7) == 0


@njit
def _decode(low: np.ndarray, low_bits: int, positions: np.ndarray) -> None:
    """Turn the indices of ones in the upper part into positions."""
    whole, rest = low_bits >> 3, low_bits & 7
    stream = (positions.size * rest + 7) >> 3
    mask = (1 << rest) - 1
    for group in range(0, positions.size, 8):
        word = np.int64(0)
        first = (group >> 3) * rest
        for byte in range(first, min(first + rest, stream)):
            word |= np.int64(low[byte]) << (8 * (byte - first))
        for index in range(group, min(group + 8, positions.size)):
            gap = (positions[index] - index) << low_bits | ((word >> (rest * (index - group))) & mask)
            for byte in range(whole):
                gap |= np.int64(low[stream + index * whole + byte]) << (rest + 8 * byte)
            positions[index] = gap + index
