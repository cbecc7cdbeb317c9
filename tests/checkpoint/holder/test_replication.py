"""What is sent on to other hosts: whole, once, and where it was given up, later."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clocks import wait_until
from holders_of_hosts import (
    LAYOUT,
    NUM_BYTES,
    SECRET,
    TOPOLOGY,
    check,
    client_of,
    flip,
    holder_process,
    is_there,
    pause,
    payload_of,
    steps,
    wait_for,
    write,
)
from thinwire.checkpoint.holder import faultpoint
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.frames import Connection, FrameKind
from thinwire.checkpoint.holder.replication import Grants, call
from thinwire.checkpoint.holder.server import Holder
from thinwire.checkpoint.holder.store import Changes
from thinwire.checkpoint.holder.version import Manifest, ShardId, topology_digest
from thinwire.errors import CorruptMessageError, LostPeerError, PeerError, ThinwireError

TIMEOUT_SECONDS = 100.0


class _TakesBeforeEachChange(Changes):
    """Lets a sender take what is granted just before a trainer may change it."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0
        self.grants: Grants | None = None

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        grants, self.grants = self.grants, None
        if grants is not None:
            self.taken = grants.take(10, lambda: False)
        with super().change():
            yield


def test_bytes_that_a_sender_takes_while_more_are_granted_are_not_granted_again() -> None:
    changed = _TakesBeforeEachChange()
    grants = Grants(changed)
    grants.revoke()
    grants.add(10)
    changed.grants = grants
    grants.add(5)
    assert changed.taken == 10
    assert grants.take(100, lambda: False) == 5


def test_a_sender_that_calls_a_lost_host_is_stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers that start again after the loss of a host register first, and that stops the senders of before."""
    from thinwire.checkpoint.holder.replication import Replicator
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


def test_a_connection_that_is_lost_between_two_looks_at_it_ends_neither_status_nor_stop() -> None:
    """The sender's thread takes no lock to disconnect, so that between any two reads its connection may be gone."""
    from thinwire.checkpoint.holder.replication import Replicator
    from thinwire.checkpoint.holder.slots import SlotSize
    from thinwire.checkpoint.holder.store import Store
    from thinwire.checkpoint.holder.version import ShardId

    closed: list[bool] = []
    peer = SimpleNamespace(tcp_counts=(0, 0.0, 0.5), close=lambda: closed.append(True))

    class LostOnRead(Replicator):
        """Each read but the first ``reads`` finds the connection gone."""

        reads = 0

        @property
        def _connection(self) -> Any:  # type: ignore[override]
            self.reads -= 1
            return peer if self.reads >= 0 else None

        @_connection.setter
        def _connection(self, value: Any) -> None:
            pass

    store = Store(1 << 20)
    shard = store.register(ShardId("run", "topology", 0), SlotSize(4096, 4096))
    sender = LostOnRead(store, shard, "10.0.0.1:1", lambda _: cast(Any, peer), Grants(store.changed), 30.0)
    for reads in range(5):
        sender.reads = reads
        status = sender.status()
        assert status["latency_seconds"] == (0.5 if status["connected"] else 0.0)
    sender.reads = 1
    sender.stop()
    assert closed == [True]
    store.close()


def test_a_version_that_was_given_up_is_sent_when_the_peer_is_there_again() -> None:
    """And not counted as pending before: its slot may be written to."""
    from thinwire.checkpoint.holder.replication import Replicator
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


QUICK = {"timeout_seconds": 0.5, "deadline_seconds": 0.5}


@pytest.mark.ranks
def test_a_version_reaches_its_replica_under_grants(host: Callable[..., Holder]) -> None:
    here, there = host("a"), host("b")
    with client_of(here, replicas=[there.address]) as client, client_of(there, hello=False) as peer:
        assert write(client, 1)
        status = client.status()
        assert (status["newest_local"], status["newest_replicated"], status["bytes_sent"]) == (1, None, 0)
        client.grant(1_000_000)
        wait_for(lambda: client.status()["bytes_sent"] == 1_000_000)
        time.sleep(0.05)
        status = client.status()
        assert (status["bytes_sent"], status["bytes_pending"]) == (1_000_000, NUM_BYTES - 1_000_000)
        assert steps(peer) == []
        client.grant_all()
        wait_for(lambda: client.status()["newest_replicated"] == 1)
        assert client.status()["bytes_sent"] == NUM_BYTES
        assert client.status()["bytes_pending"] == 0
        check(peer, 1)
        check(client, 1)
        assert [version.role for version in peer.inventory("run")] == ["replica"]
        assert [version.role for version in client.inventory("run")] == ["own"]
        assert peer.holder_status()["bytes_received"] == NUM_BYTES


