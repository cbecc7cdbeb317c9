"""A slot: shared memory with room for one version, whose header is written last.

    [page 0: magic, format, state, lengths, CRC-32s][manifest as JSON][layout][padding][payload, page-aligned]

A version is there when the state is COMPLETE and all digests match. The state leaves COMPLETE before the first byte
changes and returns to it after the last one, so a crash at any point leaves the old version or none.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from itertools import zip_longest

from thinwire.checkpoint.holder.faultpoint import reach
from thinwire.checkpoint.holder.version import CHUNK_BYTES, Manifest, Record, chunk_count
from thinwire.errors import CorruptMessageError

_HEADER = struct.Struct("<8sII QI QI QQ")  # magic, format, state, manifest, layout, payload offset, payload capacity
_CRC = struct.Struct("<I")
_MAGIC = b"TWSLOT\r\n"
_FORMAT = 1
_PAGE = 4096
_DIGEST_THREADS = 4


class State(IntEnum):
    """State of a slot. In WRITING its bytes mean nothing yet, regardless of the writer."""

    EMPTY = 0
    WRITING = 1
    COMPLETE = 2


@dataclass(frozen=True)
class SlotSize(Record):
    """Room of a slot: ``payload_bytes`` of payload, and a layout of ``layout_bytes`` beside the manifest."""

    payload_bytes: int
    layout_bytes: int

    @property
    def payload_offset(self) -> int:
        manifest_bytes = 2048 + 12 * chunk_count(self.payload_bytes, CHUNK_BYTES)  # a CRC-32 is at most 10 digits
        return _PAGE + _pages(manifest_bytes + self.layout_bytes)

    def covering(self, other: SlotSize) -> SlotSize:
        """Return the least size that has the room of both."""
        return SlotSize(max(self.payload_bytes, other.payload_bytes), max(self.layout_bytes, other.layout_bytes))

    @property
    def total_bytes(self) -> int:
        return self.payload_offset + max(_PAGE, _pages(self.payload_bytes))


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


@cache
def digest_pool() -> ThreadPoolExecutor:
    """Return the threads for CRC-32, which releases the interpreter's lock: 1 GB/s and more for each core."""
    return ThreadPoolExecutor(min(_DIGEST_THREADS, os.cpu_count() or 1), thread_name_prefix="digest")


def chunk_crcs(payload: memoryview, chunk_bytes: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Return the CRC-32 of each ``chunk_bytes`` of the payload."""
    chunks = [payload[start : start + chunk_bytes] for start in range(0, len(payload), chunk_bytes)]
    try:
        return tuple(digest_pool().map(zlib.crc32, chunks))
    finally:
        for chunk in chunks:
            chunk.release()


_SAME_BYTES = 64 << 10  # compared at a time, where the writer has not named pieces
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def runs_of(
    payload: memoryview, base: memoryview, pieces: Sequence[int] = (), base_pieces: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Return the payload as runs: bytes, and where ``base`` has the same ones, or -1 where it has not.

    All bytes are compared, piece by piece: the n-th one with the n-th one of ``base``, wherever those begin. Without
    ``pieces``, their lengths, both are compared in steps of 64 KiB.
    """
    runs: list[tuple[int, int]] = []
    if not payload or not base:
        return [(len(payload), -1)] if payload else runs
    new, old = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (payload, base))
    done, start = 0, 0
    for size, other in zip_longest(pieces or _steps(len(payload)), base_pieces or _steps(len(base)), fillvalue=0):
        origin = start if size == other and not _memcmp(new + done, old + start, size) else -1
        length, before = runs[-1] if runs else (0, 0)
        if runs and (origin == before == -1 or (origin >= 0 <= before == origin - length)):
            runs[-1] = length + size, before
        elif size:
            runs.append((size, origin))
        done, start = done + size, start + other
    return runs


def _steps(num_bytes: int) -> list[int]:
    return [min(_SAME_BYTES, num_bytes - start) for start in range(0, num_bytes, _SAME_BYTES)]


