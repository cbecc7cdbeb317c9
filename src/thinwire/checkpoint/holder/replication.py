"""Sending versions to a peer's holder under grants, and receiving them, whether as a replica or at recovery."""

import ctypes
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from thinwire.checkpoint.holder.faultpoint import reach
from thinwire.checkpoint.holder.frames import HANDSHAKE_SECONDS, Connection, FrameKind, closed_on_error
from thinwire.checkpoint.holder.slots import Slot, digest_pool, runs_of
from thinwire.checkpoint.holder.store import Changes, Holding, Shard, Store
from thinwire.checkpoint.holder.version import Manifest, Version, field
from thinwire.errors import CorruptMessageError, LostPeerError, ThinwireError

PIECE_BYTES = 1 << 20  # what was granted and is not yet sent can be revoked
_MAP_BYTES = 16 << 20
_MADV_POPULATE_WRITE = 23
_BACKOFF_SECONDS = (0.1, 2.0)
_RATE_VERSIONS = 4  # a speed is over that many versions: the speed of a link varies
_IDLE_SECONDS = 1.0  # between looks at whether an idle peer is still there


class Grants:
    """Bytes that a shard's senders may send, over all its peers. Without a trainer there is no limit."""

    def __init__(self, changed: Changes) -> None:
        self._changed = changed
        self._bytes = 0
        self._unlimited = True

    def add(self, num_bytes: int) -> None:
        with self._changed.change():
            self._bytes += num_bytes

    def unlimit(self) -> None:
        with self._changed.change():
            self._unlimited = True

    def revoke(self) -> None:
        with self._changed.change():
            self._bytes, self._unlimited = 0, False

    def take(self, num_bytes: int, given_up: Callable[[], bool]) -> int:
        """Wait until bytes are granted and return how many to send, at most ``num_bytes``; 0 if ``given_up``."""
        with self._changed:
            self._changed.wait_for(lambda: self._unlimited or self._bytes > 0 or given_up())
            if given_up():
                return 0
            if self._unlimited:
                return num_bytes
            taken = min(num_bytes, self._bytes)
            self._bytes -= taken
            return taken


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[host]:port``. Raises ValueError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"unknown address {address!r}; legal form: 'host:port'")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this host reaches that address."""
    return host in ("localhost", "::1") or host.startswith("127.")


Call = Callable[[str], Connection]


def call(address: str, secret: bytes, timeout_seconds: float, tls: Any = None) -> Connection:
    """Connect to the holder of a peer. Raises ThinwireError if it cannot be reached, PeerError, LostPeerError."""
    try:
        sock = socket.create_connection(parse_address(address), timeout=min(timeout_seconds, HANDSHAKE_SECONDS))
        sock = sock if tls is None else tls.wrap_socket(sock)
    except OSError as error:
        raise ThinwireError(f"holder {address}: {error}") from error
    tune(sock, timeout_seconds)
    connection = Connection(sock, timeout_seconds, peer=address)
    with closed_on_error(connection):
        connection.greet(secret, min(timeout_seconds, HANDSHAKE_SECONDS))
    return connection


def tune(sock: socket.socket, timeout_seconds: float) -> None:
    """Set a peer's socket to send small frames without delay and notice a silent peer; the kernel grows the buffers."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_seconds * 1000))