@pytest.mark.ranks
def test_a_host_that_joins_gets_its_shards_before_any_trainer_runs(host: Callable[..., Holder]) -> None:
    """Twice is once; a step of which a shard is nowhere is not taken, and a dead holder is left out."""
    a, b, new = host("a"), host("b"), host("new")
    for owner, holder in enumerate((a, b)):
        with client_of(holder, owner=owner) as client:
            for step in (1, 2 + owner):  # step 3 is of one owner only
                assert write(client, step)
    addresses = [a.address, "127.0.0.1:1", b.address]
    with client_of(new, hello=False) as client:
        for moved in (2 * NUM_BYTES, 0):
            assert client.prefetch("run", [0, 1], 2, addresses) == {"step": 1, "bytes": moved, "missing": {}}
        assert [version.shard.owner for version in client.inventory("run")] == [0, 1]
        assert steps(client) == [1, 1]
        check_bytes = [version for version in client.inventory("run") if version.shard.owner == 1]
        with client.open(check_bytes[0]) as reader:
            assert reader.payload == payload_of(1)[:NUM_BYTES]
        assert client.prefetch("nothing", [0], 2, addresses) == {"step": None, "bytes": 0, "missing": {}}
    small = host("small", budget_bytes=NUM_BYTES)
    with client_of(small, hello=False) as client:
        found = client.prefetch("run", [0], 2, addresses)
        assert "available are" in found["missing"][0]


@pytest.mark.ranks
def test_what_ranks_differ_in_is_not_brought_to_a_host_that_joins(host: Callable[..., Holder]) -> None:
    a, b, new = host("a"), host("b"), host("new")
    for owner, holder in enumerate((a, b)):
        with client_of(holder, owner=owner, payload_bytes=100) as client:
            for step in (1, 2):
                writer = client.slot(step)
                assert writer is not None
                digest = zlib.crc32(bytes([step + owner * (step == 2)]) * 50)
                shard = ShardId("run", topology_digest(TOPOLOGY), -1)
                writer.publish(LAYOUT, wait=True, alike=Manifest.stated(shard, step, 0, 50, [digest]))
                writer.payload.release()
    with client_of(new, hello=False) as client:
        assert client.prefetch("run", [0, 1], 2, [a.address, b.address])["step"] == 1


@pytest.mark.ranks
def test_an_old_version_that_waits_for_grants_makes_room_for_the_one_to_go_back_to(host: Callable[..., Holder]) -> None:
    """While copies move a shard has one slot. Its old version must not hold that for a sender that nobody lets send."""
    here, there, joined = host("a"), host("b"), host("c", budget_bytes=8 << 20)
    with client_of(here) as client:
        assert write(client, 1)
        assert write(client, 2, keep_step=1)
        old, new = sorted(client.inventory("run"), key=lambda version: version.step)
    for start, version in enumerate((old, new), start=1):
        with client_of(joined, hello=False) as client:
            chosen = version.attempt, version.step
            client.assign("run", [version.shard], [version.digest], attempt=start << 32, chosen=chosen)
            peers = [there.address] if version is new else []
            client.hello("run", TOPOLOGY, 0, NUM_BYTES, peers, attempt=start << 32)
            if version is new:
                (shard,) = joined.store.shards.values()
                assert len(shard.holdings) == 1
                time.sleep(0.2)  # so that a sender takes it up, if one would
            client.fetch(version, here.address)
            check(client, version.step)


