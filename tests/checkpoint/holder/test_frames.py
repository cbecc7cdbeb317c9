"""What a connection accepts: the frames of one who knows the secret, in their order, and nothing else."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clocks import wait_until
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


TIMEOUT_SECONDS = 100.0


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    """Two ends that trust each other, over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = Connection(socket.create_connection(listener.getsockname()), TIMEOUT_SECONDS)
        called = Connection(listener.accept()[0], TIMEOUT_SECONDS)
    greeting = threading.Thread(target=caller.greet, args=(b"secret",))
    greeting.start()
    welcome(called, b"secret")
    greeting.join()
    yield caller, called
    caller.close()
    called.close()


def test_an_idle_connection_is_not_lost_and_says_so_at_once(pair: tuple[Connection, Connection]) -> None:
    """Not after the timeout: a sender asks whenever it has had nothing to send for a second."""
    caller, called = pair
    started = time.monotonic()
    assert not caller.hung_up
    called.send(FrameKind.CAST)
    time.sleep(0.05)
    assert not caller.hung_up, "what has come is no end"
    assert caller.receive().kind == FrameKind.CAST
    called.close()
    wait_until(lambda: caller.hung_up)
    caller.close()
    assert caller.hung_up
    assert time.monotonic() - started < TIMEOUT_SECONDS / 2


class SlowSocket(socket.socket):
    """One whose thread is stopped on its way into the kernel, with the number of the descriptor that it will read."""

    entered: threading.Event
    goes_on: threading.Event

    def recv(self, *arguments: int) -> bytes:
        number = self.fileno()
        self.entered.set()
        assert self.goes_on.wait(TIMEOUT_SECONDS)
        return os.read(number, *arguments)


def test_a_thread_that_is_about_to_read_never_reads_from_another_socket() -> None:
    """A descriptor that is closed meanwhile is the number of the next socket, of somebody else."""
    ours, theirs = socket.socketpair()
    slow = SlowSocket(fileno=ours.detach())
    slow.entered, slow.goes_on = threading.Event(), threading.Event()
    connection, errors = Connection(slow, TIMEOUT_SECONDS), []

    def receive() -> None:
        try:
            connection.receive()
        except LostPeerError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    assert slow.entered.wait(TIMEOUT_SECONDS)
    connection.close()
    assert connection.is_closed
    others = socket.socketpair()
    others[1].sendall(b"another conversation"), others[0].sendall(b"another conversation")
    slow.goes_on.set()
    thread.join(TIMEOUT_SECONDS)
    assert [sock.recv(100) for sock in others] == [b"another conversation"] * 2
    assert len(errors) == 1
    assert slow.fileno() < 0, "who was inside releases it"
    for sock in (theirs, *others):
        sock.close()


@pytest.mark.parametrize("num_bytes", [1, 4096, (128 << 10) + 1, (3 << 20) + 7])
def test_a_payload_that_trickles_in_is_complete_and_the_next_frame_comes(
    pair: tuple[Connection, Connection], num_bytes: int
) -> None:
    caller, called = pair
    payload = random.Random(num_bytes).randbytes(num_bytes)

    def send() -> None:
        caller.send(FrameKind.DATA, {"n": 1}, payload)
        time.sleep(0.02)
        caller.send(FrameKind.CAST, {"n": 2})

    sending = threading.Thread(target=send)
    sending.start()
    frame = called.receive()
    into = bytearray(frame.payload_bytes)
    called.read_piece(frame, memoryview(into))
    assert into == payload
    assert called.receive().json == {"n": 2}
    sending.join()


def test_a_sender_that_dies_within_a_payload_is_noticed_before_the_timeout(
    pair: tuple[Connection, Connection],
) -> None:
    caller, called = pair
    caller.send(FrameKind.DATA, {}, bytes(1 << 20))
    caller.close()
    frame = called.receive()
    assert frame.payload_bytes == 1 << 20
    started = time.monotonic()
    with pytest.raises(LostPeerError):
        called.read_piece(frame, memoryview(bytearray(2 << 20)))
    assert time.monotonic() - started < TIMEOUT_SECONDS / 2


def test_the_kernel_counts_what_was_acknowledged(pair: tuple[Connection, Connection]) -> None:
    caller, called = pair
    before, *_ = caller.tcp_counts
    caller.send(FrameKind.DATA, {}, bytes(100_000))
    frame = called.receive()
    called.read_piece(frame, memoryview(bytearray(frame.payload_bytes)))
    wait_until(lambda: caller.tcp_counts[0] - before >= 100_000)
    after, seconds, latency = caller.tcp_counts
    assert 100_000 <= after - before < 101_000, "payload, header and JSON"
    assert 0.0 <= seconds < TIMEOUT_SECONDS > latency > 0.0
    caller.close()
    assert caller.tcp_counts == (0, 0.0, 0.0)
