"""A payload as codes of its tensors, in fewer bytes; every bit comes back.

    [code of piece 0][code of piece 1] ...     the layout has the length of each, and the checksum of what it stands for

A piece is 128 Ki elements of a tensor, or the rest of one. A code as long as its piece is the piece itself: what is no
floating-point number, what is short, and what does not pay. Slots have room for all pieces as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from thinwire.checkpoint.state.encode import Encoded
from thinwire.checkpoint.state.layout import DTYPES, StateLayout, TensorSlice, views
from thinwire.codes import floats
from thinwire.errors import CorruptMessageError
from thinwire.holder.faultpoint import reach
from thinwire.holder.slots import digest_pool

PIECE_VALUES = 4 * floats.CHUNK_VALUES
LEAST_VALUES = 1024  # fewer are not worth a call
_CODED = {"float16", "bfloat16", "float32", "float64"}


def pieces_of(slices: Sequence[TensorSlice]) -> Iterator[tuple[int, int, int]]:
    """Yield the index of its slice, its start in it and its length in bytes for each piece, in the payload's order."""
    for number in sorted(range(len(slices)), key=lambda number: slices[number].offset):
        where = slices[number]
        step = PIECE_VALUES * DTYPES[where.dtype].itemsize
        yield from ((number, start, min(step, where.nbytes - start)) for start in range(0, where.nbytes, step))


@dataclass(frozen=True)
class Codes:
    """Length and CRC-32 of each piece, and the bytes of all codes and of those that all ranks should have alike."""

    pieces: list[tuple[int, int]]
    payload_bytes: int
    shared_bytes: int


def pack(encoded: Encoded, payload: memoryview) -> Codes:
    """Code a payload in place. A code is written no later than where its piece began, so no other piece is hit."""
    memory, found, done, shared = torch.from_numpy(np.frombuffer(payload, np.uint8)), [], 0, 0
    for number, start, nbytes in pieces_of(encoded.slices):
        where = encoded.slices[number]
        begin, dtype = where.offset + start, DTYPES[where.dtype]
        piece = memory[begin : begin + nbytes]
        is_coded = where.dtype in _CODED and nbytes >= LEAST_VALUES * dtype.itemsize
        found.append((0, zlib.crc32(piece.numpy().data)))
        code = floats.encode(piece.view(dtype)) if is_coded else piece
        np.copyto(memory[done : done + code.numel()].numpy(), code.numpy())
        found[-1], done = (code.numel(), found[-1][1]), done + code.numel()
        shared = done if begin < encoded.shared_bytes else shared
        reach("code")
    return Codes(found, done, shared)


def tensors_of(layout: StateLayout, payload: memoryview) -> Sequence[Tensor]:
    """Return the tensors of a payload: views of it, or, of one that is coded, new ones each time they are asked for.

    Raises CorruptMessageError for a payload that does not fit the layout; so does asking for a tensor whose bits are
    not those that were coded.
    """
    return _Packed(layout, payload) if layout.codes else views(layout, payload)


class _Packed(Sequence[Tensor]):
    def __init__(self, layout: StateLayout, payload: memoryview) -> None:
        self._slices, self._memory = layout.slices, torch.from_numpy(np.frombuffer(payload, np.uint8))
        pieces, sizes = list(pieces_of(layout.slices)), [size for size, _ in layout.codes]
        fits = len(pieces) == len(sizes) and all(
            0 < size <= piece[2] for size, piece in zip(sizes, pieces, strict=True)
        )
        if not fits or sum(sizes) > len(payload):
            raise CorruptMessageError(
                f"{len(sizes)} codes in {len(payload)} bytes are not those of {len(pieces)} pieces"
            )
        self._pieces: dict[int, list[tuple[int, int, int, int, int]]] = {}
        for piece, begin, code in zip(pieces, accumulate(sizes, initial=0), layout.codes, strict=False):
            self._pieces.setdefault(piece[0], []).append((*piece[1:], begin, *code))

    def __len__(self) -> int:
        return len(self._slices)

    def __getitem__(self, number: int) -> Tensor:  # type: ignore[override]
        where, dtype = self._slices[number], DTYPES[self._slices[number].dtype]
        out = torch.empty(where.nbytes, dtype=torch.uint8)

        def decode(start: int, nbytes: int, begin: int, size: int, crc: int) -> None:
            piece, code = out[start : start + nbytes], self._memory[begin : begin + size]
            if size == nbytes:
                piece.copy_(code)
            else:
                floats.decode(code, piece.view(dtype))
            if zlib.crc32(piece.numpy().data) != crc:
                raise CorruptMessageError(f"{where.path}: what was decoded is not what was coded")

        list(digest_pool().map(lambda piece: decode(*piece), self._pieces.get(number, ())))
        return out.view(dtype).view(where.shape)
