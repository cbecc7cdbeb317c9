"""Metrics of a holder."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from checkpoint_faults.wire import connect
from clocks import wait_until
from strange_holders import NUM_BYTES, SECRET, hello, write
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.metrics import prometheus_text
from thinwire.checkpoint.holder.server import Holder

pytestmark = pytest.mark.ranks


@pytest.fixture
def host(host: Callable[..., Holder]) -> Callable[..., Holder]:
    return partial(host, secret=SECRET)


def ask(address: str, request: bytes) -> tuple[str, str]:
    with connect(address) as sock:
        sock.sendall(request)
        data = b""
        while piece := sock.recv(1 << 16):
            data += piece
    head, _, body = data.decode().partition("\r\n\r\n")
    return head.partition("\r\n")[0], body


def samples(text: str) -> dict[str, float]:
    """Every sample of Prometheus's text; each family must have its help and its type first."""
    found, families = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            families.add(line.split()[2])
            assert line.split()[3] in ("gauge", "counter")
            assert (line.split()[3] == "counter") is line.split()[2].endswith("_total")
        elif not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            assert name.partition("{")[0] in families
            assert name not in found, "a sample has one value"
            found[name] = float(value)
    return found


def test_metrics_are_what_the_status_says(host: Callable[..., Holder], tmp_path: Path) -> None:
    there = host("b")
    here = host("a", metrics=str(tmp_path / "metrics"))
    address = str(tmp_path / "metrics")
    with HolderClient.connect(here.config.socket_path, SECRET) as client:
        hello(client, there.address, run_id='a"run\\with\nall')
        status, text = ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status == "HTTP/1.1 200 OK"
        assert "newest_step" not in text, "there is none yet"
        ready = b"GET /readyz HTTP/1.1\r\n\r\n"
        assert ask(address, ready) == ("HTTP/1.1 200 OK", "ok\n"), "nothing can be lost"
        write(client, 7)
        status, text = ask(address, ready)
        assert status.endswith("503 Service Unavailable")
        assert text == "shard 0 of run 'a\"run\\\\with\\nall' has no copy\n"
        client.grant_all()
        wait_until(lambda: client.status()["newest_replicated"] == 7)
        assert ask(address, ready) == ("HTTP/1.1 200 OK", "ok\n")
        _, text = ask(address, b"GET /metrics?x HTTP/1.0\r\n\r\n")
        found = samples(text)
        (shard,) = client.holder_status()["shards"]
        topology = shard["shard"]["topology"]
        labels = f'{{run="a\\"run\\\\with\\nall",topology="{topology}",owner="0",role="own"}}'
        assert found[f"thinwire_holder_newest_step{labels}"] == 7
        assert found[f"thinwire_holder_newest_replicated_step{labels}"] == 7
        assert 0 <= found[f"thinwire_holder_newest_replicated_age_seconds{labels}"] < 60
        assert found["thinwire_holder_replication_bytes_total"] == NUM_BYTES
        assert found["thinwire_holder_used_bytes"] == client.holder_status()["used_bytes"] > 0
        assert found["thinwire_holder_trainer_connections"] == 1
        assert "secret" not in text.replace("proven no secret yet", "")
        samples(prometheus_text(there.status()))
    for probe in (b"healthz", b"livez"):
        assert ask(address, b"GET /" + probe + b" HTTP/1.1\r\n\r\n") == ("HTTP/1.1 200 OK", "ok\n")
    assert ask(address, b"POST /metrics HTTP/1.1\r\n\r\n")[0].endswith("405 Method Not Allowed")
    assert ask(address, b"GET / HTTP/1.1\r\n\r\n")[0].endswith("404 Not Found")
    with contextlib.suppress(OSError):
        assert ask(address, b"x" * 9000) == ("", "")


def test_slow_readers_of_metrics_keep_nobody_out(host: Callable[..., Holder]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    host("a", metrics=f"127.0.0.1:{port}")
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connect(f"127.0.0.1:{port}")).sendall(b"GET /met")
        assert ask(f"127.0.0.1:{port}", b"GET /metrics HTTP/1.1\r\n\r\n")[0] == "HTTP/1.1 200 OK"
