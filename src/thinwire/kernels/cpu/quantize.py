"""Signs, blocks of small integers and short floats on the CPU, compiled by numba; twins of `reference.quantize`.

Inner loops have no branches and 32-bit integers (numba's own are 64-bit), so that they are vectorized.
"""

import numpy as np
from torch import Tensor

from thinwire.kernels.cpu.memory import as_tensor
from thinwire.kernels.jit import njit
from thinwire.kernels.reference.quantize import RANDOM_BITS, packed_codes_bytes

_CHUNK = 1024  # values whose codes stay in the cache until they are packed
_LANES = 64  # sums in flight, so that adding is vectorized
_UINT32_MASK = 0xFFFFFFFF
_UINT8_VALUES = 256
_MAGNITUDE, _LARGEST_FINITE = 0x7FFFFFFF, 0x7F7FFFFF  # bits of a float32 but its sign, and of the largest
_STORED_BITS, _MOST_DROPPED_BITS = 23, 30


@njit
def _finalize(word: np.uint32) -> np.uint32:
    word = word ^ np.uint32(word >> np.uint32(16))
    word = np.uint32(word * np.uint32(0x85EBCA6B))
    word = word ^ np.uint32(word >> np.uint32(13))
    word = np.uint32(word * np.uint32(0xC2B2AE35))
    return np.uint32(word ^ np.uint32(word >> np.uint32(16)))


@njit
def _hash(index: np.uint32, low: np.uint32, high: np.uint32) -> np.uint32:
    """Return `mix` of an index below 2^32, in 32-bit arithmetic."""
    return _finalize(np.uint32(_finalize(np.uint32(index ^ low)) ^ high))


