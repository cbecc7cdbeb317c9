"""What a connection accepts: the frames of one who knows the secret, in their order, and nothing else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handshakes import welcome
from thinwire.checkpoint.holder.frames import Connection, FrameKind
from thinwire.errors import CorruptMessageError, LostPeerError, PeerError, ThinwireError

SECRET = b"a secret of the tests"


@dataclass
class Ends:
    """Both ends of a socket, as connections and as they are."""

    caller: Connection
    listener: Connection
    raw_caller: socket.socket
    raw_listener: socket.socket

    def caught(self, send: Callable[[Connection], object]) -> bytes:
        """What ``send`` makes the caller send, which does not arrive."""
        send(self.caller)
        return self.raw_listener.recv(1 << 16)


@contextmanager
def connected(timeout_seconds: float = 0.3, trusted: bool = True) -> Iterator[Ends]:
    left, right = socket.socketpair()
    ends = Ends(Connection(left, timeout_seconds), Connection(right, timeout_seconds), left, right)
    try:
        if trusted:
            assert shake(ends.caller, ends.listener) == []
        yield ends
    finally:
        ends.caller.close()
        ends.listener.close()


def shake(caller: Connection, listener: Connection, secrets: tuple[bytes, bytes] = (SECRET, SECRET)) -> list[Exception]:
    errors: list[Exception] = []

    def run(greet: Callable[[bytes], None], secret: bytes, connection: Connection) -> None:
        try:
            greet(secret)
        except ThinwireError as error:
            errors.append(error)
            connection.close()

    thread = threading.Thread(target=run, args=(partial(welcome, listener), secrets[1], listener))
    thread.start()
    run(caller.greet, secrets[0], caller)
    thread.join()
    return errors


def test_frames_arrive_as_they_were_sent() -> None:
    with connected() as ends:
        for number in range(3):
            content = {"op": "x", "number": number, "text": "ä\ud800"}
            ends.caller.send(FrameKind.REQUEST, content, b"payload" * number)
            frame = ends.listener.receive(1.0)
            assert (frame.kind, frame.json) == (FrameKind.REQUEST, content)
            assert ends.listener.read_payload(frame, 100) == b"payload" * number
            ends.listener.send(FrameKind.REPLY, {"number": number})
            assert ends.caller.answer(1.0).json == {"number": number}


@pytest.mark.parametrize("secrets", [(SECRET, b"another"), (b"another", SECRET), (SECRET, SECRET + b"\0")])
def test_another_secret_is_refused_on_both_sides(secrets: tuple[bytes, bytes]) -> None:
    with connected(trusted=False) as ends:
        errors = shake(ends.caller, ends.listener, secrets)
    assert len(errors) == 2
    assert any("another secret" in str(error) for error in errors)
    assert all(isinstance(error, PeerError) for error in errors)


def test_errors_are_raised_as_what_they_were() -> None:
    with connected() as ends:
        for error in (ValueError("no room"), CorruptMessageError("altered"), PeerError("gone"), ThinwireError("bad")):
            ends.listener.send_error(error)
            with pytest.raises(type(error), match=str(error)):
                ends.caller.answer(1.0)


@given(st.data())
def test_no_bit_of_header_or_json_can_be_flipped(data: st.DataObject) -> None:
    with connected() as ends:
        raw = bytearray(ends.caught(lambda caller: caller.send(FrameKind.CAST, {"op": "grant", "bytes": 100})))
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        ends.raw_caller.sendall(raw)
        ends.raw_caller.shutdown(socket.SHUT_WR)
        with pytest.raises(ThinwireError):
            ends.listener.receive(0.3)


def test_who_sends_what_was_altered_on_the_way_is_told() -> None:
    """In the middle of sending, when all that it sees is that the connection is gone."""
    with connected() as ends:
        raw = bytearray(ends.caught(lambda caller: caller.send(FrameKind.DATA, {}, bytes(1000))))
        raw[-100] ^= 1
        ends.raw_caller.sendall(raw)
        frame = ends.listener.receive(0.3)
        with pytest.raises(CorruptMessageError, match="altered or forged"):
            ends.listener.read_payload(frame, 1000)
        with pytest.raises(
            LostPeerError, match="the other side said: the connection was closed: a payload was altered"
        ):
            [ends.caller.send(FrameKind.DATA, {}, bytes(100_000)) for _ in range(100)]


def test_a_frame_counts_once() -> None:
    with connected() as ends:
        raw = ends.caught(lambda caller: caller.send(FrameKind.CAST, {"op": "grant"}))
        ends.raw_caller.sendall(raw + raw)
        assert ends.listener.receive(0.3).json == {"op": "grant"}
        with pytest.raises(CorruptMessageError, match="out of order"):
            ends.listener.receive(0.3)


def test_a_frame_counts_in_its_place() -> None:
    with connected() as ends:
        ends.caught(lambda caller: caller.send(FrameKind.CAST, {"n": 0}))
        ends.caller.send(FrameKind.CAST, {"n": 1})
        with pytest.raises(CorruptMessageError, match="out of order"):
            ends.listener.receive(0.3)


def test_a_frame_of_another_connection_or_direction_is_refused() -> None:
    with connected() as ends, connected() as others:
        others.raw_caller.sendall(ends.caught(lambda caller: caller.send(FrameKind.CAST, {})))
        with pytest.raises(CorruptMessageError, match="forged"):
            others.listener.receive(0.3)
        ends.raw_listener.sendall(ends.caught(lambda caller: caller.send(FrameKind.CAST, {})))
        with pytest.raises(CorruptMessageError, match="forged"):
            ends.caller.receive(0.3)


@given(st.binary(max_size=200))
def test_garbage_before_the_handshake_is_refused(garbage: bytes) -> None:
    with connected(trusted=False) as ends:
        ends.raw_caller.sendall(garbage)
        ends.raw_caller.shutdown(socket.SHUT_WR)
        with pytest.raises(ThinwireError):
            welcome(ends.listener, SECRET)


@pytest.mark.parametrize(("content", "payload"), [({"x": "a" * 5000}, b""), ({}, b"payload")])
def test_a_stranger_cannot_make_us_allocate(content: dict[str, str], payload: bytes) -> None:
    with connected(trusted=False) as ends:
        ends.caller.send(FrameKind.GREETING, content, payload)
        with pytest.raises(CorruptMessageError, match="limits"):
            welcome(ends.listener, SECRET)


def test_a_frame_that_stops_in_the_middle_is_given_up() -> None:
    with connected() as ends:
        raw = ends.caught(lambda caller: caller.send(FrameKind.CAST, {"op": "grant"}))
        ends.raw_caller.sendall(raw[:-3])
        with pytest.raises(LostPeerError, match="no answer"):
            ends.listener.receive(0.3)


def test_a_long_payload_is_refused_where_a_short_one_is_legal() -> None:
    with connected() as ends:
        ends.caller.send(FrameKind.REQUEST, {}, bytes(101))
        frame = ends.listener.receive(0.3)
        with pytest.raises(CorruptMessageError, match="at most 100"):
            ends.listener.read_payload(frame, 100)
