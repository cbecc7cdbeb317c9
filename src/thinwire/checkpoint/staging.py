"""From a GPU to a slot: through a ring of page-locked sub-buffers, on a stream of its own, beside the training."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.checkpoint.faultpoint import reach
from thinwire.cuda.device import Device
from thinwire.sync.staging import Event

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
    """What each sub-buffer is filled with: small tensors together, large ones cut. ``tensors`` are uint8 [n]."""
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


class SlotStaging:
    """The ring of one device, page-locked at the first copy."""

    def __init__(
        self, device: Device, sub_buffer_bytes: int = SUB_BUFFER_BYTES, sub_buffers: int = SUB_BUFFERS
    ) -> None:
        self._device, self._sub_buffer_bytes, self._count = device, sub_buffer_bytes, sub_buffers
        self._buffers: list[Tensor] = []

    def record(self) -> Event:
        """The point up to which the training has given work to its stream; call it on the training's thread."""
        return self._device.record()

    def copy(self, tensors: Sequence[tuple[int, Tensor]], written: Event, payload: Tensor) -> None:
        """Each tensor, as it is after ``written``, to its offset in the payload (uint8 [n] of the host).

        On any thread; it returns when all bytes are there. Nobody may write to the tensors, or free them, before that.
        """
        self._buffers = self._buffers or [self._device.pinned(self._sub_buffer_bytes) for _ in range(self._count)]
        in_flight: deque[tuple[Tensor, list[Piece], Event]] = deque()
        with self._device.lane_stream():
            self._device.wait(written)
            flat = [(offset, _bytes(tensor)) for offset, tensor in tensors if tensor.numel()]
            for number, pieces in enumerate(fills(flat, self._sub_buffer_bytes)):
                if len(in_flight) == self._count:
                    self._finish(*in_flight.popleft(), payload)
                buffer = self._buffers[number % self._count]
                for piece in pieces:
                    self._device.copy(buffer[piece.start : piece.end], piece.source)
                in_flight.append((buffer, pieces, self._device.record()))
            while in_flight:
                self._finish(*in_flight.popleft(), payload)

    def _finish(self, buffer: Tensor, pieces: list[Piece], downloaded: Event, payload: Tensor) -> None:
        self._device.synchronize(downloaded)
        for piece in pieces:
            target = payload[piece.offset : piece.offset + piece.source.numel()]
            np.copyto(target.numpy(), buffer[piece.start : piece.end].numpy())  # without Python's lock
            reach("copy")


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [n], in order. A single element is contiguous whatever its stride is, so that is said anew."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
