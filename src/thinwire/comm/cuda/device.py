"""`CudaDevice`: the operations that staging needs of a device, and no more, so that tests can substitute one."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.comm.process_group import DeviceEvent
from thinwire.errors import ThinwireError


class CudaDevice:
    """A GPU of this process, with a stream for the lane beside the one on which the model trains.

    The lane's stream has a higher priority than usual ones: its kernels are short, and a network waits for them. Events
    that the lane waits for let its thread sleep, since it waits for whole backward passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._completion = torch.cuda.Stream(device)

    def record(self) -> torch.cuda.Event:
        """Record an event after the work queued so far on the current stream of the calling thread."""
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
        """Return a context in which this is the current device of the thread."""
        return torch.cuda.device(self._device)

    @contextmanager
    def lane_stream(self) -> Iterator[None]:
        """Return a context in which this device and the lane's stream are the current ones."""
        # Threads begin on device 0. To leave the stream would select that device, which takes 0.5 GB of it.
        with self.selected(), torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Return a context in which another stream is the current one, which follows the work of the lane's so far."""
        self._completion.wait_stream(self._stream)
        with torch.cuda.stream(self._completion):
            yield

    def wait(self, event: DeviceEvent) -> None:
        """Make the lane's stream wait for an event, but not the host."""
        self._stream.wait_event(event)

    def synchronize(self, event: DeviceEvent) -> None:
        """Make the calling thread wait. Only the lane's thread does, for events of the lane's stream."""
        event.synchronize()

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor's memory, if freed, from reuse before the lane's stream has done its queued work."""
        if tensor.is_cuda:
            tensor.record_stream(self._stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between the device and pinned memory on the current stream."""
        target.copy_(source, non_blocking=True)

    def empty_like(self, host: Tensor) -> Tensor:
        """Allocate memory on the current stream for a tensor of the host."""
        return torch.empty_like(host, device=self._device, pin_memory=False)

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate uint8 [num_bytes] of host memory that the device copies from and to by itself."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def future(self) -> Future[Any]:
        """Return a future whose completion records the current stream; streams that wait for it wait for that point."""
        return Future(devices=[self._device])
