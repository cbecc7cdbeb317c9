"""`Device`: the operations that staging needs of a device, and no more, so that tests can substitute one."""

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
        """Record an event after the work queued so far on the current stream of the calling thread."""
        ...

    def lane_stream(self) -> AbstractContextManager[object]:
        """Return a context in which the lane's stream is the current one."""
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Make the lane's stream wait for an event, but not the host."""
        ...

    def synchronize(self, event: DeviceEvent) -> None:
        """Make the calling thread wait. Only the lane's thread does, for events of the lane's stream."""
        ...

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor's memory, if freed, from reuse before the lane's stream has done its queued work."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between the device and pinned memory on the current stream."""
        ...

    def empty_like(self, host: Tensor) -> Tensor:
        """Allocate memory on the current stream for a tensor of the host."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate uint8 [num_bytes] of host memory that the device copies from and to by itself."""
        ...

    def future(self) -> Future[Tensor]:
        """Return a future whose completion records the current stream; streams that wait for it wait for that point."""
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
