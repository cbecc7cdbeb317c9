"""Several parts as one message of bytes: their lengths in bytes as int64, then each, 8-byte aligned."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import CorruptMessageError
from thinwire.rows.formats import aligned

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class PartSpec:
    """One part of a payload, as a receiver expects it.

    Args:
        dtype: dtype of the part.
        numel: number of elements; None if the sender decides, up to ``max_numel``.
        max_numel: largest legal number of elements if the sender decides.
        code: see `thinwire.compress.base.Payload`.
    """

    dtype: torch.dtype
    numel: int | None = None
    max_numel: int = 0
    code: object = None


def packed_bytes(specs: Sequence[PartSpec]) -> int:
    """Return the packed bytes of parts of known lengths."""
    assert all(spec.numel is not None for spec in specs), "lengths that depend on the gradient have no fixed size"
    return message_bytes([spec.dtype.itemsize * (spec.numel or 0) for spec in specs])


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Return all parts, of any dtype, as one message."""
    return join([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def unpack(data: Tensor, specs: Sequence[PartSpec]) -> tuple[Tensor, ...]:
    """Return the parts of packed bytes, each a view of ``data`` (uint8, 8-byte aligned).

    Raises:
        CorruptMessageError: see `split`; or a part of another length than its spec says.
    """
    parts = split(data, len(specs))
    for number, (part, spec) in enumerate(zip(parts, specs, strict=True)):
        numel, rest = divmod(part.numel(), spec.dtype.itemsize)
        limit = spec.max_numel if spec.numel is None else spec.numel
        if rest or numel > limit or (spec.numel is not None and numel != spec.numel):
            raise CorruptMessageError(
                f"part {number} has {part.numel()} bytes, where {limit} elements of {spec.dtype} are expected"
            )
    return tuple(part.view(spec.dtype) for part, spec in zip(parts, specs, strict=True))


def message_bytes(lengths: Sequence[int]) -> int:
    """Return the bytes of a message with parts of these lengths."""
    return _LENGTH_BYTES * len(lengths) + sum(map(aligned, lengths))


def join(parts: Sequence[Tensor]) -> Tensor:
    """Return one message, newly allocated: uint8 [message_bytes]."""
    lengths = [data.numel() for data in parts]
    message = torch.empty(message_bytes(lengths), dtype=torch.uint8)
    end = _LENGTH_BYTES * len(parts)
    message[:end].view(torch.int64).copy_(torch.tensor(lengths, dtype=torch.int64))
    for data, length in zip(parts, lengths, strict=True):
        message[end : end + length] = data
        message[end + length : end + aligned(length)] = 0
        end += aligned(length)
    return message


def split(message: Tensor, count: int) -> list[Tensor]:
    """Return the parts of a message, as views.

    Raises:
        CorruptMessageError: lengths that do not add up to the message.
    """
    end = _LENGTH_BYTES * count
    if message.numel() < end:
        raise CorruptMessageError(f"a message of {message.numel()} bytes cannot hold {count} parts")
    lengths: list[int] = message[:end].view(torch.int64).tolist()
    if min(lengths, default=0) < 0 or message_bytes(lengths) != message.numel():
        raise CorruptMessageError(f"parts of {lengths} bytes in a message of {message.numel()}")
    padded = message[end:].split([aligned(length) for length in lengths])
    return [part[:length] for part, length in zip(padded, lengths, strict=True)]
