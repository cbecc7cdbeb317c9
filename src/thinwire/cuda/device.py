"""What the staging needs of a device, and no more, so that tests can stand in for one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.comm.process_group import DeviceEvent


class Device(Protocol):
    """A device with a stream for the lane beside the one on which the model trains."""

    def record(self) -> DeviceEvent:
        """The point that the current stream of the calling thread has been given work up to."""
        ...

    def lane_stream(self) -> AbstractContextManager[object]:
        """Inside, the current stream is that of the lane."""
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Have the stream of the lane wait; the host does not."""
        ...

    def synchronize(self, event: DeviceEvent) -> None:
        """Have the calling thread wait. Only the lane's thread does, for events of the lane's stream."""
        ...

    def keep(self, tensor: Tensor) -> None:
        """Its memory, if freed, is not used again before the lane's stream has done what it was given."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between the device and pinned memory on the current stream."""
        ...

    def empty_like(self, host: Tensor) -> Tensor:
        """Memory of the current stream for a tensor of the host."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of the host, from and to which the device copies by itself."""
        ...

    def future(self) -> Future[Tensor]:
        """One that, completed, notes where the current stream is; streams of those who wait for it wait for that."""
        ...


class CudaDevice:
    """A `Device` that is one GPU of this process.

    The lane's stream has a higher priority than usual ones: its kernels are short, and a network waits for them. Events
    that the lane waits for let its thread sleep, since it waits for whole backward passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lane_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)

    def synchronize(self, event: DeviceEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.synchronize()

    def keep(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(self._stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def empty_like(self, host: Tensor) -> Tensor:
        return torch.empty_like(host, device=self._device, pin_memory=False)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def future(self) -> Future[Tensor]:
        return Future(devices=[self._device])
