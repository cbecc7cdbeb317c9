"""The code of floats on a GPU.

A program works on a segment of 1024 values, or on what is known of a chunk. Bits are written by atomic or into zeroed
memory, since a word may hold bits of several programs; the order does not matter. Streams are decoded side by side, a
lane each. What arrives is not trusted: no byte outside of a message is read, and none outside of the values written.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.gpu.jit import jit, launch, num_blocks, tl
from thinwire.kernels.reference import floats as reference

_CHUNK = tl.constexpr(reference.CHUNK_VALUES)
_SEGMENT = tl.constexpr(reference.SEGMENT_VALUES)
_SEGMENTS = tl.constexpr(reference.CHUNK_VALUES // reference.SEGMENT_VALUES)  # of a chunk
_RUN = tl.constexpr(reference.SAMPLED_RUN)
_RAW, _EQUAL, _FIXED, _FIXED_LOW, _VARIABLE = map(
    tl.constexpr, (reference.RAW, reference.EQUAL, reference.FIXED, reference.FIXED_LOW, reference.VARIABLE)
)
_WIDTHS = tl.constexpr(64)  # counts of widths, which are behind the counts of exponents
_LOWS, _DIFFERENT = tl.constexpr(64), tl.constexpr(65)  # indices of counts behind the exponents
# Of a chunk: mode, highest exponent and width, patches, low bits, and the offsets of these and of the rest.
_FIELDS = tl.constexpr(8)
_LANES = 32
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode_floats(values: Tensor) -> Tensor:
    """Encode as the reference; it waits for the size of the code."""
    words, kind = _words(values)
    num_values, device = words.numel(), words.device
    chunks, segments = num_blocks(num_values, _CHUNK.value), num_blocks(num_values, _SEGMENT.value)
    fields, codes, _ = _choose_codes(words, kind, chunks, 1, reference.SAMPLED_VALUES, whole=True)
    measured = torch.zeros(10, chunks * _SEGMENTS.value, dtype=torch.int32, device=device)
    launch(_measure, segments, words, words, fields, codes, measured, num_values, chunks, **kind)
    sizes = torch.zeros(chunks, dtype=torch.int64, device=device)
    launch(_lay_out, chunks, words, fields, measured, sizes, num_values, chunks, **kind)
    ends = sizes.cumsum(0)
    size = int(ends[-1]) if chunks else 0
    if size >= values.nbytes:
        return words.view(torch.uint8)
    message = torch.zeros(num_blocks(size, 4), dtype=torch.int32, device=device)
    launch(_write, segments, words, words, fields, codes, measured, sizes, ends, message, num_values, chunks, **kind)
    return message.view(torch.uint8)[:size]


def decode_floats(message: Tensor, out: Tensor) -> bool:
    """Decode as the reference; it waits for the verdict."""
    words, kind = _words(out)
    num_values, device = words.numel(), words.device
    if message.numel() >= out.nbytes:
        if message.numel() == out.nbytes:
            words.view(torch.uint8).copy_(message)
        return message.numel() == out.nbytes
    chunks, segments = num_blocks(num_values, _CHUNK.value), num_blocks(num_values, _SEGMENT.value)
    streams = 2 * chunks * _SEGMENTS.value
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    records = torch.empty(chunks + 1, dtype=torch.int64, device=device)
    fields = torch.empty(chunks, _FIELDS.value, dtype=torch.int32, device=device)
    tables = torch.empty(chunks, 2, 256, dtype=torch.uint8, device=device)
    positions = torch.empty(
        3, streams, dtype=torch.int32, device=device
    )  # start, size, and bits of signs and mantissas
    classes = torch.empty(streams, _SEGMENT.value // 8, dtype=torch.int32, device=device)
    launch(_walk, 1, words, message, records, bad, message.numel(), chunks, num_warps=1)
    launch(_parse, chunks, words, message, records, fields, tables, positions, bad, num_values, chunks, **kind)
    launch(
        _decode_streams, num_blocks(streams, _LANES), words, message, records, fields, tables, positions, classes, bad,
        num_values, chunks, LANES=_LANES, num_warps=1, M=kind["M"],
    )  # fmt: skip
    launch(
        _merge, segments, words, message, records, fields, positions, classes, words, bad, num_values, chunks, **kind
    )
    halves = words.view(torch.int16)
    launch(_patch, chunks, words, message, records, fields, halves, bad, num_values, **kind)
    return not bool(bad)


def estimate_floats(values: Tensor) -> float:
    """Estimate as the reference; it waits for the result."""
    words, kind = _words(values)
    chunks = num_blocks(words.numel(), _CHUNK.value)
    if not chunks:
        return 0.0
    stride = 1 + (chunks - 1) // reference.ESTIMATED_CHUNKS
    limit = min(reference.SAMPLED_VALUES, reference.ESTIMATED_VALUES // min(chunks, reference.ESTIMATED_CHUNKS))
    *_, costs = _choose_codes(words, kind, num_blocks(chunks, stride), stride, limit, whole=False)
    bits, sampled, coded = costs.sum(0).tolist()
    return min((bits + reference.OVERHEAD * coded) / max(1, sampled), 8.0 * values.element_size())


def _words(values: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return the values as integers, and what kernels know of their dtype."""
    layout = reference.LAYOUTS[values.dtype]
    words = values.detach().reshape(-1).view(_INTEGERS[values.element_size()])
    return words, {"M": layout.mantissa, "E": layout.exponent}


