"""Frames between trainers, holders and peers' holders: JSON and raw bytes, with limits, timeouts, and a key.

    [magic u32][kind u8][json length u32][payload length u64][sequence u64][tag 16 bytes] json [payload][tag 16 bytes]

Both sides prove that they know the run's secret before anything else is said. From then on the tags are made under a
key of this connection and direction: the first of header and JSON, the second of the payload and its number. So
nothing can be forged, replayed or moved. Nothing is encrypted, except by TLS.
"""

import contextlib
import hashlib
import hmac
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from thinwire.checkpoint.holder.mac import TAG_BYTES, Tags, macs
from thinwire.checkpoint.holder.slots import parse_json
from thinwire.checkpoint.holder.version import field
from thinwire.errors import CorruptHeaderError, CorruptMessageError, LostPeerError, PeerError, ThinwireError

_HEADER = struct.Struct("<IBIQQ")
_MAGIC = 0x34465754  # TWF4
_TCP_COUNTS = struct.Struct("<120xQ20xI16xQ")  # tcpi_bytes_acked, tcpi_min_rtt, tcpi_busy_time of <linux/tcp.h>
_TCP_INFO_BYTES = 232
_WAKE_BYTES = 128 << 10  # a link that brings less within the timeout counts as dead
_STRANGER_JSON_BYTES = 4096  # from a side that has not yet proven its secret
_NONCE_DIGITS = 32
MAX_JSON_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 64 << 20
HANDSHAKE_SECONDS = 5.0
_LAST_WORD_SECONDS = 1.0


class FrameKind(IntEnum):
    """Kind of a frame. CAST asks for something without a reply; DATA is the next bytes of a payload."""

    GREETING = 1
    REQUEST = 2
    REPLY = 3
    ERROR = 4
    CAST = 5
    DATA = 6


_ERRORS = {"value": ValueError, "corrupt": CorruptMessageError, "peer": PeerError, "failed": ThinwireError}


@dataclass(frozen=True)
class Frame:
    """A frame whose JSON has been read; its payload of ``payload_bytes`` is still in the socket."""

    kind: FrameKind
    json: dict[str, Any]
    payload_bytes: int
    number: int
    descriptors: tuple[int, ...] = ()


class Handshake:
    """The listener's half of a handshake, fed with bytes as they come, so that nobody waits for a stranger.

    ``wanted``: how many bytes ``feed`` takes next; 0 at the end, when the caller has proven one of the secrets.
    """

    def __init__(self, secret: bytes) -> None:
        self._secrets, self._nonce = secret.splitlines(), os.urandom(16).hex()
        self._nonces, self._data, self._number = b"", b"", 0
        self.wanted = _HEADER.size + TAG_BYTES
        self.tags = Tags(), Tags()

    def feed(self, data: bytes) -> bytes:
        """Return what to answer, if anything. Raises CorruptMessageError, PeerError if no secret is proven."""
        self._data += data
        self.wanted -= len(data)
        if not self.wanted and len(self._data) == _HEADER.size + TAG_BYTES:
            self.wanted = _lengths(self._data, _STRANGER_JSON_BYTES, 0)[0]
        if self.wanted:
            return b""
        greeting, self._data = _opened(self._data, Tags(), self._number).json, b""
        self._number += 1
        if self._number == 1:
            mac = next((mac for mac in macs() if mac in field(greeting, "macs", list, 1, 8)), "")
            self._nonces = (_digits(greeting, "nonce", _NONCE_DIGITS) + self._nonce + mac).encode()
            self.wanted = _HEADER.size + TAG_BYTES
            proofs = [_proof(secret, b"listener", self._nonces) for secret in self._secrets]
            return _packed(FrameKind.GREETING, {"nonce": self._nonce, "mac": mac, "proofs": proofs}, 0, 0, Tags())
        proof = _digits(greeting, "proof", 64)
        for secret in self._secrets:
            if hmac.compare_digest(_proof(secret, b"caller", self._nonces), proof):
                self.tags = _tags(secret, self._nonces, b"listener", b"caller")
                return b""
        raise PeerError("a caller has another secret")


