"""A device with the hazards of a real one, for tests of what copies to it and from it.

What it copies to the host arrives when the host waits for it, and is garbage before; what it copies from the host must
not change until the host has waited.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.comm.process_group import DeviceEvent

GARBAGE = 0xAB


@dataclass(frozen=True)
class FakeEvent:
    stream: str
    number: int


class DeviceFuture(Future[Tensor]):
    """A future of a device looks for tensors in whatever completes it, an exception too, by pickling that."""

    def set_result(self, result: Tensor) -> None:
        try:
            torch._jit_internal._extract_tensors(result)
        except Exception as error:
            raise RuntimeError(f"Cannot extract tensors from value: {error}") from error
        super().set_result(result)


class FakeDevice:
    """Tensors of the CPU stand for those of the device. ``log`` is what was asked for, by which stream or thread."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.kept: list[Tensor] = []
        self._stream = threading.local()
        self._downloads: list[tuple[int, Tensor, Tensor]] = []  # number, target, what arrives there
        self._uploads: list[tuple[int, Tensor, Tensor]] = []  # number, source, what it was
        self._number = 0
        self._pinned: list[Tensor] = []
        self.uploaded_from: list[int] = []  # addresses

    @contextmanager
    def selected(self) -> Iterator[None]:
        yield

    @contextmanager
    def completing(self) -> Iterator[None]:
        assert self.current == "lane"
        self._stream.name = "completion"
        try:
            yield
        finally:
            self._stream.name = "lane"

    def record(self) -> FakeEvent:
        self._note(f"record on {self.current}")
        return FakeEvent(self.current, self._number)

    @contextmanager
    def lane_stream(self) -> Iterator[None]:
        self._stream.name = "lane"
        try:
            yield
        finally:
            self._stream.name = "training"

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, FakeEvent)
        self._note(f"wait for {event.stream}")

    def synchronize(self, event: DeviceEvent) -> None:
        assert isinstance(event, FakeEvent)
        assert event.stream == "lane", "nobody waits on the host for the training stream"
        self._note("synchronize")
        for number, target, arrived in self._downloads:
            if number <= event.number:
                target.copy_(arrived)
        for number, source, was in self._uploads:
            if number <= event.number:
                assert torch.equal(source, was), "memory was written while the device copied from it"
        self._downloads = [copy for copy in self._downloads if copy[0] > event.number]
        self._uploads = [copy for copy in self._uploads if copy[0] > event.number]

    def keep(self, tensor: Tensor) -> None:
        self._note("keep")
        self.kept.append(tensor)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert self.current == "lane", "copies do not burden the training stream"
        assert target.shape == source.shape
        assert target.dtype == source.dtype
        if self._is_pinned(target):
            self._note("download")
            for _, uploaded, was in self._uploads:
                assert torch.equal(uploaded, was), "memory was written while the device copied from it"
            self._uploads = [copy for copy in self._uploads if not overlap(copy[1], target)]  # the stream's order
            self._downloads.append((self._number, target, source.clone()))
            target.view(torch.uint8).fill_(GARBAGE)
        else:
            assert self._is_pinned(source), "the device copies from pinned memory"
            self._note("upload")
            self.uploaded_from.append(source.data_ptr())
            self._uploads.append((self._number, source, source.clone()))
            target.copy_(source)

    def empty_like(self, host: Tensor) -> Tensor:
        return torch.empty_like(host)

    def pinned(self, num_bytes: int) -> Tensor:
        self._note(f"pin {num_bytes}")
        self._pinned.append(torch.full((num_bytes,), GARBAGE, dtype=torch.uint8))
        return self._pinned[-1]

    def future(self) -> Future[Tensor]:
        future: Future[Tensor] = DeviceFuture()
        future.add_done_callback(lambda _: self._note(f"future done on {self.current}"))
        return future

    @property
    def current(self) -> str:
        return getattr(self._stream, "name", "training")

    def _note(self, what: str) -> None:
        self._number += 1
        self.log.append(what)

    def _is_pinned(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(memory.untyped_storage().data_ptr() == storage for memory in self._pinned)


def overlap(some: Tensor, other: Tensor) -> bool:
    return some.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and (
        some.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < some.data_ptr() + some.nbytes
    )
