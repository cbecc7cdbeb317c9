"""Copies a state into a slot: at once what may change at any time, beside the training what only its optimizer changes.

Parameters and the optimizer's state are written by ``optimizer.step`` alone. So they are copied on another thread while
the next forward and backward run, and ``optimizer.step`` waits for the copy (GEMINI, SOSP'23: the checkpoint of a step
is taken before the next update). All else is small, and copied before training goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from thinwire.checkpoint.client import HolderClient
from thinwire.checkpoint.encode import Encoded
from thinwire.checkpoint.faultpoint import reach
from thinwire.checkpoint.layout import TensorSlice, view_of
from thinwire.checkpoint.staging import SlotStaging
from thinwire.cuda.device import CudaDevice
from thinwire.errors import ThinwireError
from thinwire.sync.staging import Event

LATER_BYTES = 64 << 10  # smaller tensors are copied at once: that costs less than looking after them
_BATCH = 16
_SEALING_SECONDS, _POLL_SECONDS = 600.0, 0.02
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

May = Callable[[TensorSlice, Tensor], bool]


@dataclass
class Copy:
    """A copy that has begun: `finish` does the rest, on any thread."""

    seconds: float
    _later: list[tuple[Tensor, Tensor]]  # view of the slot, tensor
    _watched: list[tuple[Tensor, int]]  # tensor, version when the copy began
    _downloads: list[tuple[SlotStaging, list[tuple[int, Tensor]], Event]]
    _payload: memoryview = field(repr=False)

    @property
    def is_done(self) -> bool:
        return not self._later and not self._downloads

    def finish(self) -> bool:
        """Copy what is left; whether nobody has written to it meanwhile, so that the copy is one state."""
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
    """Numbers of the slices that are copied at once, of those that can wait, and of those on each CUDA device."""

    slices: tuple[TensorSlice, ...]
    now: list[int]
    later: list[int]
    on_device: dict[torch.device, list[int]]


class Copier:
    """For one shard.

    Args:
        may_wait: whether a tensor is written by the optimizer's step alone.
        staging_for: how a CUDA device copies to the host.
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
        """Copy what may change at any time; the rest is copied by `Copy.finish`, before the next ``optimizer.step``.

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
        later = [(views[number], tensors[number]) for number in split.later if tensors[number].device.type != "cuda"]
        watched = [(originals[number], originals[number]._version) for number in split.later]
        return Copy(time.perf_counter() - started, later, watched, downloads, payload)

    def forget_slots(self) -> None:
        """They are gone, or there are other ones."""
        self._views.clear()

    def forget_split(self) -> None:
        """Ask anew what may wait."""
        self._split = None

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
            views = [view_of(payload, where) for where in encoded.slices]
            self._views[slot] = encoded.slices, views
        return views

    def _begin_download(
        self, device: torch.device, numbers: Sequence[int], encoded: Encoded, waiting: set[int]
    ) -> tuple[SlotStaging, list[tuple[int, Tensor]], Event]:
        """What cannot wait is copied on the device first, which costs the host nothing."""
        staging = self._stagings.get(device)
        if staging is None:
            staging = self._stagings[device] = self._staging_for(device)
        tensors = [
            (
                encoded.slices[number].offset,
                encoded.tensors[number] if number in waiting else encoded.tensors[number].clone(),
            )
            for number in numbers
        ]
        return staging, tensors, staging.record()


def copy_of(client: HolderClient | None, step: int, attempt: int) -> tuple[bytes, memoryview]:
    """Layout and payload of the own version of that step, once it is complete; nobody else waits meanwhile.

    Raises ThinwireError if it does not come to be.
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