class Connection:
    """One end of a conversation, for one thread at a time except in ``close``. ``peer`` names the other end in logs."""

    def __init__(
        self,
        sock: socket.socket,
        timeout_seconds: float,
        take_descriptors: bool = False,
        handshake: Handshake | None = None,
        peer: str = "",
    ) -> None:
        self._socket, self._timeout_seconds, self.peer, self.peer_pid = sock, timeout_seconds, peer, peer_pid(sock)
        self._take_descriptors, self._is_tls = take_descriptors, hasattr(sock, "cipher")
        self._send_tags = self._receive_tags = Tags()
        self._sent = self._received = 0
        self._max_json, self._max_payload = _STRANGER_JSON_BYTES, 0
        self._deadline: float | None = None  # for the whole handshake
        self._guard, self._users, self.is_closed = threading.Lock(), 0, False
        if handshake is not None:
            self._trust(handshake.tags, 1, 2)
        sock.settimeout(timeout_seconds)

    def greet(self, secret: bytes, seconds: float = HANDSHAKE_SECONDS) -> None:
        """Shake hands as the side that connected, with the first line of ``secret`` that the other side has too.

        Raises PeerError if it has none of them, LostPeerError if all of it takes longer than ``seconds``.
        """
        self._deadline = time.monotonic() + seconds
        mine = os.urandom(16).hex()
        try:
            self.send(FrameKind.GREETING, {"nonce": mine, "macs": macs()})
            answer = self.receive(first_seconds=seconds).json
        except LostPeerError as error:
            raise LostPeerError(
                f"{error}, in the handshake: the log of the other side may say why (too many callers, another release)"
            ) from error
        mac, proofs = field(answer, "mac", str, 0, 8), field(answer, "proofs", list, 0, 64)
        if mac not in macs():
            raise PeerError(f"the other side can make no tags of {' or '.join(macs())}")
        nonces = (mine + _digits(answer, "nonce", _NONCE_DIGITS) + mac).encode()
        proven = (s for s in secret.splitlines() if _proof(s, b"listener", nonces) in proofs)
        if (common := next(proven, None)) is None:
            raise PeerError("the holder has another secret: give the same secret file, or THINWIRE_SECRET, to all")
        self.send(FrameKind.GREETING, {"proof": _proof(common, b"caller", nonces)})
        self._trust(_tags(common, nonces, b"caller", b"listener"), 2, 1)
        self._deadline = None

    def _trust(self, tags: tuple[Tags, Tags], sent: int, received: int) -> None:
        (self._send_tags, self._receive_tags), self._sent, self._received = tags, sent, received
        self._max_json, self._max_payload = MAX_JSON_BYTES, MAX_PAYLOAD_BYTES

    def send(
        self,
        kind: FrameKind,
        content: dict[str, Any] | None = None,
        payload: bytes | memoryview = b"",
        descriptors: tuple[int, ...] = (),
    ) -> None:
        """Send a frame. Raises LostPeerError if the other side is gone, or accepts nothing within the timeout."""
        data = _packed(kind, content or {}, len(payload), self._sent, self._send_tags)
        with self._lost_peer("send"):
            self._socket.settimeout(self._timeout_seconds)
            if descriptors:
                socket.send_fds(self._socket, [data[:1]], list(descriptors))
                data = data[1:]
            self._socket.sendall(data)
            if len(payload):
                self._socket.sendall(payload)
                self._socket.sendall(self._send_tags.of_payload(self._sent, payload))
            self._sent += 1

    def receive(self, first_seconds: float | None = None) -> Frame:
        """Return the next frame. Waits ``first_seconds`` for its first byte (None: forever), then the timeout for the
        rest.

        Raises LostPeerError if the other side is gone or stops in the middle, CorruptMessageError for anything that is
        not the next frame of this conversation. Either closes the connection: an answer that comes late must not be
        taken for that to a later question.
        """
        descriptors: tuple[int, ...] = ()
        try:
            with self._lost_peer("receive"):
                self._socket.settimeout(first_seconds)
                if self._take_descriptors:
                    first, received, _, _ = socket.recv_fds(self._socket, 1, 8, socket.MSG_CMSG_CLOEXEC)
                    descriptors = tuple(received)
                else:
                    first = self._socket.recv(1)
                if not first:
                    raise LostPeerError("the other side closed the connection")
                self._socket.settimeout(self._timeout_seconds)
            head = first + self._read(_HEADER.size + TAG_BYTES - 1)
            text = self._read(_lengths(head, self._max_json, self._max_payload)[0])
            frame = _opened(head + text, self._receive_tags, self._received, descriptors)
            self._received += 1
            return frame
        except BaseException as error:
            for descriptor in descriptors:
                os.close(descriptor)
            self._accuse(error)
            self.close()
            raise

    def read_payload(self, frame: Frame, limit_bytes: int) -> bytes:
        """Return a small payload, such as a layout. Raises CorruptMessageError if it exceeds ``limit_bytes``."""
        if frame.payload_bytes > limit_bytes:
            raise CorruptMessageError(f"a payload of {frame.payload_bytes} bytes where at most {limit_bytes} are legal")
        data = bytearray(frame.payload_bytes)
        if data:
            with memoryview(data) as view:
                self.read_piece(frame, view)
        return bytes(data)

    def read_piece(self, frame: Frame, view: memoryview) -> None:
        """Read a frame's payload straight into shared memory.

        Raises CorruptHeaderError, and closes the connection, if it is not what the other side sent at this point of
        this conversation; then the bytes must not be used.
        """
        self._read_into(view)
        tag = self._read(TAG_BYTES)
        if not hmac.compare_digest(tag, self._receive_tags.of_payload(frame.number, view)):
            error = CorruptHeaderError("a payload was altered or forged on the way here")
            self._accuse(error)
            self.close()
            raise error

    def _accuse(self, error: BaseException) -> None:
        """Tell the other side what came from it, as the last word: it may be in the middle of sending."""
        if isinstance(error, CorruptHeaderError) and self._send_tags.is_trusted and not self.is_closed:
            with contextlib.suppress(ThinwireError):
                self._timeout_seconds = min(self._timeout_seconds, _LAST_WORD_SECONDS)
                self.send_error(CorruptMessageError(f"the connection was closed: {error}"))

    def _last_word(self) -> str:
        """What the other side said before it closed the connection, if it said something."""
        with contextlib.suppress(ThinwireError):
            frame = self.receive(_LAST_WORD_SECONDS)
            return f"; the other side said: {frame.json.get('message')}" if frame.kind == FrameKind.ERROR else ""
        return ""

    def _read_into(self, view: memoryview) -> None:
        done, is_large = 0, len(view) > _WAKE_BYTES and not self._is_tls  # TLS has read ahead what poll waits for
        with self._lost_peer("receive"):
            while done < len(view):
                if is_large:
                    self._wake_at(len(view) - done)
                if self._deadline is not None:
                    self._socket.settimeout(max(1e-3, self._deadline - time.monotonic()))
                count = self._socket.recv_into(view[done:])
                if not count:
                    raise LostPeerError("the other side closed the connection in the middle of a frame")
                done += count
            if is_large:
                self._wake_at(1)

    def _wake_at(self, num_bytes: int) -> None:
        """Sleep until that many bytes are there, at most _WAKE_BYTES: this costs 0.4 ms of a core for each MB, and a
        wake-up at every packet 1.3 ms."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(num_bytes, _WAKE_BYTES))

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        with memoryview(data) as view:
            self._read_into(view)
        return bytes(data)

    @contextlib.contextmanager
    def _lost_peer(self, what: str) -> Iterator[None]:
        with self._guard:
            self._users += 1
        try:
            yield
        except TimeoutError as error:
            seconds = self._socket.gettimeout()
            self.close()
            raise LostPeerError(f"{what}: no answer within {seconds} seconds") from error
        except OSError as error:
            reason = "the connection was lost before" if self.is_closed else str(error)
            if what == "send" and not self.is_closed:
                reason += self._last_word()
            self.close()
            raise LostPeerError(f"{what}: {reason}") from error
        finally:
            with self._guard:
                self._users -= 1
                self._release()

    def request(self, op: str, content: dict[str, Any], payload: bytes = b"", seconds: float | None = None) -> Frame:
        """Send a request and return the answer; an error of the other side is raised here with its own class."""
        self.send(FrameKind.REQUEST, {"op": op, **content}, payload)
        return self.answer(seconds)

    def answer(self, seconds: float | None = None) -> Frame:
        frame = self.receive(first_seconds=self._timeout_seconds if seconds is None else seconds)
        if frame.kind == FrameKind.ERROR:
            kind = _ERRORS.get(str(frame.json.get("kind")), ThinwireError)
            raise kind(str(frame.json.get("message")))
        if frame.kind != FrameKind.REPLY:
            raise CorruptHeaderError(f"expected a reply, got {frame.kind.name}")
        return frame

    def send_error(self, error: Exception) -> None:
        kind = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), "failed")
        self.send(FrameKind.ERROR, {"kind": kind, "message": str(error)})

    @property
    def tcp_counts(self) -> tuple[int, float, float]:
        """Bytes that the other side has acknowledged, seconds in which some were on their way (in ticks of some
        milliseconds), and the least seconds from a segment to its acknowledgement in the last 5 minutes, by the kernel;
        zeros if the connection is not TCP."""
        with contextlib.suppress(OSError, struct.error):
            counts = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            acknowledged, latency, busy_microseconds = _TCP_COUNTS.unpack_from(counts)
            return acknowledged, busy_microseconds * 1e-6, latency % (2**32 - 1) * 1e-6
        return 0, 0.0, 0.0

    @property
    def hung_up(self) -> bool:
        """Whether the other side has closed; any thread may ask, also while another one receives."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed here
            return True

    def close(self) -> None:
        """Close the connection, which also wakes the thread that waits in ``receive``, and then releases the socket:
        were its descriptor free before, that thread could read what comes to the next socket with that number."""
        with self._guard:
            self.is_closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._release()

    def _release(self) -> None:
        if self.is_closed and not self._users:
            self._socket.close()


