"""Frames of a stream: one that changed on the way, or another one, or a failed rank, is refused with its sender."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loopback import LoopbackExchange, run_ranks
from thinwire.comm.channel import Channel, Subject
from thinwire.comm.frames import Frames, frame_bytes
from thinwire.errors import CorruptHeaderError, LostPeerError, MismatchError, PeerError
from thinwire.rows.formats import Header, Kind, Message
from thinwire.sums.lossless import begin

CONTENT = torch.arange(100, dtype=torch.uint8)


def sent(change: Callable[[Tensor], Tensor], make: Callable[[], Tensor] = lambda: CONTENT, most: int = 100) -> Tensor:
    """What rank 1 receives of a frame of rank 0, which is changed on the way."""

    def tamper(source: int, target: int, number: int, part: Tensor) -> Tensor:
        return change(part.clone()) if source == 0 else part

    def run(exchange: LoopbackExchange) -> Tensor:
        channel = Channel(exchange, Subject("gradient", "the same on all ranks"), 3)
        with channel.stream() as stream:
            frames = Frames(channel, stream)
            if exchange.rank == 0:
                frames.send((1,), Kind.PUSH, 5, make)
                return CONTENT
            return frames.receive(0, Kind.PUSH, 5, most)()

    return run_ranks(2, run, tamper=tamper)[1].get()


def changing(**fields: object) -> Callable[[Tensor], Tensor]:
    """Another header, which fits the payload."""

    def change(data: Tensor) -> Tensor:
        payload = data[Header.NUM_BYTES :]
        header = replace(Header.unpack(data[: Header.NUM_BYTES].numpy().tobytes()), **fields)  # type: ignore[arg-type]
        packed = bytearray(Message.sealed(header, payload).header.pack())
        return torch.cat([torch.frombuffer(packed, dtype=torch.uint8), payload])

    return change


def test_content_arrives_in_as_many_bytes_as_are_said() -> None:
    sizes: list[int] = []

    def change(data: Tensor) -> Tensor:
        sizes.append(data.numel())
        return data

    assert torch.equal(sent(change), CONTENT)
    assert torch.equal(sent(change, lambda: CONTENT[:0]), CONTENT[:0])
    assert sizes == [frame_bytes(100), frame_bytes(0)]


@pytest.mark.parametrize("position", [*range(0, Header.NUM_BYTES, 5), 56, 100, 155, 156, -1])
def test_a_changed_byte_is_refused(position: int) -> None:
    def change(data: Tensor) -> Tensor:
        data[position] ^= 0x40
        return data

    with pytest.raises(CorruptHeaderError, match="rank 1, gradient: from rank 0"):
        sent(change)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"held": 4}, "frame 4, where frame 5 is expected"),
        ({"count": 90}, "90 bytes in a frame of 104"),
        ({"kind": Kind.PULL}, "rank 0 sent PULL, this rank waits for PUSH"),
        ({"source": 1}, "says that rank 1 made it"),
        ({"sequence": 2}, "in another conversation"),
        ({"digest": 7}, "in another conversation"),
    ],
)
def test_another_frame_is_refused_though_its_checksum_fits(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(CorruptHeaderError, match=reason):
        sent(changing(**fields))


def test_more_than_a_frame_can_have_is_refused() -> None:
    with pytest.raises(CorruptHeaderError, match="announces 104 bytes"):
        sent(lambda data: data, most=96)


def test_a_rank_that_fails_says_why() -> None:
    def fail() -> Tensor:
        raise ValueError("no memory for the code")

    with pytest.raises(LostPeerError, match="rank 0 reports: no memory for the code"):
        sent(lambda data: data, fail)


def test_ranks_that_mean_something_else_learn_it_beside_their_first_pushes() -> None:
    def run(exchange: LoopbackExchange) -> None:
        numel = 900 if exchange.rank == 1 else 1000
        channel = Channel(exchange, Subject("bucket 0", f"{numel} values"), 0)
        channel.begin_open()
        begin(torch.ones(numel), channel)()

    errors = [outcome.error for outcome in run_ranks(3, run)]
    assert all(isinstance(error, MismatchError) for error in errors)
    assert all("1000 values" in str(error) and "900 values" in str(error) for error in errors)
    assert not any(isinstance(error, PeerError) for error in errors)
