"""The code of floating-point values on the CPU, compiled by numba.

docs/reference/wire-format.md ("Floats") has the format, and a reference of the tests the definition in numpy.

Numba checks no index: what the decoder reads is proven to be there before it is read, here and there by a copy of the
last bytes of a message, with zeros behind them.
"""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.memory import as_tensor
from thinwire.kernels.jit import Int64, make_word_access, njit
from thinwire.kernels.reference.floats import (
    CHUNK_VALUES,
    EQUAL,
    ESTIMATED_CHUNKS,
    ESTIMATED_VALUES,
    FIXED,
    FIXED_LOW,
    LOG2,
    OVERHEAD,
    RAW,
    SAMPLED_RUN,
    SAMPLED_VALUES,
    SEGMENT_VALUES,
    VARIABLE,
    words_of,
)

_ROOM = 8 * SEGMENT_VALUES + 64  # bytes from where a segment begins that reading it can touch
_load, _store, _count_zeros = make_word_access()


def encode_floats(values: Tensor) -> Tensor:
    words, layout = words_of(values)
    if not words.size:
        return torch.empty(0, dtype=torch.uint8)
    chunks, largest = -(-words.size // CHUNK_VALUES), min(words.size, CHUNK_VALUES)
    message = np.empty(words.nbytes + 4 * chunks + (12 + words.itemsize) * largest + 256, np.uint8)
    size = _encode(words.view(np.uint8), words.itemsize, layout.exponent, layout.mantissa, message)
    return as_tensor(words.view(np.uint8) if size >= words.nbytes else message[:size])


def decode_floats(message: Tensor, out: Tensor) -> bool:
    data, (words, layout) = message.numpy(), words_of(out)
    if data.size >= words.nbytes:
        words.view(np.uint8)[:] = data if data.size == words.nbytes else 0
        return data.size == words.nbytes
    return bool(_decode(data, words.view(np.uint8), words.itemsize, layout.exponent, layout.mantissa))


def estimate_floats(values: Tensor) -> float:
    words, layout = words_of(values)
    raw = words.view(np.uint8)
    return float(_estimate(raw, words.itemsize, layout.exponent, layout.mantissa)) if words.size else 0.0


@njit
def _estimate(raw: np.ndarray, item: Int64, exponent_bits: Int64, mantissa: Int64) -> float:
    exponents, widths = np.zeros(1 << exponent_bits, np.int64), np.zeros(mantissa + 1, np.int64)
    chosen, lengths = np.zeros(3, np.int64), np.zeros((2, 16), np.int64)
    chunk_bytes = CHUNK_VALUES * item
    chunks = (raw.size + chunk_bytes - 1) // chunk_bytes
    limit = min(SAMPLED_VALUES, ESTIMATED_VALUES // min(chunks, ESTIMATED_CHUNKS))
    sampled, bits = 0, 0.0
    for chunk in range(0, chunks, 1 + (chunks - 1) // ESTIMATED_CHUNKS):
        part = raw[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
        lows = _sample(part, item, limit, mantissa, exponents, widths)
        total = exponents.sum()
        if not _are_equal(part, item):
            bits += choose_code(exponents, widths, lows, 8 * item, chosen, lengths)
            bits += OVERHEAD * total if chosen[0] > RAW else 0.0
        sampled += total
    return min(bits / sampled, 8.0 * item)


@njit
def choose_code(
    exponents: np.ndarray, widths: np.ndarray, lows: Int64, item_bits: Int64, chosen: np.ndarray, lengths: np.ndarray
) -> Int64:
    """Choose the code of a chunk from counts of a sample; return the bits of the sample in it.

    Args:
        exponents: count of each exponent, int64 [2^e].
        widths: count of each number of mantissa bits without trailing zeros, int64 [mantissa bits + 1].
        lows: number of values whose low 16 bits of 32 are not zero.
        item_bits: bits of a value.
        chosen: gets the mode, the highest exponent of the window and the highest width of the window, int64 [3].
        lengths: gets the bits of the codes of classes of exponents and of widths, int64 [2, 16].
    """

    def highest_of_window(counts: np.ndarray, size: int) -> int:
        """Return the last index of the ``size`` consecutive counts that have the largest sum, without the first."""
        total = best = 0
        highest = 1
        for index in range(1, counts.size):
            total += counts[index]
            if index > size:
                total -= counts[index - size]
            if total > best:
                best, highest = total, index
        return highest

    def entropy(counts: np.ndarray, total: int) -> int:
        bits = total * LOG2[total]
        for index in range(16):
            bits -= counts[index] * LOG2[counts[index]]
        return bits

    def code_lengths(counts: np.ndarray, result: np.ndarray) -> None:
        """Lengths of a Huffman code of at most 8 bits, also for classes that the sample lacks."""
        weights, parents, depths = np.zeros(31, np.int64), np.zeros(31, np.int64), np.zeros(31, np.int64)
        for index in range(16):
            weights[index] = 8 * counts[index] + 1
        while True:
            parents[:] = 0
            for node in range(16, 31):
                first = second = -1
                for other in range(node):
                    if parents[other] == 0:
                        if first < 0 or weights[other] < weights[first]:
                            first, second = other, first
                        elif second < 0 or weights[other] < weights[second]:
                            second = other
                parents[first] = parents[second] = node
                weights[node] = weights[first] + weights[second]
            for node in range(29, -1, -1):
                depths[node] = depths[parents[node]] + 1
            longest = 0
            for index in range(16):
                result[index] = depths[index]
                longest = max(longest, depths[index])
                weights[index] = (weights[index] >> 1) + 1
            if longest <= 8:
                break

    total, mantissa = 0, widths.size - 1
    for index in range(widths.size):
        total += widths[index]
    classes, width_classes = np.zeros(16, np.int64), np.zeros(16, np.int64)
    highest, highest_width = max(15, highest_of_window(exponents, 15)), highest_of_window(widths, 14)
    classes[15], width_classes[15], width_classes[14] = total, widths[0], total - widths[0]
    width_bits = widths[0]
    for index in range(15):
        classes[index] = exponents[highest - index]
        classes[15] -= classes[index]
        if index < 14 and index < highest_width:
            width_classes[index] = widths[highest_width - index]
            width_classes[14] -= width_classes[index]
            width_bits += width_classes[index] * (highest_width - index)
    patched, width_bits = classes[15] - exponents[0], width_bits + width_classes[14] * (mantissa + 1)
    low_bits, patch_bits = min(16 * total, 32 * lows), 32 * patched
    rest = ((width_bits + patch_bits) << 8) + entropy(classes, total) + entropy(width_classes, total)
    fixed = ((8 * total + low_bits + patch_bits) << 8) + entropy(classes, total)
    mode = 4
    if (mantissa == 7 or mantissa == 23) and fixed * 32 <= rest * 33:
        mode, rest = (3 if 2 * lows > total else 2), fixed
    if rest >= total * (item_bits << 8):
        mode = 0
    chosen[0], chosen[1], chosen[2] = mode, highest, highest_width
    if mode == 0:
        return total * item_bits
    code_lengths(classes, lengths[0])
    bits = patch_bits + (width_bits if mode == 4 else 8 * total + low_bits)
    for index in range(16):
        bits += classes[index] * lengths[0, index]
    if mode == 4:
        code_lengths(width_classes, lengths[1])
        for index in range(16):
            bits += width_classes[index] * lengths[1, index]
    return bits


@njit
def _sample(
    raw: np.ndarray, item: Int64, limit: Int64, mantissa: Int64, exponents: np.ndarray, widths: np.ndarray
) -> Int64:
    """Count exponents and widths of a sample; return how many float32 have low bits."""
    exponents[:] = 0
    widths[:] = 0
    if item == 2:
        return _count(raw.view(np.uint16), limit, mantissa, exponents, widths)
    if item == 4:
        return _count(raw.view(np.uint32), limit, mantissa, exponents, widths)
    return _count(raw.view(np.uint64), limit, mantissa, exponents, widths)


@njit
def _count(words: np.ndarray, limit: Int64, mantissa: Int64, exponents: np.ndarray, widths: np.ndarray) -> Int64:
    lows = 0
    every = 1 + (words.size - 1) // limit
    mask, shift = np.uint64((1 << mantissa) - 1), np.uint64(mantissa)
    exponent_mask, low_mask = np.uint64(exponents.size - 1), np.uint64(0xFFFF if mantissa == 23 else 0)
    for number in range((words.size + SAMPLED_RUN * every - 1) // (SAMPLED_RUN * every)):
        start = SAMPLED_RUN * (number * every + number % every)
        for index in range(start, min(start + SAMPLED_RUN, words.size)):
            word = np.uint64(words[index])
            exponents[np.int64((word >> shift) & exponent_mask)] += 1
            widths[_width(word & mask, mantissa)] += 1
            lows += (word & low_mask) != 0
    return lows


@njit
def _width(bits: np.uint64, mantissa: Int64) -> Int64:
    return mantissa - _count_zeros(bits | np.uint64(1 << mantissa))


@njit
def _encode(raw: np.ndarray, item: Int64, exponent_bits: Int64, mantissa: Int64, message: np.ndarray) -> Int64:
    exponents, widths = np.zeros(1 << exponent_bits, np.int64), np.zeros(mantissa + 1, np.int64)
    chosen, lengths = np.zeros(3, np.int64), np.zeros((2, 16), np.int64)
    classes = np.empty((2, (min(raw.size // item, CHUNK_VALUES) + 15) & ~7), np.uint8)
    table = np.empty(1 << 12, np.uint32)
    at = end = np.int64(0)
    for start in range(0, raw.size, CHUNK_VALUES * item):
        part = raw[start : start + CHUNK_VALUES * item]
        if _are_equal(part, item):
            end, chosen[0] = at + 4 + item, EQUAL
        else:
            lows = _sample(part, item, SAMPLED_VALUES, mantissa, exponents, widths)
            choose_code(exponents, widths, lows, 8 * item, chosen, lengths)
        if chosen[0] > EQUAL:
            end = _encode_chunk(part, item, exponent_bits, mantissa, chosen, lengths, classes, table, message, at)
        if chosen[0] == RAW or (chosen[0] != EQUAL and end - at >= 4 + part.size):
            end, chosen[0] = at + 4 + part.size, RAW
        if chosen[0] <= EQUAL:
            for index in range(end - at - 4):
                message[at + 4 + index] = part[index]
        _put(message, at, chosen[0] | (end - at) << 8, 4)
        at = end
    return at


@njit
def _are_equal(raw: np.ndarray, item: Int64) -> bool:
    """Return whether all values are those before them."""
    for start in range(item, raw.size, SEGMENT_VALUES):
        differing = np.uint8(0)
        for index in range(start, min(start + SEGMENT_VALUES, raw.size)):
            differing |= raw[index] ^ raw[index - item]
        if differing:
            return False
    return True


@njit
def _put(message: np.ndarray, at: Int64, number: Int64, size: Int64) -> None:
    for byte in range(size):
        message[at + byte] = (number >> (8 * byte)) & 0xFF


@njit
def _get(message: np.ndarray, at: Int64, size: Int64) -> Int64:
    number = 0
    for byte in range(size):
        number |= np.int64(message[at + byte]) << (8 * byte)
    return number


@njit
def _encode_chunk(
    raw: np.ndarray, item: Int64, exponent_bits: Int64, mantissa: Int64, chosen: np.ndarray, lengths: np.ndarray,
    classes: np.ndarray, table: np.ndarray, message: np.ndarray, start: Int64,
) -> Int64:  # fmt: skip
    """Write the record of a chunk but its size, and return where it ends; there is room for more than its values."""
    mode, highest, highest_width = chosen
    size = raw.size // item
    segments, planes = (size + SEGMENT_VALUES - 1) // SEGMENT_VALUES, 2 if mode == VARIABLE else 1
    header = start + 12 + 8 * planes
    at = header + 2 * planes * segments
    patched, lows = _classify(raw, item, mantissa, exponent_bits, highest, highest_width, mode, classes)
    for plane in range(planes):
        for index in range(8):
            message[start + 12 + 8 * plane + index] = lengths[plane, 2 * index] | lengths[plane, 2 * index + 1] << 4
        _fill_pairs(lengths[plane], table)
        for segment in range(segments):
            first = segment * SEGMENT_VALUES
            end = _encode_segment(classes[plane, first : min(first + SEGMENT_VALUES, size)], table, message, at)
            _put(message, header + 2 * (plane * segments + segment), end - at, 2)
            at = end
    _put(message, start + 4, highest, 2)
    _put(message, start + 6, highest_width, 2)
    _put(message, start + 8, patched, 2)
    _put(message, start + 10, lows if mode == FIXED else 0, 2)
    if patched:
        _patch_exponents(raw, item, mantissa, (1 << exponent_bits) - 1, classes[0], size, message, at, 2 * patched)
        at += 4 * patched
    if mode == FIXED and lows:
        _patch_lows(raw.view(np.uint32), message, at, 2 * lows)
        at += 4 * lows
    if mode == VARIABLE:
        return _encode_mantissas(raw, item, mantissa, exponent_bits, highest_width, classes[1], message, at)
    if item == 2:
        _take_tops(raw.view(np.uint16), 0, message[at : at + size])
    else:
        _take_tops(raw.view(np.uint32), 16, message[at : at + size])
    at += size
    if mode == FIXED_LOW:
        for position in range(size):
            message[at + 2 * position] = raw[4 * position]
            message[at + 2 * position + 1] = raw[4 * position + 1]
        at += 2 * size
    return at


@njit
def _classify(
    raw: np.ndarray, item: Int64, mantissa: Int64, exponent_bits: Int64, highest: Int64, highest_width: Int64,
    mode: Int64, classes: np.ndarray,
) -> tuple[Int64, Int64]:  # fmt: skip
    """Write the classes of exponents and, if they are coded, of widths; return the numbers of patches."""
    patched = lows = 0
    for start in range(0, raw.size, SEGMENT_VALUES * item):
        part, first = raw[start : start + SEGMENT_VALUES * item], start // item
        result, widths = classes[0, first : first + part.size // item], classes[1, first : first + part.size // item]
        if mantissa == 7:
            patched += _classify_bfloat16(part.view(np.uint16), highest, result)
        elif mantissa == 23:
            some, low = _classify_float32(part.view(np.uint32), highest, result)
            patched, lows = patched + some, lows + low
        elif mantissa == 10:
            patched += _classify_others(part.view(np.uint16), mantissa, exponent_bits, highest, result)
        else:
            patched += _classify_others(part.view(np.uint64), mantissa, exponent_bits, highest, result)
        if mode == VARIABLE and item == 2:
            _classify_widths(part.view(np.uint16), mantissa, highest_width, widths)
        elif mode == VARIABLE and item == 4:
            _classify_widths(part.view(np.uint32), mantissa, highest_width, widths)
        elif mode == VARIABLE:
            _classify_widths(part.view(np.uint64), mantissa, highest_width, widths)
    return patched, lows


@njit
def _classify_bfloat16(words: np.ndarray, highest: Int64, classes: np.ndarray) -> Int64:
    patched, top = np.uint16(0), np.uint16(highest)  # of 16 bits, so that 16 and more are taken at a time
    for position in range(words.size):
        exponent = np.uint16(words[position] >> 7) & np.uint16(0xFF)
        index = min(np.uint16(top - exponent), np.uint16(15))
        classes[position] = index
        patched = np.uint16(patched + np.uint16(np.uint16(index == 15) - np.uint16(exponent == 0)))
    return np.int64(patched)


@njit
def _classify_float32(words: np.ndarray, highest: Int64, classes: np.ndarray) -> tuple[Int64, Int64]:
    patched, lows, top = np.uint32(0), np.uint32(0), np.uint32(highest)
    for position in range(words.size):
        exponent = np.uint32(words[position] >> 23) & np.uint32(0xFF)
        index = min(np.uint32(top - exponent), np.uint32(15))
        classes[position] = index
        patched = np.uint32(patched + np.uint32(np.uint32(index == 15) - np.uint32(exponent == 0)))
        lows = np.uint32(lows + np.uint32(np.uint32(words[position] & 0xFFFF) != 0))
    return np.int64(patched), np.int64(lows)


@njit
def _classify_others(
    words: np.ndarray, mantissa: Int64, exponent_bits: Int64, highest: Int64, classes: np.ndarray
) -> Int64:
    patched, top = 0, np.uint64(highest)
    shift, mask = np.uint64(mantissa), np.uint64((1 << exponent_bits) - 1)
    for position in range(words.size):
        exponent = (np.uint64(words[position]) >> shift) & mask
        index = min(top - exponent, np.uint64(15))
        classes[position] = index
        patched += np.int64(index == 15) - np.int64(exponent == 0)
    return patched


@njit
def _classify_widths(words: np.ndarray, mantissa: Int64, highest: Int64, classes: np.ndarray) -> None:
    mask = np.uint64((1 << mantissa) - 1)
    for position in range(words.size):
        width = _width(np.uint64(words[position]) & mask, mantissa)
        index = highest - width
        classes[position] = 15 if width == 0 else (index if 0 <= index < 14 else 14)


@njit
def _codes(lengths: np.ndarray, codes: np.ndarray) -> bool:
    """Make the canonical codes with their first bit lowest; return whether they are complete, of 1 to 8 bits."""
    code = 0
    for length in range(1, 9):
        for index in range(16):
            if lengths[index] == length:
                reverse = 0
                for bit in range(length):
                    reverse |= ((code >> bit) & 1) << (length - 1 - bit)
                codes[index] = reverse
                code += 1
        code <<= 1
    shortest, longest = 8, 0
    for index in range(16):
        shortest, longest = min(shortest, lengths[index]), max(longest, lengths[index])
    return code == 512 and shortest > 0 and longest <= 8


@njit
def _fill_pairs(lengths: np.ndarray, table: np.ndarray) -> None:
    """Make the table of the codes of two classes, at the first + 256 times the second: code * 256 + its bits."""
    codes = np.empty(16, np.int64)
    _codes(lengths, codes)
    for second in range(16):
        for first in range(16):
            code = codes[first] | codes[second] << lengths[first]
            table[second << 8 | first] = code << 8 | (lengths[first] + lengths[second])


@njit
def _flush(message: np.ndarray, at: Int64, bits: np.uint64, held: np.uint64) -> tuple[Int64, np.uint64, np.uint64]:
    """Write the bits that are held; return where the whole bytes of them end, and what is left."""
    _store(message, at, bits)
    return at + np.int64(held >> np.uint64(3)), bits >> (held & ~np.uint64(7)), held & np.uint64(7)


@njit
def _encode_segment(classes: np.ndarray, table: np.ndarray, message: np.ndarray, at: Int64) -> Int64:
    """Write the stream of a segment and return its end; up to 8 bytes behind it are overwritten."""
    bits, held, byte = np.uint64(0), np.uint64(0), np.uint64(0xFF)
    seven, eight, three = np.uint64(7), np.uint64(8), np.uint64(3)
    pairs = classes[: classes.size & ~1].view(np.uint16)
    whole = pairs.size - pairs.size % 3
    for index in range(0, whole, 3):
        for offset in range(3):
            entry = np.uint64(table[pairs[index + offset]])
            bits |= (entry >> eight) << held
            held += entry & byte
        at, bits, held = _flush(message, at, bits, held)
    for index in range(whole, pairs.size):
        entry = np.uint64(table[pairs[index]])
        bits |= (entry >> eight) << held
        held += entry & byte
    if classes.size & 1:  # as the first of a pair, of which the second is left out
        entry, alone = np.uint64(table[classes[classes.size - 1]]), np.uint64(table[0])
        length = (entry & byte) - (alone & byte) // np.uint64(2)
        bits |= ((entry >> eight) & ((np.uint64(1) << length) - np.uint64(1))) << held
        held += length
    _store(message, at, bits)
    return at + np.int64((held + seven) >> three)


@njit
def _patch_exponents(
    raw: np.ndarray, item: Int64, mantissa: Int64, mask: Int64, classes: np.ndarray, size: Int64,
    message: np.ndarray, at: Int64, beside: Int64,
) -> None:  # fmt: skip
    eights = classes[: classes.size & ~7].view(np.uint64)
    for start in range(0, size, 64):
        stop, some = min(start + 64, size), np.uint64(0)
        for index in range(start >> 3, (stop + 7) >> 3):
            half = eights[index] & (eights[index] >> np.uint64(2))
            some |= half & (half >> np.uint64(1))
        if some & np.uint64(0x0101010101010101):  # a class is 15
            for index in range(start, stop):
                if classes[index] == 15:
                    exponent = (_get(raw, index * item, item) >> mantissa) & mask
                    if exponent:
                        _put(message, at, index, 2)
                        _put(message, at + beside, exponent, 2)
                        at += 2


@njit
def _patch_lows(words: np.ndarray, message: np.ndarray, at: Int64, beside: Int64) -> None:
    for start in range(0, words.size, 64):
        stop, some = min(start + 64, words.size), np.uint32(0)
        for index in range(start, stop):
            some = np.uint32(some | words[index])
        if some & 0xFFFF:
            for index in range(start, stop):
                low = np.int64(words[index]) & 0xFFFF
                if low:
                    _put(message, at, index, 2)
                    _put(message, at + beside, low, 2)
                    at += 2


@njit
def _take_tops(words: np.ndarray, shift: Int64, tops: np.ndarray) -> None:
    """Write signs and the upper 7 bits of mantissas, from the upper 16 bits."""
    for index in range(tops.size):
        word = np.uint32(np.uint32(words[index]) >> np.uint32(shift & 31))
        tops[index] = (np.uint32(word >> 8) & np.uint32(0x80)) | (word & np.uint32(0x7F))


@njit
def _encode_mantissas(
    raw: np.ndarray, item: Int64, mantissa: Int64, exponent_bits: Int64, highest: Int64, classes: np.ndarray,
    message: np.ndarray, at: Int64,
) -> Int64:  # fmt: skip
    bits, held, three, seven = np.uint64(0), np.uint64(0), np.uint64(3), np.uint64(7)
    sizes, bodies = _verbatim_sizes(highest, mantissa), np.empty(SEGMENT_VALUES, np.uint64)
    for start in range(0, raw.size, SEGMENT_VALUES * item):
        part = raw[start : start + SEGMENT_VALUES * item]
        count, indices = part.size // item, classes[start // item : start // item + SEGMENT_VALUES]
        if item == 2:
            _take_bodies(part.view(np.uint16), mantissa, exponent_bits, highest, indices, bodies)
        elif item == 4:
            _take_bodies_of_float32(part.view(np.uint32), highest, indices, bodies)
        else:
            _take_bodies(part.view(np.uint64), mantissa, exponent_bits, highest, indices, bodies)
        pairs = count >> 1 if item <= 4 else 0  # two at a time, of at most 24 bits, and 7 that are left
        for pair in range(pairs):
            size, beside = sizes[indices[2 * pair]], sizes[indices[2 * pair + 1]]
            bits |= (bodies[2 * pair] | bodies[2 * pair + 1] << size) << held
            held += size + beside
            at, bits, held = _flush(message, at, bits, held)
        for index in range(2 * pairs, count):
            bits |= bodies[index] << held
            held += sizes[indices[index]]
            at, bits, held = _flush(message, at, bits, held)
    _store(message, at, bits)
    return at + np.int64((held + seven) >> three)


@njit
def _take_bodies(
    words: np.ndarray, mantissa: Int64, exponent_bits: Int64, highest: Int64, classes: np.ndarray, bodies: np.ndarray
) -> None:
    """Write mantissas without their trailing zeros, with the sign instead of the lowest bit, which is one.

    They are doubled before, so that the whole ones have a zero there.
    """
    one, mask, sign = np.uint64(1), np.uint64((1 << mantissa) - 1), np.uint64(mantissa + exponent_bits)
    least = np.uint64(mantissa + 1 - highest)
    for position in range(words.size):
        word, index = np.uint64(words[position]), np.uint64(classes[position])
        count = (least + index) & np.uint64(63) if index < 14 else np.uint64(0)
        bodies[position] = ((((word & mask) << one) >> count) & ~one) | (word >> sign)


@njit
def _take_bodies_of_float32(words: np.ndarray, highest: Int64, classes: np.ndarray, bodies: np.ndarray) -> None:
    """As `_take_bodies`, with 32 bits, twice as many at a time."""
    least = np.uint32(24 - highest)
    for position in range(words.size):
        word, index = words[position], np.uint32(classes[position])
        count = np.uint32(least + index) & np.uint32(31) if index < 14 else np.uint32(0)
        body = np.uint32(np.uint32((word & 0x7FFFFF) << 1) >> count)
        bodies[position] = (body & np.uint32(0xFFFFFFFE)) | np.uint32(word >> 31)


@njit
def _verbatim_sizes(highest: Int64, mantissa: Int64) -> np.ndarray:
    """Return the bits of sign and mantissa by class of widths."""
    sizes = np.empty(16, np.uint64)
    for index in range(16):
        sizes[index] = max(highest - index, 1)
    sizes[14], sizes[15] = mantissa + 1, 1
    return sizes


@njit
def _decode(data: np.ndarray, raw: np.ndarray, item: Int64, exponent_bits: Int64, mantissa: Int64) -> bool:
    classes = np.empty((2, min(raw.size // item, CHUNK_VALUES)), np.uint8)
    tail, table = np.empty(_ROOM + 4 * SEGMENT_VALUES, np.uint8), np.empty(1 << 8, np.uint16)
    at = 0
    for start in range(0, raw.size, CHUNK_VALUES * item):
        if data.size - at < 4:
            return False
        part = raw[start : start + CHUNK_VALUES * item]
        mode, end = np.int64(data[at]), at + _get(data, at + 1, 3)
        if end > data.size or end < at + 4:
            return False
        if mode <= EQUAL:
            if end - at - 4 != (part.size if mode == RAW else item):
                return False
            for index in range(part.size):
                part[index] = data[at + 4 + index] if index < end - at - 4 else part[index - item]
        elif not _decode_chunk(data, at, end, part, item, exponent_bits, mantissa, mode, classes, tail, table):
            return False
        at = end
    return at == data.size


@njit
def _decode_chunk(
    data: np.ndarray, start: Int64, end: Int64, raw: np.ndarray, item: Int64, exponent_bits: Int64, mantissa: Int64,
    mode: Int64, classes: np.ndarray, tail: np.ndarray, table: np.ndarray,
) -> bool:  # fmt: skip
    size = raw.size // item
    segments, planes = (size + SEGMENT_VALUES - 1) // SEGMENT_VALUES, 2 if mode == VARIABLE else 1
    header = start + 12 + 8 * planes
    at = header + 2 * planes * segments
    fits = mode == VARIABLE or mantissa == 23 or (mode == FIXED and mantissa == 7)
    if at > end or mode > VARIABLE or not fits:
        return False
    highest, highest_width = _get(data, start + 4, 2), _get(data, start + 6, 2)
    patches, lows = _get(data, start + 8, 2), _get(data, start + 10, 2)
    streams, lengths, codes = at, np.empty(16, np.int64), np.empty(16, np.int64)
    for segment in range(planes * segments):
        length = _get(data, header + 2 * segment, 2)
        if length > SEGMENT_VALUES:
            return False
        streams += length
    rest = streams + 4 * (patches + lows)
    fixed = size if mode == FIXED else (3 * size if mode == FIXED_LOW else end - rest)
    if fixed < 0 or rest + fixed != end or highest_width > mantissa or (lows and (mode != FIXED or mantissa != 23)):
        return False
    if not (_increase(data, streams, patches, size) and _increase(data, streams + 4 * patches, lows, size)):
        return False
    for plane in range(planes):
        for index in range(16):
            lengths[index] = (data[start + 12 + 8 * plane + (index >> 1)] >> (4 * (index & 1))) & 15
        if not _codes(lengths, codes):
            return False
        for index in range(16):
            for position in range(codes[index], 256, 1 << lengths[index]):
                table[position] = index | lengths[index] << 8
        at = _decode_plane(data, at, header + 2 * plane * segments, table, classes[plane, :size], tail)
        if at < 0:
            return False
    fields = (mantissa, exponent_bits, highest, highest_width)
    if mode == VARIABLE:
        if not _decode_mantissas(data, rest, end, fields, classes, tail, raw, item):
            return False
    elif item == 2:
        _merge_bfloat16(data[rest:end], highest, classes[0], raw.view(np.uint16))
    else:
        _merge_float32(data[rest:end], highest, classes[0], raw.view(np.uint32), mode == FIXED_LOW)
    mask = (1 << exponent_bits) - 1
    for position in range(streams, streams + 2 * patches, 2):
        where, exponent = item * _get(data, position, 2), _get(data, position + 2 * patches, 2) & mask
        _put(raw, where, (_get(raw, where, item) & ~(mask << mantissa)) | exponent << mantissa, item)
    for position in range(streams + 4 * patches, streams + 4 * patches + 2 * lows, 2):
        where = 4 * _get(data, position, 2)
        raw[where], raw[where + 1] = data[position + 2 * lows], data[position + 2 * lows + 1]
    return True


@njit
def _increase(data: np.ndarray, start: Int64, count: Int64, size: Int64) -> bool:
    """Return whether positions increase and are below ``size``."""
    before = -1
    for index in range(start, start + 2 * count, 2):
        position = np.int64(_get(data, index, 2))
        if position <= before or position >= size:
            return False
        before = position
    return True


@njit
def _decode_plane(
    data: np.ndarray, at: Int64, sizes: Int64, table: np.ndarray, out: np.ndarray, tail: np.ndarray
) -> Int64:
    """Decode the streams at ``at``, of the sizes at ``sizes``; return where they end, -1 if not where they should."""
    for first in range(0, out.size, 4 * SEGMENT_VALUES):
        part = out[first : first + 4 * SEGMENT_VALUES]
        source, begin = data, at
        if at + 4 * SEGMENT_VALUES + _ROOM > data.size:
            source, begin = tail, 0
            _copy_tail(data, at, tail)
        segments = (part.size + SEGMENT_VALUES - 1) // SEGMENT_VALUES
        starts, ends = np.zeros(4, np.uint64), np.zeros(4, np.uint64)
        index = begin
        for segment in range(segments):
            starts[segment] = 8 * index
            index += _get(data, sizes, 2)
            sizes += 2
            ends[segment] = index
        if part.size == 4 * SEGMENT_VALUES:
            _decode_four(source, starts, table, part)
        else:
            for segment in range(segments):
                piece = part[segment * SEGMENT_VALUES : (segment + 1) * SEGMENT_VALUES]
                starts[segment] = _decode_one(source, starts[segment], table, piece)
        for segment in range(segments):
            if (starts[segment] + np.uint64(7)) >> np.uint64(3) != ends[segment]:
                return -1
        at += index - begin
    return at


@njit
def _copy_tail(data: np.ndarray, at: Int64, tail: np.ndarray) -> None:
    """Copy what there is from ``at`` on, and zeros behind it."""
    for index in range(tail.size):
        tail[index] = data[at + index] if at + index < data.size else 0


@njit
def _decode_one(data: np.ndarray, at: np.uint64, table: np.ndarray, out: np.ndarray) -> np.uint64:
    for index in range(out.size):
        bits = _load(data, np.int64(at >> np.uint64(3))) >> (at & np.uint64(7))
        entry = table[np.int64(bits & np.uint64(0xFF))]
        out[index] = entry & 15
        at += np.uint64(entry >> 8)
    return at


@njit
def _decode_four(data: np.ndarray, starts: np.ndarray, table: np.ndarray, out: np.ndarray) -> None:
    """Decode four whole segments side by side, seven classes of each at a time: at most 56 bits."""
    at0, at1, at2, at3 = starts[0], starts[1], starts[2], starts[3]
    three, seven, byte, eight = np.uint64(3), np.uint64(7), np.uint64(0xFF), np.uint64(8)
    whole = SEGMENT_VALUES - SEGMENT_VALUES % 7
    for index in range(0, whole, 7):
        bits0 = _load(data, np.int64(at0 >> three)) >> (at0 & seven)
        bits1 = _load(data, np.int64(at1 >> three)) >> (at1 & seven)
        bits2 = _load(data, np.int64(at2 >> three)) >> (at2 & seven)
        bits3 = _load(data, np.int64(at3 >> three)) >> (at3 & seven)
        for offset in range(7):
            entry0 = np.uint64(table[bits0 & byte])
            entry1 = np.uint64(table[bits1 & byte])
            entry2 = np.uint64(table[bits2 & byte])
            entry3 = np.uint64(table[bits3 & byte])
            out[index + offset] = entry0 & byte
            out[index + offset + SEGMENT_VALUES] = entry1 & byte
            out[index + offset + 2 * SEGMENT_VALUES] = entry2 & byte
            out[index + offset + 3 * SEGMENT_VALUES] = entry3 & byte
            bits0 >>= entry0 >> eight
            bits1 >>= entry1 >> eight
            bits2 >>= entry2 >> eight
            bits3 >>= entry3 >> eight
            at0 += entry0 >> eight
            at1 += entry1 >> eight
            at2 += entry2 >> eight
            at3 += entry3 >> eight
    starts[0] = _decode_one(data, at0, table, out[whole:SEGMENT_VALUES])
    starts[1] = _decode_one(data, at1, table, out[SEGMENT_VALUES + whole : 2 * SEGMENT_VALUES])
    starts[2] = _decode_one(data, at2, table, out[2 * SEGMENT_VALUES + whole : 3 * SEGMENT_VALUES])
    starts[3] = _decode_one(data, at3, table, out[3 * SEGMENT_VALUES + whole : 4 * SEGMENT_VALUES])


@njit
def _merge_bfloat16(rest: np.ndarray, highest: Int64, classes: np.ndarray, words: np.ndarray) -> None:
    top = np.uint16(highest)
    for position in range(words.size):
        index, byte = np.uint16(classes[position]), np.uint16(rest[position])
        exponent = np.uint16(top - index) & np.uint16(0xFF) if index != 15 else np.uint16(0)
        words[position] = np.uint16(exponent << 7) | np.uint16((byte & 0x80) << 8) | (byte & np.uint16(0x7F))


@njit
def _merge_float32(rest: np.ndarray, highest: Int64, classes: np.ndarray, words: np.ndarray, has_low: bool) -> None:
    top, size = np.uint32(highest), words.size
    for position in range(size):
        index, byte = np.uint32(classes[position]), np.uint32(rest[position])
        exponent = np.uint32(top - index) & np.uint32(0xFF) if index != 15 else np.uint32(0)
        words[position] = np.uint32(exponent << 23) | np.uint32((byte & 0x80) << 24) | np.uint32((byte & 0x7F) << 16)
    if has_low:
        low = rest[size : 3 * size]
        for position in range(size):
            words[position] |= np.uint32(low[2 * position]) | np.uint32(low[2 * position + 1]) << 8


@njit
def _decode_mantissas(
    data: np.ndarray, start: Int64, end: Int64, fields: tuple[Int64, Int64, Int64, Int64],
    classes: np.ndarray, tail: np.ndarray, raw: np.ndarray, item: Int64,
) -> bool:  # fmt: skip
    sizes, bodies = _verbatim_sizes(fields[3], fields[0]), np.empty(SEGMENT_VALUES, np.uint64)
    at, three, seven = np.uint64(8 * start), np.uint64(3), np.uint64(7)
    for first in range(0, raw.size // item, SEGMENT_VALUES):
        part = raw[first * item : (first + SEGMENT_VALUES) * item]
        indices, widths = classes[0, first : first + SEGMENT_VALUES], classes[1, first : first + SEGMENT_VALUES]
        source, begin = data, at
        if np.int64(at >> three) + _ROOM > data.size:
            source, begin = tail, at & seven
            _copy_tail(data, np.int64(at >> three), tail)
        here = begin
        for index in range(part.size // item):
            bodies[index] = _load(source, np.int64(here >> three)) >> (here & seven)
            here += sizes[widths[index]]
        at += here - begin
        if item == 2:
            _merge_bodies(bodies, part.view(np.uint16), fields, indices, widths)
        elif item == 4:
            _merge_bodies_of_float32(bodies, part.view(np.uint32), fields, indices, widths)
        else:
            _merge_bodies(bodies, part.view(np.uint64), fields, indices, widths)
    return np.int64((at + seven) >> three) == end


@njit
def _merge_bodies(
    bodies: np.ndarray, words: np.ndarray, fields: tuple[Int64, Int64, Int64, Int64],
    classes: np.ndarray, widths: np.ndarray,
) -> None:  # fmt: skip
    """Make values of exponents and the bits that travelled, behind which there are others."""
    mantissa, exponent_bits, highest, highest_width = fields
    one, two, mask = np.uint64(1), np.uint64(2), (1 << exponent_bits) - 1
    sizes = _verbatim_sizes(highest_width, mantissa)
    for position in range(words.size):
        index, size = widths[position], sizes[widths[position]]
        body = bodies[position] & ((one << size) - two)
        if index < 14:
            body = (body | one) << (np.uint64(mantissa + 1) - size)
        exponent = np.uint64((highest - classes[position]) & mask if classes[position] < 15 else 0)
        top = (bodies[position] & one) << np.uint64(exponent_bits) | exponent
        words[position] = top << np.uint64(mantissa) | body >> one


@njit
def _merge_bodies_of_float32(
    bodies: np.ndarray, words: np.ndarray, fields: tuple[Int64, Int64, Int64, Int64],
    classes: np.ndarray, widths: np.ndarray,
) -> None:  # fmt: skip
    """As `_merge_bodies`, with 32 bits and no table, many at a time."""
    top, width, lost = np.uint32(fields[2]), np.uint32(fields[3]), np.uint32(24 - fields[3])
    for position in range(words.size):
        word, cut, index = np.uint32(bodies[position]), np.uint32(widths[position]), np.uint32(classes[position])
        is_cut = cut < 14
        size = np.uint32(width - cut) & np.uint32(31) if is_cut else np.uint32(24)
        shift = np.uint32(lost + cut) & np.uint32(31) if is_cut else np.uint32(0)
        body = np.uint32(word & np.uint32(np.uint32(np.uint32(1) << size) - np.uint32(2))) | np.uint32(is_cut)
        body = np.uint32(np.uint32(body << shift) >> 1) if cut < 15 else np.uint32(0)
        exponent = np.uint32(top - index) & np.uint32(0xFF) if index < 15 else np.uint32(0)
        words[position] = np.uint32(exponent << 23) | body | np.uint32(word << 31)