def receive_payload(
    connection: Connection,
    slot: Slot,
    manifest: Manifest,
    idle_seconds: float | None,
    base: memoryview | None = None,
    chunks: tuple[int, int] | None = None,
) -> None:
    """Receive a version's payload, or some ``chunks`` of it, into the slot, authenticating each piece and checking each
    chunk on arrival.

    Bytes that ``base``, an earlier version here, has too are copied from it, and have the same digests to match.

    Raises CorruptHeaderError for a forged piece, CorruptMessageError for a wrong digest, LostPeerError if it breaks
    off. After a wrong digest the conversation can go on; any other error closes the connection.
    """
    first, last = chunks or (0, len(manifest.chunk_crcs))
    (done, whole), crc = manifest.bounds(first, last), 0
    crcs: list[int] = []
    mapping: Future[None] | None = None
    with slot.payload(manifest.payload_bytes) as payload, closed_on_error(connection):
        if chunks is not None:
            mapping = digest_pool().submit(_map, payload[done:whole])
        try:
            while done < whole:
                frame = connection.receive(first_seconds=idle_seconds)
                end, origin = done + frame.payload_bytes, 0
                if copied := bool(frame.json):
                    origin, count = field(frame.json, "from", int), field(frame.json, "bytes", int)
                    end = done if base is None or frame.payload_bytes or origin + count > len(base) else done + count
                if frame.kind != FrameKind.DATA or not done < end <= whole:
                    raise ThinwireError(f"expected the next bytes of a version, got {frame.kind.name}")
                if chunks is None and slot.mapped_bytes < min(end + _MAP_BYTES, whole):
                    ahead = payload[slot.mapped_bytes : slot.mapped_bytes + 2 * _MAP_BYTES]
                    slot.mapped_bytes += len(ahead)
                    mapping = digest_pool().submit(_map, ahead)
                if not copied:
                    with payload[done:end] as piece:
                        connection.read_piece(frame, piece)
                # at once and in this thread, while the bytes are in its cache: 0.19 s of CPU for a GB, later 0.46
                while done < end:
                    chunk_end = done - done % manifest.chunk_bytes + manifest.chunk_bytes
                    with payload[done : min(end, chunk_end)] as part:
                        if copied and base is not None:
                            part[:], origin = base[origin : origin + len(part)], origin + len(part)
                        crc, done = zlib.crc32(part, crc), done + len(part)
                    if done in (chunk_end, whole):
                        crcs.append(crc)
                        crc = 0
                reach("receive", manifest.shard.owner, manifest.step)
        finally:
            if mapping is not None:
                mapping.result()
    if tuple(crcs) != manifest.chunk_crcs[first:last]:
        raise CorruptMessageError(f"{manifest.shard}, step {manifest.step}: chunks were altered on the way here")


def _map(part: memoryview) -> None:
    """Map the pages of new memory at once, ahead of their use: 0.22 s for a GB, and 0.4 if each of them faults."""
    with part:
        start = ctypes.c_char.from_buffer(part)
        address, size = ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(part))
        ctypes.CDLL(None).madvise(address, size, _MADV_POPULATE_WRITE)  # an error of Linux before 5.14 changes nothing
        del start  # which refers to the memory