def _halves(seed: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(seed & _UINT32_MASK), np.uint32((seed >> 32) & _UINT32_MASK)


def largest_of_blocks(values: Tensor, block: int) -> Tensor:
    array = values.numpy()
    integer, _ = _integer_type(array)
    largest = np.zeros(-(-array.size // block), dtype=array.dtype)
    _largest_words(array.view(integer), block, integer(np.iinfo(integer).max), largest.view(integer))
    return as_tensor(largest)


@njit
def _largest_words(words: np.ndarray, block: int, magnitude: np.signedinteger, largest: np.ndarray) -> None:
    """Find maxima of bits, which have the order of magnitudes, because only maxima of integers are vectorized."""
    for number in range(largest.size):
        result, chunk = largest[number], words[number * block : (number + 1) * block]
        for index in range(chunk.size):
            result = max(result, chunk[index] & magnitude)
        largest[number] = result


def pack_signs(values: Tensor, phase: int) -> Tensor:
    packed = np.empty(packed_codes_bytes(values.numel(), 1), dtype=np.uint8)
    _pack_signs(values.numpy(), phase & 1, packed)
    return as_tensor(packed)


@njit
def _pack_signs(values: np.ndarray, phase: int, packed: np.ndarray) -> None:
    """Pack eight flags, a byte each, by one multiplication: their ones meet in the highest byte, in order."""
    flags = np.empty(_CHUNK, dtype=np.uint8)
    eights = flags.view(np.uint64)
    for start in range(0, values.size, _CHUNK):
        chunk = values[start : start + _CHUNK]
        for index in range(chunk.size):
            odd = ((index + phase) & 1) == 1
            flags[index] = np.uint8((chunk[index] < 0) | ((chunk[index] == 0) & odd))
        flags[chunk.size :] = 0
        for byte in range((chunk.size + 7) >> 3):
            packed[(start >> 3) + byte] = (eights[byte] * np.uint64(0x0102040810204080)) >> np.uint64(56)


def mean_of_blocks(values: Tensor, block: int) -> Tensor:
    array = values.numpy()
    means = np.empty(-(-array.size // block), dtype=array.dtype)
    _mean_magnitudes(array, block, means)
    return as_tensor(means)


@njit
def _mean_magnitudes(values: np.ndarray, block: int, means: np.ndarray) -> None:
    wide, sums = np.empty(_LANES), np.empty(_LANES)
    for number in range(means.size):
        chunk = values[number * block : (number + 1) * block]
        sums[:] = 0.0
        whole = chunk.size // _LANES * _LANES
        for start in range(0, whole, _LANES):
            for lane in range(_LANES):
                wide[lane] = np.float64(abs(chunk[start + lane]))
            for lane in range(_LANES):
                sums[lane] += wide[lane]
        for index in range(whole, chunk.size):
            sums[index - whole] += np.float64(abs(chunk[index]))
        means[number] = sums.sum() / chunk.size


def add_signs(packed: Tensor, scales: Tensor, block: int, total: Tensor) -> None:
    _add_signs(packed.numpy(), scales.numpy(), block, total.numpy())


@njit
def _add_signs(packed: np.ndarray, scales: np.ndarray, block: int, total: np.ndarray) -> None:
    for number in range(scales.size):
        scale = scales[number]
        start, stop = number * block, min((number + 1) * block, total.size)
        first = min((start + 7) >> 3, stop >> 3)  # first byte that belongs to this block alone
        for index in range(start, min(8 * first, stop)):
            total[index] += -scale if (packed[index >> 3] >> (index & 7)) & 1 else scale
        for byte in range(first, stop >> 3):
            bits = np.uint32(packed[byte])
            for bit in range(8):
                total[8 * byte + bit] += -scale if np.uint32(bits >> np.uint32(bit)) & np.uint32(1) else scale
        for index in range(max(start, 8 * (stop >> 3)), stop):
            total[index] += -scale if (packed[index >> 3] >> (index & 7)) & 1 else scale


def quantize(values: Tensor, steps: Tensor, block: int, levels: int, bits: int, seed: int | None) -> Tensor:
    array, inverses = values.numpy(), steps.reciprocal().numpy()
    codes = np.empty(array.size, dtype=np.uint8)
    number = array.dtype.type
    rounder, unit = number(1.5 * 2 ** _integer_type(array)[1]), number(1 << RANDOM_BITS)
    settings = block, np.int32(levels), rounder, unit, seed is not None
    _round_to_steps(array, inverses, *settings, *_halves(seed or 0), codes)
    if bits == 8:
        return as_tensor(codes)
    packed = np.empty(packed_codes_bytes(array.size, bits), dtype=np.uint8)
    _pack_codes(codes, bits, packed)
    return as_tensor(packed)


@njit
def _round_to_steps(
    values: np.ndarray, inverses: np.ndarray, block: int, levels: np.int32, rounder: np.floating, unit: np.floating,
    is_random: bool, low: np.uint32, high: np.uint32, codes: np.ndarray,
) -> None:  # fmt: skip
    """Round to the nearest by adding ``rounder``, next to which a float has no bits for fractions."""
    for number in range(inverses.size):
        inverse, start = inverses[number], np.uint32(number * block)
        chunk, out = values[number * block : (number + 1) * block], codes[number * block : (number + 1) * block]
        for index in range(chunk.size):
            scaled = chunk[index] * inverse
            if is_random:
                whole = np.floor(scaled)
                random = np.int32(_hash(np.uint32(start + np.uint32(index)), low, high) >> np.uint32(32 - RANDOM_BITS))
                multiple = np.int32(np.int32(whole) + np.int32(np.float32(random) < (scaled - whole) * unit))
            else:
                multiple = np.int32((scaled + rounder) - rounder)
            out[index] = np.uint8(np.int32(min(max(multiple, np.int32(-levels)), levels) + levels))


@njit
def _pack_codes(codes: np.ndarray, bits: int, packed: np.ndarray) -> None:
    """Pack eight codes into ``bits`` bytes."""
    whole = codes.size >> 3
    for group in range(whole):
        word = np.int64(0)
        for index in range(8):
            word |= np.int64(codes[8 * group + index]) << (bits * index)
        for byte in range(bits):
            packed[group * bits + byte] = (word >> (8 * byte)) & 0xFF
    word = np.int64(0)
    for index in range(8 * whole, codes.size):
        word |= np.int64(codes[index]) << (bits * (index & 7))
    for byte in range(whole * bits, packed.size):
        packed[byte] = word & 0xFF
        word >>= 8


@njit
def _unpack_codes(packed: np.ndarray, bits: int, codes: np.ndarray) -> None:
    whole, mask = codes.size >> 3, (1 << bits) - 1
    for group in range(whole):
        word = np.int64(0)
        for byte in range(bits):
            word |= np.int64(packed[group * bits + byte]) << (8 * byte)
        for index in range(8):
            codes[8 * group + index] = (word >> (bits * index)) & mask
    word = np.int64(0)
    for byte in range(whole * bits, packed.size):
        word |= np.int64(packed[byte]) << (8 * (byte - whole * bits))
    for index in range(8 * whole, codes.size):
        codes[index] = (word >> (bits * (index & 7))) & mask


def add_quantized(packed: Tensor, steps: Tensor, block: int, levels: int, bits: int, total: Tensor) -> None:
    codes = packed.numpy()
    if bits != 8:
        codes = np.empty(total.numel(), dtype=np.uint8)
        _unpack_codes(packed.numpy(), bits, codes)
    _add_quantized(codes, steps.numpy(), block, np.int32(levels), total.numpy())


@njit
def _add_quantized(codes: np.ndarray, steps: np.ndarray, block: int, levels: np.int32, total: np.ndarray) -> None:
    for number in range(steps.size):
        step = steps[number]
        chunk, out = codes[number * block : (number + 1) * block], total[number * block : (number + 1) * block]
        for index in range(out.size):
            multiple = min(np.int32(np.int32(chunk[index]) - levels), levels)
            out[index] += np.float32(multiple) * step


def round_to_floats(values: Tensor, mantissa_bits: int, lowest: int, largest_code: int, seed: int | None) -> Tensor:
    codes = np.empty(values.numel(), dtype=np.uint8)
    settings = np.int32(mantissa_bits), np.int32(lowest), np.int32(largest_code), seed is not None
    _round_to_floats(values.numpy().view(np.int32), *settings, *_halves(seed or 0), codes)
    return as_tensor(codes)


def _integer_type(array: np.ndarray) -> tuple[type[np.signedinteger], int]:
    return (np.int32, 23) if array.dtype == np.float32 else (np.int64, 52)


@njit
def _round_to_floats(
    words: np.ndarray, mantissa_bits: np.int32, lowest: np.int32, largest_code: np.int32, is_random: bool,
    low: np.uint32, high: np.uint32, codes: np.ndarray,
) -> None:  # fmt: skip
    """Add half a unit, or a random part of one, to the significand: it carries into the exponent of the code."""
    one, stored, most = np.int32(1), np.int32(_STORED_BITS), np.int32(_MOST_DROPPED_BITS)
    for index in range(words.size):
        word = words[index]
        magnitude = np.int32(min(np.int32(word & np.int32(_MAGNITUDE)), np.int32(_LARGEST_FINITE)))
        exponent = np.int32(max(np.int32(magnitude >> stored), one))
        significand = np.int32(magnitude - np.int32(np.int32(exponent - one) << stored))
        normal = np.int32(max(exponent, lowest))
        drop = np.int32(np.int32(normal - exponent) + np.int32(stored - mantissa_bits))
        significand = np.int32(significand >> np.int32(min(max(np.int32(drop - most), np.int32(0)), most)))
        drop = np.int32(min(drop, most))
        if is_random:
            hashed = _hash(np.uint32(index), low, high)
            extra = np.int32(hashed >> np.uint32(np.uint32(32) - np.uint32(drop)))
        else:
            half = np.int32(one << np.int32(drop - one))
            extra = np.int32(np.int32(half - one) + np.int32(np.int32(significand >> drop) & one))
        code = np.int32(np.int32(np.int32(normal - lowest) << mantissa_bits) + (np.int32(significand + extra) >> drop))
        sign = np.int32(np.int32(word >> np.int32(24)) & np.int32(0x80))
        codes[index] = np.uint8(np.int32(min(code, largest_code) | sign))


def add_from_table(codes: Tensor, table: Tensor, steps: Tensor, block: int, total: Tensor) -> None:
    if table.numel() != _UINT8_VALUES:
        raise IndexError(f"a table of {table.numel()} numbers, where codes need {_UINT8_VALUES}")
    _add_from_table(codes.numpy(), table.numpy(), steps.numpy(), block, total.numpy())


@njit
def _add_from_table(codes: np.ndarray, table: np.ndarray, steps: np.ndarray, block: int, total: np.ndarray) -> None:
    for number in range(steps.size):
        step = steps[number]
        chunk, out = codes[number * block : (number + 1) * block], total[number * block : (number + 1) * block]
        for index in range(out.size):
            out[index] += table[chunk[index]] * step
