"""Frames: messages of a stream, header and payload in one, for receivers that know the most bytes of each.

A rank that fails while it makes a frame sends the reason instead. Its receivers are lost to those that wait for
more, so all of them hang up.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from thinwire.comm.channel import MAX_ERROR_BYTES, Channel
from thinwire.comm.process_group import Stream
from thinwire.errors import CorruptHeaderError, CorruptMessageError, LostPeerError, PeerError
from thinwire.rows.formats import Header, Kind, Message, aligned


def frame_bytes(num_bytes: int) -> int:
    """Return the bytes on the wire of a frame with ``num_bytes`` of content."""
    return Header.NUM_BYTES + aligned(num_bytes)


def frame(header: Header, content: Tensor) -> Tensor:
    """Return a frame, uint8 [k], with memory of its own. The header, of ``content.numel()``, gets its checksum here."""
    size, made = content.numel(), np.empty(frame_bytes(content.numel()), np.uint8)
    made[Header.NUM_BYTES :][:size], made[Header.NUM_BYTES + size :] = content.numpy(), 0
    frame = torch.from_numpy(made)  # slices of numpy cost less than those of torch
    record = Message.sealed(header, frame[Header.NUM_BYTES :]).header.pack()
    made[: Header.NUM_BYTES] = np.frombuffer(record, np.uint8)
    return frame


def content_of(message: Message) -> Tensor:
    """Return what a frame contains.

    Raises:
        CorruptMessageError: its length is not that of a frame of so many bytes.
    """
    header = message.header
    if aligned(header.count) != header.payload_bytes:
        raise CorruptMessageError(f"{header.count} bytes in a frame of {header.payload_bytes}")
    return message.payload[: header.count]


class Frames:
    """Sender and receiver of frames on a stream of a channel.

    Kind and number identify a frame between two ranks; sender and receiver pass the same. The number is in the field of
    the rows that a rank holds.
    """

    def __init__(self, channel: Channel, stream: Stream) -> None:
        self._channel, self._stream = channel, stream
        self.sent_bytes = 0

    def send(self, targets: Sequence[int], kind: Kind, number: int, make: Callable[[], Tensor]) -> None:
        """Queue one frame for some ranks; ``make`` returns its content, uint8 [k], when its turn comes, once."""
        channel = self._channel

        @cache
        def message() -> Tensor:
            try:
                content = make()
                about = kind, channel.rank, channel.sequence, channel.digest
                made = frame(Header(*about, held=number, count=content.numel()), content)
            except Exception as error:
                self._stream.fail(error)
                reason = channel.seal_error(error)
                made = frame(reason.header, reason.payload[: reason.header.count])
            self.sent_bytes += len(targets) * made.numel()
            return made

        for target in targets:
            self._stream.send(target, message)

    def receive(self, source: int, kind: Kind, number: int, most_bytes: int) -> Callable[[], Tensor]:
        """Post a receive of a frame of at most ``most_bytes``; return a function that waits and returns uint8 [k].

        That function raises:
            CorruptHeaderError: the frame was altered, or is another one.
            LostPeerError: a peer died, did not take part, or reports that it failed.
        """
        channel, limit, headers = self._channel, aligned(most_bytes), list[Header]()

        def size(data: Tensor) -> int:
            headers.append(channel.unpack(data[: Header.NUM_BYTES], source, kind, limit))
            return Header.NUM_BYTES + headers[0].payload_bytes

        receive = self._stream.receive(source, Header.NUM_BYTES + max(limit, MAX_ERROR_BYTES), size)

        def wait() -> Tensor:
            payload = receive()[Header.NUM_BYTES :]
            (header,) = headers
            try:
                with channel.reading(Message(header, payload)):
                    channel.raise_reported([Message(header, payload)])
                    if header.held != number:
                        raise CorruptMessageError(f"frame {header.held}, where frame {number} is expected")
                    return content_of(Message(header, payload))
            except CorruptMessageError as error:
                raise CorruptHeaderError(str(error)) from error
            except PeerError as error:
                raise LostPeerError(str(error)) from error

        return wait