class Replicator:
    """A sender that keeps one peer's holder supplied with the versions of one shard, in a thread of its own.

    A version that made no progress for ``deadline_seconds`` is given up: its slot is free. Once on each new connection
    the newest of those is tried again.
    """

    def __init__(
        self, store: Store, shard: Shard, address: str, call: Call, grants: Grants, deadline_seconds: float
    ) -> None:
        self._store, self._shard, self._call, self._grants = store, shard, call, grants
        self.address, self._deadline_seconds = address, deadline_seconds
        self._connection: Connection | None = None
        self._held: set[str] = set()  # digests that the peer has said it has
        self._given_up: set[str] = set()
        self._may_retry, self._retried = False, list[Manifest]()  # the one of those that is being sent
        self._sending: tuple[str, int] | None = None  # digest, bytes sent of it
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"replicator {address}", daemon=True)
        self._earlier_counts = (0, 0.0)  # of connections that are closed
        self._marks: deque[tuple[int, float]] = deque([(0, 0.0)], _RATE_VERSIONS + 1)  # counts after each version
        self.bytes_sent, self.bytes_unchanged, self.dropped, self.last_error = 0, 0, 0, ""
        self.seconds_of_last: float | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        with self._store.changed:
            self._store.changed.notify_all()
        if (connection := self._connection) is None:
            return  # it may be calling a host that is lost: a trainer that starts again must not wait for that
        connection.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(HANDSHAKE_SECONDS)

    def has(self, digest: str) -> bool:
        return digest in self._held

    def is_settled(self, digest: str) -> bool:
        return digest in self._held or digest in self._given_up

    def bytes_pending(self) -> int:
        """Return the bytes still to be sent; call it with the store's lock held."""
        digest, sent = self._sending or ("", 0)
        lacking = [*(manifest for _, manifest in self.lacking()), *self._retried]
        return sum(each.payload_bytes - (sent if each.version.digest == digest else 0) for each in lacking)

    def lacking(self) -> list[tuple[Holding, Manifest]]:
        """Return the versions that the peer should get, oldest first; call it with the store's lock held."""
        result, shard = self._shard.complete(), self._shard
        return [(h, m) for h, m in result if not self.is_settled(m.version.digest) and shard.is_wanted(m)]

    def _to_retry(self) -> list[tuple[Holding, Manifest]]:
        """Return the newest version that the peer should have had, if it is there again."""
        if self._connection is None or not self._may_retry:
            return []
        missed, shard = self._given_up - self._held, self._shard
        return [(h, m) for h, m in shard.complete() if m.version.digest in missed and shard.is_wanted(m)][-1:]

    def _counts(self) -> tuple[int, float]:
        """Bytes acknowledged, and seconds in which some were on their way, over all connections so far."""
        connection, (num_bytes, seconds) = self._connection, self._earlier_counts
        more_bytes, more_seconds, _ = (0, 0.0, 0.0) if connection is None else connection.tcp_counts
        return num_bytes + more_bytes, seconds + more_seconds

    def bytes_per_second(self) -> float | None:
        """Return the speed over the last versions, while bytes were on their way; None before the first one."""
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return (last - first) / (ended - began) if ended > began else None

    def status(self) -> dict[str, Any]:
        """Return the status of sending to this peer.

        ``seconds_sending`` are those in which bytes were on their way, not those in which they were handed to the
        kernel, which accepts a small version at once. ``seconds_of_last``: from a version's completion here to its
        completion there.
        """
        (acknowledged, seconds), rate, connection = self._counts(), self.bytes_per_second(), self._connection
        return {
            "connected": connection is not None,
            "latency_seconds": connection.tcp_counts[2] if connection is not None else 0.0,
            "bytes_sent": self.bytes_sent,
            "bytes_unchanged": self.bytes_unchanged,
            "bytes_acknowledged": acknowledged,
            "seconds_sending": round(seconds, 6),
            "mb_per_second": round(rate / 1e6, 1) if rate else None,
            "seconds_of_last": self.seconds_of_last,
            "bytes_pending": self.bytes_pending(),
            "dropped": self.dropped,
            "last_error": self.last_error,
        }

    def connect(self) -> None:
        """Connect to the peer, have it make room, and learn which versions it has.

        Raises ValueError if it has no room, ThinwireError if it is lost.
        """
        connection = self._call(self.address)
        with closed_on_error(connection):
            asked = {"shard": self._shard.id.to_json(), **self._shard.size.to_json()}
            answer = connection.request("register", asked).json
            held = {Version.from_json(version).digest for version in field(answer, "versions", list)}
        with self._store.changed.change():
            if self._stopping.is_set():
                connection.close()
                raise LostPeerError("it is stopped")
            self._held, self._connection, self._may_retry = held, connection, True

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._earlier_counts = self._counts()
            self._connection.close()
            self._connection = None

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._connection is None:
                try:
                    self.connect()
                    self.last_error = ""
                except (ThinwireError, ValueError) as error:
                    self.last_error = f"{self.address}: {error}"
            if (result := self._next()) is not None:
                try:
                    self._supply(*result)
                finally:
                    self._retried = []
                    self._store.unpin(result[0])
            elif self._connection is not None and self._connection.hung_up:
                self._disconnect()
        self._disconnect()

    def _next(self) -> tuple[Holding, Manifest] | None:
        """The oldest version that the peer lacks, pinned; None after a while without one."""
        with self._store.changed:
            due = lambda: self.lacking() or self._to_retry()  # noqa: E731
            self._store.changed.wait_for(lambda: due() or self._stopping.is_set(), _IDLE_SECONDS)
            result = [] if self._stopping.is_set() else due()
            if result:
                self._retried = [m for _, m in result[:1] if self.is_settled(m.version.digest)]
                self._may_retry = self._may_retry and not self._retried
                result[0][0].readers += 1
            return result[0] if result else None

    def _supply(self, holding: Holding, manifest: Manifest) -> None:
        """Send until the peer has it, or until there was no progress for the deadline."""
        digest = manifest.version.digest
        backoff, best, progress_at, whole = _BACKOFF_SECONDS[0], 0, time.monotonic(), False
        while not self._stopping.is_set() and self._shard.is_wanted(manifest):
            try:
                if self._connection is None:
                    self.connect()
                if self.has(digest) or self._send(holding, manifest, whole):
                    self.seconds_of_last = time.monotonic() - holding.sealed_at
                    self._marks.append(self._counts())
                    self._note(held=digest)
                else:
                    self._note(given_up=digest)
                return
            except Exception as error:  # of any kind: without this thread nothing would be sent any more
                self._disconnect()
                self.last_error = f"{self.address}: step {manifest.step}: {error}"
                whole = whole or isinstance(error, CorruptMessageError)  # perhaps it had another version altered
                altered = isinstance(error, CorruptMessageError) and not self._store.verify(manifest.version)
            reached, self._sending = self._sending[1] if self._sending else 0, None
            if altered:
                return  # altered on this host, so this is no version any more
            if self._retried:  # and not again at once, if this peer takes calls and nothing else
                with self._store.changed:
                    self._retried = []
                    self._store.changed.wait_for(lambda: self.lacking() or self._stopping.is_set(), _IDLE_SECONDS)
                return
            if reached > best:
                best, progress_at = reached, time.monotonic()
            if time.monotonic() - progress_at > self._deadline_seconds:
                self.dropped += 1
                self._note(given_up=digest)
                return
            self._stopping.wait(backoff)
            backoff = min(2 * backoff, _BACKOFF_SECONDS[1])

    def _note(self, held: str | None = None, given_up: str | None = None) -> None:
        with self._store.changed.change():
            self._sending = None
            here = {manifest.version.digest for _, manifest in self._shard.complete()}
            self._held = (self._held | {held} if held else self._held) & here
            self._given_up = (self._given_up | {given_up} if given_up else self._given_up) & here

    def _send(self, holding: Holding, manifest: Manifest, whole: bool) -> bool:
        """Send one version, ``whole`` or what the peer has not in the one before; whether the peer has it now.

        It may not need it, or it may be unwanted by now.
        """

        def given_up() -> bool:
            return self._stopping.is_set() or not self._shard.is_wanted(manifest)

        connection = self._connection
        assert connection is not None
        digest = manifest.version.digest
        self._sending = (digest, 0)
        keep = self._shard.keep
        answer = connection.request("receive", {"manifest": manifest.to_json(), "keep": keep}, holding.layout)
        if answer.json.get("have") is True or answer.json.get("superseded") is True:
            return answer.json.get("have") is True

        take = lambda wanted: self._grants.take(wanted, given_up)  # noqa: E731
        runs = [] if whole else self._runs(holding, manifest, answer.json.get("base"))
        done = 0
        for count, is_new in send_payload(connection, holding.slot, manifest, take, runs):
            done += count
            self._sending = digest, done
            if is_new:
                self.bytes_sent += count
                with self._store.changed:
                    self._store.bytes_sent += count
                reach("send", manifest.shard.owner, manifest.step)
            else:
                self.bytes_unchanged += count
        if done < manifest.payload_bytes:
            self._disconnect()  # in the middle of a version, so the peer must notice
            return False
        connection.answer()
        return True

    def _runs(self, holding: Holding, manifest: Manifest, digest: Any) -> list[tuple[int, int]]:
        """What of a version is in another one, which the peer has and keeps meanwhile; nothing if it is not here."""
        with self._store.base(self._shard, str(digest)) as base:
            if base is None or base.manifest is None:
                return []
            with (
                holding.slot.payload(manifest.payload_bytes) as new,
                base.slot.payload(base.manifest.payload_bytes) as old,
            ):
                return runs_of(new, old, holding.pieces, base.pieces)


def send_payload(
    connection: Connection,
    slot: Slot,
    manifest: Manifest,
    take: Callable[[int], int] = lambda wanted: wanted,
    runs: Sequence[tuple[int, int]] = (),
    chunks: tuple[int, int] | None = None,
) -> Iterator[tuple[int, bool]]:
    """Send a version's payload, or some ``chunks`` of it, and yield the bytes of each piece, and whether they went.

    It goes at the full speed of the link, for recovery, or as many bytes at a time as ``take`` returns, until that is
    0. Of ``runs`` (`runs_of`) that the other side has, it says where they are.
    """
    done, whole = manifest.bounds(*(chunks or (0, len(manifest.chunk_crcs))))
    with slot.payload(manifest.payload_bytes) as payload:
        for length, origin in runs or [(whole - done, -1)]:
            end = done + length
            if origin >= 0:
                connection.send(FrameKind.DATA, {"from": origin, "bytes": length})
                yield length, False
                done = end
            while done < end:
                if (count := take(min(PIECE_BYTES, end - done))) == 0:
                    return
                with payload[done : done + count] as piece:
                    connection.send(FrameKind.DATA, {}, piece)
                done += count
                yield count, True