class Slot:
    """One slot over a file descriptor of shared memory (a memfd, or a file in a tmpfs), which it owns.

    Not thread-safe: change its state with a lock held.
    """

    def __init__(self, descriptor: int, size: SlotSize, writable: bool = True) -> None:
        self.descriptor, self.size = descriptor, size
        self.mapped_bytes = 0  # of the payload: pages that were mapped for writing all at once
        if os.fstat(descriptor).st_size < size.total_bytes:
            raise CorruptMessageError(f"the slot is smaller than the {size.total_bytes} bytes that it should have")
        # a private map stays writable for torch, which insists on it, without reaching the slot
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        self._map = mmap.mmap(descriptor, size.total_bytes, access=access)

    @classmethod
    def allocate(cls, size: SlotSize) -> Slot:
        """Allocate an empty slot in anonymous shared memory. Raises OSError if there is none left."""
        descriptor = os.memfd_create("thinwire-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size.total_bytes)  # a full memory shows here, not as SIGBUS in a trainer
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # so no trainer causes one in the holder
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    def payload(self, num_bytes: int | None = None) -> memoryview:
        """Return the first ``num_bytes`` of the payload, by default its whole capacity."""
        start, room = self.size.payload_offset, self.size.payload_bytes
        return memoryview(self._map)[start : start + (room if num_bytes is None else num_bytes)]

    def begin(self) -> None:
        """Change from EMPTY or COMPLETE to WRITING, which drops the previous content."""
        self._write_header(State.WRITING)

    def clear(self) -> None:
        self._write_header(State.EMPTY)

    def digest(self, stated: Manifest, layout: bytes) -> Manifest:
        """Return what was stated of the payload, with the CRC-32s that it lacks, and with the layout.

        Those that it has are of the first chunks: their writer has computed them in this memory. Raises ValueError if
        there is no room for that much.
        """
        self.check_room(stated.payload_bytes, len(layout))
        done = len(stated.chunk_crcs) * CHUNK_BYTES
        with self.payload(stated.payload_bytes) as payload, payload[done:] as rest:
            crcs = stated.chunk_crcs + chunk_crcs(rest)
        return replace(stated, chunk_crcs=crcs, layout_bytes=len(layout), layout_crc=zlib.crc32(layout))

    def publish(self, manifest: Manifest, layout: bytes) -> None:
        """Change from WRITING to COMPLETE. The header is written last, in one store of a page without other writers."""
        self.check_room(manifest.payload_bytes, len(layout))
        text = json.dumps(manifest.to_json(), separators=(",", ":")).encode()
        if _PAGE + len(text) + len(layout) > self.size.payload_offset:
            raise ValueError(f"the manifest of {len(text)} bytes does not fit beside the layout of {len(layout)}")
        self._map[_PAGE : _PAGE + len(text) + len(layout)] = text + layout
        reach("header", manifest.shard.owner, manifest.step)
        self._write_header(State.COMPLETE, text, layout)
        reach("sealed", manifest.shard.owner, manifest.step)

    def read(self) -> tuple[Manifest, bytes]:
        """Return manifest and layout without reading the payload. Raises CorruptMessageError for an incomplete slot."""
        state, manifest_bytes, manifest_crc, layout_bytes, layout_crc = self._header()
        if state != State.COMPLETE:
            raise CorruptMessageError("the slot holds no complete version")
        if manifest_bytes + layout_bytes > self.size.payload_offset - _PAGE:
            raise CorruptMessageError("the slot's header gives lengths beyond the slot")
        text = self._map[_PAGE : _PAGE + manifest_bytes]
        layout = self._map[_PAGE + manifest_bytes : _PAGE + manifest_bytes + layout_bytes]
        if zlib.crc32(text) != manifest_crc or zlib.crc32(layout) != layout_crc:
            raise CorruptMessageError("the slot's manifest or layout was altered")
        manifest = Manifest.from_json(parse_json(text))
        if manifest.layout_bytes != layout_bytes or manifest.layout_crc != layout_crc:
            raise CorruptMessageError("the slot's header and manifest disagree about the layout")
        if manifest.payload_bytes > self.size.payload_bytes:
            raise CorruptMessageError("the slot's manifest is of a payload beyond the slot")
        return manifest, layout

    def verify(self) -> tuple[Manifest, bytes]:
        """Return manifest and layout like ``read``, after comparing every chunk of the payload with its digest."""
        manifest, layout = self.read()
        with self.payload(manifest.payload_bytes) as payload:
            crcs = chunk_crcs(payload, manifest.chunk_bytes)
        wrong = [i for i, (result, said) in enumerate(zip(crcs, manifest.chunk_crcs, strict=True)) if result != said]
        if wrong:
            raise CorruptMessageError(
                f"{manifest.shard}, step {manifest.step}: {len(wrong)} of {len(crcs)} chunks were altered, the first is"
                f" {wrong[0]}"
            )
        return manifest, layout

    def close(self) -> None:
        """Free the memory, once the last view of it is gone."""
        with contextlib.suppress(BufferError):
            self._map.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def check_room(self, payload_bytes: int, layout_bytes: int) -> None:
        """Raise ValueError if a version of that size does not fit."""
        if not 0 <= payload_bytes <= self.size.payload_bytes or layout_bytes > self.size.layout_bytes:
            raise ValueError(
                f"a version with {payload_bytes} bytes of payload and {layout_bytes} of layout does not fit a slot with"
                f" room for {self.size.payload_bytes} and {self.size.layout_bytes}; register the shard with more"
            )

    def _header(self) -> tuple[int, int, int, int, int]:
        raw = self._map[: _HEADER.size]
        (crc,) = _CRC.unpack(self._map[_HEADER.size : _HEADER.size + _CRC.size])
        magic, version, state, *lengths, offset, capacity = _HEADER.unpack(raw)
        if magic != _MAGIC or version != _FORMAT or crc != zlib.crc32(raw):
            raise CorruptMessageError("the slot has no valid header")
        if (offset, capacity) != (self.size.payload_offset, self.size.payload_bytes) or state not in list(State):
            raise CorruptMessageError("the slot's header does not belong to a slot of this size")
        return state, lengths[0], lengths[1], lengths[2], lengths[3]

    def _write_header(self, state: State, manifest: bytes = b"", layout: bytes = b"") -> None:
        raw = _HEADER.pack(
            _MAGIC, _FORMAT, state, len(manifest), zlib.crc32(manifest), len(layout), zlib.crc32(layout),
            self.size.payload_offset, self.size.payload_bytes,
        )  # fmt: skip
        self._map[: _HEADER.size + _CRC.size] = raw + _CRC.pack(zlib.crc32(raw))


def parse_json(text: bytes) -> object:
    """Parse JSON from another process. Raises CorruptMessageError, also for JSON that is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptMessageError(f"not JSON: {error}") from error


@dataclass(frozen=True)
class SlotView:
    """State of a slot on which the choice of a slot depends.

    ``order``: (attempt, step) of a complete version. ``busy``: being written or read. ``settled``: nothing more will be
    done for it (its replicas are acknowledged or given up).
    """

    order: tuple[int, int] | None
    busy: bool
    settled: bool = True


def choose_slot(
    slots: Sequence[SlotView], keep: tuple[int, int] | None = None, before: tuple[int, int] | None = None
) -> int | None:
    """Return the index of the slot for the next version, or None if none may be overwritten.

    An empty one is best. A complete one may go only if another complete one stays, and if it is not ``keep``, the
    newest version that every owner has everywhere; then those older than ``keep`` go first, and a newer one only once
    it is settled. Without ``keep``, the oldest settled one goes. With ``before``, only older versions than that go.

    Example: choose_slot([SlotView((0, 4), False), SlotView((0, 5), False)], keep=(0, 5)) == 0
    """
    for index, slot in enumerate(slots):
        if slot.order is None and not slot.busy:
            return index
    complete = [index for index, slot in enumerate(slots) if slot.order is not None]
    if len(complete) < 2:
        return None

    def may_go(index: int) -> bool:
        slot = slots[index]
        older = keep is not None and slot.order is not None and slot.order < keep
        stays = before is not None and slot.order is not None and slot.order >= before
        return not slot.busy and not stays and slot.order != keep and (slot.settled or older)

    return min((index for index in complete if may_go(index)), key=lambda index: slots[index].order or (), default=None)
