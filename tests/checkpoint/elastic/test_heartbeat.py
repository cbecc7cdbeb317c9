"""Workers that make no step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.checkpoint.elastic.heartbeat import Heartbeat, Heartbeats
from thinwire.checkpoint.holder.start import beside


def test_a_worker_that_makes_no_step_is_silent_until_it_ends(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from thinwire.checkpoint.elastic.heartbeat import Heartbeat\n"
        "heartbeat = Heartbeat(pathlib.Path(sys.argv[1]))\n"
        "for step in (6, 7):\n    heartbeat.beat(step); print(step, flush=True); sys.stdin.readline()\n"
        "heartbeat.close(); print('closed', flush=True); sys.stdin.readline()"
    )
    heartbeats = Heartbeats(tmp_path / "holder.sock")
    command = [sys.executable, "-c", code, str(tmp_path / "holder.sock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}

    def on(worker: subprocess.Popen[str]) -> str:
        worker.stdin.write("\n")  # type: ignore[union-attr]
        return worker.stdout.readline()  # type: ignore[union-attr,no-any-return]

    for ends_by_itself in (False, True):
        with subprocess.Popen(command, **pipes) as worker:  # type: ignore[call-overload]
            assert worker.stdout.readline() == "6\n"
            assert heartbeats.silent(10.0) == []
            assert heartbeats.silent(12.5) == [(2.5, worker.pid, 6)]
            assert on(worker) == "7\n"
            assert heartbeats.silent(13.0) == []
            assert heartbeats.silent(14.0) == [(1.0, worker.pid, 7)]
            if ends_by_itself:
                assert on(worker) == "closed\n"
                assert heartbeats.silent(20.0) == []
            worker.kill()
        assert heartbeats.silent(20.0) == []
        heartbeats.clear()
        assert not list(tmp_path.iterdir())


def test_an_agent_sees_no_workers_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removed what they had written, and would have killed them."""
    agents = {}
    for run in ("one", "other"):
        monkeypatch.setenv("THINWIRE_RUN_ID", run)
        agents[run] = Heartbeats(tmp_path / "holder.sock")
    heartbeat = Heartbeat(tmp_path / "holder.sock")
    heartbeat.beat(7)
    agents["one"].clear()
    assert (agents["one"]._paths(), agents["other"]._paths()) == ([], [heartbeat._path])
    heartbeat.close()


@pytest.mark.parametrize("where", ["full", "gone"])
def test_a_heartbeat_that_cannot_be_written_stops_no_training(tmp_path: Path, where: str) -> None:
    socket = tmp_path / ("gone/holder.sock" if where == "gone" else "holder.sock")
    if where == "full":
        beside(socket, f".step.{os.environ.get('LOCAL_RANK', '0')}").symlink_to("/dev/full")
    heartbeat, agent = Heartbeat(socket), Heartbeats(socket)
    for step in (1, 2):
        heartbeat.beat(step)
        assert agent.silent(100.0 * step) == []
    heartbeat.close()
    agent.clear()
