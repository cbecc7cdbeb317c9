"""Workers that are forks of a warm process: what they see, how they end, and what happens without it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from thinwire.checkpoint.elastic.warm import MODULE, _path, _receive, _send, _serve
from thinwire.checkpoint.holder.acceptor import listen_unix
from thinwire.errors import LostPeerError

SCRIPT = """
import sys
was_there = "colorsys" in sys.modules
import colorsys, json, os, random, time
if sys.argv[1] == "show":
    about = {
        "argv": sys.argv[2:], "warm": was_there, "name": __name__, "file": __file__, "mark": os.environ.get("MARK"),
        "directory": os.getcwd(), "random": random.random(), "first": sys.path[0],
    }
    print(json.dumps(about))
    sys.exit(3)
print(os.getpid(), flush=True)
time.sleep(600)
"""


class Host:
    """A directory with a script, and the warm process that an agent would keep for it."""

    def __init__(self, directory: Path, script: str = SCRIPT, run: str = "run") -> None:
        self.script, self.directory = directory / "script.py", directory
        self.script.write_text(script)
        named = {"THINWIRE_HOLDER": str(directory / "holder.sock"), "THINWIRE_RUN_ID": run}
        self.environment = {**os.environ, **named}
        with patch.dict(os.environ, named):
            self._listens_at = _path()
        command = [sys.executable, "-c", f"import {MODULE} as warm; warm.serve()", str(self.script)]
        self.warm = subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True)
        self._started = [self.warm]

    def wait(self) -> None:
        deadline = time.monotonic() + 20
        while not self._listens_at.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", MODULE, *(arguments if arguments[0] == "-m" else [self.script, *arguments])]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": self.directory}
        self._started.append(subprocess.Popen(command, env={**self.environment, **environment}, **pipes))  # type: ignore[call-overload]
        return self._started[-1]

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate(timeout=100)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    it = Host(tmp_path)
    it.wait()
    yield it
    it.close()


def is_gone(pid: int) -> bool:
    """Wait until a process is gone; the time of the test is the limit, whatever else the machine does."""
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)


def test_a_worker_is_a_fork_that_sees_what_a_fresh_process_would(host: Host) -> None:
    workers = [host.start("show", "--lr", "1", MARK="here"), host.start("-m", "script", "show")]
    (out, error), (of_module, _) = workers[0].communicate(timeout=100), workers[1].communicate()
    assert [worker.returncode for worker in workers] == [3, 3]
    assert error == ""
    about, other = json.loads(out), json.loads(of_module)
    assert about.pop("random") != other.pop("random"), "forks have one state of the random numbers in common"
    expected = {"argv": ["--lr", "1"], "warm": True, "name": "__main__", "mark": "here"}
    where = {"file": str(host.script), "directory": str(host.directory), "first": str(host.directory)}
    assert about == {**expected, **where}
    assert other == {**expected, **where, "argv": [], "mark": None}


def test_a_signal_reaches_the_worker_and_its_end_is_that_of_what_torchrun_started(host: Host) -> None:
    stand_in = host.start("sleep")
    pid = int(stand_in.stdout.readline())  # type: ignore[union-attr]
    assert pid != stand_in.pid
    stand_in.terminate()
    assert stand_in.wait() == -signal.SIGTERM
    assert is_gone(pid)


def test_a_worker_ends_with_what_torchrun_started_even_if_it_is_stopped(host: Host) -> None:
    stand_in = host.start("sleep")
    pid = int(stand_in.stdout.readline())  # type: ignore[union-attr]
    os.kill(pid, signal.SIGSTOP)
    stand_in.kill()
    assert is_gone(pid)


def test_a_worker_ends_with_the_warm_process(host: Host) -> None:
    stand_in = host.start("sleep")
    pid = int(stand_in.stdout.readline())  # type: ignore[union-attr]
    host.warm.kill()
    assert "the warm process of the agent has ended" in stand_in.communicate(timeout=100)[1]
    assert stand_in.returncode == 1
    assert is_gone(pid)


def test_the_warm_process_of_another_run_on_the_host_replaces_none(host: Host) -> None:
    """Workers were forks of the other one, and ended with that run."""
    other = Host(host.directory, run="other")
    assert other._listens_at != host._listens_at
    other.wait()
    pid = int(host.start("sleep").stdout.readline())  # type: ignore[union-attr]
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    other.close()
    assert parent == host.warm.pid


def test_without_a_warm_process_a_worker_starts_cold_and_says_so(host: Host) -> None:
    host.warm.kill()
    host.warm.wait()
    out, error = (worker := host.start("show")).communicate(timeout=100)
    assert worker.returncode == 3
    assert not json.loads(out)["warm"]
    assert "this worker starts cold" in error


def test_a_script_whose_imports_start_threads_starts_cold(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    host = Host(tmp_path, SCRIPT.replace("import sys\n", "import sys\nimport busy\n", 1))
    try:
        host.wait()
        worker = host.start("show")
        assert not json.loads(worker.communicate(timeout=100)[0])["warm"]
        assert worker.returncode == 3
        assert "starts threads, so its workers cannot be forks" in host.warm.communicate(timeout=100)[1]
    finally:
        host.close()


def test_a_fork_that_fails_has_one_worker_start_cold_and_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers end with the warm process, so a moment without memory or processes cost all ranks of the host."""
    monkeypatch.setattr(os, "fork", Mock(side_effect=[OSError(errno.EAGAIN, "no more processes"), 0]))
    with listen_unix(tmp_path / "warm.sock", socket.SOCK_SEQPACKET) as listener, contextlib.ExitStack() as stack:
        asking = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(2)]
        outputs = [os.pipe() for _ in asking]
        for number, (one, (_, output)) in enumerate(zip(asking, outputs, strict=True)):
            one.connect(str(tmp_path / "warm.sock"))
            _send(one, {"number": number}, [output])
            os.close(output)
        content, files, connection = _serve(listener)
        stack.enter_context(connection)
        assert content == {"number": 1}
        with pytest.raises(LostPeerError):
            _receive(asking[0])
        assert os.read(outputs[0][0], 1) == b"", "who reads the output of a worker waits until nobody has it open"
        for file in [*files, *(reading for reading, _ in outputs)]:
            os.close(file)
