"""Packed payloads of several parameters in one message: their lengths in bytes as int64, then each, 8-byte aligned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, Parameter, Payload
from thinwire.compress.reduction.base import Plan
from thinwire.compress.wrappers import packed_code
from thinwire.errors import CorruptMessageError
from thinwire.wire import Header, aligned

_LENGTH_BYTES = 8


def join(packed: Sequence[Tensor]) -> Tensor:
    """Return one message, newly allocated: uint8 [message_bytes]."""
    lengths = [data.numel() for data in packed]
    message = torch.empty(message_bytes(lengths), dtype=torch.uint8)
    end = _LENGTH_BYTES * len(packed)
    message[:end].view(torch.int64).copy_(torch.tensor(lengths, dtype=torch.int64))
    for data, length in zip(packed, lengths, strict=True):
        message[end : end + length] = data
        message[end + length : end + aligned(length)] = 0
        end += aligned(length)
    return message


def split(message: Tensor, count: int) -> list[Tensor]:
    """Return the packed payloads of a message, as views.

    Raises:
        CorruptMessageError: lengths that do not add up to the message.
    """
    end = _LENGTH_BYTES * count
    if message.numel() < end:
        raise CorruptMessageError(f"a message of {message.numel()} bytes cannot hold {count} payloads")
    lengths: list[int] = message[:end].view(torch.int64).tolist()
    if min(lengths, default=0) < 0 or message_bytes(lengths) != message.numel():
        raise CorruptMessageError(f"payloads of {lengths} bytes in a message of {message.numel()}")
    packed = []
    for length in lengths:
        packed.append(message[end : end + length])
        end += aligned(length)
    return packed


def unpack(message: Tensor, plans: Sequence[Plan]) -> list[Payload]:
    """Return the payload of each plan.

    Raises:
        CorruptMessageError: see `split` and `Packed.unpack`; it names the parameter.
    """
    payloads = []
    for (compressor, parameter), data in zip(plans, split(message, len(plans)), strict=True):
        try:
            payloads.append(packed_code(compressor).unpack(data, parameter))
        except CorruptMessageError as error:
            raise CorruptMessageError(f"{parameter.name}: {error}") from error
    return payloads


def message_bytes(lengths: Sequence[int]) -> int:
    """Return the bytes of a message with payloads of these lengths."""
    return _LENGTH_BYTES * len(lengths) + sum(map(aligned, lengths))


def predicted_bytes(plans: Sequence[Plan]) -> int | None:
    """Return the bytes of a message with its header, or None if they depend on the gradients."""
    return announced_bytes([packed_code(compressor).packed_bytes(parameter) for compressor, parameter in plans])


def announced_bytes(lengths: Sequence[int | None]) -> int | None:
    """Return the bytes of a message and its header, or None if a length is not known."""
    known = all_known(lengths)
    return None if known is None else Header.NUM_BYTES + message_bytes(known)


def all_known(numbers: Sequence[int | None]) -> list[int] | None:
    """Return the numbers, or None if one of them is None."""
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) else None


def max_bytes(plans: Sequence[Plan]) -> int:
    """Return the largest legal size of a message; a longer one is not even received."""
    return message_bytes([max_packed_bytes(compressor, parameter) for compressor, parameter in plans])


def max_packed_bytes(compressor: Compressor, parameter: Parameter) -> int:
    """Return the largest legal size of a payload: above that of any code worth sending (an id and a value: 16)."""
    fixed = packed_code(compressor).packed_bytes(parameter)
    return 16 * parameter.numel + 4096 if fixed is None else fixed
