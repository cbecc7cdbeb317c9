"""Pieces of tables as bytes, coded on their device: no headers, and no host that waits for the device.

A piece is what one rank sends of one table for one part: values, then ids, then zeros up to whole words, the payload of
docs/reference/wire-format.md. Both ends know the number of its rows, and from that its format and its bytes. All pieces
of a table are coded together, so the number of launches does not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from thinwire.wire import ALIGNMENT_BYTES, Format, FormatChoice, Whole, index_dtype, payload_bytes

FORMATS = (Format.COO, Format.HASH_BITMAP, Format.DENSE)
"""The formats that a device codes."""


@dataclass(frozen=True, eq=False)
class CodedPiece:
    """The number of rows of a piece, the size of its part, and what follows from them."""

    count: int
    size: int
    format: Format
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of several pieces, one piece after the other.

    Args:
        positions: int64 [k], of each row in its part.
        values: [k, width].
        pieces: int64 [k], the index of the piece of each row.
    """

    positions: Tensor
    values: Tensor
    pieces: Tensor


@dataclass(frozen=True)
class Coding:
    """How pieces of rows [width] of a dtype are coded, in one of the formats of ``choice``."""

    choice: FormatChoice
    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def piece(self, count: int, size: int) -> CodedPiece:
        """Return the piece of ``count`` rows of a part of ``size`` rows."""
        format = self.choice.smallest(count, self.row_bytes, Whole(size))
        return CodedPiece(count, size, format, payload_bytes(format, count, self.row_bytes, size, size))

    def encode(self, rows: Rows, pieces: Sequence[CodedPiece]) -> list[list[Tensor]]:
        """Return the bytes of each piece, as uint8 tensors that follow one another."""
        ends = [*accumulate((piece.count for piece in pieces), initial=0)]
        values = rows.values.contiguous().view(-1).view(torch.uint8)
        indices = [
            index
            for (format, _), run, first in _runs(pieces)
            for index in _WRITERS[format](_cut(rows, ends, first, len(run)), run)
        ]
        padding = values.new_zeros(ALIGNMENT_BYTES)
        encoded = []
        for piece, index, start, end in zip(pieces, indices, ends, ends[1:], strict=False):
            parts = [values[start * self.row_bytes : end * self.row_bytes], index]
            parts.append(padding[: piece.num_bytes - sum(part.numel() for part in parts)])
            encoded.append([part for part in parts if part.numel()])
        return encoded

    def decode(self, payloads: Sequence[Tensor], pieces: Sequence[CodedPiece], counts: Tensor) -> tuple[Rows, Tensor]:
        """Return the rows of all pieces, and whether their ids are not what these pieces can hold, bool [].

        Args:
            payloads: the bytes of each piece, each starting at a multiple of `ALIGNMENT_BYTES`.
            counts: the numbers of rows, int64 [len(pieces)], on the device.

        Positions are brought into the range of the largest part, so that no row is written elsewhere; do not use
        rows of which the second result is true.
        """
        total, device = sum(piece.count for piece in pieces), counts.device
        values = torch.cat(
            [payload[: piece.count * self.row_bytes] for payload, piece in zip(payloads, pieces, strict=True)]
        )
        ends = [*accumulate((piece.count for piece in pieces), initial=0)]
        numbers = torch.repeat_interleave(counts, output_size=total)
        found = []
        for (format, _), run, first in _runs(pieces):
            tails = [
                payload[piece.count * self.row_bytes :] for payload, piece in zip(payloads[first:], run, strict=False)
            ]
            mine = numbers[ends[first] : ends[first + len(run)]] - first
            found.append(_READERS[format](tails, run, mine))
        positions = torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=device)
        stride = max((piece.size for piece in pieces), default=0)
        wrong = ((positions < 0) | (positions >= stride)).any()
        positions = positions.clamp(0, max(0, stride - 1))
        keys = numbers * stride + positions
        wrong = wrong | (keys[1:] <= keys[:-1]).any()
        return Rows(positions, values.view(self.dtype).view(total, self.width), numbers), wrong


