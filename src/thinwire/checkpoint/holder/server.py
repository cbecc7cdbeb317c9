"""The holder: one process on each host that keeps checkpoint versions in memory beyond the life of the trainers."""

import contextlib
import fcntl
import logging
import os
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from thinwire.checkpoint.holder.acceptor import BACKLOG, Acceptor, listen_unix
from thinwire.checkpoint.holder.frames import Connection, Handshake
from thinwire.checkpoint.holder.metrics import HttpRequest
from thinwire.checkpoint.holder.replication import call, parse_address, receive_payload, tune
from thinwire.checkpoint.holder.sessions import PeerSession, TrainerSession
from thinwire.checkpoint.holder.slots import SlotSize
from thinwire.checkpoint.holder.start import HolderConfig
from thinwire.checkpoint.holder.store import Changes, Holding, Scrubber, Shard, Store
from thinwire.checkpoint.holder.version import MAX_LAYOUT_BYTES, Manifest, Version
from thinwire.checkpoint.holder.version import field as get
from thinwire.errors import CorruptMessageError, ThinwireError

log = logging.getLogger("thinwire.checkpoint.holder")

_MAX_CONNECTIONS = 512  # of trainers, and as many of peers
_MOST_STREAMS = 8  # sources of a version that is fetched
_STRIPE = 4  # chunks that one of them sends at a time, at most
_SLOWER, _LEAST_SECONDS = 3, 0.5  # a stripe takes so many times as long as another source needs, or that long, and goes
_SENDING = "bytes_pending", "bytes_sent", "bytes_unchanged", "dropped"  # of a shard, over all its replicas
_WILDCARDS = {"0.0.0.0", "::", "::ffff:0.0.0.0"}


class AlreadyRunning(ThinwireError):
    """Raised when another holder has that socket."""


