"""Encoding of rows as bytes: formats, exact sizes, and headers of payloads (docs/reference/wire-format.md)."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import CorruptMessageError
from thinwire.observe.step import ranged
from thinwire.rows import floats

ALIGNMENT_BYTES = 8
MIN_CODED_BYTES = 4096
"""Fewest bytes of values that are coded."""
MOST_CODED = 0.9
"""Largest part of the bytes of values, by a sample, for which they are coded: less to gain is not worth the time."""
_INDEX_DTYPES = ((1 << 8, torch.uint8), (1 << 16, torch.int16), (1 << 31, torch.int32), (1 << 63, torch.int64))


class Format(StrEnum):
    """Encoding of the ids of a part in a message."""

    COO = "coo"  # one index a row, of the smallest integer that holds every position of the part
    BITMAP = "bitmap"  # one bit for each row of the whole tensor
    HASH_BITMAP = "hash_bitmap"  # one bit for each position of the part (ZEN, section 3.3)
    DENSE = "dense"  # no ids: every position of the part, zeros included
    ELIAS_FANO = "elias_fano"  # the positions of the part, each in about 2 bits and log2 of the mean gap


FORMATS = tuple(Format)
_CODE = {format: code for code, format in enumerate(FORMATS)}


class Part(Protocol):
    """The share of a tensor's rows that belongs to one owner: a bijection of ids and positions, increasing in both."""

    @property
    def num_rows(self) -> int: ...
    @property
    def size(self) -> int: ...
    def ids(self, positions: Tensor) -> Tensor: ...
    def positions(self, ids: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Whole:
    """The part that holds all rows, for centralization: position = id."""

    num_rows: int

    @property
    def size(self) -> int:
        return self.num_rows

    def ids(self, positions: Tensor) -> Tensor:
        return positions

    def positions(self, ids: Tensor) -> Tensor:
        return ids


def index_dtype(size: int) -> torch.dtype:
    """Return the integer type in which COO sends a position of a part of ``size`` rows."""
    return next(dtype for limit, dtype in _INDEX_DTYPES if size <= limit)


def payload_bytes(format: Format, count: int, row_bytes: int, size: int, num_rows: int) -> int:
    """Return the exact bytes of a payload of ``count`` rows of ``row_bytes``, in a part of ``size`` of ``num_rows``."""
    rows_sent = size if format is Format.DENSE else count
    return aligned(rows_sent * row_bytes + index_bytes(format, count, size, num_rows))


def index_bytes(format: Format, count: int, size: int, num_rows: int) -> int:
    """Return the exact bytes of the ids of ``count`` rows, in a part of ``size`` of ``num_rows``."""
    if format is Format.DENSE or count == 0:
        return 0
    if format is Format.COO:
        return count * index_dtype(size).itemsize
    if format is Format.ELIAS_FANO:
        return kernels.elias_fano_bytes(count, size)
    return ((size if format is Format.HASH_BITMAP else num_rows) + 7) // 8


@lru_cache(maxsize=4096)
def most_payload_bytes(row_bytes: int, size: int, num_rows: int) -> int:
    """Return the bytes of a payload of all rows of a part, in the most wasteful format."""
    return max(payload_bytes(format, size, row_bytes, size, num_rows) for format in FORMATS)


@lru_cache(maxsize=4096)
def smallest(
    formats: tuple[Format, ...], count: int, row_bytes: int, size: int, num_rows: int, dense_switch: bool = False
) -> Format:
    """Return the format of fewest bytes, the earlier one of equals; Elias-Fano only where it saves more than 1/256.

    DENSE does not say which rows were present, so it is chosen only if all are, or if it is the only one; or, with
    ``dense_switch``, listed or not, if it has fewer bytes than all others: rows of zeros then appear as present.
    Elias-Fano is the most work: for rows of 2 kB, whose ids are a thousandth of a message, it cost 8 ranks on two
    cores 15 ms of a 340 ms synchronization.
    """

    def num_bytes(format: Format) -> int:
        return payload_bytes(format, count, row_bytes, size, num_rows)

    exact = [format for format in formats if format is not Format.DENSE or count == size] or list(formats)
    if dense_switch and num_bytes(Format.DENSE) < min(map(num_bytes, exact)):
        return Format.DENSE
    plain = [format for format in exact if format is not Format.ELIAS_FANO]
    if not plain:
        return Format.ELIAS_FANO
    best = min(plain, key=num_bytes)
    if len(plain) == len(exact):
        return best
    return Format.ELIAS_FANO if num_bytes(Format.ELIAS_FANO) < num_bytes(best) * 255 // 256 else best


@dataclass(frozen=True)
class FormatChoice:
    """The formats that a message may have; `smallest` chooses one of them."""

    formats: tuple[Format, ...]
    dense_switch: bool = False

    def smallest(self, count: int, row_bytes: int, part: Part) -> Format:
        """Return the format for ``count`` rows of a part, each of ``row_bytes``."""
        return smallest(self.formats, count, row_bytes, part.size, part.num_rows, self.dense_switch)


@ranged("pack")
def encode(
    format: Format,
    part: Part,
    positions: Tensor,
    values: Tensor,
    order: Tensor | None = None,
    *,
    codes_values: bool = False,
) -> Tensor:
    """Encode rows as a new payload: values first (so that they are aligned), then ids, then padding with zeros.

    Args:
        part: the part that the rows belong to.
        positions: int64 [k], strictly increasing positions in the part.
        values: [k, width]; or, with ``order``, a larger matrix of which the rows ``order`` [k] are encoded, which
            saves one copy.
        codes_values: whether values travel as their code (`thinwire.rows.floats`) where a sample says that it pays.

    Returns:
        uint8 [payload_bytes(...)]; shorter if values are coded, by which a receiver knows that.
    """
    count, width = positions.numel(), values.shape[1]
    row_bytes = width * values.element_size()
    total = payload_bytes(format, count, row_bytes, part.size, part.num_rows)
    payload = torch.empty(total, dtype=torch.uint8)
    end = _write_values(format, payload, part.size, positions, values, order)
    index = _encode_index(format, part, positions) if count and format is not Format.DENSE else payload[:0]
    code = code_of(payload[:end].view(values.dtype)) if codes_values else None
    if code is not None and aligned(code.numel() + index.numel() + 1) < total:
        shorter = torch.zeros(aligned(code.numel() + index.numel() + 1), dtype=torch.uint8)
        shorter[: code.numel()] = code
        shorter[code.numel() : code.numel() + index.numel()] = index
        shorter[-1] = shorter.numel() - code.numel() - index.numel()
        return shorter
    payload[end : end + index.numel()] = index
    payload[end + index.numel() :] = 0
    return payload


def code_of(values: Tensor) -> Tensor | None:
    """Return the code of values, shorter than they are; None for few values, or where a sample saves hardly any."""
    if values.nbytes < MIN_CODED_BYTES or not values.is_floating_point():
        return None
    if floats.bits_per_value(values) > MOST_CODED * 8 * values.element_size():
        return None
    code = floats.encode(values)
    return code if code.numel() < values.nbytes else None


def decode(
    format: Format, part: Part, count: int, payload: Tensor, width: int, dtype: torch.dtype,
    check_fits: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decode a payload into positions, int64 [k], and values [k, width], which share its memory unless it is coded.

    Args:
        check_fits: called with the bytes of values that are coded, before they get memory.

    Raises:
        CorruptMessageError: the length is not that of ``count`` rows, or the ids are not ``count`` strictly
            increasing positions of the part.
    """
    row_bytes = width * dtype.itemsize
    expected = payload_bytes(format, count, row_bytes, part.size, part.num_rows)
    if payload.numel() > expected or count > part.size:
        raise CorruptMessageError(f"a payload of {payload.numel()} bytes, where {count} rows need {expected}")
    rows_sent = part.size if format is Format.DENSE else count
    end = rows_sent * row_bytes
    if payload.numel() == expected:
        values, tail = payload[:end].view(dtype), payload[end:]
    else:
        index = index_bytes(format, count, part.size, part.num_rows)
        values, tail = _decode_values(payload, rows_sent * width, dtype, index, check_fits)
    values = values.view(rows_sent, width)
    if format is Format.DENSE:
        return torch.arange(part.size), values
    if count == 0:
        return torch.empty(0, dtype=torch.int64), values
    positions = _decode_index(format, part, count, tail)
    if positions.numel() != count or not _is_increasing(positions, part.size):
        raise CorruptMessageError(f"the ids of a {format.value} payload are not {count} rows of their part")
    return positions, values


def _decode_values(
    payload: Tensor, numel: int, dtype: torch.dtype, index_bytes: int, check_fits: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    """Return values from a payload that has their code, see `encode`, and what follows: ids and padding."""
    padding = int(payload[-1]) if payload.numel() else 0
    end = payload.numel() - padding - index_bytes
    is_padded = 1 <= padding <= ALIGNMENT_BYTES and not bool(payload[-padding:-1].any())
    least = -(-numel // floats.CHUNK_VALUES) * (4 + dtype.itemsize)  # of chunks whose values are equal
    if not is_padded or not least <= end < numel * dtype.itemsize or not dtype.is_floating_point:
        raise CorruptMessageError(f"a payload of {payload.numel()} bytes is too short for {numel} values")
    check_fits(numel * dtype.itemsize)
    values = torch.empty(numel, dtype=dtype)
    floats.decode(payload[:end], values)
    return values, payload[end:]


def _write_values(
    format: Format, payload: Tensor, size: int, positions: Tensor, values: Tensor, order: Tensor | None
) -> int:
    count, width = positions.numel(), values.shape[1]
    rows_sent = size if format is Format.DENSE else count
    end = rows_sent * width * values.element_size()
    target = payload[:end].view(values.dtype).view(rows_sent, width)
    if format is Format.DENSE:
        source = values if order is None else values.index_select(0, order)
        target.zero_().index_copy_(0, positions, source)
    elif order is None:
        target.copy_(values)
    else:
        kernels.gather_rows(values, order, target)
    return end


def _encode_index(format: Format, part: Part, positions: Tensor) -> Tensor:
    if format is Format.COO:
        return positions.to(index_dtype(part.size)).view(torch.uint8)
    if format is Format.HASH_BITMAP:
        return kernels.pack_bits(positions, part.size)
    if format is Format.ELIAS_FANO:
        return kernels.elias_fano_encode(positions, part.size)
    return kernels.pack_bits(part.ids(positions), part.num_rows)


def _decode_index(format: Format, part: Part, count: int, tail: Tensor) -> Tensor:
    if format is Format.COO:
        dtype = index_dtype(part.size)
        index = tail[: count * dtype.itemsize].clone().view(dtype).to(torch.int64)  # a copy is aligned
        return index & 0xFFFF if dtype == torch.int16 else index
    if format is Format.HASH_BITMAP:
        return kernels.unpack_bits(tail[: (part.size + 7) // 8])
    if format is Format.ELIAS_FANO:
        return kernels.elias_fano_decode(tail[: kernels.elias_fano_bytes(count, part.size)], count, part.size)
    ids = kernels.unpack_bits(tail[: (part.num_rows + 7) // 8])
    if ids.numel() and int(ids[-1]) >= part.num_rows:
        raise CorruptMessageError(f"a bitmap of {part.num_rows} rows names row {int(ids[-1])}")
    positions = part.positions(ids)
    if not torch.equal(part.ids(positions.clamp(max=max(part.size - 1, 0))), ids):
        raise CorruptMessageError("a bitmap names rows of another owner")
    return positions


def _is_increasing(positions: Tensor, size: int) -> bool:
    inside = int(positions[0]) >= 0 and int(positions[-1]) < size
    return inside and bool((positions[1:] > positions[:-1]).all())


def aligned(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to whole words of `ALIGNMENT_BYTES`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def ring_all_reduce_bytes(tensor_bytes: int, world_size: int) -> int:
    """Return the bytes that a rank sends in a ring all-reduce: 2 (n - 1) / n of the tensor, rounded up."""
    return -(-2 * (world_size - 1) * tensor_bytes // world_size)


def digest64(data: bytes) -> int:
    """Return a hash of 64 bits, the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class Kind(IntEnum):
    """Purpose of a message; a receiver accepts only the kind that it waits for, or ERROR."""

    ERROR = 0  # the payload is a sentence in UTF-8
    OPEN = 1  # no payload: the ranks agree that they mean the same, and how many rows each holds
    PUSH = 2  # rows on their way to their owner
    PULL = 3  # summed rows on their way from their owner
    GATHER = 4  # a rank's whole tensor on its way to all


_KINDS = tuple(Kind)  # by their numbers


@dataclass(frozen=True)
class Header:
    """The announcement of a payload, of a fixed size, so that it can be received without knowing anything."""

    kind: Kind
    source: int  # rank in the lane's group
    sequence: int  # number of the job on the lane, modulo 2^32
    digest: int  # identity of what is synchronized: name, shape, dtype, operation, scheme, seed
    format: Format = Format.COO
    held: int = 0  # rows that the sender holds of the whole tensor
    count: int = 0  # rows in the payload
    payload_bytes: int = 0
    checksum: int = 0

    _STRUCT = struct.Struct("<2sBBBxHIIQQQQQ")
    _FIELDS = struct.Struct("<BBHIQQQQQ")
    _PADDING, _CRC = slice(5, 6), slice(12, 16)
    NUM_BYTES = 56
    _MAGIC = b"TW"
    VERSION = 3

    def pack(self) -> bytes:
        data = self._STRUCT.pack(
            self._MAGIC, self.VERSION, self.kind, _CODE[self.format], self.source, self.sequence, 0,
            self.digest, self.held, self.count, self.payload_bytes, self.checksum,
        )  # fmt: skip
        return self._with_crc(data, zlib.crc32(data))

    @classmethod
    def _with_crc(cls, data: bytes, crc: int) -> bytes:
        return data[: cls._CRC.start] + crc.to_bytes(4, "little") + data[cls._CRC.stop :]

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Return the header in ``data``; raise CorruptMessageError for anything that this version would not send."""
        if len(data) != cls.NUM_BYTES:
            raise CorruptMessageError(f"a header of {len(data)} bytes instead of {cls.NUM_BYTES}")
        fields = cls._STRUCT.unpack(data)
        magic, version, kind, code, source, sequence, crc, digest, held, count, length, checksum = fields
        if magic != cls._MAGIC:
            raise CorruptMessageError(
                "bytes that are not a thinwire header: the rank made another call, or another program uses this group"
            )
        if version != cls.VERSION:
            raise CorruptMessageError(
                f"wire format version {version}, this rank speaks {cls.VERSION}: install the same thinwire everywhere"
            )
        if kind >= len(_KINDS) or code >= len(FORMATS):
            raise CorruptMessageError(f"a header of unknown kind {kind} or format {code}")
        if zlib.crc32(cls._with_crc(data, 0)) != crc or any(data[cls._PADDING]):
            raise CorruptMessageError("a header whose checksum does not match")
        header = cls(_KINDS[kind], source, sequence, digest, FORMATS[code], held, count, length, checksum)
        if not length and checksum != header.bound(0):
            raise CorruptMessageError("a header of nothing whose checksum does not match")
        return header

    def bound(self, content: int) -> int:
        """Return the checksum of a payload and the header's other fields, since CRC-32 misses one change in 2^32."""
        fields = self._FIELDS.pack(
            self.kind, _CODE[self.format], self.source, self.sequence,
            self.digest, self.held, self.count, self.payload_bytes, content,
        )  # fmt: skip
        return digest64(fields)


@dataclass(frozen=True, eq=False)
class Message:
    """A header and the payload that it announces (uint8, empty if there is none)."""

    header: Header
    payload: Tensor
    saved_bytes: int = 0  # by the code of its values, on the rank that made it

    @classmethod
    def sealed(cls, header: Header, payload: Tensor, saved_bytes: int = 0) -> Message:
        """Return a message with the length and checksum of the payload filled into its header."""
        kind, source, sequence, digest = header.kind, header.source, header.sequence, header.digest
        format, held, count, length = header.format, header.held, header.count, payload.numel()
        unsealed = Header(kind, source, sequence, digest, format, held, count, length)
        checksum = unsealed.bound(kernels.checksum(payload))
        header = Header(kind, source, sequence, digest, format, held, count, length, checksum)
        return cls(header, payload, saved_bytes)

    def verify(self) -> None:
        """Raise CorruptMessageError unless the payload is the one that the header announced."""
        if self.payload.numel() != self.header.payload_bytes:
            raise CorruptMessageError(
                f"a truncated message: {self.payload.numel()} of {self.header.payload_bytes} bytes"
            )
        if self.header.bound(kernels.checksum(self.payload)) != self.header.checksum:
            raise CorruptMessageError("a message whose checksum does not match: bits changed on the way")
