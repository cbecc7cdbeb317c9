"""Frames between trainers, holders and peers' holders: JSON and raw bytes, with limits, timeouts, and a key.

    [magic u32][kind u8][json length u32][payload length u64][sequence u64][tag 16 bytes] json payload

Both sides prove that they know the run's secret before anything else is said. From then on the tag is an HMAC-SHA256
of header and JSON under a key of this connection and direction, so a command can be neither forged, nor replayed, nor
moved. The payload is not under the tag: its CRC-32s are, in the JSON that announces it. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from thinwire.errors import CorruptHeaderError, CorruptMessageError, LostPeerError, PeerError, ThinwireError
from thinwire.holder.slots import parse_json
from thinwire.holder.version import field

_HEADER = struct.Struct("<IBIQQ")
_MAGIC = 0x31465754  # TWF1
_TAG_BYTES = 16
_TCP_COUNTS, _TCP_COUNTS_OFFSET = struct.Struct("<Q40xQ"), 120  # tcpi_bytes_acked, tcpi_busy_time of <linux/tcp.h>
_TCP_INFO_BYTES = 232
_WAKE_BYTES = 128 << 10  # a link that brings less within the timeout counts as dead
_STRANGER_JSON_BYTES = 4096  # from a side that has not yet proven its secret
MAX_JSON_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 64 << 20
HANDSHAKE_SECONDS = 5.0


class FrameKind(IntEnum):
    """Kind of a frame. CAST asks for something without a reply; DATA is the next bytes of a payload."""

    GREETING = 1
    REQUEST = 2
    REPLY = 3
    ERROR = 4
    CAST = 5
    DATA = 6


_ERRORS: dict[str, type[Exception]] = {
    "value": ValueError,
    "corrupt": CorruptMessageError,
    "peer": PeerError,
    "failed": ThinwireError,
}


@dataclass(frozen=True)
class Frame:
    """A frame whose JSON has been read; its payload of ``payload_bytes`` is still in the socket."""

    kind: FrameKind
    json: dict[str, Any]
    payload_bytes: int
    descriptors: tuple[int, ...] = ()


class Connection:
    """One end of a conversation, for one thread at a time except in ``close``."""

    def __init__(self, sock: socket.socket, timeout_seconds: float, take_descriptors: bool = False) -> None:
        self._socket, self._timeout_seconds = sock, timeout_seconds
        self._take_descriptors = take_descriptors
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0
        self._max_json, self._max_payload = _STRANGER_JSON_BYTES, 0
        sock.settimeout(timeout_seconds)

    def greet(self, secret: bytes) -> None:
        """Shake hands as the side that connected. Raises PeerError if the other does not prove the secret."""
        mine = os.urandom(16).hex()
        self.send(FrameKind.GREETING, {"nonce": mine})
        answer = self._greeting()
        theirs, nonces = _nonce(answer), (mine + _nonce(answer)).encode()
        if not hmac.compare_digest(_proof(secret, b"listener", nonces), field(answer, "proof", str, 64, 64)):
            raise PeerError("the holder has another secret: give the same secret file, or THINWIRE_SECRET, to all")
        self.send(FrameKind.GREETING, {"nonce": theirs, "proof": _proof(secret, b"caller", nonces)})
        self._trust(secret, nonces, b"caller", b"listener")

    def welcome(self, secret: bytes) -> None:
        """Shake hands as the side that was connected to. Raises PeerError if the caller does not know the secret."""
        mine, theirs = os.urandom(16).hex(), _nonce(self._greeting())
        nonces = (theirs + mine).encode()
        self.send(FrameKind.GREETING, {"nonce": mine, "proof": _proof(secret, b"listener", nonces)})
        proof = field(self._greeting(), "proof", str, 64, 64)
        if not hmac.compare_digest(_proof(secret, b"caller", nonces), proof):
            raise PeerError("a caller has another secret")
        self._trust(secret, nonces, b"listener", b"caller")

    def _greeting(self) -> dict[str, Any]:
        frame = self.receive(first_seconds=HANDSHAKE_SECONDS)
        if frame.kind != FrameKind.GREETING:
            raise CorruptHeaderError(f"expected a greeting, got {frame.kind.name}")
        return frame.json

    def _trust(self, secret: bytes, nonces: bytes, me: bytes, other: bytes) -> None:
        self._send_key = _derived(secret, b"key " + me + nonces)
        self._receive_key = _derived(secret, b"key " + other + nonces)
        self._max_json, self._max_payload = MAX_JSON_BYTES, MAX_PAYLOAD_BYTES

    def send(
        self,
        kind: FrameKind,
        content: dict[str, Any] | None = None,
        payload: bytes | memoryview = b"",
        descriptors: tuple[int, ...] = (),
    ) -> None:
        """Send a frame. Raises LostPeerError if the other side is gone, or accepts nothing within the timeout."""
        text = json.dumps(content or {}, separators=(",", ":")).encode()
        if len(text) > MAX_JSON_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a frame of {len(text)} + {len(payload)} bytes is too large")
        with self._lost_peer("send"):
            self._socket.settimeout(self._timeout_seconds)
            header = _HEADER.pack(_MAGIC, kind, len(text), len(payload), self._sent)
            head = header + _tag(self._send_key, header, text)
            if descriptors:
                socket.send_fds(self._socket, [head[:1]], list(descriptors))
                self._socket.sendall(head[1:] + text)
            else:
                self._socket.sendall(head + text)
            if len(payload):
                self._socket.sendall(payload)
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
                first, descriptors = self._first_byte()
                self._socket.settimeout(self._timeout_seconds)
            return self._rest_of_frame(first, descriptors)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            self.close()
            raise

    def _rest_of_frame(self, first: bytes, descriptors: tuple[int, ...]) -> Frame:
        head = first + self._read(_HEADER.size + _TAG_BYTES - 1)
        header, tag = head[: _HEADER.size], head[_HEADER.size :]
        magic, kind, json_bytes, payload_bytes, sequence = _HEADER.unpack(header)
        if magic != _MAGIC or json_bytes > self._max_json or payload_bytes > self._max_payload:
            raise CorruptHeaderError("not a frame of this protocol, or a length beyond its limits")
        text = self._read(json_bytes)
        if not hmac.compare_digest(tag, _tag(self._receive_key, header, text)) or sequence != self._received:
            raise CorruptHeaderError("a frame was altered, forged, or is out of order")
        if kind not in list(FrameKind):
            raise CorruptHeaderError(f"unknown kind of frame {kind}")
        content = parse_json(text)
        if not isinstance(content, dict):
            raise CorruptMessageError("a frame's JSON is not an object")
        self._received += 1
        return Frame(FrameKind(kind), content, payload_bytes, descriptors)

    def _first_byte(self) -> tuple[bytes, tuple[int, ...]]:
        descriptors: list[int] = []
        if self._take_descriptors:
            first, descriptors, _, _ = socket.recv_fds(self._socket, 1, 8, socket.MSG_CMSG_CLOEXEC)
        else:
            first = self._socket.recv(1)
        if not first:
            raise LostPeerError("the other side closed the connection")
        return first, tuple(descriptors)

    def read_payload(self, frame: Frame, limit_bytes: int) -> bytes:
        """Return a small payload, such as a layout. Raises CorruptMessageError if it exceeds ``limit_bytes``."""
        if frame.payload_bytes > limit_bytes:
            raise CorruptMessageError(f"a payload of {frame.payload_bytes} bytes where at most {limit_bytes} are legal")
        return self._read(frame.payload_bytes)

    def read_into(self, view: memoryview) -> None:
        """Read the next ``len(view)`` bytes of a payload, straight into shared memory."""
        done, is_large = 0, len(view) > _WAKE_BYTES
        with self._lost_peer("receive"):
            while done < len(view):
                if is_large:
                    self._wake_at(len(view) - done)
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
            self.read_into(view)
        return bytes(data)

    @contextlib.contextmanager
    def _lost_peer(self, what: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            seconds = self._socket.gettimeout()
            self.close()
            raise LostPeerError(f"{what}: no answer within {seconds} seconds") from error
        except OSError as error:
            closed = self._socket.fileno() < 0
            self.close()
            raise LostPeerError(f"{what}: {'the connection was lost before' if closed else error}") from error

    def request(self, op: str, content: dict[str, Any], payload: bytes = b"", seconds: float | None = None) -> Frame:
        """Send a request and return the answer; an error of the other side is raised here with its own class."""
        self.send(FrameKind.REQUEST, {"op": op, **content}, payload)
        return self.answer(self._timeout_seconds if seconds is None else seconds)

    def answer(self, seconds: float) -> Frame:
        frame = self.receive(first_seconds=seconds)
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
    def tcp_counts(self) -> tuple[int, float]:
        """Bytes that the other side has acknowledged, and seconds in which some were on their way, as counted by the
        kernel (in ticks of some milliseconds); zeros if the connection is not TCP."""
        with contextlib.suppress(OSError, struct.error):
            counts = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            acknowledged, busy_microseconds = _TCP_COUNTS.unpack_from(counts, _TCP_COUNTS_OFFSET)
            return acknowledged, busy_microseconds * 1e-6
        return 0, 0.0

    @property
    def peer_pid(self) -> int:
        """Process on the other side of a Unix socket; 0 if it is not seen from here, or the socket is none."""
        with contextlib.suppress(OSError):
            return struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return 0

    @property
    def hung_up(self) -> bool:
        """Whether the other side of a Unix socket has closed; any thread may ask, also while another one receives."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed here
            return True

    @property
    def lost(self) -> bool:
        """Whether the other side has closed, as far as the socket knows; only valid when no answer is expected."""
        poll = select.poll()  # recv would wait for the timeout, regardless of its flags
        try:
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0)) and not self._socket.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):  # closed here
            return True

    def close(self) -> None:
        """Close the connection, which also wakes the thread that waits in ``receive``."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _nonce(content: dict[str, Any]) -> str:
    return field(content, "nonce", str, 32, 32)


def _proof(secret: bytes, who: bytes, nonces: bytes) -> str:
    return _derived(secret, b"proof " + who + nonces).hex()


def _derived(secret: bytes, purpose: bytes) -> bytes:
    # hashed first: to HMAC itself, a secret with zero bytes behind it is the same secret
    return hmac.digest(hashlib.sha256(secret).digest(), purpose, "sha256")


def _tag(key: bytes, header: bytes, text: bytes) -> bytes:
    return hmac.digest(key, header + text, "sha256")[:_TAG_BYTES]
