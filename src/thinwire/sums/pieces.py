"""Pieces of tables as bytes, coded on their device: no headers, and no host that waits for the device.

A piece is what one rank sends of one table for one part: values, then ids, as in the payload of
docs/reference/wire-format.md, then zeros up to a multiple of 16 bytes. Both ends know the number of its rows, and from
that its format and its bytes. All pieces of a table are coded together, so the number of launches does not grow with
the number of ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.rows.formats import Format, FormatChoice, Whole, index_dtype, payload_bytes

FORMATS = (Format.COO, Format.HASH_BITMAP, Format.DENSE)
"""The formats that a device codes."""
ALIGNMENT_BYTES = 16
"""Pieces are whole numbers of these bytes: NCCL copies 16 bytes at once from such an address, and else one by one."""


@dataclass(frozen=True, eq=False)
class CodedPiece:
    """The number of rows of a piece, the size of its part, and what follows from them."""

    count: int
    size: int
    format: Format
    num_bytes: int


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
        num_bytes = payload_bytes(format, count, self.row_bytes, size, size)
        return CodedPiece(count, size, format, -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)

    def encode(
        self, positions: Tensor, values: Tensor, pieces: Sequence[CodedPiece], counts: Tensor
    ) -> list[list[Tensor]]:
        """Return the bytes of each piece, as uint8 tensors that follow one another.

        Args:
            positions, values: int64 [k] and [k, width], of the rows of one piece after the other.
            counts: the numbers of rows of the pieces, int64 [len(pieces)], on the device.
        """
        ends = [*accumulate((piece.count for piece in pieces), initial=0)]
        data = values.contiguous().view(-1).view(torch.uint8)
        indices = []
        for format, run, first in _runs(pieces):
            span = slice(ends[first], ends[first + len(run)])
            indices += _WRITERS[format](positions[span], counts[first : first + len(run)], run)
        parts = [
            [data[start * self.row_bytes :][: piece.count * self.row_bytes], index]
            for piece, index, start in zip(pieces, indices, ends, strict=False)
        ]
        lacking = [piece.num_bytes - sum(map(len, part)) for piece, part in zip(pieces, parts, strict=True)]
        zeros = data.new_zeros(ALIGNMENT_BYTES) if any(lacking) else data[:0]
        return [[*part, zeros[:lack]] for part, lack in zip(parts, lacking, strict=True)]

    def decode(
        self, payloads: Sequence[Tensor], pieces: Sequence[CodedPiece], counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `encode` was given, from the bytes of each piece, each at a multiple of `ALIGNMENT_BYTES`.

        Returns:
            (positions, values, and which ids are not what these pieces can hold, bool [k]). Positions are brought into
            the range of the largest part, so that no row is written elsewhere; if any id is wrong, use no row.
        """
        ends = [*accumulate((piece.count for piece in pieces), initial=0)]
        cuts = [piece.count * self.row_bytes for piece in pieces]
        values = torch.cat([payload[:cut] for payload, cut in zip(payloads, cuts, strict=True)])
        tails = [payload[cut:] for payload, cut in zip(payloads, cuts, strict=True)]
        parts = [
            _READERS[format](tails[first:], counts[first : first + len(run)], run)
            for format, run, first in _runs(pieces)
        ]
        index, largest = parts[0] if len(parts) == 1 else torch.cat(parts), max(piece.size for piece in pieces)
        positions = index.clamp(0, max(0, largest - 1))
        keys, wrong = _shifted(positions, counts, largest), positions != index
        wrong[1:].logical_or_(keys[1:] <= keys[:-1])
        return positions, values.view(self.dtype).view(ends[-1], self.width), wrong


def _shifted(positions: Tensor, counts: Tensor, stride: int) -> Tensor:
    """Return positions int64 [k], plus the index of their piece times a stride."""
    if counts.numel() == 1:
        return positions
    return positions.add(torch.repeat_interleave(counts, output_size=positions.numel()), alpha=stride)


def _runs(pieces: Sequence[CodedPiece]) -> Iterator[tuple[Format, list[CodedPiece], int]]:
    """Yield pieces in a row that are coded alike, and the index of the first of them."""
    first = 0
    for (format, _), group in groupby(pieces, lambda piece: (piece.format, index_dtype(piece.size))):
        run = [*group]
        yield format, run, first
        first += len(run)


def _write_coo(positions: Tensor, counts: Tensor, run: Sequence[CodedPiece]) -> list[Tensor]:
    dtype = index_dtype(run[0].size)
    return list(positions.to(dtype).view(torch.uint8).split([piece.count * dtype.itemsize for piece in run]))


def _read_coo(tails: Sequence[Tensor], counts: Tensor, run: Sequence[CodedPiece]) -> Tensor:
    dtype = index_dtype(run[0].size)
    cut = [tail[: piece.count * dtype.itemsize] for tail, piece in zip(tails, run, strict=False)]
    index = torch.cat(cut).view(dtype).to(torch.int64)
    return index & 0xFFFF if dtype == torch.int16 else index


def _write_bitmaps(positions: Tensor, counts: Tensor, run: Sequence[CodedPiece]) -> list[Tensor]:
    stride = -(-max(map(_bitmap_bytes, run)) // 4) * 4  # whole words, as the search reads them
    bitmap = kernels.pack_bits(_shifted(positions, counts, 8 * stride), len(run) * 8 * stride)
    return [bitmap[number * stride :][: _bitmap_bytes(piece)] for number, piece in enumerate(run)]


def _read_bitmaps(tails: Sequence[Tensor], counts: Tensor, run: Sequence[CodedPiece]) -> Tensor:
    stride = -(-max(map(_bitmap_bytes, run)) // 4) * 4  # whole words, as the search reads them
    zeros, parts = counts.new_zeros(stride, dtype=torch.uint8), []
    for tail, piece in zip(tails, run, strict=False):
        parts += [tail[: _bitmap_bytes(piece)], zeros[_bitmap_bytes(piece) :]]
    bitmap = torch.cat(parts)
    total = sum(piece.count for piece in run)
    ones, count = kernels.find_bits(bitmap, total)
    return _shifted(ones, counts, -8 * stride).masked_fill(count != total, -1)


def _bitmap_bytes(piece: CodedPiece) -> int:
    return (piece.size + 7) // 8 if piece.count else 0


def _write_nothing(positions: Tensor, counts: Tensor, run: Sequence[CodedPiece]) -> list[Tensor]:
    return [positions[:0].view(torch.uint8)] * len(run)


def _read_all(tails: Sequence[Tensor], counts: Tensor, run: Sequence[CodedPiece]) -> Tensor:
    return torch.cat([torch.arange(piece.count, device=counts.device) for piece in run])


_WRITERS = {Format.COO: _write_coo, Format.HASH_BITMAP: _write_bitmaps, Format.DENSE: _write_nothing}
_READERS = {Format.COO: _read_coo, Format.HASH_BITMAP: _read_bitmaps, Format.DENSE: _read_all}
