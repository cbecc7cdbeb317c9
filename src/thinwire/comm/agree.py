"""Gathers and broadcasts of values that all ranks must know so that they decide alike.

Each message is sealed with its purpose, its sender, its length and a checksum. A length is known before anything is
allocated, and a wait ends with the timeout of the group. Calls are collective and use a bare `Exchange`, because hosts
are discovered and machines measured before any channel is open. Inside a conversation use
`thinwire.comm.channel.Channel.gather_numbers`, which first checks that all ranks mean the same call.
"""

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.process_group import Exchange, check_fits
from thinwire.errors import CorruptHeaderError, CorruptMessageError
from thinwire.rows.formats import Header

SEAL_BYTES = 8
RECORD_BYTES = Header.NUM_BYTES
"""A record has no fewer bytes: if it meets the header of a rank that is elsewhere, its seal is wrong on both sides. A
message that is longer than what was posted for it ends the process that gets it, in a thread of Gloo."""
MAX_BYTES = 256 << 20


def gather_numbers(exchange: Exchange, what: str, numbers: Sequence[float]) -> list[list[float]]:
    """Gather the numbers of each rank, in rank order, in one round; all ranks pass equally many numbers.

    Args:
        what: name of the numbers, for error messages.

    Raises:
        CorruptMessageError: a gathered number is not finite.
        CorruptHeaderError, LostPeerError: as for `gather_records`.
    """
    layout = struct.Struct(f"<{len(numbers)}d")
    gathered = [list(layout.unpack(record)) for record in gather_records(exchange, what, layout.pack(*numbers))]
    for source, theirs in enumerate(gathered):
        if not all(map(math.isfinite, theirs)):
            mine, sender = exchange.global_ranks[exchange.rank], exchange.global_ranks[source]
            raise CorruptMessageError(f"rank {mine}, {what}: from rank {sender}: a number that is not finite")
    return gathered


def longest(exchange: Exchange, seconds: float) -> float:
    """Return the seconds of the slowest rank, on all ranks."""
    return max(gather_numbers(exchange, "seconds", [seconds]))[0]


def gather_json(exchange: Exchange, what: str, value: Any) -> list[Any]:
    """Gather the JSON value that each rank passes, in rank order.

    Raises:
        CorruptHeaderError, LostPeerError: as for `gather_bytes`.
    """
    return [json.loads(data) for data in gather_bytes(exchange, what, json.dumps(value).encode())]


def broadcast_json(exchange: Exchange, what: str, value: Any) -> Any:
    """Return the JSON value of rank 0 on all ranks; the values that the others pass are ignored.

    Raises:
        CorruptHeaderError, LostPeerError: as for `gather_bytes`.
    """
    data = json.dumps(value).encode() if exchange.rank == 0 else b""
    return json.loads(gather_bytes(exchange, what, data)[0])


def gather_bytes(exchange: Exchange, what: str, data: bytes, max_bytes: int = MAX_BYTES) -> list[bytes]:
    """Gather bytes of any length from each rank, in rank order, in two rounds: lengths, then contents.

    Args:
        what: name of the contents, for error messages and the seal.
        data: the bytes of this rank.
        max_bytes: largest length that a rank may announce; nothing longer is received.

    Raises:
        CorruptHeaderError: as for `gather_records`; or a length exceeds ``max_bytes`` or the memory that is left.
        LostPeerError: see `Exchange.swap`.
    """
    records = gather_records(exchange, f"length of the {what}", len(data).to_bytes(8, "little"))
    lengths = [int.from_bytes(record, "little") for record in records]
    where, most = f"rank {exchange.global_ranks[exchange.rank]}, {what}", max(lengths)
    if most > max_bytes:
        sender = exchange.global_ranks[lengths.index(most)]
        raise CorruptHeaderError(f"{where}: from rank {sender}: {most:,} bytes are announced, more than {max_bytes:,}")
    check_fits(sum(lengths), lambda: where)
    mine = _sealed(exchange, what, data)
    received = exchange.swap([mine] * exchange.world_size, [length + SEAL_BYTES for length in lengths])
    return _unsealed(exchange, what, received)


def gather_records(exchange: Exchange, what: str, data: bytes) -> list[bytes]:
    """Gather the record of each rank, in rank order, in one round; all records have the same length.

    Args:
        what: name of the record, part of the seal, so that no record is taken for another one.

    Raises:
        CorruptHeaderError: a record that arrived does not match the seal of its rank.
        LostPeerError: see `Exchange.swap_records`.
    """
    record = _sealed(exchange, what, data.ljust(RECORD_BYTES - SEAL_BYTES, b"\0"))
    opened = _unsealed(exchange, what, exchange.swap_records([record] * exchange.world_size))
    return [padded[: len(data)] for padded in opened]


def _sealed(exchange: Exchange, what: str, data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data + _seal(what, exchange.rank, data)), dtype=torch.uint8)


def _unsealed(exchange: Exchange, what: str, received: Sequence[Tensor]) -> list[bytes]:
    opened = []
    for source, message in enumerate(received):
        sealed = message.numpy().tobytes()
        data, seal = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
        if seal != _seal(what, source, data):
            mine, sender = exchange.global_ranks[exchange.rank], exchange.global_ranks[source]
            raise CorruptHeaderError(
                f"rank {mine}: bad checksum on the {what} from rank {sender}: it made a different call, the message was"
                " corrupted, or it runs another version of thinwire"
            )
        opened.append(data)
    return opened


def _seal(what: str, source: int, data: bytes) -> bytes:
    identity = f"{what} {source} {len(data)} ".encode()
    return hashlib.blake2b(identity + data, digest_size=SEAL_BYTES).digest()
