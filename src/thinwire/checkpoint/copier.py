"""Copies of a state into a slot in shared memory: at once any tensor that may change, the rest beside the training.

Parameters and the optimizer's state are written by ``optimizer.step`` alone. So they are copied on another thread while
the next forward and backward run, and ``optimizer.step`` waits for the copy (GEMINI, SOSP'23: the checkpoint of a step
is taken before the next update). The rest of the state is small, and copied before training goes on.

A GPU's tensors pass through a ring of page-locked sub-buffers, on a stream of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from thinwire.checkpoint.state.encode import Encoded
from thinwire.checkpoint.state.layout import TensorSlice, view_of
from thinwire.comm.process_group import DeviceEvent
from thinwire.cuda.device import CudaDevice, Device
from thinwire.errors import ThinwireError
from thinwire.holder.client import HolderClient
from thinwire.holder.faultpoint import reach

SUB_BUFFER_BYTES = 32 << 20
SUB_BUFFERS = 4  # 128 MiB of page-locked memory in all, as in the paper


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
        self, device: Device, sub_buffer_bytes: int = SUB_BUFFER_BYTES, sub_buffers: int = SUB_BUFFERS
    ) -> None:
        self._device, self._sub_buffer_bytes, self._count = device, sub_buffer_bytes, sub_buffers
        self._buffers: list[Tensor] = []

    def record(self) -> DeviceEvent:
        """Record the end of the work given to the training's stream so far; call it on the training's thread."""
        return self._device.record()

    def copy(self, tensors: Sequence[tuple[int, Tensor]], written: DeviceEvent, payload: Tensor) -> None:
        """Copy each tensor, as it is after ``written``, to its offset in the payload (uint8 [n] of the host).

        It runs on any thread and returns when all bytes are there. Do not write to the tensors, or free them, before.
        """
        self._buffers = self._buffers or [self._device.pinned(self._sub_buffer_bytes) for _ in range(self._count)]
        in_flight: deque[tuple[Tensor, list[Piece], DeviceEvent]] = deque()
        with self._device.lane_stream():
            self._device.wait(written)
            flat = [(offset, _bytes(tensor)) for offset, tensor in tensors if tensor.numel()]
            for number, pieces in enumerate(fills(flat, self._sub_buffer_bytes)):
                if len(in_flight) == self._count:
                    self._finish(*in_flight.popleft(), payload)
                buffer = self._buffers[number % self._count]
                for start, source in _runs(pieces):
                    self._device.copy(buffer[start : start + source.numel()], source)
                in_flight.append((buffer, pieces, self._device.record()))
            while in_flight:
                self._finish(*in_flight.popleft(), payload)

    def _finish(self, buffer: Tensor, pieces: list[Piece], downloaded: DeviceEvent, payload: Tensor) -> None:
        self._device.synchronize(downloaded)
        for piece in pieces:
            target = payload[piece.offset : piece.offset + piece.source.numel()]
            np.copyto(target.numpy(), buffer[piece.start : piece.end].numpy())  # without Python's lock
            reach("copy")


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [n], in order. A single element is contiguous with any stride, so the stride is set again."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


LATER_BYTES = 64 << 10  # smaller tensors are copied at once: that costs less than tracking them
_BATCH = 16
_SEALING_SECONDS, _POLL_SECONDS = 600.0, 0.02
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

May = Callable[[TensorSlice, Tensor], bool]


@dataclass
class Copy:
    """A copy that has begun: `finish` copies the rest, on any thread."""

    seconds: float
    _later: list[tuple[Tensor, Tensor]]  # view of the slot, tensor
    _watched: list[tuple[Tensor, int]]  # tensor, version when the copy began
    _downloads: list[tuple[SlotStaging, list[tuple[int, Tensor]], DeviceEvent]]
    _payload: memoryview = field(repr=False)

    @property
    def is_done(self) -> bool:
        return not self._later and not self._downloads

    def finish(self) -> bool:
        """Copy the rest and return whether it was unchanged meanwhile, so that the copy is one state."""
        started = time.perf_counter()
        for staging, tensors, written in self._downloads:
            staging.copy(tensors, written, torch.frombuffer(self._payload, dtype=torch.uint8))
        for view, tensor in self._later:
            copy_bytes(view, tensor)
            reach("copy")
        unchanged = all(tensor._version == version for tensor, version in self._watched)
        self._later, self._downloads, self._watched = [], [], []
        self.seconds += time.perf_counter() - started
        return unchanged


@dataclass(frozen=True)
class _Split:
    """Indices of the slices that are copied at once, of those that can wait, and of those on each CUDA device."""

    slices: tuple[TensorSlice, ...]
    now: list[int]
    later: list[int]
    on_device: dict[torch.device, list[int]]


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
        self._views: dict[Hashable, tuple[tuple[TensorSlice, ...], list[Tensor]]] = {}

    def begin(self, encoded: Encoded, payload: memoryview, slot: Hashable) -> Copy:
        """Copy tensors that may change at any time; `Copy.finish` copies the rest, before the next ``optimizer.step``.

        ``slot`` names the memory of ``payload``: the same name, the same memory.
        """
        started = time.perf_counter()
        if len(payload) < encoded.payload_bytes:
            raise ValueError(f"a slot of {len(payload)} bytes for a payload of {encoded.payload_bytes}")
        split, views = self._split_of(encoded), self._views_of(encoded, payload, slot)
        tensors, originals = encoded.tensors, encoded.originals
        with torch.no_grad():
            for start in range(0, len(split.now), _BATCH):
                batch = split.now[start : start + _BATCH]
                torch._foreach_copy_([views[number] for number in batch], [tensors[number] for number in batch])
                reach("copy")
            downloads = [
                self._begin_download(device, numbers, encoded, set(split.later))
                for device, numbers in split.on_device.items()
            ]
        # Detached, they keep their memory: code may exchange ``.data`` meanwhile, to evaluate averaged weights.
        kept = {number: tensors[number].detach() for number in split.later}
        later = [(views[number], tensor) for number, tensor in kept.items() if tensor.device.type != "cuda"]
        watched = [(originals[number], originals[number]._version) for number in split.later]
        return Copy(time.perf_counter() - started, later, watched, downloads, payload)

    def forget_slots(self) -> None:
        """Drop the views of the slots, which were freed or replaced."""
        self._views.clear()

    @property
    def uses_device(self) -> bool:
        """Whether tensors of the last copy were on a CUDA device."""
        return bool(self._stagings)

    def _split_of(self, encoded: Encoded) -> _Split:
        split = self._split
        if split is None or split.slices is not encoded.slices:
            self._split = split = _Split(encoded.slices, [], [], {})
            for number, (where, tensor) in enumerate(zip(encoded.slices, encoded.originals, strict=True)):
                if where.nbytes == 0:
                    continue
                device = encoded.tensors[number].device
                waits = where.nbytes >= LATER_BYTES and not tensor.is_inference() and self._may_wait(where, tensor)
                if device.type == "cuda":
                    split.on_device.setdefault(device, []).append(number)
                elif not waits:
                    split.now.append(number)
                if waits:
                    split.later.append(number)
        return split

    def _views_of(self, encoded: Encoded, payload: memoryview, slot: Hashable) -> list[Tensor]:
        slices, views = self._views.get(slot, ((), []))
        if slices is not encoded.slices:
            views, end = [view_of(payload, where) for where in encoded.slices], 0
            for where in sorted(encoded.slices, key=lambda where: where.offset):
                payload[end : where.offset] = bytes(where.offset - end)  # the gaps have digests too
                end = where.offset + where.nbytes
            self._views[slot] = encoded.slices, views
        return views

    def _begin_download(
        self, device: torch.device, numbers: Sequence[int], encoded: Encoded, waiting: set[int]
    ) -> tuple[SlotStaging, list[tuple[int, Tensor]], DeviceEvent]:
        """Tensors that cannot wait are copied into one on the device first: of many small ones a clone each is slow."""
        staging = self._stagings.get(device)
        if staging is None:
            staging = self._stagings[device] = self._staging_for(device)
        now = [number for number in numbers if number not in waiting]
        flat = [_bytes(encoded.tensors[number]) for number in now]
        copies = torch.cat(flat).split([tensor.numel() for tensor in flat]) if flat else ()
        kept = [(number, encoded.tensors[number].detach()) for number in numbers if number in waiting]
        tensors = [(encoded.slices[number].offset, copy) for number, copy in (*zip(now, copies, strict=True), *kept)]
        return staging, tensors, staging.record()


def copy_of(client: HolderClient | None, step: int, attempt: int) -> tuple[bytes, memoryview]:
    """Return layout and payload of the own version of that step, once it is complete; no other thread waits meanwhile.

    Raises ThinwireError if it does not become complete.
    """
    deadline = time.monotonic() + _SEALING_SECONDS
    while client is not None and client.shard is not None and time.monotonic() < deadline:
        for version in client.inventory(verify=False):
            if (version.shard, version.step, version.attempt) == (client.shard, step, attempt):
                with client.open(version) as reader:
                    copy = np.empty(len(reader.payload), np.uint8)
                    np.copyto(copy, np.frombuffer(reader.payload, np.uint8))
                    return reader.layout, copy.data
        time.sleep(_POLL_SECONDS)
    raise ThinwireError(f"step {step} did not become a version on this host")


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy a tensor of the host on this thread alone, without Python's lock."""
    source = source.detach()
    if source.is_conj() or source.is_neg():
        target.copy_(source)
        return
    raw = _RAW[source.itemsize]
    np.copyto(target.view(raw).numpy(), source.view(raw).numpy())
