"""Where a holder listens, what an earlier start has left there, and how a host without a home remembers its runs."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holders import SECRET
from holders_of_hosts import _alive, check, client_of, holder_process, wait_for, write
from thinwire.checkpoint.holder import start
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.server import Holder
from thinwire.checkpoint.holder.start import (
    HolderOptions,
    KnownRun,
    RunMarker,
    beside,
    birth_of,
    default_directory,
    ensure_holder,
    load_secret,
    socket_path,
    start_holder,
    stop_holder,
)
from thinwire.checkpoint.holder.version import NONCE_BITS
from thinwire.errors import PeerError

pytestmark = pytest.mark.ranks

_ELSEWHERE = "192.0.2.1"  # of no host (RFC 5737)


def test_the_place_of_a_holder_depends_on_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start from a login and one from cron or a batch system find the same holder, and so the same versions."""
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.delenv(variable, raising=False)
    places = {default_directory()}
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(variable, str(tmp_path))
        places.add(default_directory())
    assert len(places) == 1


def test_a_path_that_is_too_long_for_a_socket_names_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_HOLDER", str(tmp_path / ("x" * 110)))
    with pytest.raises(ValueError, match="too long for a socket: name a shorter path with THINWIRE_HOLDER"):
        socket_path()
    monkeypatch.setenv("THINWIRE_HOLDER", str(tmp_path / ("x" * (99 - len(str(tmp_path))))))
    path = socket_path()
    assert len(str(path)) == 100
    assert len(f"{beside(path)}~") <= 107, "what else listens there"


def test_the_environment_names_one_socket_for_all_working_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frameworks change the directory between the start of a process and its Checkpointer, each start to another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THINWIRE_HOLDER", "holder.sock")
    with pytest.raises(ValueError, match=r"THINWIRE_HOLDER=holder.sock .*: set it to an absolute path"):
        socket_path()
    assert socket_path("named.sock") == tmp_path / "named.sock", "what is named here means what it means here"


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's homes are, one of its entry, and the directory of its socket, none of which is there yet."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=str(tmp_path / "entry")))
    monkeypatch.setattr(start, "default_directory", lambda: tmp_path / "sockets")
    return tmp_path


def test_a_run_is_known_whatever_home_it_was_started_with(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a login, by cron and by sudo, after a reboot, and where an earlier release has written it."""

    def marker(home: str, state: str = "") -> RunMarker:
        monkeypatch.setenv("HOME", str(homes / home))
        monkeypatch.setenv("XDG_STATE_HOME", state and str(homes / state))
        return RunMarker(homes / "sockets/holder.sock", "run")

    assert marker("a").read() == KnownRun()
    assert marker("a").write(KnownRun(40, origin=7)) == ""
    for start_again in (("b",), ("b", "state")):
        assert marker(*start_again).read() == KnownRun(40, origin=7)
    shutil.rmtree(homes / "sockets")
    assert marker("b").read().step == 40
    shutil.rmtree(homes / "entry")
    assert (marker("b").read().step, marker("a").read().step) == (-1, 40)
    given_up = KnownRun(attempt=3 << NONCE_BITS)
    marker("b").write(given_up)
    assert marker("a").read() == given_up, "which is newer than what was before it"
    marker("a").remove()
    assert marker("a").read() == KnownRun()


def test_a_disk_remembers_a_run_too(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hosts are others now. In which training one of them took part, it knows itself."""
    monkeypatch.setenv("HOME", "")
    socket, disk = homes / "named/h", homes / "disk"
    assert RunMarker(socket, "run", disk).write(KnownRun(5, holders=("a:1",), origin=7)) == ""
    assert not disk.exists(), "which may be mounted there later"
    disk.mkdir()
    RunMarker(socket, "run", disk).write(KnownRun(6, holders=("a:1",), origin=7))
    other = RunMarker(homes / "new/h", "run", disk)
    assert other.read() == KnownRun(6, holders=("a:1",))
    assert RunMarker(socket, "other run", disk).read() == KnownRun()
    (homes / "new").touch()
    assert other.write(KnownRun(7)) == "", "in one of two"
    assert RunMarker(socket, "run", disk).read() == KnownRun(7, origin=7)
    assert f"{homes}/new/h.run-" in RunMarker(homes / "new/h", "run").write(KnownRun(7))


def test_a_user_without_a_home_remembers_runs_beside_the_socket(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert [path.parent for path in RunMarker(homes / "sockets/holder.sock", "run").paths] == [homes / "sockets"]


@pytest.fixture
def left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A holder that a start on one host has left on loopback, under a secret of its own."""
    monkeypatch.delenv("THINWIRE_SECRET", raising=False)
    said = start_holder(HolderOptions(socket=str(tmp_path / "holder.sock"), memory_budget="50MB", drain_seconds=0.0))
    yield said
    if birth_of(said["pid"]):
        stop_holder(_client_of(said))


def _client_of(said: dict[str, Any]) -> HolderClient:
    secret = Path(f"{said['socket']}.secret")
    return HolderClient.connect(said["socket"], load_secret(Path(said["socket"]), secret))


def test_a_holder_that_other_hosts_cannot_reach_is_named_with_what_ends_it(left_behind: dict[str, Any]) -> None:
    """It would be the one of a job on several hosts, which cannot start with it."""
    options = {"socket": left_behind["socket"], "memory_budget": "50MB"}
    with ensure_holder(HolderOptions(**options)) as client:
        assert client.holder_status()["pid"] == left_behind["pid"], "on one host it is the one to use"
    with pytest.raises(ValueError, match=rf"{left_behind['address']}, where other .*: thinwire holder --stop"):
        ensure_holder(HolderOptions(**options, bind=_ELSEWHERE, secret_file=f"{left_behind['socket']}.secret"))


def test_a_holder_with_another_secret_is_named_with_what_ends_it(left_behind: dict[str, Any]) -> None:
    with pytest.raises(
        PeerError, match=rf"an earlier start or release: thinwire holder --stop --pid {left_behind['pid']}"
    ):
        HolderClient.connect(left_behind["socket"], SECRET.encode())


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
