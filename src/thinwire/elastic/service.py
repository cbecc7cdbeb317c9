"""The board over the network: every agent at an endpoint serves one, and agents agree on which of them to use.

The frames are those between holders: JSON under a key made from the job's secret, with limits and timeouts.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.elastic.board import Board
from thinwire.errors import LostPeerError, PeerError, ThinwireError
from thinwire.holder.acceptor import Acceptor
from thinwire.holder.frames import Connection, FrameKind, Handshake
from thinwire.holder.replication import call, parse_address
from thinwire.holder.version import field

logger = logging.getLogger("thinwire")

_LOST_SECONDS = 0.2  # for another look at the board that was just lost, where others answer
_IDLE_SECONDS = 60.0  # an agent speaks every second


def is_local(host: str) -> bool:
    """Return whether ``host`` is an address of this machine, which is so if a socket can be bound to it."""
    with contextlib.suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as sock:
            sock.bind(where)
            return True
    return False


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


class BoardServer:
    """A server of one board on all addresses of this host, or on loopback only if that is the endpoint.

    Raises OSError if the port is taken.
    """

    def __init__(self, board: Board, endpoint: str, secret: bytes) -> None:
        self._board, self._lock, self._connections = board, threading.Lock(), set[Connection]()
        host, port = parse_address(endpoint)
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where if is_loopback(host) else ("", port), family=family, backlog=512)
        self._acceptor = Acceptor(
            listener, lambda: Handshake(secret), self._admit, lambda *why: logger.debug("%s", why)
        )

    def close(self) -> None:
        self._acceptor.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def _admit(self, sock: socket.socket, handshake: Handshake, _: str) -> None:
        connection = Connection(sock, self._board.patience, handshake=handshake)
        with self._lock:
            self._connections.add(connection)
        threading.Thread(target=self._serve, args=(connection,), daemon=True, name="agent").start()

    def _serve(self, connection: Connection) -> None:
        names: set[str] = set()
        try:
            while True:
                request = connection.receive(_IDLE_SECONDS).json
                try:
                    connection.send(FrameKind.REPLY, self._answer(request, names))
                except ValueError as error:
                    connection.send_error(error)
        except (ThinwireError, OSError):
            pass
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)
                self._board.disconnected(names, time.monotonic())

    def _answer(self, request: dict[str, Any], names: set[str]) -> dict[str, Any]:
        op = field(request, "op", str)
        with self._lock:
            if op == "sync":
                name = field(request, "name", str, 1, 256)
                names.add(name)
                return self._board.sync(name, request, time.monotonic())
            if op == "store":
                return self._board.store(field(request, "round", int), request)
            return self._board.holders() if op == "holders" else self._board.look()


class Boards:
    """The boards at all endpoints, as an agent sees them: it uses the one where the run is furthest, and of several
    the first. So agents that lost one find each other at the next, and a host that returns finds the others.

    Args:
        endpoints: ``host:port``, in the same order on all hosts.
        secret: of the job.
        timeout: seconds for a connection, and for an answer.
        new_board: makes the board that this agent serves at an endpoint of its own.
    """

    def __init__(self, endpoints: Sequence[str], secret: bytes, timeout: float, new_board: Callable[[], Board]) -> None:
        self.endpoints, self._secret, self._timeout, self._new_board = list(endpoints), secret, timeout, new_board
        self._served: dict[str, BoardServer] = {}
        self._endpoint: str | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    @property
    def serving(self) -> bool:
        """Whether this agent serves the board that it uses."""
        return self._endpoint in self._served

    def request(self, op: str, content: dict[str, Any], choose: bool = False) -> dict[str, Any]:
        """Ask the board in use. If the connection is lost, try it again, or with ``choose`` the best of all boards.

        Raises LostPeerError if it does not answer, PeerError for another secret, ValueError for another run.
        """
        with self._lock:
            if self._connection is None:
                self._use(self._best() if choose or self._endpoint is None else self._endpoint)
            assert self._connection is not None
            try:
                return self._connection.request(op, content).json
            except ThinwireError as error:
                self._connection = self._connection.close()
                raise LostPeerError(f"the agent at {self._endpoint}: {error}") from error

    def review(self, leave: dict[str, Any]) -> None:
        """Change to a better board, if there is one now; ``leave`` is what to say to the one in use."""
        if len(self.endpoints) < 2:
            return
        best = self._best()
        with self._lock:
            if best != self._endpoint and self._connection is not None:
                with contextlib.suppress(ThinwireError, ValueError):
                    self._connection.request("sync", leave)
                self._connection = self._connection.close()
                self._use(best)

    def close(self) -> None:
        with self._lock:
            self._connection = self._connection and self._connection.close()
        for server in self._served.values():
            server.close()

    def _use(self, endpoint: str) -> None:
        try:
            self._connection, self._endpoint = call(endpoint, self._secret, self._timeout), endpoint
        except (ThinwireError, OSError) as error:
            kind = LostPeerError if type(error) is not PeerError else PeerError
            reason = str(error).removeprefix(f"holder {endpoint}: ")
            raise kind(f"the agent at {endpoint}: {reason}") from error

    def _best(self) -> str:
        """Return the endpoint where the run is furthest, the first of those; serve at its own endpoints, too."""
        for endpoint in self.endpoints:
            if endpoint not in self._served and is_local(parse_address(endpoint)[0]):
                with contextlib.suppress(OSError):  # another agent of this host serves it
                    self._served[endpoint] = BoardServer(self._new_board(), endpoint, self._secret)
        found: dict[str, int] = {}
        failed: dict[str, Exception] = {}

        def look(endpoint: str) -> None:
            try:
                connection = call(endpoint, self._secret, self._timeout)
                try:
                    found[endpoint] = field(connection.request("look", {}).json, "round", int)
                finally:
                    connection.close()
            except (ThinwireError, OSError, ValueError) as error:
                failed[endpoint] = error

        lost = self._endpoint if self._connection is None else None
        ordered = sorted(self.endpoints, key=lambda endpoint: endpoint == lost)
        threads = [threading.Thread(target=look, args=(endpoint,), daemon=True) for endpoint in ordered]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + self._timeout
        for endpoint, thread in zip(ordered, threads, strict=True):  # a stopped process accepts and never answers
            seconds = _LOST_SECONDS if endpoint == lost and found else self._timeout
            thread.join(max(0.0, min(seconds, deadline - time.monotonic())))
        answered = dict(found)
        if not answered:
            reasons = dict(failed)
            for error in reasons.values():
                if type(error) is PeerError:
                    raise error
            raise LostPeerError(f"no agent answers at {', '.join(self.endpoints)}: {reasons or 'no answer in time'}")
        return max(self.endpoints, key=lambda endpoint: answered.get(endpoint, -1))