@pytest.mark.ranks
def test_a_paused_peer_costs_a_version_not_the_training(host: Callable[..., Holder], tmp_path: Path) -> None:
    here = host("a", **QUICK)
    with holder_process(tmp_path, "b") as process, client_of(here, replicas=[process["address"]]) as client:
        client.grant_all()
        assert write(client, 1)
        wait_for(lambda: client.status()["newest_replicated"] == 1)
        pause(process["pid"])
        assert write(client, 2, keep_step=1)
        wait_for(lambda: client.status()["dropped"] == 1)
        status = client.status()
        assert (status["newest_local"], status["newest_replicated"], status["bytes_pending"]) == (2, 1, 0)
        assert process["address"] in status["last_error"]
        assert write(client, 3, keep_step=1)  # in the place of 2, which nobody else will ever have
        assert steps(client) == [1, 3]
        os.kill(process["pid"], signal.SIGCONT)
        wait_for(lambda: client.status()["newest_replicated"] == 3 or client.status()["dropped"] == 2)


@pytest.mark.ranks
def test_a_lost_host_gets_its_shard_back_and_its_replica_is_rebuilt(host: Callable[..., Holder]) -> None:
    here, there, third = host("a"), host("b"), host("c")
    with client_of(here, replicas=[there.address]) as client:
        client.grant_all()
        assert write(client, 1)
        assert write(client, 2)
        wait_for(lambda: client.status()["newest_replicated"] == 2)
    here.stop()
    with client_of(there, hello=False) as peer:
        versions = peer.inventory("run")
    replacement = host("d")
    with client_of(replacement, replicas=[there.address, third.address], attempt=1) as client:
        for version in versions:
            assert client.fetch(version, there.address)["bytes"] == NUM_BYTES
            assert client.fetch(version, there.address)["bytes"] == 0
        check(client, 1)
        check(client, 2)
        assert [v.digest for v in client.inventory()] == [v.digest for v in versions]
        client.grant_all()
        wait_for(lambda: client.status()["newest_replicated"] == 2)
        with client_of(third, hello=False) as peer:
            check(peer, 2)
        assert write(client, 3, keep_step=2)
        assert {(version.step, version.attempt) for version in client.inventory()} == {(2, 0), (3, 1)}


@pytest.mark.ranks
def test_a_restarted_peer_is_supplied_again(host: Callable[..., Holder]) -> None:
    here, there = host("a"), host("b")
    with client_of(here, replicas=[there.address]) as client:
        client.grant_all()
        assert write(client, 1)
        wait_for(lambda: client.status()["newest_replicated"] == 1)
        port = int(there.address.rpartition(":")[2])
        there.stop()
        again = host("b", port=port)
        with client_of(again, hello=False) as peer:
            wait_for(lambda: steps(peer) == [1])
        wait_for(lambda: client.status()["newest_replicated"] == 1)


def put(client: HolderClient, step: int, payload: bytes, pieces: tuple[int, ...] = ()) -> None:
    """Write a version and wait until the peer has it."""
    writer = client.slot(step, client.status()["newest_replicated"])
    assert writer is not None
    writer.payload[: len(payload)] = payload
    writer.payload.release()
    writer.publish(LAYOUT, len(payload), wait=True, pieces=pieces)
    wait_for(lambda: client.status()["newest_replicated"] == step)


@pytest.mark.ranks
def test_only_what_changed_is_sent_again(host: Callable[..., Holder]) -> None:
    """Bytes anywhere change, none, all; the payload grows and shrinks; every version is exact on the peer."""
    here, there = host("a"), host("b")
    draw, sent = random.Random(5), 0
    payload = bytearray(draw.randbytes(NUM_BYTES - 5000))
    with client_of(here, replicas=[there.address]) as client:
        client.grant_all()
        for step in range(1, 12):
            changed = {draw.randrange(len(payload)) for _ in range((0, 1, 3, 9)[step % 4])}
            for place in changed:
                payload[place] ^= 1 + draw.randrange(255)
            payload = payload + draw.randbytes(3000) if step == 5 else payload[:-4000] if step == 8 else payload
            payload = bytearray(draw.randbytes(len(payload))) if step == 10 else payload
            put(client, step, bytes(payload))
            assert is_there(there, step, bytes(payload))
            now = client.status()["bytes_sent"]
            whole = step in (1, 10)
            most = len(payload) if whole else (len(changed) + (step in (5, 8))) * (64 << 10)
            assert now - sent <= most, f"step {step} changed at {len(changed)} places"
            assert not whole or now - sent == len(payload)
            sent = now
        assert client.status()["bytes_unchanged"] > 8 * NUM_BYTES


