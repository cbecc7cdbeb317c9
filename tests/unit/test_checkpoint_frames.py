"""What a connection accepts: the frames of one who knows the secret, in their order, and nothing else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.checkpoint.frames import Connection, Kind
from thinwire.errors import CorruptMessageError, LostPeerError, PeerError, ThinwireError

SECRET = b"a secret of the tests"


def ends(timeout_seconds: float = 2.0) -> tuple[Connection, Connection, socket.socket, socket.socket]:
    left, right = socket.socketpair()
    return Connection(left, timeout_seconds), Connection(right, timeout_seconds), left, right


def shake(caller: Connection, listener: Connection, secrets: tuple[bytes, bytes] = (SECRET, SECRET)) -> list[Exception]:
    errors: list[Exception] = []

    def run(greet: Callable[[bytes], None], secret: bytes, connection: Connection) -> None:
        try:
            greet(secret)
        except ThinwireError as error:
            errors.append(error)
            connection.close()

    thread = threading.Thread(target=run, args=(listener.welcome, secrets[1], listener))
    thread.start()
    run(caller.greet, secrets[0], caller)
    thread.join()
    return errors


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection, socket.socket, socket.socket]]:
    made = ends()
    assert shake(*made[:2]) == []
    yield made
    made[0].close()
    made[1].close()


def test_frames_arrive_as_they_were_sent(pair: tuple[Connection, Connection, socket.socket, socket.socket]) -> None:
    caller, listener, *_ = pair
    for number in range(3):
        caller.send(Kind.REQUEST, {"op": "x", "number": number, "text": "ä\ud800"}, b"payload" * number)
        frame = listener.receive(1.0)
        assert (frame.kind, frame.json["number"], frame.json["text"]) == (Kind.REQUEST, number, "ä\ud800")
        assert listener.read_payload(frame, 100) == b"payload" * number
        listener.send(Kind.REPLY, {"number": number})
        assert caller.answer(1.0).json == {"number": number}


@pytest.mark.parametrize("secrets", [(SECRET, b"another"), (b"another", SECRET), (SECRET, SECRET + b"\0")])
def test_another_secret_is_refused_on_both_sides(secrets: tuple[bytes, bytes]) -> None:
    caller, listener, *_ = ends()
    errors = shake(caller, listener, secrets)
    assert len(errors) == 2
    assert any("another secret" in str(error) for error in errors)
    assert all(isinstance(error, PeerError) for error in errors)


def test_errors_are_raised_as_what_they_were(
    pair: tuple[Connection, Connection, socket.socket, socket.socket],
) -> None:
    caller, listener, *_ = pair
    for error in (ValueError("no room"), CorruptMessageError("altered"), PeerError("gone"), ThinwireError("failed")):
        listener.send_error(error)
        with pytest.raises(type(error), match=str(error)):
            caller.answer(1.0)


def recorded(send: Callable[[Connection], None]) -> tuple[Connection, socket.socket, bytes]:
    """A listener after its handshake, the raw end of its caller, and the bytes that ``send`` makes the caller send."""
    caller, listener, left, right = ends(0.2)
    assert shake(caller, listener) == []
    send(caller)
    return listener, left, right.recv(1 << 16)


@given(st.data())
def test_no_bit_of_header_or_json_can_be_flipped(data: st.DataObject) -> None:
    listener, left, raw = recorded(lambda caller: caller.send(Kind.CAST, {"op": "grant", "bytes": 100}))
    altered = bytearray(raw)
    altered[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    left.sendall(altered)
    with pytest.raises(ThinwireError):
        listener.receive(0.2)
    left.close()
    listener.close()


def test_a_frame_counts_once_and_in_its_place() -> None:
    listener, left, raw = recorded(lambda caller: caller.send(Kind.CAST, {"op": "grant"}))
    left.sendall(raw + raw)
    assert listener.receive(0.2).json == {"op": "grant"}
    with pytest.raises(CorruptMessageError, match="out of order"):
        listener.receive(0.2)
    listener.close()
    listener, left, raw = recorded(lambda caller: [caller.send(Kind.CAST, {"n": n}) for n in (0, 1)] and None)
    left.sendall(raw[len(raw) // 2 :])
    with pytest.raises(CorruptMessageError):
        listener.receive(0.2)
    listener.close()
    left.close()


def test_a_frame_of_another_connection_or_direction_is_refused() -> None:
    _, _, raw = recorded(lambda caller: caller.send(Kind.CAST, {}))
    listener, left, own = recorded(lambda caller: caller.send(Kind.CAST, {}))
    left.sendall(raw)
    with pytest.raises(CorruptMessageError, match="forged"):
        listener.receive(0.2)
    listener.close()
    caller, listener, left, right = ends(0.2)
    shake(caller, listener)
    caller.send(Kind.CAST, {})
    echo = right.recv(1000)
    right.sendall(echo)
    with pytest.raises(CorruptMessageError, match="forged"):
        caller.receive(0.2)
    caller.close()
    listener.close()


@given(st.binary(max_size=200))
def test_garbage_before_the_handshake_is_refused(garbage: bytes) -> None:
    _, listener, left, _ = ends(0.05)
    left.sendall(garbage)
    left.shutdown(socket.SHUT_WR)
    with pytest.raises(ThinwireError):
        listener.welcome(SECRET)
    listener.close()
    left.close()


def test_a_stranger_cannot_make_us_allocate() -> None:
    caller, listener, *_ = ends(0.2)
    for kind, content, payload in ((Kind.GREETING, {"x": "a" * 5000}, b""), (Kind.GREETING, {}, b"payload")):
        caller, listener, *_ = ends(0.2)
        caller.send(kind, content, payload)
        with pytest.raises(CorruptMessageError, match="limits"):
            listener.welcome(SECRET)
        caller.close()
        listener.close()


def test_a_frame_that_stops_in_the_middle_is_given_up() -> None:
    listener, left, raw = recorded(lambda caller: caller.send(Kind.CAST, {"op": "grant"}))
    left.sendall(raw[:-3])
    with pytest.raises(LostPeerError, match="no answer"):
        listener.receive(0.2)
    listener.close()
    left.close()


def test_a_long_payload_is_refused_where_a_short_one_is_legal(
    pair: tuple[Connection, Connection, socket.socket, socket.socket],
) -> None:
    caller, listener, *_ = pair
    caller.send(Kind.REQUEST, {}, bytes(101))
    frame = listener.receive(1.0)
    with pytest.raises(CorruptMessageError, match="at most 100"):
        listener.read_payload(frame, 100)
