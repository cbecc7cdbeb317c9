"""A payload as codes of its tensors, in fewer bytes; every bit comes back.

    [code of piece 0][code of piece 1] ...     the layout has the length of each, and the checksum of what it stands for

A piece is 128 Ki elements of a tensor, or the rest of it. A code as long as its piece is the piece itself: what is no
floating-point number, what is short, and what does not pay. Slots have room for all pieces as they are.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from thinwire.checkpoint.holder.faultpoint import reach
from thinwire.checkpoint.holder.slots import digest_pool
from thinwire.checkpoint.state.encode import Encoded
from thinwire.checkpoint.state.layout import DTYPES, StateLayout, TensorSlice, aligned, view_of
from thinwire.errors import CorruptMessageError
from thinwire.rows import floats

PIECE_VALUES = 4 * floats.CHUNK_VALUES
LEAST_VALUES = 1024  # fewer are not worth a call
_CODED = {"float16", "bfloat16", "float32", "float64"}


def pieces_of(slices: Sequence[TensorSlice], base: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yield the index of its slice, its start in it and its length in bytes for each piece of a payload that begins at
    ``base``, in its order."""
    for number in sorted(range(len(slices)), key=lambda number: slices[number].offset):
        where = slices[number]
        if where.offset < base:
            continue
        step = PIECE_VALUES * DTYPES[where.dtype].itemsize
        yield from ((number, start, min(step, where.nbytes - start)) for start in range(0, where.nbytes, step))


@dataclass(frozen=True)
class Codes:
    """Length and CRC-32 of each piece, and the bytes of all codes."""

    pieces: list[tuple[int, int]]
    payload_bytes: int


def pack(encoded: Encoded, payload: memoryview, base: int = 0) -> Codes:
    """Code a payload, which begins at ``base`` of the state, in place. A code is written no later than where its piece
    began, so no other piece is hit."""
    memory, result, done = torch.from_numpy(np.frombuffer(payload, np.uint8)), [], 0
    for number, start, nbytes in pieces_of(encoded.slices, base):
        where = encoded.slices[number]
        begin, dtype = where.offset - base + start, DTYPES[where.dtype]
        piece = memory[begin : begin + nbytes]
        is_coded = where.dtype in _CODED and nbytes >= LEAST_VALUES * dtype.itemsize
        result.append((0, zlib.crc32(piece.numpy().data)))
        code = floats.encode(piece.view(dtype)) if is_coded else piece
        np.copyto(memory[done : done + code.numel()].numpy(), code.numpy())
        result[-1], done = (code.numel(), result[-1][1]), done + code.numel()
        reach("code")
    return Codes(result, done)


def tensors_of(layout: StateLayout, payload: memoryview, common: memoryview | None = None) -> Sequence[Tensor]:
    """Return the tensors of a payload: views of it, or, of one that is coded, new ones each time they are asked for.

    What is in ``common`` with other ranks is not coded.

    Raises CorruptMessageError for a payload that does not fit the layout; so does asking for a tensor whose bits are
    not those that were coded.
    """
    return _Stored(layout, payload, common)


class _Stored(Sequence[Tensor]):
    def __init__(self, layout: StateLayout, payload: memoryview, common: memoryview | None) -> None:
        if common is not None and len(common) != layout.shared_bytes:
            raise CorruptMessageError(f"{len(common)} bytes in common with other ranks, expected {layout.shared_bytes}")
        self._slices, self._payload, self._common = layout.slices, payload, common
        self._base = 0 if common is None else aligned(layout.shared_bytes)
        self._is_coded = bool(layout.codes)
        if not self._is_coded:
            if len(payload) < (needed := layout.payload_bytes - self._base):
                raise CorruptMessageError(f"the buffer of {len(payload)} bytes has no payload of {needed}")
            return
        pieces, sizes = list(pieces_of(layout.slices, self._base)), [size for size, _ in layout.codes]
        fits = len(pieces) == len(sizes) and all(
            0 < size <= piece[2] for size, piece in zip(sizes, pieces, strict=True)
        )
        if not fits or sum(sizes) > len(payload):
            raise CorruptMessageError(f"{len(sizes)} codes in {len(payload)} bytes do not fit {len(pieces)} pieces")
        self._pieces: dict[int, list[tuple[int, int, int, int, int]]] = {}
        for piece, begin, code in zip(pieces, accumulate(sizes, initial=0), layout.codes, strict=False):
            self._pieces.setdefault(piece[0], []).append((*piece[1:], begin, *code))

    def __len__(self) -> int:
        return len(self._slices)

    def __getitem__(self, number: int) -> Tensor:  # type: ignore[override]
        where, dtype = self._slices[number], DTYPES[self._slices[number].dtype]
        if self._common is not None and where.offset < self._base:
            return view_of(self._common, where)
        if not self._is_coded:
            return view_of(self._payload, where, self._base)
        memory = torch.from_numpy(np.frombuffer(self._payload, np.uint8))
        out = torch.empty(where.nbytes, dtype=torch.uint8)

        def decode(start: int, nbytes: int, begin: int, size: int, crc: int) -> None:
            piece, code = out[start : start + nbytes], memory[begin : begin + size]
            if size == nbytes:
                piece.copy_(code)
            else:
                floats.decode(code, piece.view(dtype))
            if zlib.crc32(piece.numpy().data) != crc:
                raise CorruptMessageError(f"{where.path}: what was decoded is not what was coded")

        list(digest_pool().map(lambda piece: decode(*piece), self._pieces.get(number, ())))
        return out.view(dtype).view(where.shape)
