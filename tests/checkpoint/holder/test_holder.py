"""Holders with everything that can end a process or alter a byte: what is complete is exact, what is not is nothing."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import thinwire.checkpoint.holder.daemon as daemon
from thinwire.checkpoint.holder import faultpoint, store
from thinwire.checkpoint.holder.client import Common, HolderClient
from thinwire.checkpoint.holder.frames import Connection, FrameKind
from thinwire.checkpoint.holder.metrics import prometheus_text
from thinwire.checkpoint.holder.replication import call
from thinwire.checkpoint.holder.server import AlreadyRunning, Holder, HolderConfig
from thinwire.checkpoint.holder.slots import Slot, SlotSize
from thinwire.checkpoint.holder.start import HolderOptions, ensure_holder, start_holder, stop_holder
from thinwire.checkpoint.holder.version import CHUNK_BYTES, Manifest, ShardId, Version, topology_digest
from thinwire.errors import CorruptMessageError, LostPeerError, PeerError, ThinwireError

pytestmark = pytest.mark.ranks

SECRET = b"a secret of the tests, long enough"
TOPOLOGY = {"machines": [0, 1]}
NUM_BYTES = CHUNK_BYTES + 12_345
LAYOUT = b'{"tree": 1}'
QUICK = {"timeout_seconds": 0.5, "deadline_seconds": 0.5}


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Holder]]:
    """Start holders in this process, each as on a host of its own."""
    with contextlib.ExitStack() as stack:

        def start(name: str, **options: Any) -> Holder:
            given = {"timeout_seconds": 2.0, "deadline_seconds": 5.0, "budget_bytes": 200 << 20}
            given |= {"drain_seconds": 0.0, **options}
            config = HolderConfig(socket=str(tmp_path / name), secret=SECRET, **given)
            return stack.enter_context(Holder(config))

        yield start
    wait_for(lambda: not any(thread.name.startswith("replicator") for thread in threading.enumerate()))


@contextlib.contextmanager
def client_of(holder: Holder | Path, hello: bool = True, **options: Any) -> Iterator[HolderClient]:
    path = holder if isinstance(holder, Path) else holder.config.socket_path
    with HolderClient.connect(path, SECRET) as client:
        if hello:
            given = {"run_id": "run", "topology": TOPOLOGY, "owner": 0, "payload_bytes": NUM_BYTES, **options}
            client.hello(**given)
        yield client


def payload_of(step: int) -> bytes:
    return bytes((step * 7 + i) % 251 for i in range(1000)) * (NUM_BYTES // 1000 + 1)


def write(client: HolderClient, step: int, keep_step: int | None = None, wait: bool = True) -> bool:
    writer = client.slot(step, keep_step)
    if writer is None:
        return False
    writer.payload[:] = payload_of(step)[:NUM_BYTES]
    writer.payload.release()
    writer.publish(LAYOUT, wait=wait)
    return True


def steps(client: HolderClient, **options: Any) -> list[int]:
    return sorted(version.step for version in client.inventory("run", **options))


def check(client: HolderClient, step: int) -> None:
    (version,) = [version for version in client.inventory("run") if version.step == step]
    with client.open(version) as reader:
        assert reader.layout == LAYOUT
        assert reader.payload == payload_of(step)[:NUM_BYTES]


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


def test_the_version_that_all_have_is_never_overwritten(host: Callable[..., Holder]) -> None:
    here, there = host("a"), host("b")
    with client_of(here, replicas=[there.address]) as client:
        client.grant_all()
        assert write(client, 1)
        wait_for(lambda: client.status()["newest_replicated"] == 1)
        client.revoke()
        assert write(client, 2, keep_step=1)
        assert not write(client, 3, keep_step=1)  # 2 is on its way
        client.grant_all()
        wait_for(lambda: client.status()["newest_replicated"] == 2)
        assert write(client, 3, keep_step=1)
        assert steps(client) == [1, 3]
        wait_for(lambda: client.status()["newest_replicated"] == 3)
        with client_of(there, hello=False) as peer:
            assert steps(peer) == [1, 3]
        assert write(client, 4, keep_step=3)
        assert steps(client) == [3, 4]


TRAINER = """
import sys, time
sys.path.insert(0, sys.argv[1].rpartition("/thinwire/")[0])
from thinwire.checkpoint.holder.client import HolderClient
client = HolderClient.connect(sys.argv[2], bytes.fromhex(sys.argv[3]))
client.hello("run", {"machines": [0, 1]}, 0, int(sys.argv[4]), sys.argv[6].split(",") if sys.argv[6] else [])
def write(step, wait):
    writer = client.slot(step)
    for i in range(0, len(writer.payload), 1000):
        if step == 2 and sys.argv[5] == "copy" and i > 100000:
            print("here", flush=True); time.sleep(60)
        piece = bytes((step * 7 + j) % 251 for j in range(1000))
        writer.payload[i : i + 1000] = piece[: len(writer.payload) - i]
    if step == 2 and sys.argv[5] == "before":
        print("here", flush=True); time.sleep(60)
    writer.publish(b'{"tree": 1}', wait=wait)
