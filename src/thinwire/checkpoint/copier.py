"""Copies of a state into a slot in shared memory: at once any tensor that may change, the rest beside the training.

Parameters and the optimizer's state are written by ``optimizer.step`` alone. So they are copied on another thread while
the next forward and backward run, and ``optimizer.step`` waits for the copy (GEMINI, SOSP'23: the checkpoint of a step
is taken before the next update). The rest of the state is small, and copied before training goes on.

A GPU's tensors pass through a ring of page-locked sub-buffers, on a stream of its own.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.faultpoint import reach
from thinwire.checkpoint.holder.version import CHUNK_BYTES, joined_crc
from thinwire.checkpoint.state.encode import Encoded
from thinwire.checkpoint.state.layout import ALIGNMENT_BYTES, TensorSlice, aligned
from thinwire.comm.cuda.device import CudaDevice
from thinwire.comm.process_group import DeviceEvent
from thinwire.errors import ThinwireError

SUB_BUFFER_BYTES = 32 << 20
SUB_BUFFERS = 4  # 128 MiB of page-locked memory in all, as in the paper

Take = Callable[[int, np.ndarray], None]
"""It is given bytes and their offset in the payload."""


@dataclass(frozen=True)
class Piece:
    """Bytes of a tensor of the device, on their way to ``start`` in a sub-buffer and to ``offset`` in the payload."""

    source: Tensor
    start: int
    offset: int

    @property
    def end(self) -> int:
        return self.start + self.source.numel()


def fills(tensors: Sequence[tuple[int, Tensor]], sub_buffer_bytes: int) -> Iterator[list[Piece]]:
    """Yield the pieces for each sub-buffer: small tensors together, large ones cut. ``tensors`` are uint8 [n]."""
    pieces: list[Piece] = []
    used = 0
    for offset, tensor in tensors:
        done = 0
        while done < tensor.numel():
            count = min(sub_buffer_bytes - used, tensor.numel() - done)
            pieces.append(Piece(tensor[done : done + count], used, offset + done))
            done, used = done + count, used + count
            if used == sub_buffer_bytes:
                yield pieces
                pieces, used = [], 0
    if pieces:
        yield pieces


def _runs(pieces: Sequence[Piece]) -> Iterator[tuple[int, Tensor]]:
    """Yield pieces with their starts, and those that follow one another on the device too as one tensor."""
    first = 0
    for last, piece in enumerate(pieces):
        following = pieces[last + 1].source if last + 1 < len(pieces) else None
        if following is None or not _adjoin(piece.source, following):
            yield pieces[first].start, pieces[first].source.as_strided((piece.end - pieces[first].start,), (1,))
            first = last + 1


def _adjoin(one: Tensor, other: Tensor) -> bool:
    """Return whether the second tensor of bytes begins where the first one ends, in the same memory."""
    is_next = other.storage_offset() == one.storage_offset() + one.numel()
    return is_next and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class SlotStaging:
    """A ring of sub-buffers between one device and a slot, page-locked at the first copy."""

    def __init__(
        self, device: CudaDevice, sub_buffer_bytes: int = SUB_BUFFER_BYTES, sub_buffers: int = SUB_BUFFERS
    ) -> None:
        self._device, self._sub_buffer_bytes, self._count = device, sub_buffer_bytes, sub_buffers
        self._buffers: list[Tensor] = []

    def record(self) -> DeviceEvent:
        """Record the end of the work given to the training's stream so far; call it on the training's thread."""
        return self._device.record()

    def copy(self, tensors: Sequence[tuple[int, Tensor]], written: DeviceEvent, take: Take) -> None:
        """Have ``take`` copy each tensor, as it is after ``written``, to its offset in the payload.

        It runs on any thread and returns when all bytes are there. Do not write to the tensors, or free them, before.
        """
        self._buffers = self._buffers or [self._device.pinned(self._sub_buffer_bytes) for _ in range(self._count)]
        in_flight: deque[tuple[Tensor, list[Piece], DeviceEvent]] = deque()
        with self._device.lane_stream():
            self._device.wait(written)
            flat = [(offset, _bytes(tensor)) for offset, tensor in tensors if tensor.numel()]
            for number, pieces in enumerate(fills(flat, self._sub_buffer_bytes)):
                if len(in_flight) == self._count:
                    self._finish(*in_flight.popleft(), take)
                buffer = self._buffers[number % self._count]
                for start, source in _runs(pieces):
                    self._device.copy(buffer[start : start + source.numel()], source)
                in_flight.append((buffer, pieces, self._device.record()))
            while in_flight:
                self._finish(*in_flight.popleft(), take)

    def _finish(self, buffer: Tensor, pieces: list[Piece], downloaded: DeviceEvent, take: Take) -> None:
        self._device.synchronize(downloaded)
        for piece in pieces:
            take(piece.offset, buffer[piece.start : piece.end].numpy())
            reach("copy")


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [n], in order. A single element is contiguous with any stride, so the stride is set again."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


LATER_BYTES = 64 << 10  # smaller tensors of a device are copied at once, all together: a copy of each takes longer
_BLOCK_BYTES = 512 << 10  # copied, and digested while they are in the cache
_SEALING_SECONDS, _POLL_SECONDS = 600.0, 0.02

May = Callable[[TensorSlice, Tensor], bool]


@dataclass(frozen=True)
class Target:
    """Memory for a state: all of it goes to ``payload``.

    With ``common``, what ranks have in common does not: of those first bytes, the ones from ``begin`` to ``end`` go
    there, and other ranks of this host write the rest.
    """

    payload: memoryview
    common: memoryview | None = None
    begin: int = 0
    end: int = 0


class _Writing:
    """The bytes of a state, in any order, on their way to a target; with the digests of those that ranks have alike.

    What this rank writes is digested where it was written, the rest where it is: so each rank's digests are of all of
    its own bytes.
    """

    def __init__(self, encoded: Encoded, target: Target) -> None:
        self._target, self._shared_bytes = target, encoded.shared_bytes
        self._base = 0 if target.common is None else aligned(encoded.shared_bytes)
        self._payload = np.frombuffer(target.payload, np.uint8)
        self._common = None if target.common is None else np.frombuffer(target.common, np.uint8)
        self._runs: dict[int, list[tuple[int, int, int]]] = {}  # by chunk: start, end and CRC-32

    def _at(self, offset: int, count: int) -> np.ndarray | None:
        if offset >= self._base:
            return self._payload[offset - self._base : offset - self._base + count]
        is_own = self._common is not None and self._target.begin <= offset < self._target.end
        return self._common[offset : offset + count] if is_own and self._common is not None else None

    def clear(self, start: int, end: int) -> None:
        """Write zeros between two tensors: these have digests too."""
        if (memory := self._at(start, end - start)) is not None:
            memory[:] = 0

    def take(self, offset: int, data: np.ndarray) -> None:
        done = 0
        while done < len(data):
            start, alike = offset + done, offset < self._shared_bytes
            count = min(_BLOCK_BYTES - start % _BLOCK_BYTES, len(data) - done) if alike else len(data)
            part, memory = data[done : done + count], self._at(start, count)
            if memory is not None:
                np.copyto(memory, part)  # without Python's lock
                part = memory
            if alike:
                self._digest(start, part)
            done += count

    def _digest(self, start: int, part: np.ndarray) -> None:
        runs = self._runs.setdefault(start // CHUNK_BYTES, [])
        begin, crc = start, 0
        if runs and 0 <= start - runs[-1][1] < ALIGNMENT_BYTES:  # the next tensor
            begin, end, crc = runs.pop()
            crc = zlib.crc32(bytes(start - end), crc)
        runs.append((begin, start + len(part), zlib.crc32(part.data, crc)))

    def crcs(self) -> tuple[int, ...]:
        """Return the CRC-32 of each chunk of what ranks have alike."""
        result = []
        for start in range(0, self._shared_bytes, CHUNK_BYTES):
            crc, done, last = 0, start, min(start + CHUNK_BYTES, self._shared_bytes)
            for begin, end, of_run in sorted(self._runs.get(start // CHUNK_BYTES, [])):
                crc, done = joined_crc(zlib.crc32(bytes(begin - done), crc), of_run, end - begin), end
            result.append(zlib.crc32(bytes(last - done), crc))
        return tuple(result)


@dataclass
class Copy:
    """A copy that has begun: `finish` copies the rest, on any thread; then ``crcs`` are of what ranks have alike."""

    seconds: float
    _later: list[tuple[int, Tensor]]  # offset, tensor
    _watched: list[tuple[Tensor, int]]  # tensor, version when the copy began
    _downloads: list[tuple[SlotStaging, list[tuple[int, Tensor]], DeviceEvent]]
    _writing: _Writing = field(repr=False)
    crcs: tuple[int, ...] = ()

    def finish(self) -> bool:
        """Copy the rest and return whether it was unchanged meanwhile, so that the copy is one state."""
        started = time.perf_counter()
        for staging, tensors, written in self._downloads:
            staging.copy(tensors, written, self._writing.take)
        for offset, tensor in self._later:
            self._writing.take(offset, _bytes(tensor).numpy())
            reach("copy")
        unchanged = all(tensor._version == version for tensor, version in self._watched)
        self._later, self._downloads, self._watched = [], [], []
        self.crcs = self._writing.crcs()
        self.seconds += time.perf_counter() - started
        return unchanged


@dataclass(frozen=True)
class _Split:
    """Indices of the slices that are copied at once, of those that can wait, and of those on each CUDA device."""

    slices: tuple[TensorSlice, ...]
    now: list[int]
    later: list[int]
    on_device: dict[torch.device, list[int]]
    gaps: list[tuple[int, int]]


def _gaps(slices: Sequence[TensorSlice]) -> list[tuple[int, int]]:
    result, end = [], 0
    for where in sorted(slices, key=lambda where: where.offset):
        result += [(end, where.offset)] if end < where.offset else []
        end = where.offset + where.nbytes
    return result


class Copier:
    """A copier of the state of one shard.

    Args:
        may_wait: returns whether a tensor is written by the optimizer's step alone.
        staging_for: returns the ring through which a CUDA device copies to the host.
    """

    def __init__(
        self,
        may_wait: May,
        staging_for: Callable[[torch.device], SlotStaging] = lambda device: SlotStaging(CudaDevice(device)),
    ) -> None:
        self._may_wait, self._staging_for = may_wait, staging_for
        self._stagings: dict[torch.device, SlotStaging] = {}
        self._split: _Split | None = None

    def begin(self, encoded: Encoded, target: Target) -> Copy:
        """Copy tensors that may change at any time; `Copy.finish` copies the rest, before the next optimizer step."""
        started = time.perf_counter()
        room, needed = len(target.payload), encoded.payload_bytes
        if target.common is not None:
            room, needed = room + aligned(encoded.shared_bytes), max(needed, aligned(encoded.shared_bytes))
        if room < needed:
            raise ValueError(f"a slot of {room} bytes for a payload of {needed}")
        split, writing = self._split_of(encoded), _Writing(encoded, target)
        tensors, originals = encoded.tensors, encoded.originals
        for start, end in split.gaps:
            writing.clear(start, end)
        with torch.no_grad():
            for number in split.now:
                writing.take(encoded.slices[number].offset, _bytes(tensors[number]).numpy())
                reach("copy")
            waiting = set(split.later)
            downloads = [self._begin_download(device, its, encoded, waiting) for device, its in split.on_device.items()]
        # Detached, they keep their memory: code may exchange ``.data`` meanwhile, to evaluate averaged weights.
        kept = {number: tensors[number].detach() for number in split.later}
        offsets = [(encoded.slices[number].offset, tensor) for number, tensor in kept.items()]
        later = [(offset, tensor) for offset, tensor in offsets if tensor.device.type != "cuda"]
        watched = [(originals[number], originals[number]._version) for number in split.later]
        return Copy(time.perf_counter() - started, later, watched, downloads, writing)

    @property
    def uses_device(self) -> bool:
        """Whether tensors of the last copy were on a CUDA device."""
        return bool(self._stagings)

    def _split_of(self, encoded: Encoded) -> _Split:
        split = self._split
        if split is None or split.slices is not encoded.slices:
            self._split = split = _Split(encoded.slices, [], [], {}, _gaps(encoded.slices))
            for number, (where, tensor) in enumerate(zip(encoded.slices, encoded.originals, strict=True)):
                if where.nbytes == 0:
                    continue
                device = encoded.tensors[number].device
                is_large = where.nbytes >= LATER_BYTES or device.type != "cuda"
                waits = is_large and not tensor.is_inference() and self._may_wait(where, tensor)
                if device.type == "cuda":
                    split.on_device.setdefault(device, []).append(number)
                elif not waits:
                    split.now.append(number)
                if waits:
                    split.later.append(number)
        return split

    def _begin_download(
        self, device: torch.device, numbers: Sequence[int], encoded: Encoded, waiting: set[int]
    ) -> tuple[SlotStaging, list[tuple[int, Tensor]], DeviceEvent]:
        """Tensors that cannot wait are copied into one on the device first: of many small ones a clone each is slow."""
        if (staging := self._stagings.get(device)) is None:
            staging = self._stagings[device] = self._staging_for(device)
        now = [number for number in numbers if number not in waiting]
        flat = [_bytes(encoded.tensors[number]) for number in now]
        copies = torch.cat(flat).split([tensor.numel() for tensor in flat]) if flat else ()
        kept = [(number, encoded.tensors[number].detach()) for number in numbers if number in waiting]
        tensors = [(encoded.slices[number].offset, copy) for number, copy in (*zip(now, copies, strict=True), *kept)]
        return staging, tensors, staging.record()


def copy_of(client: HolderClient | None, step: int, attempt: int) -> tuple[bytes, memoryview, memoryview | None]:
    """Return layout and payload of the own version of that step, once it is complete, and what it has in common with
    other ranks; no other thread waits meanwhile.

    Raises ThinwireError if it does not become complete.
    """
    deadline = time.monotonic() + _SEALING_SECONDS
    while client is not None and client.shard is not None and time.monotonic() < deadline:
        for version in client.inventory(verify=False):
            if (version.shard, version.step, version.attempt) == (client.shard, step, attempt):
                with client.open(version) as reader:
                    copied = np.frombuffer(reader.payload, np.uint8).copy()
                    common = None if reader.common is None else np.frombuffer(reader.common, np.uint8).copy()
                    return reader.layout, copied.data, None if common is None else common.data
        if client.status()["failed"] == [attempt, step]:
            break
        time.sleep(_POLL_SECONDS)
    raise ThinwireError(f"step {step} did not become a version on this host")
