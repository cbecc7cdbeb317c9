"""The code of floating-point values in numpy: the definition of correct, with which both compiled twins are compared.

docs/reference/wire-format.md ("Floats") describes the format. What a chunk's code looks like follows from a sample of
its values by `choose_code`, in integers: that is the choice of the library itself, uncompiled, and no second one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import floats as compiled
from thinwire.kernels.dispatch import Kernel
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
    FloatLayout,
    words_of,
)

choose_code = getattr(compiled.choose_code, "py_func", compiled.choose_code)
HEADER_BYTES = {RAW: 4, EQUAL: 4, FIXED: 20, FIXED_LOW: 20, VARIABLE: 28}
WINDOW, WIDTH_WINDOW = 15, 14
ZERO, VERBATIM, NO_WIDTH = 15, 14, 15
CODE_BITS = 8


def definition(kernel: Kernel) -> Callable[..., Any]:
    """Return the definition of correct of any kernel; the library has no plain one of these codes."""
    known = {function.__name__: function for function in (encode_floats, decode_floats, estimate_floats)}
    return known.get(kernel.name, kernel.reference)


def encode_floats(values: Tensor) -> Tensor:
    """Return the code of contiguous float16, bfloat16, float32 or float64 values, uint8 [k], k <= their bytes.

    Of k equal to their bytes it is the values themselves, and may share their memory.
    """
    words, layout = words_of(values)
    records = [_encode(words[at : at + CHUNK_VALUES], layout) for at in range(0, words.size, CHUNK_VALUES)]
    if sum(record.size for record in records) >= words.nbytes:
        return torch.from_numpy(words.view(np.uint8)) if words.size else torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.concatenate(records))


def decode_floats(message: Tensor, out: Tensor) -> bool:
    """Fill contiguous ``out`` from the code of as many values; return False, with ``out`` undefined, if it is none."""
    data, (words, layout) = message.numpy(), words_of(out)
    if data.size == words.nbytes:
        words.view(np.uint8)[:] = data
        return True
    if data.size > words.nbytes:
        return False
    records, at = [], 0
    for start in range(0, words.size, CHUNK_VALUES):
        part = words[start : start + CHUNK_VALUES]
        size = int.from_bytes(data[at + 1 : at + 4].tobytes(), "little")
        if at + 4 > data.size or not 4 <= size <= data.size - at:
            return False
        record = _Record.parse(data[at : at + size], part, layout)
        if record is None:
            return False
        records.append(record)
        at += size
    streams = [stream for record in records for stream in record.streams()]
    return at == data.size and _decode_streams(streams) and all(record.finish() for record in records)


def estimate_floats(values: Tensor) -> float:
    """Return about how many bits of a value the code of `encode_floats` has, from a sample."""
    words, layout = words_of(values)
    item_bits, chunks = 8 * words.itemsize, -(-words.size // CHUNK_VALUES)
    bits = sampled = 0
    chosen, lengths = np.zeros(3, np.int64), np.zeros((2, 16), np.int64)
    for chunk in range(0, chunks, 1 + max(0, chunks - 1) // ESTIMATED_CHUNKS):
        part = words[chunk * CHUNK_VALUES : (chunk + 1) * CHUNK_VALUES]
        are_equal = (part == part[0]).all()
        part = part[_sample(part.size, min(SAMPLED_VALUES, ESTIMATED_VALUES // min(chunks, ESTIMATED_CHUNKS)))]
        if not are_equal:
            bits += choose_code(*_counts(part, layout), item_bits, chosen, lengths)
            bits += OVERHEAD * part.size if chosen[0] > RAW else 0
        sampled += part.size
    return min(float(bits) / sampled, float(item_bits)) if sampled else 0.0


def _encode(words: np.ndarray, layout: FloatLayout) -> np.ndarray:
    """Return the record of a chunk."""
    if (words == words[0]).all():
        return _join(EQUAL, words[:1])
    exponents, mantissas, signs = _split(words, layout)
    widths = _widths(mantissas, layout.mantissa)
    chosen, lengths = np.zeros(3, np.int64), np.zeros((2, 16), np.int64)
    sample = words[_sample(words.size, SAMPLED_VALUES)]
    choose_code(*_counts(sample, layout), 8 * words.itemsize, chosen, lengths)
    mode, highest, highest_width = map(int, chosen)
    if mode == RAW:
        return _join(RAW, words)
    classes = highest - exponents
    outside = (exponents > 0) & ((classes < 0) | (classes >= WINDOW))
    classes[(exponents == 0) | outside] = ZERO
    planes = [_encode_plane(classes, lengths[0])]
    (patched,), low = outside.nonzero(), np.empty(0, np.int64)
    if mode == FIXED and layout.mantissa == 23:
        (low,) = (words & 0xFFFF).nonzero()
    if mode == VARIABLE:
        width_classes = highest_width - widths
        width_classes[(width_classes < 0) | (width_classes >= WIDTH_WINDOW)] = VERBATIM
        width_classes[widths == 0] = NO_WIDTH
        planes.append(_encode_plane(width_classes, lengths[1]))
        shifted = (mantissas >> (layout.mantissa - widths).astype(np.uint64)) & ~np.uint64(1)
        verbatim = np.where(width_classes == VERBATIM, mantissas << np.uint64(1), shifted) | signs
        rest = [_pack(verbatim, _verbatim_bits(width_classes, highest_width, layout.mantissa))]
    else:
        tops = words >> np.array(16 if layout.mantissa == 23 else 0, words.dtype)
        rest = [(tops >> 8 & 0x80 | tops & 0x7F).astype(np.uint8)]
        rest += [words.astype("<u2")] if mode == FIXED_LOW else []
    record = _join(
        mode, np.array([highest, highest_width, patched.size, low.size], "<u2"),
        *[(code[::2] | code[1::2] << 4).astype(np.uint8) for code in lengths[: len(planes)]],
        *[sizes for sizes, _ in planes], *[stream for _, stream in planes],
        patched.astype("<u2"), exponents[patched].astype("<u2"), low.astype("<u2"), words[low].astype("<u2"), *rest,
    )  # fmt: skip
    return record if record.size < 4 + words.nbytes else _join(RAW, words)


def _sample(size: int, limit: int) -> np.ndarray:
    """Return which of ``size`` values are in the sample: runs of at most ``limit`` values, one of every so many.

    The second one is taken of the second so many, and so on: at equal distances they would be the same columns of a
    matrix of 128 or 1024 columns.
    """
    runs, every = np.arange(size) // SAMPLED_RUN, 1 + (size - 1) // limit
    return runs % every == runs // every % every


def _counts(words: np.ndarray, layout: FloatLayout) -> tuple[np.ndarray, np.ndarray, int]:
    """Return what `choose_code` wants to know of a sample."""
    exponents, mantissas, _ = _split(words, layout)
    widths = np.bincount(_widths(mantissas, layout.mantissa), minlength=layout.mantissa + 1)
    lows = int(np.count_nonzero(words & 0xFFFF)) if layout.mantissa == 23 else 0
    return np.bincount(exponents, minlength=1 << layout.exponent), widths, lows


def _join(mode: int, *parts: np.ndarray) -> np.ndarray:
    size = 4 + sum(part.nbytes for part in parts)
    return np.concatenate(
        [np.array([mode | size << 8], "<u4").view(np.uint8), *[part.view(np.uint8) for part in parts]]
    )


def _split(words: np.ndarray, layout: FloatLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return exponents, int64, mantissas and signs, uint64."""
    wide = words.astype(np.uint64)
    exponents = wide >> np.uint64(layout.mantissa) & np.uint64((1 << layout.exponent) - 1)
    signs = wide >> np.uint64(layout.mantissa + layout.exponent)
    return exponents.astype(np.int64), wide & np.uint64((1 << layout.mantissa) - 1), signs