write(1, True)
write(2, False)
print("here", flush=True)
time.sleep(60)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(("point", "expected"), [("copy", [1]), ("before", [1]), ("after", [1, 2])])
def test_a_killed_trainer_leaves_its_complete_versions(
    host: Callable[..., Holder], point: str, expected: list[int]
) -> None:
    """And they go on to the peer, whom it had granted nothing."""
    here, there = host("a"), host("b")
    script = [sys.executable, "-c", TRAINER, daemon.__file__, str(here.config.socket_path), SECRET.hex()]
    with subprocess.Popen([*script, str(NUM_BYTES), point, there.address], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        try:
            assert trainer.stdout.readline() == b"here\n"
        finally:
            trainer.kill()
    with client_of(there, hello=False) as peer:
        wait_for(lambda: steps(peer) == expected)
        check(peer, expected[-1])
    with client_of(here) as client:
        assert steps(client) == expected
        for step in expected:
            check(client, step)
        assert client.status()["writing"] is False


@contextlib.contextmanager
def holder_process(directory: Path, name: str, **options: Any) -> Iterator[dict[str, Any]]:
    secret = directory / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    given = {"socket": str(directory / name), "secret_file": str(secret), "memory_budget": "200MB", **options}
    said = start_holder(HolderOptions(**given))
    try:
        yield said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(said["pid"], signal.SIGCONT)
            os.kill(said["pid"], signal.SIGKILL)
        wait_for(lambda: not _alive(said["pid"]))


def _state(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return "gone"


def _alive(pid: int) -> bool:
    """A zombie is dead: who adopts it may not be in a hurry."""
    return _state(pid) not in ("Z", "X", "gone")


def pause(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _state(pid) == "T")


def test_a_killed_sender_leaves_the_old_version_to_its_peer(host: Callable[..., Holder], tmp_path: Path) -> None:
    there = host("b")
    with holder_process(tmp_path, "a") as process, client_of(tmp_path / "a", replicas=[there.address]) as client:
        assert write(client, 1)
        client.grant_all()
        wait_for(lambda: client.status()["newest_replicated"] == 1)
        client.revoke()
        client.grant(1_000_000)
        assert write(client, 2)
        wait_for(lambda: client.status()["bytes_sent"] == NUM_BYTES + 1_000_000)
        (shard,) = there.store.shards.values()
        assert shard.receiver is not None
        os.kill(process["pid"], signal.SIGKILL)
        wait_for(lambda: shard.receiver is None)
        with pytest.raises(LostPeerError):
            client.status()
        with client_of(there, hello=False) as peer:
            assert steps(peer) == [1]
            check(peer, 1)


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


def test_a_stopped_holder_is_named_with_what_wakes_it(tmp_path: Path) -> None:
    with holder_process(tmp_path, "a") as said:
        pause(said["pid"])
        try:
            with pytest.raises(
                LostPeerError, match=f"process {said['pid']}, does not answer.* kill -CONT {said['pid']}$"
            ):
                HolderClient.connect(said["socket"], SECRET, timeout_seconds=0.5)
        finally:
            os.kill(said["pid"], signal.SIGCONT)
        HolderClient.connect(said["socket"], SECRET).close()


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


def flip(holder: Holder, step: int, place: int) -> None:
    for shard in holder.store.shards.values():
        for holding in shard.holdings:
            if holding.manifest is not None and holding.manifest.step == step:
                with holding.slot.payload() as payload:
                    payload[place] ^= 1


def test_an_altered_slot_is_not_a_copy(host: Callable[..., Holder]) -> None:
    here, there = host("a"), host("b")
    with client_of(here, replicas=[there.address]) as client:
        client.grant_all()
        assert write(client, 1)
        assert write(client, 2)
        wait_for(lambda: client.status()["newest_replicated"] == 2)
        flip(here, 2, NUM_BYTES - 1)
        assert steps(client, verify=False) == [1, 2]
        assert steps(client) == [1]
        assert "altered" in client.status()["last_error"]
        (good,) = [v for v in client.inventory() if v.step == 1]
        with client_of(there, hello=False) as peer:
            (version,) = [v for v in peer.inventory("run") if v.step == 2]
        flip(there, 2, 5)
        with pytest.raises(CorruptMessageError, match="on the way"):
            client.fetch(version, there.address)
        assert steps(client) == [1]
        check(client, good.step)


@pytest.fixture
def always_reread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SCRUB_SECONDS", 0.0)
    monkeypatch.setattr(store, "_SCRUB_LOOK_SECONDS", 0.05)


@pytest.mark.usefixtures("always_reread")
def test_a_copy_that_is_altered_is_found_and_replaced_unasked(
    host: Callable[..., Holder],
) -> None:
    """On the host of its trainer from the replica; a replica by its sender. Where there is no other, it is missing."""
    here, there, alone = host("a"), host("b"), host("c")
    with client_of(here, replicas=[there.address]) as client:
        client.grant_all()
        assert write(client, 1)
        wait_for(lambda: client.status()["newest_replicated"] == 1)
        for holder in (here, there):
            flip(holder, 1, NUM_BYTES // 2)
            wait_for(lambda holder=holder: holder.status()["damaged_versions"])
            wait_for(lambda holder=holder: holder.status()["shards"][0]["versions"])
            assert is_there(holder, 1, payload_of(1)[:NUM_BYTES])
        wait_for(lambda: here.status()["bytes_scrubbed"] > NUM_BYTES)  # it goes on
        assert "thinwire_holder_damaged_versions_total 1" in prometheus_text(here.status())
    with client_of(alone) as client:
        assert write(client, 1)
        flip(alone, 1, 0)
        wait_for(lambda: alone.status()["damaged_versions"])
        assert steps(client, verify=False) == []
        assert "step 1: chunk 0 of its 2 was altered in memory" in client.holder_status()["shards"][0]["last_error"]


@pytest.mark.usefixtures("always_reread")
def test_what_is_reread_may_be_overwritten(host: Callable[..., Holder]) -> None:
    """And is not taken for altered: no slot waits for the rereading."""
    here = host("a")
    with client_of(here) as client:
        for step in range(1, 60):
            assert write(client, step, step - 1 or None)
        assert here.status()["damaged_versions"] == 0
        wait_for(lambda: here.status()["bytes_scrubbed"] > 4 * NUM_BYTES)
        assert (here.status()["damaged_versions"], steps(client)) == (0, [58, 59])


def put(client: HolderClient, step: int, payload: bytes, pieces: tuple[int, ...] = ()) -> None:
    """Write a version and wait until the peer has it."""
    writer = client.slot(step, client.status()["newest_replicated"])
    assert writer is not None
    writer.payload[: len(payload)] = payload
    writer.payload.release()
    writer.publish(LAYOUT, len(payload), wait=True, pieces=pieces)
    wait_for(lambda: client.status()["newest_replicated"] == step)


def is_there(holder: Holder, step: int, payload: bytes) -> bool:
    with client_of(holder, hello=False) as peer:
        (version,) = [version for version in peer.inventory("run") if version.step == step]
        with peer.open(version) as reader:
            return bytes(reader.payload) == payload


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


def test_another_secret_is_refused(host: Callable[..., Holder], tmp_path: Path) -> None:
    here = host("a")
    with pytest.raises(PeerError, match="another secret"):
        HolderClient.connect(here.config.socket_path, b"another secret")
    with pytest.raises(PeerError, match="another secret"):
        call(here.address, b"another secret", 2.0)
    with pytest.raises(LostPeerError, match="thinwire holder"):
        HolderClient.connect(tmp_path / "nobody", SECRET)


def test_a_holder_has_its_socket_to_itself(host: Callable[..., Holder]) -> None:
    here = host("a")
    assert here.config.socket_path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(AlreadyRunning, match="already serves"):
        host("a")
    with client_of(here, hello=False) as client:
        assert client.holder_status()["address"] == here.address


@pytest.mark.parametrize("is_common", [False, True])
def test_memory_that_is_allocated_keeps_nobody_waiting(
    host: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch, is_common: bool
) -> None:
    """For gigabytes that takes longer than the patience of the others, which took the holder for lost."""
    answered, in_time, allocate = threading.Event(), [], Slot.allocate
    size = {"topology": {"of": 2}, "common": Common(0, 10_000, 1) if is_common else None}
    with client_of(here := host("a"), owner=1, payload_bytes=10, topology={"of": 2}) as other:
        with client_of(here, payload_bytes=10, **size):
            """It leaves slots that are too small."""
        larger = {"common": Common(0, 90_000, 1)} if is_common else {"payload_bytes": 90_000}
        with client_of(here, **{**size, "payload_bytes": 10, **larger}) as client:

            def slow(size: SlotSize) -> Slot:
                asks.start()
                in_time.append(answered.wait(5))
                return allocate(size)

            asks = threading.Thread(target=lambda: other.status() and answered.set())
            monkeypatch.setattr(Slot, "allocate", slow)
            writer = client.slot(1)
            asks.join(60)
            assert writer is not None
            assert len(writer.common if writer.common is not None else writer.payload) >= 90_000
            assert in_time == [True]


def test_without_room_it_says_how_much_is_needed(host: Callable[..., Holder]) -> None:
    here, small = host("a"), host("b", budget_bytes=NUM_BYTES)
    with client_of(small, hello=False) as client:
        with pytest.raises(ValueError, match=rf"needs [\d,]+ bytes, available are {NUM_BYTES:,}"):
            client.hello("run", TOPOLOGY, 0, NUM_BYTES)
        assert client.holder_status()["used_bytes"] == 0
    with client_of(here, hello=False) as client:
        with pytest.raises(ValueError, match=rf"holder {small.address}: .* available are {NUM_BYTES:,}"):
            client.hello("run", TOPOLOGY, 0, NUM_BYTES, [small.address])
        assert client.holder_status()["used_bytes"] == 0
        client.hello("run", TOPOLOGY, 0, NUM_BYTES)


def test_one_run_never_sees_the_versions_of_another(host: Callable[..., Holder]) -> None:
    here = host("a")
    with client_of(here) as first, client_of(here, run_id="second") as second:
        assert write(first, 1)
        assert second.inventory() == []
        with pytest.raises(ValueError, match="in use"):
            second.forget("run")
    with client_of(here, run_id="second") as second:
        used = second.holder_status()["used_bytes"]
        assert second.forget("run") == 1
        assert second.holder_status()["used_bytes"] == used // 2
        assert steps(second) == []


def test_a_shard_has_one_trainer_and_a_topology_keeps_to_itself(host: Callable[..., Holder]) -> None:
    here = host("a")
    with client_of(here) as client:
        assert write(client, 1)
        with client_of(here, hello=False) as other, pytest.raises(ValueError, match="another trainer"):
            other.hello("run", TOPOLOGY, 0, NUM_BYTES)
        with client_of(here, topology={"machines": [0, 1, 2]}) as other:
            assert other.status()["newest_local"] is None
    with client_of(here) as client:
        assert client.status()["newest_local"] == 1


def test_an_open_version_stays(host: Callable[..., Holder]) -> None:
    here = host("a")
    with client_of(here) as client:
        assert write(client, 1)
        assert write(client, 2)
        with client.open(client.inventory()[0]) as reader:
            assert write(client, 3)
            assert steps(client) == [1, 3]
            assert reader.payload == payload_of(1)[:NUM_BYTES]
            reader.payload[0] ^= 1  # a private copy
        check(client, 1)
        assert write(client, 4)
        assert steps(client) == [3, 4]


OPERATIONS = (
    *("hello", "slot", "publish", "abandon", "status", "inventory", "fetch", "open", "close", "holder_status"),
    *("receive", "register", "read", "what"),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    ["shard", "run_id", "topology", "owner", "step", "slot", "payload_bytes", "layout_bytes", "version", "manifest",
     "source", "verify", "replicas", "attempt", "handle", "keep", "keep_step", "bytes"]
)  # fmt: skip
contents = st.dictionaries(names, json_values, max_size=8)
requests = st.tuples(st.sampled_from(list(FrameKind)), st.sampled_from(OPERATIONS), contents, st.binary(max_size=20))
messages = st.binary(max_size=100) | requests


@pytest.mark.slow
def test_nothing_a_client_says_changes_what_is_complete(host: Callable[..., Holder]) -> None:
    """Not before the handshake, and not after it either, but for what its requests are for."""
    here = host("a", timeout_seconds=0.3, deadline_seconds=0.3)
    host_, port = here.address.rsplit(":", 1)
    with client_of(here) as client:
        assert write(client, 1)
        assert write(client, 2)
        before = json.dumps([version.to_json() for version in client.inventory()])

        @settings(
            max_examples=min(60, settings.default.max_examples),
            suppress_health_check=[HealthCheck.function_scoped_fixture],
        )
        @given(st.booleans(), st.lists(messages, max_size=5))
        def talk(local: bool, said: list[Any]) -> None:
            sock = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
            sock.connect(str(here.config.socket_path) if local else (host_, int(port)))
            connection = Connection(sock, 1.0)
            with contextlib.closing(connection), contextlib.suppress(ThinwireError, OSError):
                if said and not isinstance(said[0], bytes):
                    connection.greet(SECRET)
                for message in said:
                    if isinstance(message, bytes):
                        sock.sendall(message)
                    else:
                        kind, op, content, payload = message
                        connection.send(kind, {**content, "op": op}, payload)

        talk()
        assert json.dumps([version.to_json() for version in client.inventory()]) == before
        check(client, 2)
        assert write(client, 3)
    wait_for(lambda: len(here._sessions) == 0)


def test_peers_cannot_do_what_trainers_can(host: Callable[..., Holder]) -> None:
    here = host("a")
    for op in ("stop", "forget", "hello", "fetch", "open"):
        with contextlib.closing(call(here.address, SECRET, 2.0)) as connection, pytest.raises(LostPeerError):
            connection.request(op, {"run_id": "run"})
    assert not here.stopping.is_set()


@pytest.mark.parametrize("bind", ["0.0.0.0", "0", "::", "::0", "", "192.0.2.1", "no such host"])
def test_an_address_that_is_not_ours_alone_is_refused(host: Callable[..., Holder], bind: str) -> None:
    with pytest.raises(ValueError, match="bind"):
        host("a", bind=bind)
    assert "scrub" not in {thread.name for thread in threading.enumerate()}


def test_a_holder_is_reached_once_it_is_whole(host: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first trainers lost it: what they asked for did not exist yet."""
    whole, accept = [], Holder._accept

    def accepting(holder: Holder, kind: str, listener: socket.socket) -> None:
        whole.append(holder.status()["damaged_versions"] == 0)
        accept(holder, kind, listener)

    monkeypatch.setattr(Holder, "_accept", accepting)
    host("a")
    assert whole == [True, True]


def test_the_process_starts_once_survives_its_starter_and_ends_clean(tmp_path: Path) -> None:
    options = HolderOptions(socket=str(tmp_path / "holder.sock"), memory_budget="50MB")
    clients: list[HolderClient] = []
    threads = [threading.Thread(target=lambda: clients.append(ensure_holder(options))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    pids = {client.holder_status()["pid"] for client in clients}
    assert len(clients) == 3
    assert len(pids) == 1
    (pid,) = pids
    assert os.getsid(pid) == pid
    assert (tmp_path / "holder.sock.secret").stat().st_mode & 0o777 == 0o600
    resident = int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])
    assert resident < 60_000, "it must not have imported torch"
    stop_holder(clients[0])
    for client in clients:
        client.close()
    wait_for(lambda: not _alive(pid))
    assert {path.name for path in tmp_path.iterdir()} == {f"holder.sock.{end}" for end in ("lock", "log", "secret")}


def test_a_holder_that_cannot_start_says_why(tmp_path: Path) -> None:
    path = str(tmp_path / "holder.sock")
    for options, says in [
        (HolderOptions(socket=path, memory_budget="900TiB"), "available"),
        (HolderOptions(socket=path, bind="10.255.255.1"), "one secret"),
        (HolderOptions(socket=str(tmp_path / "none" / "x")), "not a directory"),
        (HolderOptions(socket=path, secret_file=str(tmp_path / "absent")), "no secret"),
    ]:
        with pytest.raises(ValueError, match=says):
            start_holder(options)
    open_file = tmp_path / "open"
    open_file.write_text(secrets.token_hex(16))
    open_file.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        start_holder(HolderOptions(socket=path, secret_file=str(open_file)))


def test_sigterm_sends_what_is_pending_and_frees(host: Callable[..., Holder], tmp_path: Path) -> None:
    there = host("b")
    with holder_process(tmp_path, "a") as process, client_of(tmp_path / "a", replicas=[there.address]) as client:
        assert write(client, 1)
        os.kill(process["pid"], signal.SIGTERM)
        wait_for(lambda: not _alive(process["pid"]))
    with client_of(there, hello=False) as peer:
        check(peer, 1)
    assert not (tmp_path / "a").exists()


@pytest.fixture
def strike_at() -> Iterator[Callable[..., None]]:
    yield faultpoint.arm
    faultpoint.arm(None)


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


def test_a_version_is_open_only_as_what_was_asked_for(host: Callable[..., Holder]) -> None:
    here = host("a")
    with client_of(here) as client:
        assert write(client, 1)
        (version,) = client.inventory()
        other = Version(version.shard, 2, 0, NUM_BYTES, version.digest[::-1])
        with pytest.raises(ThinwireError, match="no such"):
            client.open(other)
        with pytest.raises(ThinwireError, match="no such"):
            client.fetch(other, here.address)
        with pytest.raises(ValueError, match="legal form"):
            client.fetch(other, "nowhere")


def test_a_holder_that_answers_late_is_lost_not_misunderstood(tmp_path: Path) -> None:
    """Its late answer to one question must not become the answer to the next."""
    with holder_process(tmp_path, "a") as process, HolderClient.connect(tmp_path / "a", SECRET, 0.3) as client:
        pause(process["pid"])
        with pytest.raises(LostPeerError, match="no answer within"):
            client.holder_status()
        os.kill(process["pid"], signal.SIGCONT)
        with pytest.raises(LostPeerError):
            client.inventory("run")


def test_a_long_run_leaves_nothing_behind(host: Callable[..., Holder]) -> None:
    here, there = host("a"), host("b")
    with client_of(here, payload_bytes=1000, replicas=[there.address]) as client:
        client.grant_all()
        files = 0
        for step in range(100):
            writer = client.slot(step, keep_step=step - 1 if step else None)
            assert writer is not None
            writer.payload[:4] = step.to_bytes(4)
            writer.payload.release()
            writer.publish(LAYOUT, wait=True)
            wait_for(lambda step=step: client.status()["newest_replicated"] == step)
            files = len(os.listdir("/proc/self/fd")) if step == 1 else files  # both slots are mapped by now
        (shard,) = here.store.shards.values()
        (replicator,) = shard.replicas.values()
        assert len(replicator._held) <= 2  # type: ignore[attr-defined]
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= files)  # what earlier tests left closes meanwhile
        assert client.status()["bytes_sent"] == 100 * 1000


def test_a_fetch_says_how_fast_it_was(host: Callable[..., Holder], record_property: Callable[..., None]) -> None:
    here, there, num_bytes = host("a"), host("b"), 64 << 20
    with client_of(here, payload_bytes=num_bytes) as client, client_of(there, hello=False) as peer:
        writer = client.slot(1)
        assert writer is not None
        writer.payload[-5:] = b"exact"
        writer.payload.release()
        writer.publish(LAYOUT, wait=True)
        (version,) = client.inventory()
        fetched = peer.fetch(version, here.address)
        assert fetched["bytes"] == num_bytes
        assert fetched["seconds"] > 0
        record_property("fetch_mb_per_second", num_bytes / fetched["seconds"] / 1e6)
        with peer.open(version) as reader:
            assert reader.payload[-5:] == b"exact"


def test_the_command_shows_forgets_and_stops(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from thinwire.lab.cli.main import app

    def run(*options: str) -> Any:
        given = ["holder", "--socket", str(tmp_path / "a"), "--secret-file", str(tmp_path / "secret"), *options]
        return CliRunner().invoke(app, given)

    assert run("--status").exit_code == 1
    with holder_process(tmp_path, "a") as process:
        with client_of(tmp_path / "a") as client:
            assert write(client, 1)
            assert run("--forget", "run").exit_code == 2
        shown = json.loads(run("--status", "--json", "-").stdout)
        assert [version["step"] for version in shown["shards"][0]["versions"]] == [1]
        assert "run" in run("--status").stdout
        assert run("--forget", "run").exit_code == 0
        assert json.loads(run("--status", "--json", "-").stdout)["used_bytes"] == 0
        assert run("--stop").exit_code == 0
        wait_for(lambda: not _alive(process["pid"]))
