"""Whether a connection lives, by its descriptor alone, which another owner may close and the system give to another."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.comm import connections
from thinwire.comm.connections import between, connected, dead, packed_ends

Pair = tuple[socket.socket, socket.socket]


def _pair() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = _pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def _found(ours: socket.socket) -> connections.Connected:
    return next(one for one in connected() if one[1].descriptor == ours.fileno())


def test_a_look_opens_and_lists_no_descriptor(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = _found(pair[0])

    def never(*args: object) -> None:
        raise AssertionError(f"{args}: 400 descriptors took 5.5 ms of the interpreter, four times a second")

    monkeypatch.setattr(os, "listdir", never)
    monkeypatch.setattr(os, "dup", never)
    monkeypatch.setattr(socket, "socket", never)  # whose end, as by Ctrl-C, is that of the connection
    assert found.is_connected()
    pair[1].shutdown(socket.SHUT_WR)
    assert not found.is_connected()


def test_a_descriptor_that_became_another_connection_is_gone(pair: Pair) -> None:
    _, found = _found(pair[0])
    other, there = _pair()
    os.dup2(other.fileno(), pair[0].fileno())
    assert not found.is_connected()
    other.close()
    there.close()


def test_a_process_is_dead_when_all_connections_to_it_are_gone(pair: Pair) -> None:
    """One end of each is told by the other side: here the ends of two connections, as if they were of rank 1."""
    more, there = _pair()
    mine = [_found(pair[0]), _found(more)]
    theirs = packed_ends([_found(pair[1]), _found(there)])
    processes = between(mine, [b"", theirs, packed_ends(mine)])
    assert [len(found) for found in processes] == [0, 2, 0]
    more.close()
    assert dead(processes) == set()
    pair[1].shutdown(socket.SHUT_RDWR)
    assert dead(processes) == {1}
    there.close()


def _takes(path: Path) -> bool:
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", code, path], capture_output=True).returncode == 0


def test_a_search_for_connections_leaves_locks_of_files_as_they_are(tmp_path: Path) -> None:
    """Closing any descriptor of a file drops the locks that a process has on it, as sqlite has on a database."""
    path = tmp_path / "database"
    with path.open("w") as locked:
        fcntl.lockf(locked, fcntl.LOCK_EX)
        connected()
        assert not _takes(path)


def test_a_search_for_connections_leaves_them_waiting_where_sockets_have_a_default_timeout(
    pair: Pair,
) -> None:
    """That of torch's store, which would then fail in place of waiting for the answer."""
    socket.setdefaulttimeout(60)
    try:
        _found(pair[0])
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(pair[0].fileno())