@contextlib.contextmanager
def closed_on_error(resource: Any) -> Iterator[None]:
    """Close what was just opened unless the block ends well."""
    try:
        yield
    except BaseException:
        resource.close()
        raise


def peer_pid(sock: socket.socket) -> int:
    """Return the process on the other side of a Unix socket; 0 if it is not seen from here, or the socket is none."""
    with contextlib.suppress(OSError):
        return struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return 0


def _digits(content: dict[str, Any], name: str, count: int) -> str:
    text = field(content, name, str, count, count)
    if not text.isascii():  # which neither `encode` nor `compare_digest` would forgive
        raise CorruptMessageError(f"{name!r} is no hexadecimal number")
    return text


def _proof(secret: bytes, who: bytes, nonces: bytes) -> str:
    return _derived(secret, b"proof " + who + nonces).hex()


def _derived(secret: bytes, purpose: bytes) -> bytes:
    # hashed first: to HMAC itself, a secret with zero bytes behind it is the same secret
    return hmac.digest(hashlib.sha256(secret).digest(), purpose, "sha256")


def _tags(secret: bytes, nonces: bytes, me: bytes, other: bytes) -> tuple[Tags, Tags]:
    mac = nonces[2 * _NONCE_DIGITS :].decode()
    return Tags(_derived(secret, b"key " + me + nonces), mac), Tags(_derived(secret, b"key " + other + nonces), mac)


