"""A holder that stopped, answers late or sends slowly, as its client sees it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from holders_of_hosts import LAYOUT, SECRET, client_of, holder_process, pause
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.frames import Connection, Frame
from thinwire.checkpoint.holder.server import Holder
from thinwire.errors import LostPeerError

pytestmark = pytest.mark.ranks


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


def test_a_holder_that_answers_late_is_lost_not_misunderstood(tmp_path: Path) -> None:
    """Its late answer to one question must not become the answer to the next."""
    with holder_process(tmp_path, "a") as process, HolderClient.connect(tmp_path / "a", SECRET, 0.3) as client:
        pause(process["pid"])
        with pytest.raises(LostPeerError, match="no answer within"):
            client.holder_status()
        os.kill(process["pid"], signal.SIGCONT)
        with pytest.raises(LostPeerError):
            client.inventory("run")


def test_what_frees_memory_is_waited_for(host: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    """To free 25 GB took 10 s, after which the holder was said to be lost, and a fresh start refused."""
    patience: list[float | None] = []
    answer = Connection.answer

    def noting(connection: Connection, seconds: float | None = None) -> Frame:
        patience.append(seconds)
        return answer(connection, seconds)

    with client_of(host("a"), hello=False) as client:
        monkeypatch.setattr(Connection, "answer", noting)
        assert client.forget("run") == 0
        client.release("run", [])
        monkeypatch.undo()
    assert patience == [600.0, 600.0]


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
