"""`Device`: the operations that staging needs of a device, and no more, so that tests can substitute one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.comm.process_group import DeviceEvent
from thinwire.errors import ThinwireError


class Device(Protocol):
    """A device with a stream for the lane beside the one on which the model trains."""

    def record(self) -> DeviceEvent:
        """Record an event after the work queued so far on the current stream of the calling thread."""
        ...

    def selected(self) -> AbstractContextManager[object]:
        """Return a context in which this is the current device of the thread."""
        ...

    def lane_stream(self) -> AbstractContextManager[object]:
        """Return a context in which this device and the lane's stream are the current ones."""
        ...

    def completing(self) -> AbstractContextManager[object]:
        """Return a context in which another stream is the current one, which follows the work of the lane's so far."""
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

    def future(self) -> Future[Any]:
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
        self._completion = torch.cuda.Stream(device)

    def record(self) -> torch.cuda.Event:
        if torch.cuda.is_current_stream_capturing():
            raise ThinwireError(
                "a CUDA graph is being captured, and what thinwire exchanges with other ranks or copies to the host"
                " cannot be captured: capture only parts of the model, by torch.cuda.make_graphed_callables before"
                " attach, and call backward() and step() of a Checkpointer outside of torch.cuda.graph"
            )
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def selected(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device)

    @contextmanager
    def lane_stream(self) -> Iterator[None]:
        # Threads begin on device 0. To leave the stream would select that device, which takes 0.5 GB of it.
        with self.selected(), torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def completing(self) -> Iterator[None]:
        self._completion.wait_stream(self._stream)
        with torch.cuda.stream(self._completion):
            yield

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

    def future(self) -> Future[Any]:
        return Future(devices=[self._device])
