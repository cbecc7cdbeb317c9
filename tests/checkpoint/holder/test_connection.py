"""What a connection knows of its socket: whether the other side is there, and what the kernel has counted."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clocks import FakeClock, wait_until
from handshakes import welcome
from thinwire.checkpoint.holder.frames import Connection, FrameKind
from thinwire.checkpoint.pacing import gaps
from thinwire.checkpoint.pacing.gaps import Pacer
from thinwire.errors import LostPeerError

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


def test_a_pacer_knows_when_an_offer_should_be_through(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(gaps, "time", clock)
    grants: list[int] = []
    pacer = Pacer(grants.append, every=1, watched=False)
    assert pacer.seconds_left == 0.0
    pacer.note_step()
    clock.pass_by(1.0)
    pacer.note_step()
    pacer.offer(1_000_000, 500_000.0)
    assert pacer.seconds_left == pytest.approx(0.8 * 15 / 16 + 2.0 / 16), "the last even grant, and sending that"
    pacer.offer(0, 500_000.0)
    assert pacer.seconds_left == 0.0
    pacer.close()


def test_a_sender_that_calls_a_lost_host_is_stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers that start again after the loss of a host register first, and that stops the senders of before."""
    from thinwire.checkpoint.holder.replication import Grants, Replicator
    from thinwire.checkpoint.holder.slots import SlotSize
    from thinwire.checkpoint.holder.store import Store
    from thinwire.checkpoint.holder.version import ShardId

    store, answers, calls = Store(1 << 20), threading.Event(), threading.Event()

    def call(address: str) -> Connection:
        calls.set()
        answers.wait(TIMEOUT_SECONDS)  # as a connection to a host that is switched off
        raise LostPeerError("it does not answer")

    shard = store.register(ShardId("run", "topology", 0), SlotSize(4096, 4096))
    sender = Replicator(store, shard, "10.0.0.1:1", call, Grants(store.changed), 30.0)
    sender.start()
    assert calls.wait(TIMEOUT_SECONDS)
    started = time.monotonic()
    sender.stop()
    assert time.monotonic() - started < TIMEOUT_SECONDS / 2
    answers.set()
    store.close()


def test_a_version_that_was_given_up_is_sent_when_the_peer_is_there_again() -> None:
    """And not counted as pending before: its slot may be written to."""
    from thinwire.checkpoint.holder.replication import Grants, Replicator
    from thinwire.checkpoint.holder.slots import SlotSize
    from thinwire.checkpoint.holder.store import Store
    from thinwire.checkpoint.holder.version import Manifest, ShardId

    store, is_there = Store(1 << 20), threading.Event()

    class Peer:
        """It has the version that it is asked about, once it has been asked to take one."""

        is_closed, hung_up, tcp_counts = False, False, (0, 0.0, 0.0)

        def request(self, op: str, content: dict[str, Any], payload: bytes = b"") -> SimpleNamespace:
            return SimpleNamespace(json={"versions": []} if op == "register" else {"have": True})

        def close(self) -> None:
            """It stays."""

    def call(address: str) -> Connection:
        if not is_there.is_set():
            raise LostPeerError("it does not answer")
        return cast(Connection, Peer())

    shard = store.register(ShardId("run", "topology", 0), SlotSize(4096, 4096))
    sender = Replicator(store, shard, "10.0.0.1:1", call, Grants(store.changed), 0.0)
    shard.replicas = {sender.address: sender}
    manifest = Manifest(shard.id, 1, 0, 0, 1, (), 0, zlib.crc32(b""))
    holding = store.begin(shard, None)
    assert holding is not None
    store.seal(holding, manifest, b"")
    sender.start()
    wait_until(lambda: sender.dropped == 1)
    with store.changed:
        assert (sender.bytes_pending(), sender.is_settled(manifest.version.digest)) == (0, True)
    is_there.set()
    wait_until(lambda: sender.has(manifest.version.digest))
    assert (sender.dropped, sender.last_error) == (1, "")
    sender.stop()
    store.close()
