"""The holder: one process on each host that keeps checkpoint versions in memory beyond the life of the trainers."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError
from thinwire.holder.acceptor import Acceptor
from thinwire.holder.frames import Connection, Handshake
from thinwire.holder.metrics import HttpRequest
from thinwire.holder.replication import PeerTimes, call, parse_address, tune
from thinwire.holder.sessions import PeerSession, TrainerSession
from thinwire.holder.store import Holding, Shard, Store
from thinwire.holder.version import Manifest

log = logging.getLogger("thinwire.holder")

_MAX_CONNECTIONS = 512  # of trainers, and as many of peers
_BACKLOG = 1024  # connections that the kernel keeps until they are accepted
_WILDCARDS = {"0.0.0.0", "::", "::ffff:0.0.0.0"}


@dataclass(frozen=True)
class HolderConfig:
    """Configuration of a holder: `HolderOptions`, looked up and checked (`thinwire.holder.start.config_of`).

    ``secret``: one or more, a line each; all are accepted, and ``reload_secret`` reads them again. ``generated_secret``
    is its file if it was generated here. ``tls``: files of the certificate, its key, and the authority.
    """

    socket_path: Path
    secret: bytes
    budget_bytes: int
    bind: str = "127.0.0.1"
    port: int = 0
    times: PeerTimes = field(default_factory=PeerTimes)
    drain_seconds: float = 5.0
    reload_secret: Callable[[], bytes] | None = None
    generated_secret: Path | None = None
    tls: tuple[str, str, str] | None = None
    metrics: str | None = None


class AlreadyRunning(ThinwireError):
    """Raised when another holder has that socket."""


class Holder:
    """A server of checkpoint memory that runs until ``stop``; every trusted connection has a thread of its own.

    Example: with Holder(config) as holder: print(holder.address)
    """

    def __init__(self, config: HolderConfig) -> None:
        if not config.secret:
            raise ValueError("a holder needs a secret: give --secret-file, or set THINWIRE_SECRET")
        self.config, self.secret, self.store = config, config.secret, Store(config.budget_bytes)
        self._tls = None if config.tls is None else _tls_contexts(*config.tls)
        self.stopping = threading.Event()
        self.sealing = ThreadPoolExecutor(4, thread_name_prefix="seal")
        self.refused, self._traffic = 0, dict.fromkeys(("received", "served", "fetched"), (0, 0.0))
        self._started_at, self._refused_at, self.socket_error = time.monotonic(), -1.0, ""
        self._sessions: dict[Connection, str] = {}
        self.joined: set[TrainerSession] = set()
        self._lock = threading.Lock()
        self._acceptors: dict[str, Acceptor] = {}
        self._claim = _claim(config.socket_path)
        try:
            listener, self.address = _listen_tcp(config.bind, config.port)
            if listener.getsockname()[0] in _WILDCARDS:  # which has many names: 0, ::0, ...
                listener.close()
                raise ValueError("bind to one address, on which peers reach this host, not to all of them")
            self._accept("peer", listener)
            self._listen_unix()
            if config.metrics is not None:
                self._serve_metrics(config.metrics)
        except BaseException:
            for acceptor in self._acceptors.values():
                acceptor.close()
            os.close(self._claim)
            raise

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self, kind: str, listener: socket.socket) -> None:
        def admit(sock: socket.socket, handshake: Handshake, peer: str) -> None:
            if kind == "peer":
                tune(sock, self.config.times.timeout_seconds)
            connection = Connection(sock, self.config.times.timeout_seconds, handshake=handshake, peer=peer)
            try:
                with self._lock:
                    if list(self._sessions.values()).count(kind) >= _MAX_CONNECTIONS:
                        raise ThinwireError(f"{_MAX_CONNECTIONS} connections, as many as a holder takes")
                    self._sessions[connection] = kind
                threading.Thread(target=self._serve, args=(kind, connection), daemon=True, name=kind).start()
            except (ThinwireError, RuntimeError) as error:  # no more threads now; those who call later may be served
                self._sessions.pop(connection, None)
                self.refuse(peer, error)
                connection.close()

        tls = self._tls[0] if self._tls is not None and kind == "peer" else None
        self._acceptors[kind] = Acceptor(listener, lambda: Handshake(self.secret), admit, self.refuse, tls)

    def _serve(self, kind: str, connection: Connection) -> None:
        try:
            (PeerSession if kind == "peer" else TrainerSession)(self, connection).serve()
        finally:
            with self._lock:
                self._sessions.pop(connection, None)

    def _serve_metrics(self, where: str) -> None:
        path = Path(where)
        listener = _listen_unix(path) if path.is_absolute() else _listen_tcp(*parse_address(where))[0]

        def end(sock: socket.socket, *_: object) -> None:
            sock.close()

        self._acceptors["metrics"] = Acceptor(listener, lambda: HttpRequest(self.status), end, self.refuse)

    def _listen_unix(self) -> None:
        self._accept("trainer", _listen_unix(self.config.socket_path))
        self._socket_file = _file_id(self.config.socket_path)

    def keep_socket(self) -> None:
        """Make the socket again if somebody has deleted it, with its directory, its lock and the generated secret.

        A cleaner of temporary files does that; trainers that start later would else never reach their checkpoints. If
        it cannot be made, the log and ``status`` say so, and peers still reach the holder.
        """
        path, secret = self.config.socket_path, self.config.generated_secret
        if _file_id(path) == self._socket_file:
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.fstat(self._claim)
            if _file_id(Path(f"{path}.lock")) != (lock.st_dev, lock.st_ino):
                claim = _claim(path)
                os.close(self._claim)
                self._claim = claim
            if secret is not None and not secret.exists():
                with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(self.secret)
            self._acceptors["trainer"].close()  # which stays in its place if the next line fails
            self._listen_unix()
            log.warning("%s was deleted and is there again", path)
            self.socket_error = ""
        except (OSError, ValueError, ThinwireError) as error:
            if str(error) != self.socket_error:
                self.socket_error = str(error)
                log.error(
                    "%s is gone: %s; peers still reach this holder at %s; to end it: thinwire holder --stop --pid %d",
                    path, error, self.address, os.getpid(),
                )  # fmt: skip

    def reload(self) -> int:
        """Read the secret and the certificates again; connections stay. Returns the number of secrets.

        Raises ValueError, without any change, if the secret cannot be read, or is not in a file.
        """
        if self.config.reload_secret is None:
            raise ValueError("the secret did not come from a file, so it cannot be read again: use --secret-file")
        self.secret = self.config.reload_secret()
        if self._tls is not None and self.config.tls is not None:
            for context in self._tls:
                context.load_cert_chain(*self.config.tls[:2])
                context.load_verify_locations(self.config.tls[2])
        log.info("read %d secrets", len(self.secret.splitlines()))
        return len(self.secret.splitlines())

    def call(self, address: str) -> Connection:
        """Connect to a peer's holder. Raises ThinwireError if it cannot be reached, PeerError, LostPeerError."""
        return call(address, self.secret, self.config.times.timeout_seconds, self._tls and self._tls[1])

    def refuse(self, peer: str, reason: object) -> None:
        """Count a connection that was refused, or closed for what it said; log one a second at most."""
        with self._lock:
            self.refused += 1
            level = logging.WARNING if time.monotonic() - self._refused_at > 1.0 else logging.DEBUG
            self._refused_at = time.monotonic() if level == logging.WARNING else self._refused_at
        log.log(level, "closed a connection of %s: %s (%d so far)", peer, reason, self.refused)

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

    def note(self, what: str, num_bytes: int, seconds: float) -> None:
        """Count bytes that were "received" as replicas, "served" to peers that recover, or "fetched" from peers."""
        with self._lock:
            self._traffic[what] = self._traffic[what][0] + num_bytes, self._traffic[what][1] + seconds

    def shard_status(self, shard: Shard) -> dict[str, Any]:
        """Return the status of one shard: its versions here, those of its replicas, and the progress of sending."""
        with self.store.changed:
            replicas = {address: replica.status() for address, replica in shard.replicas.items()}
            versions = [manifest.listed(shard.role).to_json() for _, manifest in shard.complete()]
            rates = [replica.bytes_per_second() or 0.0 for replica in shard.replicas.values()]
            errors = [shard.last_error, *(str(replica["last_error"]) for replica in replicas.values())]
            return {
                "shard": shard.id.to_json(),
                "role": shard.role,
                "trainer": shard.trainer is not None,
                "slot_bytes": shard.total_bytes,
                "writing": any(holding.writing for holding in shard.holdings),
                "free": shard.is_free(),
                "newest_local": shard.newest(),
                "newest_age_seconds": _age(shard, shard.newest()),
                "newest_replicated": shard.newest(replicated=True),
                "newest_replicated_age_seconds": _age(shard, shard.newest(replicated=True)),
                "bytes_pending": sum(replica["bytes_pending"] for replica in replicas.values()),
                "bytes_per_second": sum(rates) or None,  # they send at the same time
                "latency_seconds": max((replica["latency_seconds"] for replica in replicas.values()), default=0.0),
                "bytes_sent": sum(replica["bytes_sent"] for replica in replicas.values()),
                "bytes_unchanged": sum(replica["bytes_unchanged"] for replica in replicas.values()),
                "dropped": sum(replica["dropped"] for replica in replicas.values()),
                "cpu_seconds": time.process_time(),  # of the whole holder
                "last_error": next((error for error in errors if error), ""),
                "versions": versions,
                "replicas": replicas,
            }

    def status(self) -> dict[str, Any]:
        """Return the status of the whole holder: memory, traffic, and every shard."""
        with self.store.changed:
            shards = [self.shard_status(shard) for shard in self.store.shards.values()]
        with self._lock:
            kinds = list(self._sessions.values())
        strangers = sum(acceptor.num_strangers for kind, acceptor in self._acceptors.items() if kind != "metrics")
        return {
            "pid": os.getpid(),
            "socket": str(self.config.socket_path),
            "address": self.address,
            "uptime_seconds": round(time.monotonic() - self._started_at, 3),
            "cpu_seconds": round(time.process_time(), 3),
            "budget_bytes": self.config.budget_bytes,
            "used_bytes": self.store.used_bytes,
            "bytes_sent": self.store.bytes_sent,
            **{key: value for each in self._traffic.items() for key, value in _traffic(*each).items()},
            "refused_connections": self.refused,
            "connections": {**{kind: kinds.count(kind) for kind in ("trainer", "peer")}, "unauthenticated": strangers},
            "secrets": len(self.secret.splitlines()),
            "socket_error": self.socket_error,
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
        for acceptor in self._acceptors.values():
            acceptor.close()
        self.drain()
        with self._lock:
            sessions = list(self._sessions)
        for connection in sessions:
            connection.close()
        self.sealing.shutdown(wait=True)
        self.store.close()
        if _file_id(self.config.socket_path) == self._socket_file:
            self.config.socket_path.unlink()
        os.close(self._claim)
        self._claim = -1


def _traffic(name: str, total: tuple[int, float]) -> dict[str, Any]:
    num_bytes, seconds = total
    speed = round(num_bytes / seconds / 1e6, 1) if seconds else None
    return {f"bytes_{name}": num_bytes, f"seconds_{name}": round(seconds, 6), f"mb_per_second_{name}": speed}


def _age(shard: Shard, step: int | None) -> float | None:
    """Seconds since the shard's newest version of a step was complete here."""
    found = [holding.sealed_at for holding, manifest in shard.complete() if manifest.step == step]
    return round(time.monotonic() - found[-1], 3) if found else None


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _tls_contexts(certificate: str, key: str, authority: str) -> tuple[Any, Any]:
    """Return the contexts of a listener and of a caller, each of which asks for the other's certificate."""
    import ssl

    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in contexts:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False  # an address is not a name, and the secret is proven besides
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(authority)
        except OSError as error:  # which ssl.SSLError is
            raise ValueError(f"TLS with {certificate}, {key} and {authority}: {error}") from error
    return contexts


def _claim(socket_path: Path) -> int:
    """Lock the socket until this process ends, so that of two holders on one socket the second one is refused."""
    descriptor = os.open(f"{socket_path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise AlreadyRunning(f"a holder already serves {socket_path}; see it with: thinwire holder --status") from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, b"%d\n" % os.getpid())
    return descriptor


def _listen_unix(path: Path) -> socket.socket:
    if path.exists() and not path.is_socket():
        raise ValueError(f"cannot listen at {path}: what is there is no socket, so it is not replaced")
    path.unlink(missing_ok=True)  # of a holder that was killed: the lock says that it is gone
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        old = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(old)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen at {path}: {error}") from error
    return listener


def _listen_tcp(bind: str, port: int) -> tuple[socket.socket, str]:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"cannot bind to {bind}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot bind to {bind}, port {port}: {error}; give an address of this host") from error
    host, port = listener.getsockname()[:2]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
