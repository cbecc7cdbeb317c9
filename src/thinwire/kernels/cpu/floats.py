"""The code of floating-point values on the CPU, compiled by numba; twin of `reference.floats`.

Numba checks no index: what the decoder reads is proven to be there before it is read, here and there by a copy of the
last bytes of a message, with zeros behind them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.memory import as_tensor
from thinwire.kernels.jit import Int64, make_word_access, njit
from thinwire.kernels.reference import floats as reference_floats
from thinwire.kernels.reference.floats import (
    CHUNK_VALUES,
    EQUAL,
    ESTIMATED_CHUNKS,
    ESTIMATED_VALUES,
    FIXED,
    FIXED_LOW,
    OVERHEAD,
    RAW,
    SAMPLED_RUN,
    SAMPLED_VALUES,
    SEGMENT_VALUES,
    VARIABLE,
    words_of,
)

_ROOM = 8 * SEGMENT_VALUES + 64  # bytes from where a segment begins that reading it can touch
_BLOCK = 1 << 12
_load, _store, _count_zeros = make_word_access()
_choose_code = njit(reference_floats.choose_code)


def encode_floats(values: Tensor) -> Tensor:
    words, layout = words_of(values)
    if not words.size:
        return torch.empty(0, dtype=torch.uint8)
    chunks, largest = -(-words.size // CHUNK_VALUES), min(words.size, CHUNK_VALUES)
    message = np.empty(words.nbytes + 4 * chunks + (12 + words.itemsize) * largest + 256, np.uint8)
    size = _encode(words, words.view(np.uint8), layout.exponent, layout.mantissa, message)
    return as_tensor(words.view(np.uint8) if size >= words.nbytes else message[:size])


def decode_floats(message: Tensor, out: Tensor) -> bool:
    data, (words, layout) = message.numpy(), words_of(out)
    if data.size >= words.nbytes:
        words.view(np.uint8)[:] = data if data.size == words.nbytes else 0
        return data.size == words.nbytes
    return bool(_decode(data, words, words.view(np.uint8), layout.exponent, layout.mantissa))


def estimate_floats(values: Tensor) -> float:
    words, layout = words_of(values)
    return float(_estimate(words, layout.exponent, layout.mantissa)) if words.size else 0.0


@njit
def _estimate(words: np.ndarray, exponent_bits: Int64, mantissa: Int64) -> float:
    exponents, widths = np.zeros(1 << exponent_bits, np.int64), np.zeros(mantissa + 1, np.int64)
    chosen, lengths = np.zeros(3, np.int64), np.zeros((2, 16), np.int64)
    chunks = (words.size + CHUNK_VALUES - 1) // CHUNK_VALUES
    limit = min(SAMPLED_VALUES, ESTIMATED_VALUES // min(chunks, ESTIMATED_CHUNKS))
    sampled, bits = 0, 0.0
    for chunk in range(0, chunks, 1 + (chunks - 1) // ESTIMATED_CHUNKS):
        part = words[chunk * CHUNK_VALUES : (chunk + 1) * CHUNK_VALUES]
        lows = _count_sample(part, limit, mantissa, exponents, widths)
        total = exponents.sum()
        if not _are_equal(part):
            bits += _choose_code(exponents, widths, lows, 8 * words.itemsize, chosen, lengths)
            bits += OVERHEAD * total if chosen[0] > RAW else 0.0
        sampled += total
    return min(bits / sampled, 8.0 * words.itemsize)


@njit
def _count_sample(words: np.ndarray, limit: Int64, mantissa: Int64, exponents: np.ndarray, widths: np.ndarray) -> Int64:
    """Count exponents and widths of a sample; return how many float32 have low bits."""
    exponents[:] = 0
    widths[:] = 0
    lows = 0
    step = SAMPLED_RUN * (1 + (words.size - 1) // limit)
    mask, shift = np.uint64((1 << mantissa) - 1), np.uint64(mantissa)
    exponent_mask, low_mask = np.uint64(exponents.size - 1), np.uint64(0xFFFF if mantissa == 23 else 0)
    for start in range(0, words.size, step):
        for place in range(start, min(start + SAMPLED_RUN, words.size)):
            word = np.uint64(words[place])
            exponents[np.int64((word >> shift) & exponent_mask)] += 1
            widths[_width(word & mask, mantissa)] += 1
            lows += (word & low_mask) != 0
    return lows


@njit
def _width(bits: np.uint64, mantissa: Int64) -> Int64:
    return mantissa - _count_zeros(bits | np.uint64(1 << mantissa))


@njit
def _encode(words: np.ndarray, raw: np.ndarray, exponent_bits: Int64, mantissa: Int64, message: np.ndarray) -> Int64:
    exponents, widths = np.zeros(1 << exponent_bits, np.int64), np.zeros(mantissa + 1, np.int64)
    chosen, lengths = np.zeros(3, np.int64), np.zeros((2, 16), np.int64)
    classes = np.empty((2, (min(words.size, CHUNK_VALUES) + 15) & ~7), np.uint8)
    table, item = np.empty(1 << 12, np.uint32), words.itemsize
    at = end = np.int64(0)
    for start in range(0, words.size, CHUNK_VALUES):
        chunk = words[start : start + CHUNK_VALUES]
        if _are_equal(chunk):
            end, chosen[0] = at + 4 + item, EQUAL
        else:
            lows = _count_sample(chunk, SAMPLED_VALUES, mantissa, exponents, widths)
            _choose_code(exponents, widths, lows, 8 * item, chosen, lengths)
        if chosen[0] > EQUAL:
            end = _encode_chunk(chunk, exponent_bits, mantissa, chosen, lengths, classes, table, message, at)
        if chosen[0] == RAW or (chosen[0] != EQUAL and end - at >= 4 + item * chunk.size):
            end, chosen[0] = at + 4 + item * chunk.size, RAW
        if chosen[0] <= EQUAL:
            message[at + 4 : end] = raw[start * item : start * item + end - at - 4]
        _put(message, at, chosen[0] | (end - at) << 8, 4)
        at = end
    return at


@njit
def _are_equal(words: np.ndarray) -> bool:
    for start in range(0, words.size, SEGMENT_VALUES):
        differing = 0
        for place in range(start, min(start + SEGMENT_VALUES, words.size)):
            differing |= words[place] != words[0]
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
    words: np.ndarray, exponent_bits: Int64, mantissa: Int64, chosen: np.ndarray, lengths: np.ndarray,
    classes: np.ndarray, table: np.ndarray, message: np.ndarray, start: Int64,
) -> Int64:  # fmt: skip
    """Write the record of a chunk but its size, and return where it ends; there is room for more than its values."""
    mode, highest, highest_width = chosen
    size, segments = words.size, (words.size + SEGMENT_VALUES - 1) // SEGMENT_VALUES
    planes = 2 if mode == VARIABLE else 1
    header = start + 12 + 8 * planes
    at = header + 2 * planes * segments
    exponent_mask = (1 << exponent_bits) - 1
    outside, lows = _classify(words, mantissa, exponent_mask, highest, classes[0])
    if mode == VARIABLE:
        _classify_widths(words, mantissa, highest_width, classes[1])
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
    _put(message, start + 8, outside, 2)
    _put(message, start + 10, lows if mode == FIXED else 0, 2)
    if outside:
        at = _patch_exponents(words, mantissa, exponent_mask, classes[0], outside, message, at)
    if mode == FIXED and lows:
        at = _patch_lows(words, lows, message, at)
    if mode == VARIABLE:
        return _encode_mantissas(words, mantissa, exponent_bits, highest_width, classes[1], message, at)
    _take_tops(words, mantissa, message[at : at + size])
    at += size
    if mode == FIXED_LOW:
        low = message[at : at + 2 * size]
        for place in range(size):
            low[2 * place] = words[place] & 0xFF
            low[2 * place + 1] = (words[place] >> 8) & 0xFF
        at += 2 * size
    return at


@njit
def _classify(
    words: np.ndarray, mantissa: Int64, mask: Int64, highest: Int64, classes: np.ndarray
) -> tuple[Int64, Int64]:
    """Write the classes of exponents; return how many are patched, and how many float32 have low bits."""
    patched = lows = 0
    for start in range(0, words.size, _BLOCK):
        part, found = words[start : start + _BLOCK], classes[start : start + _BLOCK]
        # Sums of 16 and 32 bits, which are added up many at a time.
        few, some, low = np.uint16(0), np.uint32(0), np.uint32(0)
        if mantissa == 7:
            top = np.uint16(highest)
            for place in range(part.size):
                exponent = np.uint16(part[place] >> 7) & np.uint16(0xFF)
                index = min(np.uint16(top - exponent), np.uint16(15))
                found[place] = index
                few = np.uint16(few + np.uint16(np.uint16(index == 15) - np.uint16(exponent == 0)))
        elif mantissa == 23:
            high = np.uint32(highest)
            for place in range(part.size):
                field = np.uint32(part[place] >> 23) & np.uint32(0xFF)
                number = min(np.uint32(high - field), np.uint32(15))
                found[place] = number
                some = np.uint32(some + np.uint32(np.uint32(number == 15) - np.uint32(field == 0)))
                low = np.uint32(low + np.uint32(np.uint32(part[place] & 0xFFFF) != 0))
        else:
            for place in range(part.size):
                wide = (np.uint64(part[place]) >> np.uint64(mantissa)) & np.uint64(mask)
                other = min(np.uint64(highest) - wide, np.uint64(15))
                found[place] = other
                some = np.uint32(some + np.uint32(np.uint32(other == 15) - np.uint32(wide == 0)))
        patched += np.int64(few) + np.int64(some)
        lows += np.int64(low)
    return patched, lows


@njit
def _classify_widths(words: np.ndarray, mantissa: Int64, highest: Int64, classes: np.ndarray) -> None:
    mask = np.uint64((1 << mantissa) - 1)
    for place in range(words.size):
        width = _width(np.uint64(words[place]) & mask, mantissa)
        index = highest - width
        classes[place] = 15 if width == 0 else (index if 0 <= index < 14 else 14)


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
def _encode_segment(classes: np.ndarray, table: np.ndarray, message: np.ndarray, at: Int64) -> Int64:
    """Write the stream of a segment and return its end; up to 8 bytes behind it are overwritten."""
    bits, held, byte = np.uint64(0), np.uint64(0), np.uint64(0xFF)
    seven, eight, three = np.uint64(7), np.uint64(8), np.uint64(3)
    pairs = classes[: classes.size & ~1].view(np.uint16)
    whole = pairs.size - pairs.size % 3
    for place in range(0, whole, 3):
        for offset in range(3):
            entry = np.uint64(table[pairs[place + offset]])
            bits |= (entry >> eight) << held
            held += entry & byte
        _store(message, at, bits)
        at += np.int64(held >> three)
        bits >>= held & ~seven
        held &= seven
    for place in range(whole, pairs.size):
        entry = np.uint64(table[pairs[place]])
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
    words: np.ndarray, mantissa: Int64, mask: Int64, classes: np.ndarray, count: Int64, message: np.ndarray, at: Int64
) -> Int64:
    found = at
    eights = classes[: classes.size & ~7].view(np.uint64)
    for start in range(0, words.size, 64):
        stop, some = min(start + 64, words.size), np.uint64(0)
        for place in range(start >> 3, (stop + 7) >> 3):
            four = eights[place] & (eights[place] >> np.uint64(2))
            some |= four & (four >> np.uint64(1))
        if some & np.uint64(0x0101010101010101):  # a class is 15
            for place in range(start, stop):
                if classes[place] == 15:
                    exponent = np.int64(np.uint64(words[place]) >> np.uint64(mantissa)) & mask
                    if exponent:
                        _put(message, found, place, 2)
                        _put(message, found + 2 * count, exponent, 2)
                        found += 2
    return at + 4 * count


@njit
def _patch_lows(words: np.ndarray, count: Int64, message: np.ndarray, at: Int64) -> Int64:
    found = at
    for start in range(0, words.size, 64):
        stop, some = min(start + 64, words.size), np.uint32(0)
        for place in range(start, stop):
            some = np.uint32(some | np.uint32(words[place]))
        if some & 0xFFFF:
            for place in range(start, stop):
                low = np.int64(words[place]) & 0xFFFF
                if low:
                    _put(message, found, place, 2)
                    _put(message, found + 2 * count, low, 2)
                    found += 2
    return at + 4 * count


@njit
def _take_tops(words: np.ndarray, mantissa: Int64, tops: np.ndarray) -> None:
    """Write signs and the upper 7 bits of mantissas."""
    if mantissa == 7:
        for place in range(tops.size):
            word = np.uint16(words[place])
            tops[place] = (np.uint16(word >> 8) & np.uint16(0x80)) | (word & np.uint16(0x7F))
    else:
        for place in range(tops.size):
            wide = np.uint32(words[place])
            tops[place] = (np.uint32(wide >> 24) & np.uint32(0x80)) | (np.uint32(wide >> 16) & np.uint32(0x7F))


@njit
def _encode_mantissas(
    words: np.ndarray, mantissa: Int64, exponent_bits: Int64, highest: Int64, classes: np.ndarray,
    message: np.ndarray, at: Int64,
) -> Int64:  # fmt: skip
    bits, held, three, seven = np.uint64(0), np.uint64(0), np.uint64(3), np.uint64(7)
    sizes, bodies = _verbatim_sizes(highest, mantissa), np.empty(SEGMENT_VALUES, words.dtype)
    for start in range(0, words.size, SEGMENT_VALUES):
        part, indices = words[start : start + SEGMENT_VALUES], classes[start : start + SEGMENT_VALUES]
        _take_bodies(part, mantissa, exponent_bits, highest, indices, bodies)
        pairs = part.size >> 1 if mantissa <= 23 else 0  # two at a time, of at most 24 bits, and 7 that are left
        for pair in range(pairs):
            size, beside = sizes[indices[2 * pair]], sizes[indices[2 * pair + 1]]
            bits |= (np.uint64(bodies[2 * pair]) | np.uint64(bodies[2 * pair + 1]) << size) << held
            held += size + beside
            _store(message, at, bits)
            at += np.int64(held >> three)
            bits >>= held & ~seven
            held &= seven
        for place in range(2 * pairs, part.size):
            bits |= np.uint64(bodies[place]) << held
            held += sizes[indices[place]]
            _store(message, at, bits)
            at += np.int64(held >> three)
            bits >>= held & ~seven
            held &= seven
    _store(message, at, bits)
    return at + np.int64((held + seven) >> three)


@njit
def _take_bodies(
    words: np.ndarray, mantissa: Int64, exponent_bits: Int64, highest: Int64, classes: np.ndarray, bodies: np.ndarray
) -> None:
    """Write mantissas without their trailing zeros, with the sign in the place of the lowest bit, which is one."""
    if mantissa == 23:
        lost = np.uint32(24 - highest)  # of the mantissa, times two: so the whole one has a zero where the sign goes
        for place in range(words.size):
            word, index = np.uint32(words[place]), np.uint32(classes[place])
            shift = np.uint32(lost + index) & np.uint32(31) if index < 14 else np.uint32(0)
            body = np.uint32(np.uint32((word & 0x7FFFFF) << 1) >> shift)
            bodies[place] = (body & np.uint32(0xFFFFFFFE)) | np.uint32(word >> 31)
    else:
        one, mask, sign = np.uint64(1), np.uint64((1 << mantissa) - 1), np.uint64(mantissa + exponent_bits)
        least = np.uint64(mantissa + 1 - highest)
        for place in range(words.size):
            wide, number = np.uint64(words[place]), np.uint64(classes[place])
            count = (least + number) & np.uint64(63) if number < 14 else np.uint64(0)
            bodies[place] = ((((wide & mask) << one) >> count) & ~one) | (wide >> sign)


@njit
def _verbatim_sizes(highest: Int64, mantissa: Int64) -> np.ndarray:
    """Return the bits of sign and mantissa by class of widths."""
    sizes = np.empty(16, np.uint64)
    for index in range(16):
        sizes[index] = max(highest - index, 1)
    sizes[14], sizes[15] = mantissa + 1, 1
    return sizes


@njit
def _decode(data: np.ndarray, words: np.ndarray, raw: np.ndarray, exponent_bits: Int64, mantissa: Int64) -> bool:
    classes = np.empty((2, min(words.size, CHUNK_VALUES)), np.uint8)
    tail, table, item = np.empty(_ROOM + 4 * SEGMENT_VALUES, np.uint8), np.empty(1 << 8, np.uint16), words.itemsize
    at = 0
    for start in range(0, words.size, CHUNK_VALUES):
        if data.size - at < 4:
            return False
        chunk = words[start : start + CHUNK_VALUES]
        mode, end = np.int64(data[at]), at + _get(data, at + 1, 3)
        if end > data.size or end < at + 4:
            return False
        if mode <= EQUAL:
            part = raw[start * item : start * item + chunk.size * item]
            if end - at - 4 != (part.size if mode == RAW else item):
                return False
            part[: end - at - 4] = data[at + 4 : end]
            if mode == EQUAL:
                chunk[:] = chunk[0]
        elif not _decode_chunk(data, at, end, chunk, exponent_bits, mantissa, mode, classes, tail, table):
            return False
        at = end
    return at == data.size


@njit
def _decode_chunk(
    data: np.ndarray, start: Int64, end: Int64, words: np.ndarray, exponent_bits: Int64, mantissa: Int64, mode: Int64,
    classes: np.ndarray, tail: np.ndarray, table: np.ndarray,
) -> bool:  # fmt: skip
    size, segments = words.size, (words.size + SEGMENT_VALUES - 1) // SEGMENT_VALUES
    planes = 2 if mode == VARIABLE else 1
    header = start + 12 + 8 * planes
    at = header + 2 * planes * segments
    if (
        at > end
        or mode > VARIABLE
        or (mode == FIXED and mantissa not in (7, 23))
        or (mode == FIXED_LOW and mantissa != 23)
    ):
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
    for place in range(streams, streams + 2 * patches, 2):
        if _get(data, place, 2) >= size:
            return False
    for place in range(streams + 4 * patches, streams + 4 * patches + 2 * lows, 2):
        if _get(data, place, 2) >= size:
            return False
    for plane in range(planes):
        for index in range(16):
            lengths[index] = (data[start + 12 + 8 * plane + (index >> 1)] >> (4 * (index & 1))) & 15
        if not _codes(lengths, codes):
            return False
        for index in range(16):
            for place in range(codes[index], 256, 1 << lengths[index]):
                table[place] = index | lengths[index] << 8
        at = _decode_plane(data, at, header + 2 * plane * segments, table, classes[plane, :size], tail)
        if at < 0:
            return False
    if mode == VARIABLE:
        fields = (mantissa, exponent_bits, highest, highest_width)
        if not _decode_mantissas(data, rest, end, fields, classes, tail, words):
            return False
    else:
        _merge(data[rest:end], mantissa, highest, classes[0], mode == FIXED_LOW, words)
    _apply_patches(data, streams, patches, mantissa, exponent_bits, words)
    for place in range(lows):
        where = _get(data, streams + 4 * patches + 2 * place, 2)
        words[where] |= np.uint32(_get(data, streams + 4 * patches + 2 * (lows + place), 2))
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
        place = begin
        for segment in range(segments):
            starts[segment] = 8 * place
            place += _get(data, sizes, 2)
            sizes += 2
            ends[segment] = place
        if part.size == 4 * SEGMENT_VALUES:
            _decode_four(source, starts, table, part)
        else:
            for segment in range(segments):
                piece = part[segment * SEGMENT_VALUES : (segment + 1) * SEGMENT_VALUES]
                starts[segment] = _decode_one(source, starts[segment], table, piece)
        for segment in range(segments):
            if (starts[segment] + np.uint64(7)) >> np.uint64(3) != ends[segment]:
                return -1
        at += place - begin
    return at


@njit
def _copy_tail(data: np.ndarray, at: Int64, tail: np.ndarray) -> None:
    """Copy what there is from ``at`` on, and zeros behind it."""
    size = min(max(data.size - at, 0), tail.size)
    tail[:size] = data[at : at + size]
    tail[size:] = 0


@njit
def _decode_one(data: np.ndarray, at: np.uint64, table: np.ndarray, out: np.ndarray) -> np.uint64:
    for place in range(out.size):
        bits = _load(data, np.int64(at >> np.uint64(3))) >> (at & np.uint64(7))
        entry = table[np.int64(bits & np.uint64(0xFF))]
        out[place] = entry & 15
        at += np.uint64(entry >> 8)
    return at


@njit
def _decode_four(data: np.ndarray, starts: np.ndarray, table: np.ndarray, out: np.ndarray) -> None:
    """Decode four whole segments side by side, seven classes of each at a time: at most 56 bits."""
    at0, at1, at2, at3 = starts[0], starts[1], starts[2], starts[3]
    three, seven, byte, eight = np.uint64(3), np.uint64(7), np.uint64(0xFF), np.uint64(8)
    whole = SEGMENT_VALUES - SEGMENT_VALUES % 7
    for place in range(0, whole, 7):
        bits0 = _load(data, np.int64(at0 >> three)) >> (at0 & seven)
        bits1 = _load(data, np.int64(at1 >> three)) >> (at1 & seven)
        bits2 = _load(data, np.int64(at2 >> three)) >> (at2 & seven)
        bits3 = _load(data, np.int64(at3 >> three)) >> (at3 & seven)
        for offset in range(7):
            entry0 = np.uint64(table[bits0 & byte])
            entry1 = np.uint64(table[bits1 & byte])
            entry2 = np.uint64(table[bits2 & byte])
            entry3 = np.uint64(table[bits3 & byte])
            out[place + offset] = entry0 & byte
            out[place + offset + SEGMENT_VALUES] = entry1 & byte
            out[place + offset + 2 * SEGMENT_VALUES] = entry2 & byte
            out[place + offset + 3 * SEGMENT_VALUES] = entry3 & byte
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
def _merge(
    rest: np.ndarray, mantissa: Int64, highest: Int64, classes: np.ndarray, has_low: bool, words: np.ndarray
) -> None:
    size = words.size
    if mantissa == 7:
        top = np.uint16(highest)
        for place in range(size):
            index, byte = np.uint16(classes[place]), np.uint16(rest[place])
            exponent = np.uint16(top - index) & np.uint16(0xFF) if index != 15 else np.uint16(0)
            words[place] = np.uint16(exponent << 7) | np.uint16((byte & 0x80) << 8) | (byte & np.uint16(0x7F))
    else:
        high = np.uint32(highest)
        for place in range(size):
            number, wide = np.uint32(classes[place]), np.uint32(rest[place])
            field = np.uint32(high - number) & np.uint32(0xFF) if number != 15 else np.uint32(0)
            words[place] = np.uint32(field << 23) | np.uint32((wide & 0x80) << 24) | np.uint32((wide & 0x7F) << 16)
        if has_low:
            low = rest[size : 3 * size]
            for place in range(size):
                words[place] |= np.uint32(low[2 * place]) | np.uint32(low[2 * place + 1]) << 8


@njit
def _decode_mantissas(
    data: np.ndarray, start: Int64, end: Int64, fields: tuple[Int64, Int64, Int64, Int64],
    classes: np.ndarray, tail: np.ndarray, words: np.ndarray,
) -> bool:  # fmt: skip
    mantissa, _, _, highest_width = fields
    sizes, three, seven = _verbatim_sizes(highest_width, mantissa), np.uint64(3), np.uint64(7)
    at = np.uint64(8 * start)
    for first in range(0, words.size, SEGMENT_VALUES):
        part, widths = words[first : first + SEGMENT_VALUES], classes[1, first : first + SEGMENT_VALUES]
        source, begin = data, at
        if np.int64(at >> three) + _ROOM > data.size:
            source, begin = tail, at & seven
            _copy_tail(data, np.int64(at >> three), tail)
        here = begin
        for place in range(part.size):
            part[place] = _load(source, np.int64(here >> three)) >> (here & seven)
            here += sizes[widths[place]]
        at += here - begin
        _merge_bodies(part, fields, classes[0, first : first + SEGMENT_VALUES], widths)
    return np.int64((at + seven) >> three) == end


@njit
def _merge_bodies(
    words: np.ndarray, fields: tuple[Int64, Int64, Int64, Int64], classes: np.ndarray, widths: np.ndarray
) -> None:
    """Turn the words, which begin with the bits that travelled, into values."""
    mantissa, exponent_bits, highest, highest_width = fields
    if mantissa == 23:
        top, width, lost = np.uint32(highest), np.uint32(highest_width), np.uint32(24 - highest_width)
        for place in range(words.size):
            word, cut, exponent = np.uint32(words[place]), np.uint32(widths[place]), np.uint32(classes[place])
            is_cut = cut < 14
            size = np.uint32(width - cut) & np.uint32(31) if is_cut else np.uint32(24)
            shift = np.uint32(lost + cut) & np.uint32(31) if is_cut else np.uint32(0)
            body = np.uint32(word & np.uint32(np.uint32(np.uint32(1) << size) - np.uint32(2))) | np.uint32(is_cut)
            body = np.uint32(np.uint32(body << shift) >> 1) if cut < 15 else np.uint32(0)
            field = np.uint32(top - exponent) & np.uint32(0xFF) if exponent < 15 else np.uint32(0)
            words[place] = np.uint32(field << 23) | body | np.uint32(word << 31)
    else:
        one, two, exponent_mask = np.uint64(1), np.uint64(2), np.uint64((1 << exponent_bits) - 1)
        sizes, bits, sign = _verbatim_sizes(highest_width, mantissa), np.uint64(mantissa), np.uint64(exponent_bits)
        for place in range(words.size):
            wide, index, number = np.uint64(words[place]), widths[place], np.uint64(classes[place])
            rest = wide & ((one << sizes[index]) - two)
            if index < 14:
                rest = (rest | one) << (bits + one - sizes[index])
            found = (np.uint64(highest) - number) & exponent_mask if number < 15 else np.uint64(0)
            words[place] = (((wide & one) << sign | found) << bits) | rest >> one


@njit
def _apply_patches(
    data: np.ndarray, at: Int64, count: Int64, mantissa: Int64, exponent_bits: Int64, words: np.ndarray
) -> None:
    mask = (1 << exponent_bits) - 1
    keep = ~(np.uint64(mask) << np.uint64(mantissa))
    for place in range(count):
        where, exponent = _get(data, at + 2 * place, 2), _get(data, at + 2 * (count + place), 2) & mask
        words[where] = (np.uint64(words[where]) & keep) | np.uint64(exponent) << np.uint64(mantissa)
