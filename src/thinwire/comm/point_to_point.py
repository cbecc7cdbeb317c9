"""Tensors from one rank to another, in one message that says itself whether it is a code or the values as they are.

The sender decides. Gloo completes a receive that was posted for more bytes than come, so the size need not be known.
The header says dtype and number of values: a receiver that expects others is told, and one that expects no message too.
"""

from contextlib import suppress

import torch
from torch import Tensor

from thinwire.comm.frames import content_of, frame, frame_bytes
from thinwire.errors import CorruptMessageError, MismatchError
from thinwire.rows import floats
from thinwire.rows.formats import Header, Kind, Message, digest64

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LEAST_BYTES = Header.NUM_BYTES
"""Fewest bytes of a message."""
_IDENTITY = digest64(b"point to point")


def most_bytes(tensor: Tensor) -> int:
    """Return the most bytes of the message of a tensor."""
    return frame_bytes(tensor.nbytes)


def pack(tensor: Tensor, rank: int, is_coded: bool) -> Tensor:
    """Return the message of a contiguous tensor of the CPU, uint8 [k], which has memory of its own."""
    values = tensor.detach().view(-1)
    content = floats.encode(values) if is_coded else values.view(torch.uint8)
    header = Header(
        Kind.GATHER, rank, _DTYPES.index(tensor.dtype), _IDENTITY, held=tensor.numel(), count=content.numel()
    )
    return frame(header, content)


def unpack(data: Tensor, out: Tensor, source: int) -> None:
    """Fill a contiguous tensor from the message of ``source``, which is at the beginning of ``data``.

    Raises:
        CorruptMessageError: the message was altered, or is another one.
        MismatchError: the message has a tensor of another dtype or number of values.
    """
    header = Header.unpack(data[: Header.NUM_BYTES].numpy().tobytes())
    if (header.kind, header.source, header.digest) != (Kind.GATHER, source, _IDENTITY):
        raise CorruptMessageError(f"a message of rank {header.source}, where a tensor of rank {source} is expected")
    _check(header, out, source)
    message = Message(header, data[Header.NUM_BYTES :][: header.payload_bytes])
    message.verify()
    floats.decode(content_of(message), out.detach().view(-1))


def check_plain(data: Tensor, source: int) -> None:
    """Raise MismatchError if what came as it is, into a tensor that gets no messages, is a message of ``source``."""
    record = data.detach().view(-1).view(torch.uint8)[: Header.NUM_BYTES].numpy().tobytes()
    with suppress(CorruptMessageError):
        header = Header.unpack(record)
        if (header.kind, header.source, header.digest) == (Kind.GATHER, source, _IDENTITY):
            _check(header, data, source)


def _check(header: Header, out: Tensor, source: int) -> None:
    index, numel = header.sequence, header.held
    dtype = _DTYPES[index] if index < len(_DTYPES) else None
    if (dtype, numel) != (out.dtype, out.numel()):
        raise MismatchError(
            f"rank {source} sent {numel} values of {dtype}, and this rank receives {out.numel()} of {out.dtype}: pass"
            " a tensor of the dtype and size that was sent"
        )
