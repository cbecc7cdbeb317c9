"""Conversion of parts of a payload to bytes and back: each part 8-byte aligned, after its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import CorruptMessageError
from thinwire.wire import aligned

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class PartSpec:
    """One part of a payload, as a receiver expects it.

    Args:
        dtype: dtype of the part.
        numel: number of elements; None if the sender decides, up to ``max_numel``.
        max_numel: largest legal number of elements if the sender decides.
    """

    dtype: torch.dtype
    numel: int | None = None
    max_numel: int = 0


def packed_bytes(specs: Sequence[PartSpec]) -> int:
    """Return the packed bytes of parts of known lengths."""
    assert all(spec.numel is not None for spec in specs), "lengths that depend on the gradient have no fixed size"
    return sum(_LENGTH_BYTES + aligned(spec.dtype.itemsize * (spec.numel or 0)) for spec in specs)


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Return all parts as one uint8 tensor, newly allocated: for each part its length in elements, its bytes, zeros."""
    sizes = [part.numel() * part.element_size() for part in parts]
    data = torch.empty(sum(_LENGTH_BYTES + aligned(size) for size in sizes), dtype=torch.uint8)
    end = 0
    for part, size in zip(parts, sizes, strict=True):
        data[end : end + _LENGTH_BYTES].view(torch.int64)[0] = part.numel()
        end += _LENGTH_BYTES
        data[end : end + size] = part.contiguous().view(-1).view(torch.uint8)
        data[end + size : end + aligned(size)] = 0
        end += aligned(size)
    return data


def unpack(data: Tensor, specs: Sequence[PartSpec]) -> tuple[Tensor, ...]:
    """Return the parts of packed bytes, each a view of ``data`` (uint8, 8-byte aligned).

    Raises:
        CorruptMessageError: a part of another length than its spec says, or bytes left over or missing.
    """
    parts, end = [], 0
    for number, spec in enumerate(specs):
        start = end + _LENGTH_BYTES
        if start > data.numel():
            raise CorruptMessageError(f"a payload of {data.numel()} bytes ends before part {number}")
        numel = int(data[end:start].view(torch.int64)[0])
        limit = spec.max_numel if spec.numel is None else spec.numel
        if numel < 0 or numel > limit or (spec.numel is not None and numel != spec.numel):
            raise CorruptMessageError(f"part {number} of a payload has {numel} elements, where {limit} are expected")
        size = numel * spec.dtype.itemsize
        end = start + aligned(size)
        if end > data.numel():
            raise CorruptMessageError(f"a payload of {data.numel()} bytes ends inside part {number}")
        parts.append(data[start : start + size].view(spec.dtype))
    if end != data.numel():
        raise CorruptMessageError(f"{data.numel() - end} bytes after the last part of a payload")
    return tuple(parts)
