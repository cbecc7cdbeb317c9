"""What the process of a holder does at a signal, whatever its main thread is doing at that moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.checkpoint.holder import daemon
from thinwire.checkpoint.holder.start import HolderOptions

INTERRUPTED = """
import json, os, signal, sys
from thinwire.checkpoint.holder import daemon, server

def keep_socket(holder):
    with holder.stopping._cond:  # as the main thread does whenever it begins or ends to wait for the event
        os.kill(os.getpid(), signal.SIGTERM)
        os.getpid()  # where a handler would run

daemon._LOOK_SECONDS = 0.01
server.Holder.keep_socket = keep_socket
os._exit(daemon.main(json.loads(sys.argv[1])))
"""


def test_a_signal_stops_a_holder_whose_main_thread_holds_the_lock_of_the_event(tmp_path: Path) -> None:
    options = json.dumps(HolderOptions(socket=str(tmp_path / "holder.sock"), memory_budget="1MB").to_json())
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, options], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, json.loads(ended.stdout)["ready"]) == (0, True), ended.stderr


def test_a_file_that_says_a_holder_is_ready_is_whole_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there, and empty, before it was written."""
    ready, real, seen = tmp_path / "ready.json", Path.write_text, []

    def write_text(path: Path, text: str) -> int:
        result = real(path, text)
        seen.append(ready.exists())
        return result

    monkeypatch.setattr(Path, "write_text", write_text)
    daemon._write_whole(ready, "{}")
    assert (seen, ready.read_text(), [path.name for path in tmp_path.iterdir()]) == ([False], "{}", ["ready.json"])
    daemon._write_whole(Path(os.devnull), "{}")
    assert not Path(os.devnull).is_file()
