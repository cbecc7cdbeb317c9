"""What trainers may say, and what they are told."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holders_of_hosts import NUM_BYTES, SECRET, TOPOLOGY, check, client_of, payload_of, steps, wait_for, write
from thinwire.checkpoint.holder.frames import Connection, FrameKind
from thinwire.checkpoint.holder.replication import call
from thinwire.checkpoint.holder.server import Holder
from thinwire.checkpoint.holder.version import Version
from thinwire.errors import LostPeerError, ThinwireError

pytestmark = pytest.mark.ranks


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