def _choose_codes(
    words: Tensor, kind: dict[str, Any], chunks: int, stride: int, limit: int, whole: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the codes of every ``stride``-th chunk from ``limit`` values; return fields, codes and costs of these.

    Args:
        whole: whether all values of a chunk, not its sample, say if it is of equal ones.
    """
    device = words.device
    counts = torch.zeros(chunks, (1 << kind["E"]) + _DIFFERENT.value + 1, dtype=torch.int32, device=device)
    fields = torch.zeros(chunks, _FIELDS.value, dtype=torch.int32, device=device)
    codes = torch.empty(chunks, 2, 16, dtype=torch.int32, device=device)
    costs = torch.zeros(chunks, 3, dtype=torch.int64, device=device)
    skipped = (chunks - 1) * (stride - 1) * _CHUNK.value
    programs = num_blocks(min(words.numel() - skipped, chunks * _CHUNK.value), _SEGMENT.value)
    kind = {**kind, "num_warps": 8 if kind["E"] > 8 else 4}  # for 2048 counts, with fewer 300 registers
    launch(_count, programs, words, words, counts, words.numel(), stride, limit, WHOLE=whole, **kind)
    launch(_choose, chunks, words, counts, _logarithms(device), fields, codes, costs, **kind)
    return fields, codes, costs


@cache
def _logarithms(device: torch.device) -> Tensor:
    return torch.from_numpy(reference.LOG2).to(device, torch.int32)


@jit()
def _load(words, index, inside, LAST: tl.constexpr):
    """Return words, of which ``LAST`` is the last bit, as unsigned integers of 32 or 64 bits."""
    word = tl.load(words + index, mask=inside, other=0)
    return word.to(tl.uint64) if LAST == 63 else word.to(tl.uint32) & ((2 << LAST) - 1)


@jit()
def _exponent(word, M: tl.constexpr, E: tl.constexpr):
    return ((word >> M) & ((1 << E) - 1)).to(tl.int32)


@jit()
def _width(word, M: tl.constexpr):
    mantissa = word & ((1 << M) - 1)
    lowest = mantissa & (~mantissa + 1)  # a power of two, which float32 has exactly
    zeros = (lowest.to(tl.int64).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where(mantissa == 0, 0, M - zeros)


@jit()
def _class_of_exponent(exponent, highest):
    outside = (exponent == 0) | (exponent > highest) | (exponent <= highest - 15)
    return tl.where(outside, 15, highest - exponent)


@jit()
def _class_of_width(width, highest):
    outside = (width > highest) | (width <= highest - 14)
    return tl.where(width == 0, 15, tl.where(outside, 14, highest - width))


@jit()
def _verbatim_bits(width_class, highest, M: tl.constexpr):
    known = tl.maximum(highest - width_class, 1)
    return tl.where(width_class == 15, 1, tl.where(width_class == 14, M + 1, known))


@jit("words", "num_values", "stride", "limit")
def _count(words, counts, num_values, stride, limit, M: tl.constexpr, E: tl.constexpr, WHOLE: tl.constexpr):
    """Count exponents and widths of the sample, its low bits that are not zero, and values that are not the first."""
    row = tl.program_id(0) // _SEGMENTS
    start = row.to(tl.int64) * stride * _CHUNK
    size = tl.minimum(num_values - start, _CHUNK).to(tl.int32)
    index = tl.program_id(0) % _SEGMENTS * _SEGMENT + tl.arange(0, _SEGMENT)
    every = 1 + (size - 1) // limit
    sampled = (index < size) & (index // _RUN % every == index // _RUN // every % every)
    read = (index < size) if WHOLE else sampled
    word = _load(words, start + index, read, M + E)
    row_counts = counts + row.to(tl.int64) * ((1 << E) + _DIFFERENT + 1)
    histogram = tl.histogram(_exponent(word, M, E), 1 << E, mask=sampled)
    tl.atomic_add(row_counts + tl.arange(0, 1 << E), histogram, mask=histogram > 0, sem="relaxed")
    row_counts += 1 << E
    histogram = tl.histogram(_width(word, M), _WIDTHS, mask=sampled)
    tl.atomic_add(row_counts + tl.arange(0, _WIDTHS), histogram, mask=histogram > 0, sem="relaxed")
    if M == 23:
        lows = tl.sum((sampled & ((word & 0xFFFF) != 0)).to(tl.int32), axis=0)
        tl.atomic_add(row_counts + _LOWS, lows, sem="relaxed")
    different = tl.sum((read & (word != _load(words, start, True, M + E))).to(tl.int32), axis=0)
    tl.atomic_add(row_counts + _DIFFERENT, different, sem="relaxed")


@jit()
def _highest_of_window(counts, SIZE: tl.constexpr, WINDOW: tl.constexpr):
    index = tl.arange(0, SIZE)
    total = tl.zeros([SIZE], dtype=tl.int32)
    for before in tl.static_range(WINDOW):
        total += tl.load(counts + index - before, mask=index > before, other=0)
    return tl.where(tl.max(total, axis=0) > 0, tl.argmax(total, axis=0), 1)


@jit()
def _entropy(counts, total, logarithms):
    each = counts * tl.load(logarithms + counts)
    return (total * tl.load(logarithms + total) - tl.sum(each, axis=0)).to(tl.int64)


@jit()
def _lengths(counts):
    """Return the lengths of a Huffman code: of each class its tree's weight and newest node are in one integer."""
    index = tl.arange(0, 16)
    weight = 8 * counts + 1
    length = tl.zeros([16], dtype=tl.int32)
    longest = 9
    while longest > 8:
        tree = weight * 32 + index
        length = tl.zeros([16], dtype=tl.int32)
        for node in range(16, 31):
            first = tl.min(tree, axis=0)
            second = tl.min(tl.where(tree == first, 1 << 30, tree), axis=0)
            joined = (tree == first) | (tree == second)
            tree = tl.where(joined, (first // 32 + second // 32) * 32 + node, tree)
            length += joined.to(tl.int32)
        longest = tl.max(length, axis=0)
        weight = (weight >> 1) + 1
    return length


@jit()
def _codes(length):
    """Return canonical codes, their first bit lowest."""
    index = tl.arange(0, 16)
    shorter, longer = tl.expand_dims(length, 0), tl.expand_dims(length, 1)
    before = (tl.expand_dims(index, 0) < tl.expand_dims(index, 1)) & (shorter == longer) | (shorter < longer)
    code = tl.sum(tl.where(before, 256 >> shorter, 0), axis=1)
    code = (code & 0xF0) >> 4 | (code & 0x0F) << 4
    code = (code & 0xCC) >> 2 | (code & 0x33) << 2
    return (code & 0xAA) >> 1 | (code & 0x55) << 1


@jit()
def _choose(counts, logarithms, fields, codes, costs, M: tl.constexpr, E: tl.constexpr):
    """Choose as `kernels.cpu.floats` does; a code and its length are in one integer."""
    chunk = tl.program_id(0).to(tl.int64)
    counts += chunk * ((1 << E) + _DIFFERENT + 1)
    total = tl.sum(tl.load(counts + tl.arange(0, 1 << E)), axis=0)
    highest = tl.maximum(_highest_of_window(counts, 1 << E, 15), 15)
    index = tl.arange(0, 16)
    classes = tl.load(counts + highest - index, mask=index < 15, other=0)
    patch_bits = 32 * (total - tl.sum(classes, axis=0) - tl.load(counts)).to(tl.int64)
    classes = tl.where(index == 15, total - tl.sum(classes, axis=0), classes)
    counts += 1 << E
    highest_width = _highest_of_window(counts, _WIDTHS, 14)
    width = tl.where(index == 15, 0, highest_width - index)
    known = (index == 15) | (index < 14) & (width > 0)
    widths = tl.load(counts + width, mask=known, other=0)
    widths = tl.where(index == 14, total - tl.sum(widths, axis=0), widths)
    each = tl.where(index == 15, 1, tl.where(index == 14, M + 1, width))
    width_bits = tl.sum(widths * each, axis=0).to(tl.int64)
    lows = tl.load(counts + _LOWS)
    low_bits = tl.minimum(16 * total, 32 * lows).to(tl.int64)
    entropy = _entropy(classes, total, logarithms)
    rest = ((width_bits + patch_bits) << 8) + entropy + _entropy(widths, total, logarithms)
    fixed = ((8 * total + low_bits + patch_bits) << 8) + entropy
    mode = _VARIABLE
    if M == 7 or M == 23:
        is_fixed = fixed * 32 <= rest * 33
        mode = tl.where(is_fixed, tl.where(2 * lows > total, _FIXED_LOW, _FIXED), _VARIABLE)
        rest = tl.where(is_fixed, fixed, rest)
    mode = tl.where(rest >= total.to(tl.int64) * ((M + E + 1) << 8), _RAW, mode)
    length, width_length = _lengths(classes), _lengths(widths)
    cost = patch_bits + tl.sum(classes * length, axis=0)
    variable = cost + width_bits + tl.sum(widths * width_length, axis=0)
    cost = tl.where(mode == _VARIABLE, variable, cost + 8 * total + low_bits)
    cost = tl.where(mode == _RAW, total * (M + E + 1), cost)
    is_equal = tl.load(counts + _DIFFERENT) == 0
    tl.store(costs + 3 * chunk, tl.where(is_equal, 0, cost))
    tl.store(costs + 3 * chunk + 1, total.to(tl.int64))
    tl.store(costs + 3 * chunk + 2, tl.where(is_equal | (mode == _RAW), 0, total).to(tl.int64))
    tl.store(fields + _FIELDS * chunk, tl.where(is_equal, _EQUAL, mode))
    tl.store(fields + _FIELDS * chunk + 1, highest)
    tl.store(fields + _FIELDS * chunk + 2, highest_width)
    tl.store(codes + 32 * chunk + index, _codes(length) | length << 8)
    tl.store(codes + 32 * chunk + 16 + index, _codes(width_length) | width_length << 8)


@jit("words", "num_values", "chunks")
def _measure(words, fields, codes, measured, num_values, chunks, M: tl.constexpr, E: tl.constexpr):
    """Of a segment: bytes of streams, patches, low bits, and bits of signs and mantissas."""
    segment = tl.program_id(0).to(tl.int64)
    chunk, columns = segment // _SEGMENTS, chunks.to(tl.int64) * _SEGMENTS
    mode = tl.load(fields + _FIELDS * chunk)
    if mode >= _FIXED:
        index = segment * _SEGMENT + tl.arange(0, _SEGMENT)
        inside = index < num_values
        word = _load(words, index, inside, M + E)
        exponent = _exponent(word, M, E)
        exponent_class = _class_of_exponent(exponent, tl.load(fields + _FIELDS * chunk + 1))
        bits = tl.load(codes + 32 * chunk + exponent_class, mask=inside, other=0) >> 8
        tl.store(measured + segment, (tl.sum(bits, axis=0) + 7) >> 3)
        patched = inside & (exponent_class == 15) & (exponent > 0)
        tl.store(measured + 2 * columns + segment, tl.sum(patched.to(tl.int32), axis=0))
        if mode == _VARIABLE:
            highest = tl.load(fields + _FIELDS * chunk + 2)
            width_class = _class_of_width(_width(word, M), highest)
            bits = tl.load(codes + 32 * chunk + 16 + width_class, mask=inside, other=0) >> 8
            tl.store(measured + columns + segment, (tl.sum(bits, axis=0) + 7) >> 3)
            bits = tl.where(inside, _verbatim_bits(width_class, highest, M), 0)
            tl.store(measured + 4 * columns + segment, tl.sum(bits, axis=0))
        elif M == 23 and mode == _FIXED:
            lows = inside & ((word & 0xFFFF) != 0)
            tl.store(measured + 3 * columns + segment, tl.sum(lows.to(tl.int32), axis=0))


@jit("num_values", "chunks")
def _lay_out(fields, measured, sizes, num_values, chunks, M: tl.constexpr, E: tl.constexpr):
    """Size a record, and say where in it what of each segment begins."""
    chunk = tl.program_id(0).to(tl.int64)
    columns = chunks.to(tl.int64) * _SEGMENTS
    size = tl.minimum(num_values - chunk * _CHUNK, _CHUNK).to(tl.int32)
    mode = tl.load(fields + _FIELDS * chunk)
    at = measured + chunk * _SEGMENTS + tl.arange(0, _SEGMENTS)
    planes = tl.where(mode == _VARIABLE, 2, 1)
    end = 12 + 8 * planes + 2 * planes * ((size + _SEGMENT - 1) // _SEGMENT)
    for row in tl.static_range(5):
        each = tl.load(at + row * columns)
        start, total = tl.cumsum(each, axis=0) - each, tl.sum(each, axis=0)
        if row < 2:
            tl.store(at + (5 + row) * columns, end + start)
            end += total
        else:
            tl.store(at + (5 + row) * columns, start)
        if row == 2:
            tl.store(fields + _FIELDS * chunk + 5, end)
        if row == 2 or row == 3:
            tl.store(fields + _FIELDS * chunk + row + 1, total)
            end += 4 * total
        if row == 4:
            tl.store(fields + _FIELDS * chunk + 6, end)
            rest = tl.where(mode == _FIXED_LOW, 3 * size, size)
            end += tl.where(mode == _VARIABLE, (total + 7) >> 3, rest)
    raw = 4 + size * ((M + E + 1) // 8)
    mode = tl.where((mode >= _FIXED) & (end >= raw), _RAW, mode)
    tl.store(fields + _FIELDS * chunk, mode)
    record = tl.where(mode == _RAW, raw, tl.where(mode == _EQUAL, 4 + (M + E + 1) // 8, end))
    tl.store(sizes + chunk, record.to(tl.int64))


@jit()
def _put(message, bit, value, mask):
    """Write the bits of values, uint64, at any bit; a word that gets none but zeros is not touched."""
    word, shift = message + (bit >> 5), (bit & 31).to(tl.uint64)
    for part in tl.static_range(3):
        if part == 0:
            bits = value << shift
        elif part == 1:
            bits = value >> (32 - shift)
        else:
            bits = (value >> 32) >> (32 - shift)
        low = (bits & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
        tl.atomic_or(word + part, low, mask=mask & (low != 0), sem="relaxed")


@jit()
def _put_grouped(message, bit, value, length):
    """Write 1024 values, of at most 8 bits each, that follow one another; four of them at a time."""
    ends = tl.cumsum(length, axis=0)
    start = tl.reshape(ends - length, [256, 4])
    first = tl.min(start, axis=1)
    joined = tl.sum(tl.reshape(value, [256, 4]).to(tl.uint32) << (start - first[:, None]).to(tl.uint32), axis=1)
    _put(message, bit + first, joined.to(tl.uint64), joined != 0)


@jit("words", "num_values", "chunks")
def _write(words, fields, codes, measured, sizes, ends, message, num_values, chunks, M: tl.constexpr, E: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    chunk, columns = segment // _SEGMENTS, chunks.to(tl.int64) * _SEGMENTS
    size = tl.minimum(num_values - chunk * _CHUNK, _CHUNK).to(tl.int32)
    number = (segment % _SEGMENTS).to(tl.int32)  # of the segment in its chunk
    index = number * _SEGMENT + tl.arange(0, _SEGMENT)
    inside = index < size
    word = _load(words, chunk * _CHUNK + index, inside, M + E)
    fields += _FIELDS * chunk
    codes += 32 * chunk
    measured += segment
    mode, highest, highest_width = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    record = tl.load(sizes + chunk)
    start = (tl.load(ends + chunk) - record) * 8  # all positions are in bits
    one = tl.arange(0, 2)
    if number == 0:
        _put(
            message, start + one * 0, (mode.to(tl.int64) | record << 8).to(tl.uint64) + one.to(tl.uint64) * 0, one == 0
        )
    if mode == _RAW:
        _put(message, start + 32 + index * (M + E + 1), word.to(tl.uint64), inside)
    elif mode == _EQUAL:
        _put(message, start + 32 + index * (M + E + 1), word.to(tl.uint64), index == 0)
    else:
        exponent = _exponent(word, M, E)
        exponent_class = _class_of_exponent(exponent, highest)
        code = tl.load(codes + exponent_class, mask=inside, other=0)
        _put_grouped(message, start + 8 * tl.load(measured + 5 * columns), code & 0xFF, code >> 8)
        patched = inside & (exponent_class == 15) & (exponent > 0)
        num_patched, num_lows = tl.load(fields + 3), tl.load(fields + 4)
        at = start + 8 * tl.load(fields + 5)
        position = at + 16 * (tl.load(measured + 7 * columns) + tl.cumsum(patched.to(tl.int32), axis=0) - 1)
        _put(message, position, index.to(tl.uint64), patched)
        _put(message, position + 16 * num_patched, exponent.to(tl.uint64), patched)
        at += 32 * num_patched
        rest = start + 8 * tl.load(fields + 6)
        if mode == _VARIABLE:
            width = _width(word, M)
            width_class = _class_of_width(width, highest_width)
            code = tl.load(codes + 16 + width_class, mask=inside, other=0)
            _put_grouped(message, start + 8 * tl.load(measured + 6 * columns), code & 0xFF, code >> 8)
            bits = tl.where(inside, _verbatim_bits(width_class, highest_width, M), 0)
            mantissa = (word & ((1 << M) - 1)).to(tl.uint64)
            known = (mantissa >> (M - width).to(tl.uint64)) & 0xFFFFFFFFFFFFFFFE
            verbatim = tl.where(width_class == 14, mantissa << 1, known) | (word >> (M + E)).to(tl.uint64)
            position = rest + tl.load(measured + 9 * columns) + tl.cumsum(bits, axis=0) - bits
            _put(message, position, verbatim, inside)
        elif M == 7 or M == 23:
            top = (word >> (M + E - 15)).to(tl.int32)
            length = tl.where(inside, 8, 0)
            _put_grouped(
                message, rest + 8 * _SEGMENT * number, tl.where(inside, top >> 8 & 0x80 | top & 0x7F, 0), length
            )
            if M == 23:
                low = (word & 0xFFFF).to(tl.uint64)
                if mode == _FIXED_LOW:
                    _put(message, rest + 8 * size + 16 * index, low, inside)
                else:
                    has = inside & (low != 0)
                    position = at + 16 * (tl.load(measured + 8 * columns) + tl.cumsum(has.to(tl.int32), axis=0) - 1)
                    _put(message, position, index.to(tl.uint64), has)
                    _put(message, position + 16 * num_lows, low, has)
        planes = tl.where(mode == _VARIABLE, 2, 1)
        if number == 0:
            field = tl.arange(0, 4)
            value = tl.load(fields + 1 + field)
            _put(message, start + 32 + 16 * field, value.to(tl.uint64), field < 4)
            half = tl.arange(0, 32)
            value = tl.load(codes + half, mask=half < 16 * planes, other=0) >> 8
            _put(message, start + 96 + 4 * half, value.to(tl.uint64), half < 16 * planes)
        count = (size + _SEGMENT - 1) // _SEGMENT
        value = tl.load(measured + one * columns, mask=one < planes, other=0)
        position = start + 8 * (12 + 8 * planes) + 16 * (one * count + number)
        _put(message, position, value.to(tl.uint64), one < planes)


@jit()
def _bytes(message, at, end, mask, COUNT: tl.constexpr):
    """Return bytes of a message, the first one lowest, uint64; what is not in front of ``end`` is zero."""
    value = tl.load(message + at, mask=mask & (at < end), other=0).to(tl.uint64)
    for byte in tl.static_range(1, COUNT):
        value |= tl.load(message + at + byte, mask=mask & (at + byte < end), other=0).to(tl.uint64) << (8 * byte)
    return value


@jit("message", "size", "chunks")
def _walk(message, records, bad, size, chunks):
    """Find where records begin; from the first one on of which the size is wrong, they are empty."""
    size = size.to(tl.int64)
    at = size * 0
    wrong = at > 0
    for chunk in range(chunks):
        tl.store(records + chunk, at)
        length = (_bytes(message, at, size, True, 4) >> 8).to(tl.int64)
        fits = (at + 4 <= size) & (length >= 4) & (length <= size - at)
        wrong = wrong | (fits == 0)
        at = tl.where(fits, at + length, size)
    tl.store(records + chunks, at)
    tl.store(bad, (wrong | (at != size)).to(tl.int32))


@jit("message", "num_values", "chunks")
def _parse(message, records, fields, tables, positions, bad, num_values, chunks, M: tl.constexpr, E: tl.constexpr):
    """Check a record; of a wrong one the mode is -1, its streams are empty, and nothing of it is read."""
    chunk = tl.program_id(0).to(tl.int64)
    columns = chunks.to(tl.int64) * _SEGMENTS
    start, end = tl.load(records + chunk), tl.load(records + chunk + 1)
    record = (end - start).to(tl.int32)
    size = tl.minimum(num_values - chunk * _CHUNK, _CHUNK).to(tl.int32)
    mode = tl.load(message + start, mask=start < end, other=255).to(tl.int32)
    is_plain = mode < _FIXED
    planes = tl.where(mode == _VARIABLE, 2, 1)
    count = (size + _SEGMENT - 1) // _SEGMENT
    first = tl.where(is_plain, 4, 12 + 8 * planes + 2 * planes * count)
    fits = (mode <= _VARIABLE) & (record >= first)
    if M != 7 and M != 23:
        fits = fits & (is_plain | (mode == _VARIABLE))
    is_coded = mode >= _FIXED
    end = tl.where(fits & is_coded, end, 0)  # so that nothing of others is read
    highest = _bytes(message, start + 4, end, True, 2).to(tl.int32)
    highest_width = _bytes(message, start + 6, end, True, 2).to(tl.int32)
    patches = _bytes(message, start + 8, end, True, 2).to(tl.int32)
    lows = _bytes(message, start + 10, end, True, 2).to(tl.int32)
    segment = tl.arange(0, _SEGMENTS)
    at = first
    for plane in tl.static_range(2):
        has = segment < tl.where(plane < planes, count, 0)
        each = _bytes(message, start + 12 + 8 * planes + 2 * (plane * count + segment), end, has, 2).to(tl.int32)
        tl.store(positions + plane * columns + chunk * _SEGMENTS + segment, at + tl.cumsum(each, axis=0) - each)
        tl.store(positions + (2 + plane) * columns + chunk * _SEGMENTS + segment, each)
        at += tl.sum(each, axis=0)
        fits = fits & (tl.max(each, axis=0) <= _SEGMENT)
        index = tl.arange(0, 16)
        packed = _bytes(message, start + 12 + 8 * plane + index // 2, end, index < 16, 1)
        length = (packed.to(tl.int32) >> (index % 2 * 4)) & 15
        length = tl.where((end > 0) & (plane < planes), length, 4)
        fits = fits & (tl.min(length, axis=0) >= 1) & (tl.max(length, axis=0) <= 8)
        fits = fits & (tl.sum(256 >> length, axis=0) == 256)
        window = tl.arange(0, 256)
        code, length = tl.expand_dims(_codes(length), 0), tl.expand_dims(length, 0)
        is_code = (tl.expand_dims(window, 1) & ((1 << length) - 1)) == code
        entry = tl.sum(tl.where(is_code, tl.expand_dims(index, 0) | length << 4, 0), axis=1)
        tl.store(tables + (2 * chunk + plane) * 256 + window, entry.to(tl.uint8))
    rest = at + 4 * (patches + lows)
    fixed = tl.where(mode == _FIXED, size, tl.where(mode == _FIXED_LOW, 3 * size, record - rest))
    proper = (rest + fixed == record) & (fixed >= 0) & (highest_width <= M)
    proper = proper & ((lows == 0) | ((mode == _FIXED) & (M == 23))) & ((mode != _FIXED_LOW) | (M == 23))
    plain = record - 4 == tl.where(mode == _RAW, size * ((M + E + 1) // 8), (M + E + 1) // 8)
    fits = fits & tl.where(is_plain, plain, proper)
    fields += _FIELDS * chunk
    tl.store(fields, tl.where(fits, mode, -1))
    tl.store(fields + 1, highest)
    tl.store(fields + 2, highest_width)
    tl.store(fields + 3, tl.where(fits & is_coded, patches, 0))
    tl.store(fields + 4, tl.where(fits & is_coded, lows, 0))
    tl.store(fields + 5, at)
    tl.store(fields + 6, tl.where(is_plain, 4, rest))
    tl.atomic_or(bad, (fits == 0).to(tl.int32), sem="relaxed")


@jit("message", "num_values", "chunks")
def _decode_streams(
    message, records, fields, tables, positions, classes, bad, num_values, chunks, LANES: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """Decode a stream a lane, four classes from one look at the message, and eight to a word of the result."""
    columns = chunks.to(tl.int64) * _SEGMENTS
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    plane, segment = lane // columns, lane % columns
    chunk = segment // _SEGMENTS
    there = plane < 2
    mode = tl.load(fields + _FIELDS * chunk, mask=there, other=0)
    highest = tl.load(fields + _FIELDS * chunk + 2, mask=there, other=0)
    there = there & ((mode == _VARIABLE) | (mode >= _FIXED) & (plane == 0))
    count = tl.minimum(num_values - segment * _SEGMENT, _SEGMENT).to(tl.int32)
    count = tl.where(there, tl.maximum(count, 0), 0)
    size = tl.load(positions + 2 * columns + lane, mask=there, other=0)
    start = tl.load(records + chunk, mask=there, other=0) + tl.load(positions + lane, mask=there, other=0)
    table = tables + (2 * chunk + plane) * 256
    at = tl.zeros([LANES], dtype=tl.int32)
    verbatim = tl.zeros([LANES], dtype=tl.int32)
    for step in range(0, tl.max(count, axis=0), 8):
        packed = tl.zeros([LANES], dtype=tl.uint32)
        for half in tl.static_range(2):
            window = _bytes(message, start + (at >> 3), start + size, there, 5) >> (at & 7).to(tl.uint64)
            for number in tl.static_range(4):
                live = step + 4 * half + number < count
                entry = tl.load(table + (window & 0xFF).to(tl.int32), mask=live, other=0).to(tl.int32)
                packed |= (entry & 15).to(tl.uint32) << (16 * half + 4 * number)
                at += entry >> 4
                window = window >> (entry >> 4).to(tl.uint64)
                verbatim += tl.where(live, _verbatim_bits(entry & 15, highest, M), 0)
        tl.store(classes + lane * (_SEGMENT // 8) + step // 8, packed.to(tl.int32, bitcast=True), mask=step < count)
    tl.store(positions + 4 * columns + lane, verbatim, mask=there)
    wrong = tl.max((there & ((at + 7) >> 3 != size)).to(tl.int32), axis=0)
    tl.atomic_or(bad, wrong, sem="relaxed")


@jit("message", "words", "num_values", "chunks")
def _merge(
    message, records, fields, positions, classes, words, bad, num_values, chunks, M: tl.constexpr, E: tl.constexpr
):
    """Put the words of a segment together."""
    segment = tl.program_id(0).to(tl.int64)
    chunk, columns = segment // _SEGMENTS, chunks.to(tl.int64) * _SEGMENTS
    number = (segment % _SEGMENTS).to(tl.int32)
    size = tl.minimum(num_values - chunk * _CHUNK, _CHUNK).to(tl.int32)
    index = number * _SEGMENT + tl.arange(0, _SEGMENT)
    inside = index < size
    start, end = tl.load(records + chunk), tl.load(records + chunk + 1)
    fields += _FIELDS * chunk
    mode, highest, highest_width = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    rest = start + tl.load(fields + 6)
    word = tl.zeros([_SEGMENT], dtype=tl.uint64)
    if (mode == _RAW) | (mode == _EQUAL):
        word = _bytes(
            message, rest + tl.where(mode == _RAW, index, 0) * ((M + E + 1) // 8), end, inside, (M + E + 1) // 8
        )
    elif mode >= _FIXED:
        eighth = tl.arange(0, _SEGMENT) // 8
        shift = tl.arange(0, _SEGMENT) % 8 * 4
        packed = tl.load(classes + segment * (_SEGMENT // 8) + eighth, mask=inside, other=0)
        exponent_class = (packed >> shift) & 15
        exponent = tl.where(exponent_class == 15, 0, highest - exponent_class) & ((1 << E) - 1)
        if mode == _VARIABLE:
            packed = tl.load(classes + (columns + segment) * (_SEGMENT // 8) + eighth, mask=inside, other=0)
            width_class = (packed >> shift) & 15
            bits = tl.where(inside, _verbatim_bits(width_class, highest_width, M), 0)
            each = tl.arange(0, _SEGMENTS)
            has = each * _SEGMENT < size
            each_bits = tl.load(positions + 5 * columns + chunk * _SEGMENTS + each, mask=has, other=0)
            before = tl.sum(tl.where(each < number, each_bits, 0), axis=0)
            wrong = (tl.sum(each_bits, axis=0) + 7) >> 3 != (end - rest).to(tl.int32)
            tl.atomic_or(bad, wrong.to(tl.int32), sem="relaxed")
            bit = before + tl.cumsum(bits, axis=0) - bits
            verbatim = _bytes(message, rest + (bit >> 3), end, inside, (M + 15) // 8) >> (bit & 7).to(tl.uint64)
            verbatim &= (tl.full([_SEGMENT], 1, tl.uint64) << bits.to(tl.uint64)) - 1
            sign = verbatim & 1
            known = (verbatim | 1) << (M + 1 - bits).to(tl.uint64)
            mantissa = tl.where(width_class < 14, known, verbatim ^ sign) >> 1
            word = exponent.to(tl.uint64) << M | mantissa | sign << (M + E)
        elif M == 7 or M == 23:
            top = _bytes(message, rest + index, end, inside, 1)
            word = ((top & 0x80) << 8 | exponent.to(tl.uint64) << 7 | top & 0x7F) << (M + E - 15)
            if mode == _FIXED_LOW:
                word |= _bytes(message, rest + size + 2 * index, end, inside, 2)
    tl.store(words + chunk * _CHUNK + index, word.to(words.dtype.element_ty), mask=inside)


@jit("message", "halves", "num_values")
def _patch(message, records, fields, halves, bad, num_values, M: tl.constexpr, E: tl.constexpr):
    """Write patched exponents, which are in the upper 16 bits of a word, and low bits, which are not."""
    chunk = tl.program_id(0).to(tl.int64)
    size = tl.minimum(num_values - chunk * _CHUNK, _CHUNK).to(tl.int32)
    start, end = tl.load(records + chunk), tl.load(records + chunk + 1)
    at = start + tl.load(fields + _FIELDS * chunk + 5)
    for kind in tl.static_range(2):
        count = tl.load(fields + _FIELDS * chunk + 3 + kind)
        for first in range(0, count, _SEGMENT):
            number = first + tl.arange(0, _SEGMENT)
            index = _bytes(message, at + 2 * number, end, number < count, 2).to(tl.int32)
            patch = _bytes(message, at + 2 * (count + number), end, number < count, 2).to(tl.int32)
            inside = (number < count) & (index < size)
            following = _bytes(message, at + 2 * number + 2, end, number < count - 1, 2).to(tl.int32)
            following = tl.where(number < count - 1, following, size)
            wrong = tl.max(((number < count) & (index >= following)).to(tl.int32), axis=0)
            tl.atomic_or(bad, wrong, sem="relaxed")
            half = halves + (chunk * _CHUNK + index) * ((M + E + 1) // 16)
            if kind == 0:
                half += (M + E + 1) // 16 - 1
                kept = tl.load(half, mask=inside, other=0).to(tl.int32) & (0xFFFF ^ ((1 << E) - 1) << (15 - E))
                patch = kept | (patch & ((1 << E) - 1)) << (15 - E)
            tl.store(half, patch.to(tl.int16), mask=inside)
        at += 4 * count
