"""Emulated hosts with a holder each: one secret, holders that are lost and replaced, and none that is left behind."""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from thinwire.lab.bench.checkpoint import hosts
from thinwire.lab.bench.checkpoint.hosts import HolderHosts, link_bytes
from thinwire.lab.testbed.network import EmulatedNetwork, Link

READY = "import sys; print('{\"ready\": 1}', flush=True); sys.stdin.read(); __import__('signal').pause()"
"""What a holder says when it has started, and then it waits, until it is killed."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Options of the holders that are started; programs that only say that they are ready stand for them."""
    options: list[Any] = []

    def command(given: Any) -> list[str]:
        options.append(given)
        return [sys.executable, "-I", "-S", "-c", READY]

    monkeypatch.setattr(hosts, "command", command)
    return options


def has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("budget", [None, "10MB"])
def test_hosts_have_sockets_of_their_own_and_one_secret_that_nobody_else_reads(
    tmp_path: Path, started: list[Any], budget: str | None
) -> None:
    with HolderHosts(3, Link(None), str(tmp_path), budget) as emulated:
        assert len({*emulated.sockets}) == 3
        assert emulated.link_mbit is None
        secrets = [Path(f"{socket}.secret") for socket in emulated.sockets]
        assert len({path.read_text() for path in secrets}) == 1
        assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
        assert [(one.socket, one.secret_file) for one in started] == [
            (socket, str(secret)) for socket, secret in zip(emulated.sockets, secrets, strict=True)
        ]
        assert {one.bind for one in started} == {"127.0.0.1"}
        assert {one.memory_budget for one in started} == {budget}


def test_a_lost_holder_is_killed_with_its_disk_and_another_takes_its_place(tmp_path: Path, started: list[Any]) -> None:
    with HolderHosts(2, Link(None), str(tmp_path)) as emulated:
        before = dict(emulated._processes)
        disks = [tmp_path / f"host-{host}.disk" for host in range(2)]
        for disk in disks:
            disk.mkdir()
        emulated.lose(1)
        assert before[1].returncode == -signal.SIGKILL
        assert [disk.exists() for disk in disks] == [True, False]
        assert before[0].poll() is None
        emulated.start(1)
        assert started[2] == started[1], "where trainers look for it"
        processes = [process.pid for process in (*before.values(), *emulated._processes.values())]
    assert all(map(has_ended, processes))


@pytest.mark.parametrize(
    ("program", "reason"),
    [('print(\'{"error": "no room for 1 GB"}\')', "no room for 1 GB"), ("exit(1)", "it gave no reason")],
)
def test_a_holder_that_does_not_start_says_why_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    texts = iter([READY, program])
    monkeypatch.setattr(hosts, "command", lambda options: [sys.executable, "-I", "-S", "-c", next(texts)])
    emulated, processes = HolderHosts(3, Link(None), str(tmp_path)), list[int]()
    start = hosts._start

    def noted(line: list[str]) -> Any:
        process = start(line)
        processes.append(process.pid)
        return process

    monkeypatch.setattr(hosts, "_start", noted)
    with pytest.raises(ValueError, match=f"the holder of host 1 did not start: {reason}"):
        emulated.__enter__()
    assert len(processes) == 2
    assert all(map(has_ended, processes))


@pytest.mark.parametrize("sent", [0, 1500, 2**40])
def test_bytes_of_a_link_are_those_that_its_interface_sent_and_are_read_again(tmp_path: Path, sent: int) -> None:
    table = tmp_path / "dev"
    table.write_text(f"Inter-| Receive\n lo: 7 {'1 ' * 7}9 9\n {EmulatedNetwork.interface}: 8 {'2 ' * 7}{sent} 9\n")
    counter = os.open(table, os.O_RDONLY)
    try:
        assert [link_bytes(counter), link_bytes(counter)] == [sent, sent]
    finally:
        os.close(counter)


@pytest.mark.slow
def test_holders_are_reached_with_their_secret_and_a_new_one_is_empty(tmp_path: Path) -> None:
    with HolderHosts(2, Link(None), str(tmp_path), "50MB") as emulated:
        first = [emulated.status(host)["pid"] for host in range(2)]
        emulated.forget("a run that nobody has")
        emulated.lose(0)
        emulated.start(0)
        again = [emulated.status(host) for host in range(2)]
        assert first[0] != again[0]["pid"]
        assert first[1] == again[1]["pid"], "the other host goes on"
        assert not any(status["shards"] for status in again)
