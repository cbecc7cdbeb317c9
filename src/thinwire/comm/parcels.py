"""Parcels: messages of a stream, each followed by a seal of its checksum, sender, number and conversation.

Ranks of a stream have agreed on every size before, so no header travels; or on the largest one, and a parcel begins
with its own size. A rank that fails in the middle cannot report the reason: it raises `CorruptHeaderError`, on which
the lane hangs up, and the others fail at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.channel import Channel
from thinwire.comm.process_group import Receive, Stream
from thinwire.errors import CorruptHeaderError
from thinwire.wire import ALIGNMENT_BYTES

SEAL_BYTES = 8
SIZE_BYTES = 8

Write = Callable[[Tensor], object]


def parcel_bytes(num_bytes: int) -> int:
    """Return the bytes on the wire of a parcel of ``num_bytes``, with padding and seal; 0 if it is empty."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + SEAL_BYTES if num_bytes else 0


def sized_parcel_bytes(num_bytes: int) -> int:
    """Return the bytes on the wire of a parcel of ``num_bytes`` that begins with its size."""
    return parcel_bytes(SIZE_BYTES + num_bytes)


class Parcels:
    """Sender and receiver of sealed parcels on the stream of a channel that was opened.

    ``place`` numbers the parcels of a conversation; sender and receiver pass the same number.
    """

    def __init__(self, channel: Channel, stream: Stream) -> None:
        self._channel, self._stream = channel, stream
        self._conversation = f"{channel.subject.digest()} {channel.sequence}"

    def send(self, target: int, place: int, num_bytes: int, write: Write) -> None:
        """Queue a parcel; ``write`` fills its uint8 [num_bytes] when its turn comes."""
        if num_bytes:
            self._stream.send(target, parcel_bytes(num_bytes), lambda: self._sealed(place, num_bytes, write))

    def send_to_all(self, place: int, num_bytes: int, write: Write) -> None:
        """Queue one parcel for all other ranks, the next rank first; ``write`` is called once."""
        made: list[Tensor] = []

        def make() -> Tensor:
            if not made:
                made.append(self._sealed(place, num_bytes, write))
            return made[0]

        rank, world_size = self._channel.rank, self._channel.world_size
        for step in range(1, world_size if num_bytes else 1):
            self._stream.send((rank + step) % world_size, parcel_bytes(num_bytes), make)

    def send_sized(self, targets: Sequence[int], place: int, make: Callable[[], Tensor]) -> None:
        """Queue one parcel of any size for some ranks; ``make`` returns its uint8 [k] when its turn comes, once."""
        made: list[Tensor] = []

        def sealed() -> Tensor:
            if not made:
                data = make()

                def write(target: Tensor) -> None:
                    target[:SIZE_BYTES].view(torch.int64).fill_(data.numel())
                    target[SIZE_BYTES:] = data

                made.append(self._sealed(place, SIZE_BYTES + data.numel(), write))
            return made[0]

        for target in targets:
            self._stream.send(target, None, sealed)

    def receive_sized(self, source: int, place: int, most_bytes: int) -> Callable[[], Tensor]:
        """Post a receive of a parcel of at most ``most_bytes``; return a function that waits and returns uint8 [k].

        Raises:
            CorruptHeaderError, LostPeerError: as for `receive`.
        """

        def size(data: Tensor) -> int:
            told = int(data[:SIZE_BYTES].view(torch.int64))
            if not 0 <= told <= most_bytes:
                raise CorruptHeaderError(
                    f"{self._channel.where(source)}: a message says that it has {told} bytes, of {most_bytes} at most:"
                    " bits changed on the way, or the rank failed"
                )
            return sized_parcel_bytes(told)

        receive = self._stream.receive(source, sized_parcel_bytes(most_bytes), size)

        def wait() -> Tensor:
            data = self._opened(source, place, receive())
            return data[SIZE_BYTES:][: int(data[:SIZE_BYTES].view(torch.int64))]

        return wait

    def receive(self, source: int, place: int, num_bytes: int) -> Receive:
        """Post a receive of at most ``num_bytes``; return a function that waits and returns uint8 [num_bytes].

        Pass that function the number of bytes if fewer arrive than were posted; it must not be 0.

        Raises:
            CorruptHeaderError: raised by that function: the parcel does not match the seal of ``source``.
            LostPeerError: see `Stream.receive`.
        """
        if not num_bytes:
            return lambda num_bytes=None: torch.empty(0, dtype=torch.uint8)
        posted = num_bytes
        receive = self._stream.receive(source, parcel_bytes(posted))

        def wait(num_bytes: int | None = None) -> Tensor:
            num_bytes = posted if num_bytes is None else num_bytes
            return self._opened(source, place, receive(parcel_bytes(num_bytes)))[:num_bytes]

        return wait

    def _opened(self, source: int, place: int, data: Tensor) -> Tensor:
        """Return what is in a parcel, with its padding, whose seal is checked."""
        payload, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
        if seal.numpy().tobytes() != self._seal(source, place, payload):
            raise CorruptHeaderError(
                f"{self._channel.where(source)}: a message whose checksum does not match: bits changed on the"
                " way, or the rank failed"
            )
        return payload

    def _sealed(self, place: int, num_bytes: int, write: Write) -> Tensor:
        data = torch.empty(parcel_bytes(num_bytes), dtype=torch.uint8)
        data[-SEAL_BYTES - ALIGNMENT_BYTES :] = 0
        write(data[:num_bytes])
        seal = bytearray(self._seal(self._channel.rank, place, data[:-SEAL_BYTES]))
        data[-SEAL_BYTES:] = torch.frombuffer(seal, dtype=torch.uint8)
        return data

    def _seal(self, source: int, place: int, payload: Tensor) -> bytes:
        identity = f"{self._conversation} {source} {place} "
        content = kernels.checksum(payload).to_bytes(8, "little")
        return hashlib.blake2b(identity.encode() + content, digest_size=SEAL_BYTES).digest()
