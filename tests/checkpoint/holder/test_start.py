"""Where a holder listens, what an earlier start has left there, and how a host without a home remembers its runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holders import SECRET
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.start import (
    HolderOptions,
    RunMarker,
    birth_of,
    default_directory,
    ensure_holder,
    load_secret,
    socket_path,
    start_holder,
    stop_holder,
)
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


def test_the_environment_names_one_socket_for_all_working_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frameworks change the directory between the start of a process and its Checkpointer, each start to another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THINWIRE_HOLDER", "holder.sock")
    with pytest.raises(ValueError, match="THINWIRE_HOLDER=holder.sock .*: set it to an absolute path"):
        socket_path()
    assert socket_path("named.sock") == tmp_path / "named.sock", "what is named here means what it means here"


def test_a_user_without_a_home_remembers_runs_beside_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert default_directory() in RunMarker(default_directory() / "holder.sock", "run").path.parents


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
