"""The holder: one process on each host that keeps checkpoint versions in memory beyond the life of the trainers."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError
from thinwire.holder.frames import Connection
from thinwire.holder.replication import PeerTimes, Replicator, tune
from thinwire.holder.sessions import PeerSession, TrainerSession
from thinwire.holder.store import Holding, Shard, Store
from thinwire.holder.version import Manifest

log = logging.getLogger("thinwire.holder")

_MAX_CONNECTIONS = 512
_WILDCARDS = {"0.0.0.0", "::", ""}


@dataclass(frozen=True)
class HolderConfig:
    """Configuration of a holder.

    ``bind`` is the one address that peers reach; port 0 picks a free one. ``budget_bytes`` is the limit for all slots
    together.
    """

    socket_path: Path
    secret: bytes
    budget_bytes: int
    bind: str = "127.0.0.1"
    port: int = 0
    times: PeerTimes = field(default_factory=PeerTimes)
    drain_seconds: float = 5.0


class AlreadyRunning(ThinwireError):
    """Raised when another holder has that socket."""


class Holder:
    """A server of checkpoint memory that runs until ``stop``; every connection has a thread of its own.

    Example: with Holder(config) as holder: print(holder.address)
    """

    def __init__(self, config: HolderConfig) -> None:
        if config.bind in _WILDCARDS:
            raise ValueError("bind to one address, that of the interface on which peers reach this host, not to all")
        if not config.secret:
            raise ValueError("a holder needs a secret: give --secret-file, or set THINWIRE_SECRET")
        self.config, self.store = config, Store(config.budget_bytes)
        self.stopping = threading.Event()
        self.sealing = ThreadPoolExecutor(4, thread_name_prefix="seal")
        self.refused, self._received, self._served, self._fetched = 0, (0, 0.0), (0, 0.0), (0, 0.0)
        self._started_at = time.monotonic()
        self._sessions: set[Connection] = set()
        self.joined: set[TrainerSession] = set()
        self._lock = threading.Lock()
        self._claim = _claim(config.socket_path)
        try:
            self._tcp, self.address = _listen_tcp(config)
            self._unix = _listen_unix(config.socket_path)
        except BaseException:
            os.close(self._claim)
            raise
        for listener, session in ((self._tcp, PeerSession), (self._unix, TrainerSession)):
            threading.Thread(target=self._accept, args=(listener, session), daemon=True, name="accept").start()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self, listener: socket.socket, kind: type[PeerSession] | type[TrainerSession]) -> None:
        while not self.stopping.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if listener.fileno() < 0 or self.stopping.wait(0.05):
                    return
                log.debug("accept: %s", error)
                continue
            if len(self._sessions) >= _MAX_CONNECTIONS:
                sock.close()
                continue
            if sock.family != socket.AF_UNIX:
                tune(sock, self.config.times.timeout_seconds)
            connection = Connection(sock, self.config.times.timeout_seconds)
            thread = threading.Thread(target=self._serve, args=(kind, connection), daemon=True, name=kind.__name__)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads now; those who call later may be served
                log.warning("a caller was turned away: %s", error)
                connection.close()

    def _serve(self, kind: type[PeerSession] | type[TrainerSession], connection: Connection) -> None:
        with self._lock:
            self._sessions.add(connection)
        try:
            kind(self, connection).serve()
        finally:
            with self._lock:
                self._sessions.discard(connection)

    @contextlib.contextmanager
    def into(
        self,
        shard: Shard,
        keep: tuple[int, int] | None,
        manifest: Manifest,
        layout: bytes,
        recovering: bool = False,
    ) -> Iterator[Holding]:
        """Receive a version into a slot: it becomes a version if the block ends well, and nothing otherwise.

        A replica never replaces a newer version; a version fetched when ``recovering`` may. Raises ThinwireError if no
        slot is free, ValueError if it does not fit.
        """
        before = None if recovering else manifest.order
        holding = self.store.begin(shard, keep, before, recovering, manifest.version.digest)
        if holding is None:
            raise ThinwireError(f"{shard.id}: no slot is free for step {manifest.step}")
        try:
            holding.slot.check_room(manifest.payload_bytes, len(layout))
            yield holding
            self.store.seal(holding, manifest, layout)
        finally:
            self.store.abandon(holding)

    def note_received(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._received = (self._received[0] + num_bytes, self._received[1] + seconds)

    def note_served(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._served = (self._served[0] + num_bytes, self._served[1] + seconds)

    def note_fetched(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._fetched = (self._fetched[0] + num_bytes, self._fetched[1] + seconds)

    def shard_status(self, shard: Shard) -> dict[str, Any]:
        """Return the status of one shard: its versions here, those of its replicas, and the progress of sending."""
        with self.store.changed:
            replicas = {a: r.status() for a, r in shard.replicas.items() if isinstance(r, Replicator)}
            versions = [h.manifest.listed(shard.role).to_json() for h in shard.complete() if h.manifest]
            rates = [r.bytes_per_second() or 0.0 for r in shard.replicas.values() if isinstance(r, Replicator)]
            errors = [shard.last_error, *(str(replica["last_error"]) for replica in replicas.values())]
            return {
                "shard": shard.id.to_json(),
                "role": shard.role,
                "trainer": shard.trainer is not None,
                "slot_bytes": shard.total_bytes,
                "writing": any(holding.writing for holding in shard.holdings),
                "free": shard.is_free(),
                "newest_local": shard.newest(),
                "newest_replicated": shard.newest(replicated=True),
                "bytes_pending": sum(replica["bytes_pending"] for replica in replicas.values()),
                "bytes_per_second": sum(rates) or None,  # they send at the same time
                "bytes_sent": sum(replica["bytes_sent"] for replica in replicas.values()),
                "dropped": sum(replica["dropped"] for replica in replicas.values()),
                "last_error": next((error for error in errors if error), ""),
                "versions": versions,
                "replicas": replicas,
            }

    def status(self) -> dict[str, Any]:
        """Return the status of the whole holder: memory, traffic, and every shard."""
        with self.store.changed:
            shards = [self.shard_status(shard) for shard in self.store.shards.values()]
        return {
            "pid": os.getpid(),
            "socket": str(self.config.socket_path),
            "address": self.address,
            "uptime_seconds": round(time.monotonic() - self._started_at, 3),
            "budget_bytes": self.config.budget_bytes,
            "used_bytes": self.store.used_bytes,
            "bytes_sent": sum(shard["bytes_sent"] for shard in shards),
            **_traffic("received", self._received),
            **_traffic("served", self._served),
            **_traffic("fetched", self._fetched),
            "refused_connections": self.refused,
            "shards": shards,
        }

    def drain(self) -> None:
        """Send pending versions, for at most ``drain_seconds``."""
        deadline = time.monotonic() + self.config.drain_seconds
        with self.store.changed:
            for shard in self.store.shards.values():
                if isinstance(shard.trainer, TrainerSession):
                    shard.trainer.grants.unlimit()

        def pending() -> int:
            with self.store.changed:
                return sum(self.shard_status(shard)["bytes_pending"] for shard in self.store.shards.values())

        while pending() and time.monotonic() < deadline:
            time.sleep(0.02)

    def stop(self) -> None:
        """Drain, end all connections, and free the memory. A second call does nothing."""
        self.stopping.set()
        if self._claim < 0:
            return
        for listener in (self._tcp, self._unix):
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.drain()
        with self._lock:
            sessions = list(self._sessions)
        for connection in sessions:
            connection.close()
        self.sealing.shutdown(wait=True)
        self.store.close()
        with contextlib.suppress(FileNotFoundError):
            self.config.socket_path.unlink()
        os.close(self._claim)
        self._claim = -1


def _traffic(name: str, total: tuple[int, float]) -> dict[str, Any]:
    num_bytes, seconds = total
    speed = round(num_bytes / seconds / 1e6, 1) if seconds else None
    return {f"bytes_{name}": num_bytes, f"seconds_{name}": round(seconds, 6), f"mb_per_second_{name}": speed}


def _claim(socket_path: Path) -> int:
    """Lock the socket until this process ends, so that of two holders on one socket the second one is refused."""
    descriptor = os.open(f"{socket_path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise AlreadyRunning(f"a holder already serves {socket_path}; see it with: thinwire holder --status") from error
    return descriptor


def _listen_unix(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # of a holder that was killed: the lock says that it is gone
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        old = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(old)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen at {path}: {error}") from error
    return listener


def _listen_tcp(config: HolderConfig) -> tuple[socket.socket, str]:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            config.bind, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"cannot bind to {config.bind}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"cannot bind to {config.bind}, port {config.port}: {error}; give an address of this host"
        ) from error
    host, port = listener.getsockname()[:2]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
