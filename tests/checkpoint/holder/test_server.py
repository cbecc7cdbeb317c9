"""Holders with everything that can end a process or alter a byte: what is complete is exact, what is not is nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import thinwire.checkpoint.holder.daemon as daemon
from holders_of_hosts import (
    LAYOUT,
    NUM_BYTES,
    SECRET,
    _alive,
    check,
    client_of,
    flip,
    holder_process,
    is_there,
    payload_of,
    steps,
    wait_for,
    write,
)
from thinwire.checkpoint.holder import store
from thinwire.checkpoint.holder.client import Common
from thinwire.checkpoint.holder.metrics import prometheus_text
from thinwire.checkpoint.holder.server import AlreadyRunning, Holder
from thinwire.checkpoint.holder.slots import Slot, SlotSize
from thinwire.errors import CorruptMessageError, LostPeerError

pytestmark = pytest.mark.ranks


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
