"""Records of a few bytes that every rank tells all others, each sealed: what it is, whose, how long, a checksum.

They travel outside of a `thinwire.sync.channel`, whose headers have all this: before the first conversation, or where a
header would be most of what is measured.
"""

from __future__ import annotations

import hashlib

import torch

from thinwire.errors import CorruptHeaderError
from thinwire.sync.exchange import Exchange

SEAL_BYTES = 8


def swap_record(exchange: Exchange, what: str, data: bytes) -> list[bytes]:
    """The record of each rank, in rank order, on all of them; a collective call, with equally many bytes on each rank.

    Args:
        what: the record is; part of the seal, so that no record is taken for another one.

    Raises:
        CorruptHeaderError: what came is not what that rank sealed.
        LostPeerError: see `Exchange.swap_records`.
    """
    sealed = data + _seal(what, exchange.rank, data)
    record = torch.frombuffer(bytearray(sealed), dtype=torch.uint8)
    told = [other.numpy().tobytes() for other in exchange.swap_records([record] * exchange.world_size)]
    for source, other in enumerate(told):
        if other[-SEAL_BYTES:] != _seal(what, source, other[:-SEAL_BYTES]):
            raise CorruptHeaderError(
                f"rank {exchange.rank}: the {what} that rank {source} told has another checksum: bits changed on the"
                " way, or another version of thinwire runs there"
            )
    return [other[:-SEAL_BYTES] for other in told]


def _seal(what: str, source: int, data: bytes) -> bytes:
    identity = f"{what} {source} {len(data)} ".encode()
    return hashlib.blake2b(identity + data, digest_size=SEAL_BYTES).digest()