def _runs(pieces: Sequence[CodedPiece]) -> Iterator[tuple[tuple[Format, object], list[CodedPiece], int]]:
    """Yield pieces in a row that are coded alike, and the index of the first of them; empty ones are like any."""
    first = 0
    for key, group in groupby(pieces, lambda piece: (piece.format, index_dtype(piece.size))):
        run = [*group]
        yield key, run, first
        first += len(run)


def _cut(rows: Rows, ends: Sequence[int], first: int, length: int) -> tuple[Tensor, Tensor]:
    span = slice(ends[first], ends[first + length])
    return rows.positions[span], rows.pieces[span] - first


def _write_coo(rows: tuple[Tensor, Tensor], run: Sequence[CodedPiece]) -> list[Tensor]:
    dtype = index_dtype(run[0].size)
    index = rows[0].to(dtype).view(torch.uint8)
    return list(index.split([piece.count * dtype.itemsize for piece in run]))


def _read_coo(tails: Sequence[Tensor], run: Sequence[CodedPiece], pieces: Tensor) -> Tensor:
    dtype = index_dtype(run[0].size)
    cut = [tail[: piece.count * dtype.itemsize] for tail, piece in zip(tails, run, strict=True)]
    index = torch.cat(cut).view(dtype).to(torch.int64)
    return index & 0xFFFF if dtype == torch.int16 else index


def _write_bitmaps(rows: tuple[Tensor, Tensor], run: Sequence[CodedPiece]) -> list[Tensor]:
    positions, pieces = rows
    stride = _bitmap_bytes(max(piece.size for piece in run))
    bitmap = pack_bits(positions + pieces * (8 * stride), len(run) * stride)
    lengths = [_bitmap_bytes(piece.size) if piece.count else 0 for piece in run]
    return [bitmap[place * stride :][:length] for place, length in enumerate(lengths)]


def _read_bitmaps(tails: Sequence[Tensor], run: Sequence[CodedPiece], pieces: Tensor) -> Tensor:
    stride = _bitmap_bytes(max(piece.size for piece in run))
    bitmap = tails[0].new_zeros(len(run), stride)
    for row, tail, piece in zip(bitmap, tails, run, strict=True):
        if piece.count:
            length = _bitmap_bytes(piece.size)
            row[:length] = tail[:length]
    return list_ones(bitmap.view(-1), pieces.numel()) - pieces * (8 * stride)


def _bitmap_bytes(size: int) -> int:
    return (size + 7) // 8


def _write_nothing(rows: tuple[Tensor, Tensor], run: Sequence[CodedPiece]) -> list[Tensor]:
    return [rows[0][:0].view(torch.uint8)] * len(run)


def _read_all(tails: Sequence[Tensor], run: Sequence[CodedPiece], pieces: Tensor) -> Tensor:
    return torch.cat([torch.arange(piece.count, device=pieces.device) for piece in run])


_WRITERS: dict[Format, Callable[[tuple[Tensor, Tensor], Sequence[CodedPiece]], list[Tensor]]] = {
    Format.COO: _write_coo,
    Format.HASH_BITMAP: _write_bitmaps,
    Format.DENSE: _write_nothing,
}
_READERS: dict[Format, Callable[[Sequence[Tensor], Sequence[CodedPiece], Tensor], Tensor]] = {
    Format.COO: _read_coo,
    Format.HASH_BITMAP: _read_bitmaps,
    Format.DENSE: _read_all,
}


def pack_bits(positions: Tensor, num_bytes: int) -> Tensor:
    """Return a bitmap uint8 [num_bytes] with ones at unique positions, least significant bit first."""
    bits = torch.zeros(8 * num_bytes, dtype=torch.uint8, device=positions.device)
    bits[positions] = 1
    return (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def list_ones(bitmap: Tensor, count: int) -> Tensor:
    """Return the positions int64 [count] of the ones of a bitmap, increasing; not one of them if it has others."""
    bits = (bitmap[:, None] >> torch.arange(8, dtype=torch.uint8, device=bitmap.device)) & 1
    ones = torch.nonzero_static(bits.view(-1), size=count + 1, fill_value=-1).view(-1)
    return torch.where(ones[-1] < 0, ones[:-1], -1)