def _packed(kind: FrameKind, content: dict[str, Any], payload_bytes: int, number: int, tags: Tags) -> bytes:
    """Return all of a frame but its payload. Raises ValueError if it is too large."""
    text = json.dumps(content, separators=(",", ":")).encode()
    if len(text) > MAX_JSON_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {len(text)} + {payload_bytes} bytes is too large")
    header = _HEADER.pack(_MAGIC, kind, len(text), payload_bytes, number)
    return header + tags.of_frame(header + text) + text


def _lengths(head: bytes, max_json: int, max_payload: int) -> tuple[int, int]:
    magic, _, json_bytes, payload_bytes, _ = _HEADER.unpack_from(head)
    if magic != _MAGIC and (magic ^ _MAGIC) & 0xFFFFFF == 0:
        raise CorruptHeaderError("the other side is of another release of thinwire: install the same one on all hosts")
    if magic != _MAGIC or json_bytes > max_json or payload_bytes > max_payload:
        raise CorruptHeaderError("not a frame of this protocol, or a length beyond its limits")
    return json_bytes, payload_bytes


def _opened(data: bytes, tags: Tags, number: int, descriptors: tuple[int, ...] = ()) -> Frame:
    """Return the frame. Raises CorruptMessageError unless it has the tag and the number that it should have."""
    header, text = data[: _HEADER.size], data[_HEADER.size + TAG_BYTES :]
    _, kind, _, payload_bytes, index = _HEADER.unpack(header)
    tag = data[_HEADER.size : _HEADER.size + TAG_BYTES]
    if not hmac.compare_digest(tag, tags.of_frame(header + text)) or index != number:
        raise CorruptHeaderError("a frame was altered, forged, or is out of order")
    if kind not in list(FrameKind) or (kind == FrameKind.GREETING) is tags.is_trusted:
        raise CorruptHeaderError(f"a frame of kind {kind} at the wrong time")
    content = parse_json(text)
    if not isinstance(content, dict):
        raise CorruptMessageError("a frame's JSON is not an object")
    return Frame(FrameKind(kind), content, payload_bytes, number, descriptors)