def _widths(mantissas: np.ndarray, bits: int) -> np.ndarray:
    """Return the number of bits from the highest of a mantissa to its lowest one, int64; 0 of a mantissa of zero."""
    lowest = (mantissas & (~mantissas + np.uint64(1))).astype(np.float64)
    return np.where(mantissas > 0, bits + 1 - np.frexp(lowest)[1], 0)


def _verbatim_bits(width_classes: np.ndarray, highest_width: int, mantissa: int) -> np.ndarray:
    """Return how many bits the sign and the mantissa take of each value, int64."""
    table = np.maximum(highest_width - np.arange(16), 1)
    table[VERBATIM], table[NO_WIDTH] = mantissa + 1, 1
    return table[width_classes]


def _pack(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Write the low bits of values one after another, the lowest bit first."""
    ends = np.cumsum(sizes)
    bits = np.zeros(int(ends[-1]), np.uint8)
    for bit in range(int(sizes.max())):
        has = sizes > bit
        bits[(ends - sizes)[has] + bit] = values[has] >> np.uint64(bit) & np.uint64(1)
    return np.packbits(bits, bitorder="little")


def _codes(lengths: np.ndarray) -> np.ndarray:
    """Return the canonical code of each class with its first bit lowest: by length, then by class."""
    codes, code = np.zeros(16, np.uint64), 0
    for length in range(1, CODE_BITS + 1):
        for index in range(16):
            if lengths[index] == length:
                codes[index] = int(f"{code:0{length}b}"[::-1], 2)
                code += 1
        code <<= 1
    return codes


def _encode_plane(classes: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sizes of the streams of all segments, and the streams."""
    codes, streams = _codes(lengths), []
    for at in range(0, classes.size, SEGMENT_VALUES):
        part = classes[at : at + SEGMENT_VALUES]
        streams.append(_pack(codes[part], lengths[part]))
    return np.array([stream.size for stream in streams], "<u2"), np.concatenate(streams)


class _Stream(NamedTuple):
    data: np.ndarray
    table: np.ndarray
    out: np.ndarray


def _decode_streams(streams: list[_Stream]) -> bool:
    """Decode all streams side by side, a class of each at a time; return whether they end where they should."""
    if not streams:
        return True
    room = SEGMENT_VALUES + 2
    buffer = np.zeros((len(streams), room), np.uint8)
    for row, stream in zip(buffer, streams, strict=True):
        row[: stream.data.size] = stream.data
    buffer, tables = buffer.reshape(-1), np.concatenate([stream.table for stream in streams])
    counts = np.array([stream.out.size for stream in streams])
    starts, table_starts = np.arange(len(streams)) * room * 8, np.arange(len(streams)) << CODE_BITS
    at, classes = starts.copy(), np.empty((int(counts.max()), len(streams)), np.uint8)
    whole = int(counts.min())
    for step in range(len(classes)):
        byte = at >> 3
        window = (buffer[byte] | buffer[byte + 1].astype(np.int64) << 8) >> (at & 7) & 0xFF
        entry = tables[table_starts + window]
        classes[step] = entry & 15
        at += entry >> 4 if step < whole else np.where(step < counts, entry >> 4, 0)
    for index, stream in enumerate(streams):
        stream.out[:] = classes[: stream.out.size, index]
    return bool((at - starts + 7 >> 3 == [stream.data.size for stream in streams]).all())


class _Record:
    """The code of a chunk, of which the sizes fit."""

    def __init__(self, words: np.ndarray, layout: FloatLayout, mode: int, rest: np.ndarray) -> None:
        self.words, self.layout, self.mode, self.rest = words, layout, mode, rest
        self.highest = self.highest_width = 0
        self.planes: list[np.ndarray] = []
        self.coded: list[_Stream] = []
        self.patches = self.lows = (rest.view(np.uint8)[:0].view("<u2"),) * 2

    @classmethod
    def parse(cls, data: np.ndarray, words: np.ndarray, layout: FloatLayout) -> _Record | None:
        """Read a record of ``words.size`` values; None if it is none."""
        mode, header = int(data[0]), HEADER_BYTES.get(int(data[0]), 1 << 30)
        if data.size < header or (mode in (FIXED, FIXED_LOW) and layout.mantissa not in (7, 23)):
            return None
        if mode in (RAW, EQUAL):
            fits = data.size - 4 == (words.nbytes if mode == RAW else words.itemsize)
            return cls(words, layout, mode, data[4:]) if fits else None
        fields = data[4:12].view("<u2")
        num_planes, num_segments = 1 + (mode == VARIABLE), -(-words.size // SEGMENT_VALUES)
        patches, lows = int(fields[2]), int(fields[3])
        start = header + 2 * num_planes * num_segments
        if start > data.size:
            return None
        sizes = data[header:start].view("<u2").astype(np.int64)
        end = start + int(sizes.sum())
        rest = end + 4 * (patches + lows)
        fixed = {FIXED: words.size, FIXED_LOW: 3 * words.size}.get(mode, data.size - rest)
        if (
            rest + fixed != data.size
            or fixed < 0
            or sizes.max() > SEGMENT_VALUES
            or (lows and (mode, layout.mantissa) != (FIXED, 23))
        ):
            return None
        if (mode == FIXED_LOW and layout.mantissa != 23) or fields[1] > layout.mantissa:
            return None
        record = cls(words, layout, mode, data[rest:])
        record.highest, record.highest_width = int(fields[0]), int(fields[1])
        u16 = data[end:rest].view("<u2")
        record.patches = u16[:patches], u16[patches : 2 * patches]
        record.lows = u16[2 * patches : 2 * patches + lows], u16[2 * patches + lows :]
        wheres = [np.append(where.astype(np.int64), words.size) for where, _ in (record.patches, record.lows)]
        if any((np.diff(where) <= 0).any() for where in wheres):  # positions increase
            return None
        for plane in range(num_planes):
            packed = data[12 + 8 * plane : 20 + 8 * plane]
            lengths = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1).astype(np.int64)
            if lengths.min() < 1 or lengths.max() > CODE_BITS or (1 << (CODE_BITS - lengths)).sum() != 1 << CODE_BITS:
                return None
            table, classes = np.zeros(1 << CODE_BITS, np.int64), np.empty(words.size, np.uint8)
            for index, (code, length) in enumerate(zip(_codes(lengths), lengths, strict=True)):
                table[int(code) :: 1 << int(length)] = index | int(length) << 4
            record.planes.append(classes)
            for segment in range(num_segments):
                size = int(sizes[plane * num_segments + segment])
                part = slice(segment * SEGMENT_VALUES, (segment + 1) * SEGMENT_VALUES)
                record.coded.append(_Stream(data[start : start + size], table, classes[part]))
                start += size
        return record

    def streams(self) -> list[_Stream]:
        return self.coded

    def finish(self) -> bool:
        """Write the values, now that the streams are decoded; return whether the mantissas end where they should."""
        words, layout = self.words, self.layout
        if self.mode in (RAW, EQUAL):
            words[:] = np.frombuffer(self.rest.tobytes(), layout.word)
            return True
        mask = (1 << layout.exponent) - 1
        exponents = np.where(self.planes[0] == ZERO, 0, self.highest - self.planes[0].astype(np.int64)) & mask
        exponents[self.patches[0]] = self.patches[1] & mask
        wide = exponents.astype(np.uint64)
        if self.mode == VARIABLE:
            sizes = _verbatim_bits(self.planes[1], self.highest_width, layout.mantissa)
            if (int(sizes.sum()) + 7) >> 3 != self.rest.size:
                return False
            verbatim = _unpack(self.rest, sizes)
            body, signs = verbatim & ~np.uint64(1), verbatim & np.uint64(1)
            is_known = self.planes[1] < WIDTH_WINDOW
            shift = np.where(is_known, layout.mantissa + 1 - sizes, 0).astype(np.uint64)
            mantissas = (body | is_known.astype(np.uint64)) << shift >> np.uint64(1)
            whole = (
                wide << np.uint64(layout.mantissa) | mantissas | signs << np.uint64(layout.exponent + layout.mantissa)
            )
            words[:] = whole.astype(layout.word)
            return True
        tops = self.rest[: words.size].astype(np.uint32)
        tops = (tops & 0x80) << 8 | wide.astype(np.uint32) << 7 | tops & 0x7F
        if layout.mantissa == 7:
            words[:] = tops
            return True
        words[:] = tops << 16
        words[self.lows[0]] |= self.lows[1].astype(words.dtype)
        if self.mode == FIXED_LOW:
            words |= np.frombuffer(self.rest[words.size :].tobytes(), "<u2").astype(words.dtype)
        return True


def _unpack(data: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    bits, starts = np.unpackbits(data, bitorder="little").astype(np.uint64), np.cumsum(sizes) - sizes
    values = np.zeros(sizes.size, np.uint64)
    for bit in range(int(sizes.max())):
        has = sizes > bit
        values[has] |= bits[starts[has] + bit] << np.uint64(bit)
    return values
