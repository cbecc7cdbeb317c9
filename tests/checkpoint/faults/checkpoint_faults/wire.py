"""Someone in between two holders, who reads frames and passes on others; and those who do not speak the protocol."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from checkpoint_faults.hosts import SECRET
from thinwire.checkpoint.holder.frames import Connection, FrameKind
from thinwire.errors import ThinwireError

_HEADER = struct.Struct("<IBIQQ")
_TAG_BYTES = 16


@dataclass
class Frame:
    """A frame as it is on the wire. ``number`` counts those of its kind in one direction of one connection."""

    kind: FrameKind
    number: int
    header: bytearray  # with the tag
    text: bytearray
    payload: bytearray
    tag: bytearray  # of the payload

    def __bytes__(self) -> bytes:
        return bytes(self.header + self.text + self.payload + self.tag)


Tamper = Callable[[Frame], bytes | None]


@dataclass
class Proxy:
    """In front of holders: what goes to `to(address)` goes to ``address``, as ``tamper`` passes it on.

    ``tamper`` returns the bytes to pass on, or None to hang up; it sees both directions. A context manager.
    """

    tamper: Tamper = bytes
    seen: bytearray = field(default_factory=bytearray)  # all that callers have said, over all connections
    _sockets: list[socket.socket] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _addresses: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)

    def to(self, address: str) -> str:
        """Where to call instead of ``address``."""
        if address not in self._addresses:
            listener = socket.create_server(("127.0.0.1", 0))
            self._sockets.append(listener)
            self._addresses[address] = f"127.0.0.1:{listener.getsockname()[1]}"
            self._run(self._accept, listener, address)
        return self._addresses[address]

    def _run(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, address: str) -> None:
        host, port = address.rsplit(":", 1)
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                self._sockets += [near, far]
                self._run(self._pump, near, far, True)
                self._run(self._pump, far, near, False)

    def _pump(self, source: socket.socket, sink: socket.socket, forward: bool) -> None:
        counts: dict[int, int] = {}
        with contextlib.suppress(OSError, ValueError):
            while True:
                header = _exactly(source, _HEADER.size + _TAG_BYTES)
                _, kind, text_bytes, payload_bytes, _ = _HEADER.unpack(header[: _HEADER.size])
                counts[kind] = counts.get(kind, -1) + 1
                text, payload = _exactly(source, text_bytes), _exactly(source, payload_bytes)
                tag = _exactly(source, _TAG_BYTES if payload_bytes else 0)
                frame = Frame(FrameKind(kind), counts[kind], header, text, payload, tag)
                self.seen += bytes(frame) if forward else b""
                passed = self.tamper(frame)
                if passed is None:
                    break
                sink.sendall(passed)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _exactly(sock: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray()
    while len(data) < num_bytes:
        piece = sock.recv(min(1 << 20, num_bytes - len(data)))
        if not piece:
            raise OSError("closed")
        data += piece
    return data


def once(what: FrameKind, tamper: Callable[[Frame], bytes | None]) -> Tamper:
    """Do it to the first frame of a kind that comes by, and to none after that."""
    done = threading.Event()

    def first_only(frame: Frame) -> bytes | None:
        if frame.kind is not what or done.is_set():
            return bytes(frame)
        done.set()
        return tamper(frame)

    return first_only


def flipped(part: str) -> Callable[[Frame], bytes]:
    """One bit in the middle of the frame's header, text or payload."""

    def flip(frame: Frame) -> bytes:
        piece: bytearray = getattr(frame, part)
        piece[len(piece) // 2] ^= 4
        return bytes(frame)

    return flip


def connect(address: str) -> socket.socket:
    """To a holder: ``host:port``, or the path of its socket."""
    if address.startswith("/"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(2.0)
        sock.connect(address)
        return sock
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=2.0)


def say(address: str, *sayings: bytes) -> None:
    """Raw bytes, from someone who does not know the secret; waits until the holder has hung up."""
    with contextlib.suppress(OSError), connect(address) as sock:
        for saying in sayings:
            sock.sendall(saying)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass


def header(kind: int, text_bytes: int, payload_bytes: int, sequence: int = 0) -> bytes:
    """Of a frame, with a tag that is none."""
    return _HEADER.pack(0x32465754, kind, text_bytes, payload_bytes, sequence) + bytes(_TAG_BYTES)


def babble(address: str, chance: random.Random, knows_secret: bool, sentences: int = 5) -> int:
    """Bytes and requests without sense, until the holder has enough of it; returns how many it took."""
    connection, said = Connection(connect(address), 2.0), 0
    with contextlib.closing(connection), contextlib.suppress(ThinwireError, OSError, ValueError):
        if knows_secret:
            connection.greet(SECRET.encode())
        for _ in range(sentences):
            if not knows_secret or chance.random() < 1 / sentences:
                connection._socket.sendall(chance.randbytes(chance.randrange(200)))
                said += 1
                continue
            kind = FrameKind.REQUEST if chance.random() < 0.99 else chance.choice(list(FrameKind))
            connection.send(kind, _nonsense(chance), chance.randbytes(20 if chance.random() < 0.01 else 0))
            said += 1
            if kind is FrameKind.REQUEST:
                connection.receive(2.0)
    return said


_OPERATIONS = (
    *("hello", "slot", "publish", "abandon", "status", "inventory", "fetch", "open", "close", "keep", "holder_status"),
    *("register", "receive", "read", "grant", "none of these"),
)
_FIELDS = (
    "shard",
    "run_id",
    "owner",
    "step",
    "slot",
    "payload_bytes",
    "version",
    "manifest",
    "source",
    "keep",
    "bytes",
)


def _nonsense(chance: random.Random) -> dict[str, object]:
    values = (None, True, -1, 1 << 70, 0.5, "x" * 300, "127.0.0.1:1", [], [1, 2], {}, {"run_id": "run", "owner": 0})
    chosen = {name: chance.choice(values) for name in chance.sample(_FIELDS, chance.randrange(len(_FIELDS)))}
    return {**chosen, "op": chance.choice(_OPERATIONS)}
