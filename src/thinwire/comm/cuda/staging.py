"""Staging of gradients on a device: the way to the lane, whose process group is on the CPU, and back.

The training stream waits for nothing. Where DDP hands a bucket over, an event is recorded. The lane's stream waits for
it, selects the non-zero rows, and copies only those to pinned memory; the lane's *thread* waits for that copy. Results
are copied back on the same stream, and DDP's future is completed on it: a stream that waits for the future waits for an
event.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.comm.cuda.arena import FIRST_BYTES, LIMIT_BYTES, Arena
from thinwire.comm.cuda.device import CudaDevice
from thinwire.comm.process_group import DeviceEvent, Handover, Staging

CHUNK_BYTES = 4 << 20


class DeviceStaging(Staging):
    """A `Staging` of gradients on a device, for the lane's thread.

    Others call `hand_over`, `future`, `working` and `stats`.

    Pinned memory is an `Arena` for compact rows, of the size that the jobs so far needed, and two chunks for dense
    tensors. What does not fit the arena goes through the chunks too, in rounds, and is counted; the next job has a
    larger arena. While the host is at work on one chunk, the other one is copied.

    The lane's stream is serial. So a copy to the host never overtakes an earlier copy from the same memory to the
    device; only before the *host* writes to memory again must it wait. A job that reads has waited by then.
    """

    is_host = False

    def __init__(
        self,
        device: CudaDevice,
        first_bytes: int = FIRST_BYTES,
        limit_bytes: int = LIMIT_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._device = device
        self._arena = Arena(device.pinned, first_bytes, limit_bytes)
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._may_write = False  # whether the host has waited, in this job, for copies of earlier ones
        self._overflow_rounds = 0

    def future(self) -> Future[Any]:
        return self._device.future()

    def selected(self) -> AbstractContextManager[object]:
        return self._device.selected()

    def completing(self) -> AbstractContextManager[object]:
        return self._device.completing()

    def hand_over(self, tensors: Sequence[Tensor]) -> Handover:
        return Handover(tuple(tensors), self._device.record())

    @contextmanager
    def taking(self, handover: Handover) -> Iterator[None]:
        with self._device.lane_stream():
            self._may_write = False
            self._arena.begin()
            assert handover.event is not None
            self._device.wait(handover.event)
            for tensor in handover.tensors:
                for part in _strided(tensor):
                    self._device.keep(part)
            yield

    def working(self) -> AbstractContextManager[object]:
        return self._device.lane_stream()

    def to_host(self, *tensors: Tensor) -> list[Tensor]:
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        rooms = [self._arena.take(tensor.nbytes) for tensor in tensors]
        for tensor, room in zip(tensors, rooms, strict=True):
            if room is not None:
                self._device.copy(room, _bytes(tensor))
        self._wait()
        return [
            self._to_host_in_rounds(tensor) if room is None else room.view(tensor.dtype).view(tensor.shape)
            for tensor, room in zip(tensors, rooms, strict=True)
        ]

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        return [self._to_device(tensor.contiguous()) for tensor in tensors]

    def all_reduce(self, tensor: Tensor, all_reduce: Callable[[Tensor], None], world_size: int) -> None:
        """Sum in chunks: one is summed while the next is copied to the host and the last one back.

        Chunks are multiples of the world size, so that together they send the bytes of one all-reduce.
        """
        assert tensor.is_contiguous(), "an all-reduce is in place"
        elements = max(1, self._chunk_bytes // tensor.element_size() // world_size) * world_size
        for part, host in self._downloads(tensor.view(-1).split(elements) if tensor.numel() else ()):
            all_reduce(host)
            self._device.copy(part, host)
        self._may_write = False

    def stats(self) -> dict[str, float]:
        """Return ``cuda/pinned_bytes`` of host memory and ``cuda/overflow_rounds``, copies that did not fit it."""
        chunks = sum(chunk.numel() for chunk in self._chunks)
        return {
            "cuda/pinned_bytes": float(self._arena.capacity_bytes + chunks),
            "cuda/overflow_rounds": float(self._overflow_rounds),
        }

    def _downloads(self, parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each part with its copy in a chunk, which is the caller's until he asks for the next."""
        following = self._download(parts[0], 0) if parts else None
        for number, part in enumerate(parts):
            host, event = following  # pyrefly: ignore [not-iterable]
            following = self._download(parts[number + 1], number + 1) if number + 1 < len(parts) else None
            self._device.synchronize(event)
            yield part, host

    def _download(self, part: Tensor, number: int) -> tuple[Tensor, DeviceEvent]:
        """Copy into the chunk whose part before last the stream has copied back by then."""
        host = self._chunk(number, part.nbytes).view(part.dtype)
        self._device.copy(host, part)
        return host, self._device.record()

    def _chunk(self, number: int, num_bytes: int) -> Tensor:
        self._chunks = self._chunks or [self._device.pinned(self._chunk_bytes) for _ in range(2)]
        return self._chunks[number % 2][:num_bytes]

    def _wait(self) -> None:
        """Wait for all copies so far."""
        self._device.synchronize(self._device.record())
        self._may_write = True

    def _to_device(self, tensor: Tensor) -> Tensor:
        target = self._device.empty_like(tensor)
        if self._arena.holds(tensor):  # it came from the device in this job
            self._device.copy(_bytes(target), _bytes(tensor))
            return target
        if not self._may_write:
            self._wait()
        room = self._arena.take(tensor.nbytes)
        if room is None:
            self._to_device_in_rounds(tensor, target)
        else:
            room.copy_(_bytes(tensor))
            self._device.copy(_bytes(target), room)
        return target

    def _to_device_in_rounds(self, tensor: Tensor, target: Tensor) -> None:
        events: list[DeviceEvent] = []
        for number, (there, here) in enumerate(zip(self._rounds(target), self._rounds(tensor), strict=True)):
            if number > 1:
                self._device.synchronize(events[-2])
            chunk = self._chunk(number, here.numel())
            chunk.copy_(here)
            self._device.copy(there, chunk)
            self._overflow_rounds += 1
            events.append(self._device.record())
        self._may_write = False

    def _to_host_in_rounds(self, tensor: Tensor) -> Tensor:
        target = torch.empty(tensor.shape, dtype=tensor.dtype)
        for there, (_, host) in zip(self._rounds(target), self._downloads(self._rounds(tensor)), strict=True):
            there.copy_(host)
            self._overflow_rounds += 1
        return target

    def _rounds(self, tensor: Tensor) -> Sequence[Tensor]:
        return _bytes(tensor).split(self._chunk_bytes)


def staging_for(device: torch.device) -> Staging:
    """Return the staging of gradients on a device.

    Raises:
        ValueError: a device that is neither a CPU nor a CUDA device.
    """
    if device.type == "cpu":
        return Staging()
    if device.type == "cuda":
        return DeviceStaging(CudaDevice(device))
    raise ValueError(f"parameters are on {device}: thinwire synchronizes gradients on CPU and CUDA devices")


def _strided(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold a tensor's memory."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