@pytest.mark.ranks
def test_pieces_that_moved_are_not_sent_again(host: Callable[..., Holder]) -> None:
    here, there = host("a"), host("b")
    draw = random.Random(6)
    pieces = [draw.randbytes(size) for size in (70_000, 1, 900_000, 0, 5_000, 1_000_000)]
    with client_of(here, replicas=[there.address]) as client:
        client.grant_all()
        put(client, 1, b"".join(pieces), tuple(map(len, pieces)))
        pieces[0], pieces[4] = draw.randbytes(69_999), draw.randbytes(7_000)
        put(client, 2, b"".join(pieces), tuple(map(len, pieces)))
        assert is_there(there, 2, b"".join(pieces))
        assert client.status()["bytes_sent"] == 1_975_001 + 69_999 + 7_000
        writer = client.slot(3, 2)
        assert writer is not None
        for wrong in ((5,), (-1, 11), ("a",), (True,) * 10):
            with pytest.raises(ValueError, match="pieces"):
                writer.publish(LAYOUT, 10, pieces=wrong)  # type: ignore[arg-type]


@pytest.mark.ranks
@pytest.mark.parametrize("where", ["sender", "peer"])
def test_a_version_never_rests_on_an_altered_one(host: Callable[..., Holder], where: str) -> None:
    """What the sender takes for the same differs on the peer: the digests tell, and all of it is sent."""
    here, there = host("a"), host("b")
    old, new = payload_of(1)[:NUM_BYTES], bytearray(payload_of(1)[:NUM_BYTES])
    with client_of(here, replicas=[there.address]) as client:
        client.grant_all()
        put(client, 1, old)
        new[77] ^= 1
        flip(here if where == "sender" else there, 1, 77 if where == "sender" else NUM_BYTES - 1)
        put(client, 2, bytes(new))
        assert is_there(there, 2, bytes(new))
        assert client.status()["bytes_sent"] >= 2 * NUM_BYTES


@pytest.mark.ranks
def test_a_replaced_peer_gets_all_of_it(host: Callable[..., Holder]) -> None:
    here, there = host("a"), host("b")
    with client_of(here, replicas=[there.address]) as client:
        client.grant_all()
        put(client, 1, payload_of(1)[:NUM_BYTES])
        port = int(there.address.rpartition(":")[2])
        there.stop()
        again = host("b", port=port)
        put(client, 2, payload_of(1)[:NUM_BYTES])
        assert is_there(again, 2, payload_of(1)[:NUM_BYTES])
        assert client.status()["bytes_unchanged"] <= NUM_BYTES  # of version 1, if that was sent again before


@pytest.mark.ranks
@pytest.mark.parametrize("content", [{"from": 0}, {"from": 1, "bytes": NUM_BYTES}, {"from": -1, "bytes": 5}, {"a": 1}])
def test_a_peer_cannot_have_copied_what_is_not_there(host: Callable[..., Holder], content: dict[str, Any]) -> None:
    here, there = host("a"), host("b")
    with client_of(here, replicas=[there.address]) as client:
        client.grant_all()
        put(client, 1, payload_of(1)[:NUM_BYTES])
        (shard,) = here.store.shards.values()
        later = {**shard.complete()[0][1].to_json(), "step": 2}
        with contextlib.closing(call(there.address, SECRET, 2.0)) as connection:
            answer = connection.request("receive", {"manifest": later, "keep": None}, LAYOUT).json
            assert answer == {"have": False, "base": shard.complete()[0][1].version.digest}
            connection.send(FrameKind.DATA, content)
            with pytest.raises((LostPeerError, ThinwireError)):
                connection.answer(2.0)
        with client_of(there, hello=False) as peer:
            assert steps(peer) == [1]


