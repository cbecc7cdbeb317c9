"""Accepting connections without waiting for any: strangers share one thread, a quota, and a deadline."""

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from thinwire.checkpoint.holder.frames import HANDSHAKE_SECONDS, closed_on_error, peer_pid

MAX_STRANGERS = 64
BACKLOG = 1024  # connections that the kernel keeps until they are accepted
_ACCEPTS = 32  # before those who are here already are looked at again


def listen_unix(path: Path, kind: int) -> socket.socket:
    """Return a socket that listens at ``path``, instead of what is there; it is not seen there before it listens."""
    hidden, listener = Path(f"{path}~"), socket.socket(socket.AF_UNIX, kind)
    with closed_on_error(listener):
        hidden.unlink(missing_ok=True)
        listener.bind(str(hidden))
        hidden.chmod(0o600)
        listener.listen(BACKLOG)
        hidden.rename(path)
    return listener


class Preamble(Protocol):
    """What is said before a connection is admitted: ``feed`` takes ``wanted`` bytes at most, 0 at the end, and returns
    what to answer. It raises ThinwireError for a caller that is to be refused."""

    wanted: int

    def feed(self, data: bytes) -> bytes: ...


@dataclass(eq=False)
class _Stranger:
    """A connection whose preamble is not over. ``name``: its host's address, or its process on this host."""

    sock: socket.socket
    name: str
    preamble: Preamble
    deadline: float
    outgoing: bytes = b""


class Acceptor:
    """A thread that accepts from one listening socket until ``close``.

    Every connection has HANDSHAKE_SECONDS for its ``preamble``, all together, and is then handed to ``admit``. Of
    MAX_STRANGERS waiting ones, the oldest of the host, or process, that has the most makes room for the next; so
    neither slow callers nor many can keep out others. ``refuse`` is called with the name and the reason. ``tls`` may be
    replaced by another context, for those who call from then on. ``strangers``: those who are not admitted yet.
    """

    def __init__(
        self,
        listener: socket.socket,
        preamble: Callable[[], Preamble],
        admit: Callable[[socket.socket, Any, str], None],
        refuse: Callable[[str, object], None],
        tls: Any = None,
    ) -> None:
        self._listener, self._preamble, self._admit, self._refuse, self.tls = listener, preamble, admit, refuse, tls
        self._again: tuple[type[OSError], ...] = (BlockingIOError,)
        if tls is not None:
            import ssl

            self._again = (BlockingIOError, ssl.SSLWantReadError)
        self.strangers: dict[int, _Stranger] = {}  # by descriptor, the oldest first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="accept")
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and drop all that are not admitted."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._thread.join(HANDSHAKE_SECONDS)

    def _run(self) -> None:
        while not self._closing:
            oldest = next(iter(self.strangers.values()), None)
            for key, _ in self._selector.select(
                None if oldest is None else max(0.0, oldest.deadline - time.monotonic())
            ):
                if key.fileobj is self._listener:
                    self._accept()
                elif (stranger := self.strangers.get(key.fd)) is not None:  # None: dropped in this round
                    self._talk(stranger)
            now = time.monotonic()
            for stranger in [each for each in self.strangers.values() if each.deadline <= now]:
                self._drop(stranger, f"no handshake within {HANDSHAKE_SECONDS} seconds")
        for stranger in list(self.strangers.values()):
            self._drop(stranger)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, where = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self._closing:
                    self._make_room()
                    time.sleep(0.05)
                return
            sock.setblocking(False)
            name = str(where[0]) if where else f"process {peer_pid(sock)}"
            if len(self.strangers) >= MAX_STRANGERS:
                self._make_room()
            if self.tls is not None:
                try:
                    sock = self.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                except OSError:
                    sock.close()
                    continue
            stranger = _Stranger(sock, name, self._preamble(), time.monotonic() + HANDSHAKE_SECONDS)
            self.strangers[sock.fileno()] = stranger
            self._selector.register(sock, selectors.EVENT_READ)

    def _make_room(self) -> None:
        names = Counter(stranger.name for stranger in self.strangers.values())
        for most, _ in names.most_common(1):
            oldest = next(stranger for stranger in self.strangers.values() if stranger.name == most)
            self._drop(oldest, "too many connections at once that have proven nothing yet")

    def _drop(self, stranger: _Stranger, reason: object = None) -> None:
        self._forget(stranger)
        stranger.sock.close()
        if reason is not None:
            self._refuse(stranger.name, reason)

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.sock)
        del self.strangers[stranger.sock.fileno()]

    def _talk(self, stranger: _Stranger) -> None:
        sock, preamble = stranger.sock, stranger.preamble
        try:
            while stranger.outgoing or preamble.wanted:
                if stranger.outgoing:
                    stranger.outgoing = stranger.outgoing[sock.send(stranger.outgoing) :]
                    continue
                if not (data := sock.recv(preamble.wanted)):
                    return self._drop(stranger)
                stranger.outgoing = preamble.feed(data)
        except self._again:
            events = selectors.EVENT_WRITE if stranger.outgoing else selectors.EVENT_READ
            self._selector.modify(sock, events)
        except Exception as error:  # of any kind: without this thread nobody would be accepted any more
            self._drop(stranger, error)
        else:
            self._forget(stranger)
            self._admit(sock, preamble, stranger.name)