class Holder(contextlib.AbstractContextManager["Holder"]):
    """A server of checkpoint memory that runs until ``stop``; every trusted connection has a thread of its own.

    Example: with Holder(config) as holder: print(holder.address)
    """

    def __init__(self, config: HolderConfig) -> None:
        if not config.secret:
            raise ValueError("a holder needs a secret: give --secret-file, or set THINWIRE_SECRET")
        self.config, self.secret, self.store = config, config.secret, Store(config.budget_bytes)
        self._tls = config.tls and _tls_contexts(*config.tls)
        self.stopping = threading.Event()
        self.sealing = ThreadPoolExecutor(4, thread_name_prefix="seal")
        self.refused, self._traffic = 0, dict.fromkeys(("received", "served", "fetched"), (0, 0.0))
        self._started_at, self._refused_at, self.socket_error = time.monotonic(), -1.0, ""
        self._sessions: dict[Connection, str] = {}
        self.joined: set[TrainerSession] = set()
        self._lock = threading.Lock()
        self._acceptors: dict[str, Acceptor] = {}
        self._claim = _claim(config.socket_path)
        self.scrubber = Scrubber(self.store, self._mend)
        try:  # last, since whoever finds an address asks at once
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
            self.scrubber.stop()
            os.close(self._claim)
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self, kind: str, listener: socket.socket) -> None:
        def admit(sock: socket.socket, handshake: Handshake, peer: str) -> None:
            if kind == "peer":
                tune(sock, self.config.timeout_seconds)
            connection = Connection(sock, self.config.timeout_seconds, handshake=handshake, peer=peer)
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

        tls = self._tls[0] if self._tls and kind == "peer" else None
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
            self._acceptors["trainer"].close()  # which stays where it is if the next line fails
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

        Raises ValueError, without any change, if one of them cannot be read, or if the secret is not in a file.
        """
        if self.config.reload_secret is None:
            raise ValueError("the secret did not come from a file, so it cannot be read again: use --secret-file")
        secret, tls = self.config.reload_secret(), self.config.tls and _tls_contexts(*self.config.tls)
        self.secret, self._tls = secret, tls
        if tls:
            self._acceptors["peer"].tls = tls[0]
        log.info("read %d secrets", len(self.secret.splitlines()))
        return len(self.secret.splitlines())

    def call(self, address: str, seconds: float | None = None) -> Connection:
        """Connect to a peer's holder. Raises ThinwireError if it cannot be reached, PeerError, LostPeerError.

        ``seconds``: patience with it, if not the usual one.
        """
        return call(address, self.secret, seconds or self.config.timeout_seconds, self._tls and self._tls[1])

    def refuse(self, peer: str, reason: object) -> None:
        """Count a connection that was refused, or closed for what it said; log one a second at most."""
        with self._lock:
            self.refused += 1
            level = logging.WARNING if time.monotonic() - self._refused_at > 1.0 else logging.DEBUG
            self._refused_at = time.monotonic() if level == logging.WARNING else self._refused_at
        log.log(level, "closed a connection of %s: %s (%d so far)", peer, reason, self.refused)

    @contextlib.contextmanager
    def into(
        self, shard: Shard, keep: tuple[int, int] | None, manifest: Manifest, layout: bytes, recovering: bool = False
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

    def fetch(self, version: Version, sources: Sequence[str], evict: bool = True) -> tuple[int, float]:
        """Fetch a version from other holders, from all that have it in stripes; return its bytes, 0 if it is here, and
        the seconds that it took.

        Raises ThinwireError if all of them are lost, or have no such version; ValueError if there is no room.
        """
        with self.store.fetching(version) as brought:
            if brought or self.store.verify(version):
                return 0, 0.0
            started = time.monotonic()
            stream = _Fetch(self, version, sources[:_MOST_STREAMS])
            try:
                manifest, room, layout = stream.offer()
                shard = self.store.register(version.shard, room, evict)
                with self.into(shard, None, manifest, layout, recovering=True) as holding:
                    stream.fill(holding, manifest)
            finally:
                stream.end()
            seconds = time.monotonic() - started
        self.note("fetched", version.payload_bytes, seconds)
        return version.payload_bytes, seconds

    @staticmethod
    def offered(connection: Connection, version: Version, source: str) -> tuple[Manifest, SlotSize, bytes]:
        """Ask another holder for a version, and receive all of it but the payload."""
        frame = connection.request("offer", {"version": version.to_json()})
        manifest = Manifest.from_json(get(frame.json, "manifest", dict))
        layout = connection.read_payload(frame, MAX_LAYOUT_BYTES)
        if manifest.version.digest != version.digest or manifest.layout_crc != zlib.crc32(layout):
            raise CorruptMessageError(f"holder {source} offers another version than the one that was asked for")
        return manifest, SlotSize.from_json(get(frame.json, "room", dict)), layout

    def _mend(self, shard: Shard, manifest: Manifest) -> None:
        """Get a version that was altered here again: from a replica, or, of a replica, from its sender.

        The sender calls again when its connection ends, and learns then what is missing here.
        """
        version = manifest.version
        with self.store.changed:
            sources = [address for address, replica in shard.replicas.items() if replica.has(version.digest)]
            wanted, sender = shard.is_wanted(manifest), shard.sender
            if shard.id.owner < 0:  # the peers have it too, of whatever shard
                run = self.store.of_run(shard.id.run_id)
                sources = sorted({address for each in run for address in each.replicas})
        if sender is not None:
            sender.close()
        if not (sources and wanted):
            return
        names = ", ".join(sources)
        try:
            self.fetch(version, sources, evict=False)
            log.warning("%s, step %d: replaced by the copy of %s", shard.id, manifest.step, names)
        except (ThinwireError, ValueError) as error:
            log.warning("%s, step %d: not replaced by the copy of %s: %s", shard.id, manifest.step, names, error)

    def note(self, what: str, num_bytes: int, seconds: float) -> None:
        """Count bytes that were "received" as replicas, "served" to peers that recover, or "fetched" from peers."""
        with self._lock:
            self._traffic[what] = self._traffic[what][0] + num_bytes, self._traffic[what][1] + seconds

    def shard_status(self, shard: Shard) -> dict[str, Any]:
        """Return the status of one shard: its versions here and at its replicas, and the progress of sending."""
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
                "failed": shard.failed,
                "newest_local": shard.newest(),
                "newest_age_seconds": _age(shard, shard.newest()),
                "newest_replicated": shard.newest(replicated=True),
                "newest_replicated_age_seconds": _age(shard, shard.newest(replicated=True)),
                **{name: sum(replica[name] for replica in replicas.values()) for name in _SENDING},
                "bytes_per_second": sum(rates) or None,  # they send at the same time
                "latency_seconds": max((replica["latency_seconds"] for replica in replicas.values()), default=0.0),
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
        strangers = sum(len(acceptor.strangers) for kind, acceptor in self._acceptors.items() if kind != "metrics")
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
            "bytes_scrubbed": self.scrubber.bytes_read,
            "damaged_versions": self.scrubber.damaged,
            "refused_connections": self.refused,
            "connections": {**{kind: kinds.count(kind) for kind in ("trainer", "peer")}, "unauthenticated": strangers},
            "secrets": len(self.secret.splitlines()),
            "socket_error": self.socket_error,
            "shards": shards,
        }

    def drain(self) -> None:
        """Send pending versions, and wait until peers say that they have them, for at most ``drain_seconds``."""
        with self.store.changed:
            for shard in self.store.shards.values():
                if isinstance(shard.trainer, TrainerSession):
                    shard.trainer.grants.unlimit()
            senders = [replica for shard in self.store.shards.values() for replica in shard.replicas.values()]
            self.store.changed.wait_for(
                lambda: not any(sender.lacking() for sender in senders), self.config.drain_seconds
            )

    def stop(self) -> None:
        """Drain, end all connections, and free the memory. A second call does nothing."""
        self.stopping.set()
        if self._claim < 0:
            return
        for acceptor in self._acceptors.values():
            acceptor.close()
        self.scrubber.stop()
        self.sealing.shutdown(wait=True)  # first: what trainers were told is accepted is pending, too
        self.drain()
        with self._lock:
            sessions = list(self._sessions)
        for connection in sessions:
            connection.close()
        self.store.close()
        if _file_id(self.config.socket_path) == self._socket_file:
            self.config.socket_path.unlink()
        os.close(self._claim)
        self._claim = -1


class _Fetch:
    """A version on its way from several sources: each connects by itself, so a lost one delays nobody, and takes the
    next stripe when it is there; what a lost one had taken goes to the others. At the end, when nothing is left to
    take, one that is much slower than another that waits counts as lost."""

    def __init__(self, holder: Holder, version: Version, sources: Sequence[str]) -> None:
        self._holder, self._version, self._changed = holder, version, Changes()
        self._offers, self._failures = list[tuple[Manifest, SlotSize, bytes]](), list[Exception]()
        self._slot: tuple[Holding, Manifest] | None = None
        self._stripes, self._missing, self._ended, self._sources = deque[tuple[int, int]](), 0, False, len(sources)
        self._pulling: dict[Connection, float] = {}  # since when
        for source in sources:
            threading.Thread(target=self._run, args=(source,), daemon=True, name="fetch").start()

    def offer(self) -> tuple[Manifest, SlotSize, bytes]:
        """Return the first offer of a source. Raises ThinwireError or ValueError if none of them makes one."""
        with self._changed:
            self._changed.wait_for(lambda: self._offers or not self._sources)
            if not self._offers:
                raise self._failures[-1]
            return self._offers[0]

    def fill(self, holding: Holding, manifest: Manifest) -> None:
        """Receive the payload, from all that have made an offer. Raises ThinwireError if all of them are lost."""
        count = len(manifest.chunk_crcs)
        with self._changed:
            size = max(1, min(_STRIPE, count // (2 * self._sources or 1)))
            self._stripes.extend((first, min(first + size, count)) for first in range(0, count, size))
            self._slot, self._missing = (holding, manifest), len(self._stripes)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._missing and self._sources))
            if self._missing:
                raise self._failures[-1]

    def end(self) -> None:
        """Let the sources go; one that is still being called is closed as it answers."""
        with self._changed.change():
            self._ended = True

    def _run(self, source: str) -> None:
        try:
            with contextlib.closing(self._holder.call(source)) as connection:
                offer = self._holder.offered(connection, self._version, source)
                with self._changed.change():
                    self._offers.append(offer)
                seconds = None
                while (stripe := self._next(seconds)) is not None:
                    seconds = self._pull(connection, *stripe)
        except Exception as error:
            self._failures.append(error)
        with self._changed.change():
            self._sources -= 1

    def _next(self, seconds: float | None) -> tuple[int, int] | None:
        """Wait for a stripe to take: those of others may come back, and those that take much longer than the
        ``seconds`` in which this source brings one are taken from them. None at the end."""
        patience = threading.TIMEOUT_MAX if seconds is None else max(_SLOWER * seconds, _LEAST_SECONDS)
        with self._changed:
            while not (self._ended or self._stripes or (self._slot and not self._missing)):
                self._changed.wait(patience)
                for connection, began in self._pulling.items():
                    if began + patience < time.monotonic():
                        connection.close()
            return None if self._ended or not self._stripes else self._stripes.popleft()

    def _pull(self, connection: Connection, first: int, last: int) -> float:
        """Receive a stripe, and return the seconds that the largest one would have taken."""
        assert self._slot is not None
        (holding, manifest), done, began = self._slot, False, time.monotonic()
        (start, end), patience = manifest.bounds(first, last), self._holder.config.timeout_seconds
        with self._changed:
            self._pulling[connection] = began
        try:
            connection.request("read", {"version": manifest.version.to_json(), "first": first, "last": last})
            receive_payload(connection, holding.slot, manifest, patience, chunks=(first, last))
            done = True
            return (time.monotonic() - began) * _STRIPE * manifest.chunk_bytes / (end - start)
        finally:
            with self._changed.change():
                del self._pulling[connection]
                self._missing -= done
                self._stripes.extend([] if done else [(first, last)])


def _traffic(name: str, total: tuple[int, float]) -> dict[str, Any]:
    num_bytes, seconds = total
    speed = round(num_bytes / seconds / 1e6, 1) if seconds else None
    return {f"bytes_{name}": num_bytes, f"seconds_{name}": round(seconds, 6), f"mb_per_second_{name}": speed}


def _age(shard: Shard, step: int | None) -> float | None:
    """Seconds since the shard's newest version of a step was complete here."""
    result = [holding.sealed_at for holding, manifest in shard.complete() if manifest.step == step]
    return round(time.monotonic() - result[-1], 3) if result else None


def _file_id(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        result = path.stat()
        return result.st_dev, result.st_ino
    return None


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
        raise AlreadyRunning(
            f"a holder already serves {socket_path}; see thinwire holder --status, or --stop"
        ) from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, b"%d\n" % os.getpid())
    return descriptor


def _listen_unix(path: Path) -> socket.socket:
    if path.exists() and not path.is_socket():
        raise ValueError(f"cannot listen at {path}: what is there is no socket, so it is not replaced")
    try:
        return listen_unix(path, socket.SOCK_STREAM)  # a holder that was killed left one: the lock says that it is gone
    except OSError as error:
        raise ValueError(f"cannot listen at {path}: {error}") from error


def _listen_tcp(bind: str, port: int) -> tuple[socket.socket, str]:
    try:
        family, _, _, _, where = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        dual = family == socket.AF_INET6  # to all addresses of IPv6 means to those of IPv4, too
        listener = socket.create_server(where, family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    except OSError as error:
        raise ValueError(f"cannot bind to {bind}, port {port}: {error}; give an address of this host") from error
    host, port = listener.getsockname()[:2]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