class Proxy:
    """Between two holders: flips a bit of every long piece that goes to the ``target``, while ``tampering``."""

    def __init__(self, target: str) -> None:
        self.tampering = True
        self._target = (target.rpartition(":")[0], int(target.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for source, sink, forward in ((near, far, True), (far, near, False)):
                    self._threads.append(threading.Thread(target=self._pump, args=(source, sink, forward)))
                    self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket, forward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if forward and self.tampering and len(data) > 5000:
                    data[-1] ^= 4
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for sock in self._sockets:
            sock.close()


@pytest.mark.ranks
def test_what_was_altered_on_the_wire_is_sent_again_or_dropped(host: Callable[..., Holder]) -> None:
    here, there = host("a", timeout_seconds=2.0, deadline_seconds=0.2), host("b")
    with contextlib.closing(Proxy(there.address)) as proxy, client_of(here, replicas=[proxy.address]) as client:
        client.grant_all()
        assert write(client, 1)
        wait_for(lambda: client.status()["dropped"] == 1)
        with client_of(there, hello=False) as peer:
            assert steps(peer) == []
            proxy.tampering = False
            assert write(client, 2)
            wait_for(lambda: client.status()["newest_replicated"] == 2)
            check(peer, 2)


@pytest.mark.ranks
def test_a_version_without_its_digests_is_refused(host: Callable[..., Holder]) -> None:
    here, there = host("a"), host("b")
    with client_of(here, replicas=[there.address]) as client:
        client.grant_all()
        assert write(client, 1)
        wait_for(lambda: client.status()["newest_replicated"] == 1)
        (shard,) = here.store.shards.values()
        manifest = shard.complete()[0][1]
        bad = {**manifest.to_json(), "step": 9, "chunk_crcs": []}
        connection = call(there.address, SECRET, 2.0)
        with contextlib.closing(connection), pytest.raises(CorruptMessageError, match="missing"):
            connection.request("receive", {"manifest": bad, "keep": None}, LAYOUT)
        with client_of(there, hello=False) as peer:
            assert steps(peer) == [1]


@pytest.mark.ranks
def test_another_secret_is_refused(host: Callable[..., Holder], tmp_path: Path) -> None:
    here = host("a")
    with pytest.raises(PeerError, match="another secret"):
        HolderClient.connect(here.config.socket_path, b"another secret")
    with pytest.raises(PeerError, match="another secret"):
        call(here.address, b"another secret", 2.0)
    with pytest.raises(LostPeerError, match="thinwire holder"):
        HolderClient.connect(tmp_path / "nobody", SECRET)


@pytest.fixture
def strike_at() -> Iterator[Callable[..., None]]:
    yield faultpoint.arm
    faultpoint.arm(None)


@pytest.mark.ranks
def test_a_holder_that_ends_sends_what_it_has_accepted(
    host: Callable[..., Holder], strike_at: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a version that is not complete yet: this one is not until `stop` waits for it, or has sent all it knows."""
    here, there, go_on = host("a", drain_seconds=60.0), host("b"), threading.Event()

    def shut_down(wait: bool, real: Callable[..., None] = here.sealing.shutdown) -> None:
        go_on.set()
        real(wait)

    def drain(real: Callable[[], None] = here.drain) -> None:
        real()
        go_on.set()

    monkeypatch.setattr(here.sealing, "shutdown", shut_down)
    monkeypatch.setattr(here, "drain", drain)
    strike_at(lambda point, *_: point == "header" and go_on.wait(60))
    with client_of(here, replicas=[there.address]) as client:
        assert write(client, 1, wait=False)
        here.stop()
    with client_of(there, hello=False) as peer:
        check(peer, 1)


@pytest.mark.ranks
def test_a_holder_that_ends_waits_until_its_peer_has_what_was_sent(
    host: Callable[..., Holder], strike_at: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer has all of the bytes, and makes them a version only when the holder waits for that, or for nothing."""
    here, there, received, go_on = host("a", drain_seconds=60.0), host("b"), threading.Event(), threading.Event()
    wait_for_change, at_the_end = here.store.changed.wait_for, list[list[int | None]]()

    def strike(point: str, *_: int) -> None:
        if point == "header":
            received.set()
            go_on.wait(60)

    def wait(holds: Callable[[], bool], seconds: float) -> bool:
        if not holds():
            go_on.set()
        return wait_for_change(holds, seconds)

    def drain(real: Callable[[], None] = here.drain) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(here.store.changed, "wait_for", wait)
            real()
        at_the_end.append([shard.newest() for shard in there.store.shards.values()])
        go_on.set()

    monkeypatch.setattr(here, "drain", drain)
    with client_of(here, replicas=[there.address]) as client:
        assert write(client, 1)
        strike_at(strike)
        client.grant_all()
        assert received.wait(60)
        assert client.status()["bytes_pending"] == 0
        here.stop()
    assert at_the_end == [[1]]
