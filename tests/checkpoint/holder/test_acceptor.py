"""Listening, and who is accepted: see also test_holder_strangers.py, with a holder."""

import os
import socket
from pathlib import Path

import pytest

from thinwire.checkpoint.holder.acceptor import listen_unix


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_socket_that_is_seen_is_one_that_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: socket.SocketKind
) -> None:
    """Who waits until it is there connects at once: what did not listen yet refused the workers of an agent."""
    path, seen = tmp_path / "a.sock", []
    path.write_text("what was left there")

    def listen(self: socket.socket, backlog: int) -> None:
        seen.append(path.is_socket())
        listens(self, backlog)

    listens = socket.socket.listen
    monkeypatch.setattr(socket.socket, "listen", listen)
    with listen_unix(path, kind), socket.socket(socket.AF_UNIX, kind) as client:
        assert seen == [False]
        assert path.stat().st_mode & 0o777 == 0o600
        client.connect(str(path))
    assert os.listdir(tmp_path) == ["a.sock"]


def test_what_cannot_listen_leaves_nothing_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"directory|No such file"):
        listen_unix(tmp_path / "gone" / "a.sock", socket.SOCK_STREAM)
    assert len(os.listdir("/proc/self/fd")) == len(before)
