"""What the lane knows of the device of the gradients: how they get to the host and back. `thinwire.cuda` does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.sync.exchange import ProcessGroupExchange


class Event(Protocol):
    """A point in the work of a stream."""


@dataclass(frozen=True, eq=False)
class Handover:
    """Tensors that are written once ``event`` is reached."""

    tensors: tuple[Tensor, ...]
    event: Event | None = None


class Staging(Protocol):
    """Between the device of the gradients and the lane."""

    is_host: bool

    def future(self) -> Future[Tensor]:
        """One that can be completed with a tensor of the device."""
        ...

    def hand_over(self, tensors: Sequence[Tensor]) -> Handover:
        """Called where the tensors were written, on the thread and the stream that did so."""
        ...

    def taking(self, handover: Handover) -> AbstractContextManager[object]:
        """Around a job of the lane: inside, the tensors may be used, and results are written and handed back."""
        ...

    def to_host(self, *tensors: Tensor) -> list[Tensor]:
        """Copies on the host, until the job ends. The lane's thread waits for them."""
        ...

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        """Copies on the device, for work that follows on the lane's stream. Nobody waits."""
        ...

    def all_reduce(self, tensor: Tensor, all_reduce: Callable[[Tensor], None], world_size: int) -> None:
        """Have ``all_reduce`` sum a contiguous tensor of the device over the ranks, in place, on the host."""
        ...

    def stats(self) -> dict[str, float]:
        """For `Synchronizer.stats`."""
        ...


class HostStaging:
    """For gradients on the CPU: there is nothing to do."""

    is_host = True

    def future(self) -> Future[Tensor]:
        return Future()

    def hand_over(self, tensors: Sequence[Tensor]) -> Handover:
        return Handover(tuple(tensors))

    def taking(self, handover: Handover) -> AbstractContextManager[object]:
        return nullcontext()

    def to_host(self, *tensors: Tensor) -> list[Tensor]:
        return list(tensors)

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        return list(tensors)

    def all_reduce(self, tensor: Tensor, all_reduce: Callable[[Tensor], None], world_size: int) -> None:
        all_reduce(tensor)

    def stats(self) -> dict[str, float]:
        return {}


class StagedExchange(ProcessGroupExchange):
    """A `ProcessGroupExchange` over Gloo whose all-reduce takes dense gradients where they are."""

    def __init__(self, process_group: dist.ProcessGroup, staging: Staging) -> None:
        super().__init__(process_group)
        self._staging = staging

    def all_reduce(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu":
            super().all_reduce(tensor)
        elif self.world_size > 1:
            self._staging.all_reduce(tensor, super().all_reduce, self.world_size)
