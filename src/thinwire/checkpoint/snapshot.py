"""What a checkpoint holds: the training state of one rank, gathered, copied into a slot, and put back in place."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.checkpoint.layout import Layout, flatten, load_into, view_of, write

SUB_BUFFER_BYTES = 32 << 20
SUB_BUFFERS = 4  # 128 MiB of page-locked memory in all, as in the paper


@dataclass(frozen=True)
class Training:
    """All that training needs to go on as if nothing had happened. Whatever is None is left out.

    Everything but the model has ``state_dict`` and ``load_state_dict``.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    scaler: Any = None
    synchronizer: Any = None
    data: Any = None

    @property
    def module(self) -> nn.Module:
        """The model, out of DDP."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def parts(self) -> dict[str, Any]:
        named = {
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "synchronizer": self.synchronizer,
            "data": self.data,
        }
        return {name: part for name, part in named.items() if part is not None}

    def capture(self, step: int) -> dict[str, Any]:
        """The state after ``step`` steps. Its tensors are those of the training: copy them before they change."""
        states = {name: part.state_dict() for name, part in self.parts().items()}
        return {"model": self.module.state_dict(), **states, "step": step, "random": random_states()}

    def load(self, layout: Layout, tensors: Sequence[Tensor]) -> int:
        """Put a stored state back, tensors in place, and say after how many steps it was.

        Raises ValueError if it has not the parts that this training has.
        """
        existing = self.capture(0)
        state = load_into(existing, layout, tensors)
        if not isinstance(state, dict) or set(state) != set(existing):
            raise ValueError(
                f"the checkpoint has {sorted(state)} and this training {sorted(existing)}: pass the Checkpointer the"
                " same parts"
            )
        self.module.load_state_dict(state["model"])
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        set_random_states(state["random"])
        return int(state["step"])

    def describe(self) -> str:
        """Digest of what a checkpoint of another model would differ in: names, shapes and dtypes, and the parts.

        Raises ValueError, with the path, for a state that cannot be stored.
        """
        layout, _ = flatten({"model": self.module.state_dict()})
        lines = [f"{item.path} {item.dtype} {item.shape}" for item in layout.slices]
        lines += [name for name in self.parts() if name != "optimizer"]
        lines.append(f"optimizer {type(self.optimizer).__name__}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def random_states() -> dict[str, Any]:
    """Of torch (and the current CUDA device, if it is in use), Python and numpy."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, last = np.random.get_state(legacy=True)
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_cuda else None,
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
        "numpy": [str(name), torch.from_numpy(np.array(keys, np.int64)), int(position), int(has_gauss), float(last)],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Back to what `random_states` returned."""
    version, internal, gauss = states["python"]
    name, keys, *others = states["numpy"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    np.random.set_state((name, keys.numpy().astype(np.uint32), *others))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


class Copier:
    """Copies a state into a slot; when `copy` returns, training may change the state.

    From the host's memory it is one copy. From a GPU it is two at once: to page-locked sub-buffers on a stream of its
    own, and from those to the slot.
    """

    def __init__(self) -> None:
        self._staging: dict[torch.device, _DeviceStaging] = {}

    def copy(self, layout: Layout, tensors: Sequence[Tensor], payload: memoryview) -> None:
        """``payload`` has room for at least ``layout.payload_bytes``."""
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        if not devices:
            return write(layout, tensors, payload)
        pairs = list(zip(layout.slices, tensors, strict=True))
        for where, tensor in pairs:
            if tensor.device not in devices:
                view_of(payload, where).copy_(tensor)
        for device in devices:
            staging = self._staging.setdefault(device, _DeviceStaging(device))
            here = [(where.offset, tensor) for where, tensor in pairs if tensor.device == device and where.nbytes]
            staging.copy(here, torch.frombuffer(payload, dtype=torch.uint8))
        return None


class _DeviceStaging:
    """A ring of page-locked sub-buffers for one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._buffers = [torch.empty(SUB_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(SUB_BUFFERS)]
        self._events = [torch.cuda.Event() for _ in range(SUB_BUFFERS)]

    def copy(self, tensors: list[tuple[int, Tensor]], payload: Tensor) -> None:
        """Each tensor to its offset in the payload; returns when all bytes are there."""
        in_flight: list[tuple[int, int, int]] = []  # sub-buffer, offset, bytes
        turn = 0
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for offset, tensor in tensors:
            with torch.cuda.stream(self._stream):
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            for start in range(0, flat.numel(), SUB_BUFFER_BYTES):
                if len(in_flight) == SUB_BUFFERS:
                    self._finish(in_flight.pop(0), payload)
                index, turn = turn % SUB_BUFFERS, turn + 1
                piece = flat[start : start + SUB_BUFFER_BYTES]
                with torch.cuda.stream(self._stream):
                    self._buffers[index][: piece.numel()].copy_(piece, non_blocking=True)
                    self._events[index].record(self._stream)
                in_flight.append((index, offset + start, piece.numel()))
        for flight in in_flight:
            self._finish(flight, payload)

    def _finish(self, flight: tuple[int, int, int], payload: Tensor) -> None:
        index, offset, num_bytes = flight
        self._events[index].synchronize()
        payload[offset : offset + num_bytes].copy_(self._buffers[index][:num_bytes])
