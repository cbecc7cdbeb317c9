"""Bytes altered, lost, repeated or made up on the wire, and clients that are not what they should be."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from checkpoint_faults.hosts import SECRET
from checkpoint_faults.kind import Expected, Kind, Outcome, refused, restored
from checkpoint_faults.shards import Shards
from checkpoint_faults.wire import Proxy, Tamper, babble, connect, flipped, header, once, say
from handshakes import welcome
from thinwire.checkpoint.holder.client import HolderClient
from thinwire.checkpoint.holder.frames import Connection, FrameKind
from thinwire.checkpoint.holder.replication import call, send_payload
from thinwire.checkpoint.holder.slots import Slot, SlotSize
from thinwire.checkpoint.holder.version import CHUNK_BYTES, Manifest, Version, chunk_count
from thinwire.errors import PeerError, ThinwireError

_GROUP = "wire"
_BABBLERS = 25


def sending(directory: Path, make_tamper: Callable[[], Tamper], arrives: bool = True) -> Outcome:
    """Two steps are sent through it, then the sender's host is lost."""
    with Proxy(make_tamper()) as proxy, Shards(directory, via=proxy.to) as shards:
        shards.train([1, 2] if arrives else [1], replicate=arrives)
        if not arrives:
            Shards.wait_for(lambda: all(c.status()["dropped"] for c in shards.owners.values()), "a version is dropped")
        shards.replace(1)
        return shards.recover()


def fetching(directory: Path, make_tamper: Callable[[], Tamper]) -> Outcome:
    """A lost host brings its shard back through it."""
    with Proxy() as proxy, Shards(directory, via=proxy.to) as shards:
        shards.train([1, 2])
        shards.replace(1)
        proxy.tamper = make_tamper()
        return shards.recover()


def replayed_elsewhere(directory: Path) -> Outcome:
    """All that a sender ever said is said again, on a connection of one's own."""
    with Proxy() as proxy, Shards(directory, via=proxy.to) as shards:
        shards.train([1])
        recorded = bytes(proxy.seen)
        shards.train([2])
        for holder in shards.holders:
            say(holder.address, recorded)
        return shards.recover()


def said(directory: Path, *sayings: bytes) -> Outcome:
    """By a stranger, on all ways into all holders."""
    with Shards(directory) as shards:
        shards.train([1, 2])
        for holder in shards.holders:
            for address in (holder.address, str(holder.config.socket_path)):
                for saying in sayings:
                    say(address, saying)
        return shards.recover()


def oversized(directory: Path) -> Outcome:
    """By one who knows the secret: lengths that no memory has, in frames and in what they ask for."""
    with Shards(directory) as shards:
        shards.train([1, 2])
        address = shards.holders[0].address
        for sizes in ((1 << 31, 0), (10, 1 << 62), ((64 << 20) + 1, 0)):
            connection = call(address, SECRET.encode(), 2.0)
            with contextlib.closing(connection), contextlib.suppress(OSError):
                connection._socket.sendall(header(FrameKind.REQUEST, *sizes))
                connection._socket.recv(1)
        shard = shards.owners[0].shard
        assert shard is not None
        for num_bytes in (1 << 43, 1 << 62, -1):
            connection = call(address, SECRET.encode(), 2.0)
            with contextlib.closing(connection), contextlib.suppress(ThinwireError, ValueError):
                room = {"payload_bytes": num_bytes, "layout_bytes": 100}
                connection.request("register", {"shard": {**shard.to_json(), "run_id": "large"}, **room})
        return shards.recover()


def garbage(directory: Path, knows_secret: bool) -> Outcome:
    """Clients without sense, at all holders, before and after the trainers write."""
    chance = random.Random(0)
    with Shards(directory) as shards:
        shards.train([1])
        addresses = [a for h in shards.holders for a in (h.address, str(h.config.socket_path))]
        for _ in range(_BABBLERS):
            babble(chance.choice(addresses), chance, knows_secret)
        shards.train([2])
        return shards.recover()


def silence(directory: Path) -> Outcome:
    """Callers that say nothing, or half a greeting, and stay."""
    with Shards(directory) as shards, contextlib.ExitStack() as stack:
        for holder in shards.holders:
            for number in range(40):
                caller = stack.enter_context(connect(holder.address))
                caller.sendall(header(FrameKind.GREETING, 60, 0)[: number % 20])
        shards.train([1, 2])
        return shards.recover()


def another_secret(directory: Path) -> Outcome:
    """Somebody who has another one wants to read a version, by the local socket and by TCP."""
    another = b"another secret"
    with Shards(directory) as shards:
        shards.train([1, 2])
        holder = shards.holders[0]
        says = []
        for connect_as in (
            lambda: HolderClient.connect(holder.config.socket_path, another),
            lambda: call(holder.address, another, 2.0),
        ):
            try:
                connect_as().close()
            except PeerError as error:
                says.append(str(error))
        return Outcome("refused" if len(says) == 2 else "restored", says="; ".join(says))


@contextlib.contextmanager
def impostor(serve: Callable[[Connection], None], secret: bytes = SECRET.encode()) -> Iterator[str]:
    """Somebody who listens where a holder should, and knows its secret."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                connection = Connection(sock, 2.0)
                with contextlib.closing(connection), contextlib.suppress(ThinwireError, OSError):
                    welcome(connection, secret)
                    serve(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def senseless_peer(directory: Path) -> Outcome:
    """The peer answers everything with nonsense: training goes on, and what the own host has is restored."""

    def serve(connection: Connection) -> None:
        connection.receive(2.0)
        connection.send(FrameKind.REPLY, {"versions": [{"step": "many"}], "manifest": 7}, b"nonsense")

    with impostor(serve) as address, Shards(directory, via=lambda _: address) as shards:
        shards.train([1, 2], replicate=False)
        return shards.recover()


def lying_peer(directory: Path, make_manifest: Callable[[Version], Manifest]) -> Outcome:
    """A peer that knows the secret offers zeros for the lost shard."""
    wanted: list[Version] = []

    def serve(connection: Connection) -> None:
        frame = connection.receive(2.0)
        if frame.json["op"] == "register":
            connection.send(FrameKind.REPLY, {"versions": []})
            return
        wanted.append(Version.from_json(frame.json["version"]))
        manifest = make_manifest(wanted[-1])
        slot = Slot.allocate(SlotSize(manifest.payload_bytes, 100))
        connection.send(FrameKind.REPLY, {"manifest": manifest.to_json()}, b"{}")
        list(send_payload(connection, slot, manifest))
        slot.close()

    via: list[str] = []
    with impostor(serve) as address, Shards(directory, via=lambda real: via[0] if via else real) as shards:
        shards.train([1, 2])
        shards.replace(1)
        via.append(address)
        return shards.recover()


def _consistent(version: Version) -> Manifest:
    """Of zeros, with the digests that zeros have."""
    slot = Slot.allocate(SlotSize(version.payload_bytes, 100))
    stated = Manifest.stated(version.shard, version.step, version.attempt, version.payload_bytes)
    manifest = slot.digest(stated, b"{}")
    slot.close()
    return manifest


def _empty(version: Version) -> Manifest:
    chunks = chunk_count(version.payload_bytes, CHUNK_BYTES)
    return Manifest(
        version.shard, version.step, version.attempt, version.payload_bytes, CHUNK_BYTES, (0,) * chunks, 2, 0
    )


def _kind(name: str, what: str, run: Callable[[Path], Outcome], expected: Expected, slow: bool = False) -> Kind:
    return Kind(name, _GROUP, what, run, expected, slow)


def _data(tamper: Callable[..., bytes | None]) -> Callable[[], Tamper]:
    return lambda: once(FrameKind.DATA, tamper)


def _always_flipped() -> Tamper:
    flip = flipped("payload")
    return lambda frame: flip(frame) if frame.kind is FrameKind.DATA else bytes(frame)


_MEMORY, _PEER = restored("memory", 2), restored("peer", 2)
KINDS = (
    _kind("payload altered, once", "one bit of a replica flipped on its way; the sender's host is lost",
          partial(sending, make_tamper=_data(flipped("payload"))), _PEER),
    _kind("payload altered, always", "a bit of every piece flipped on its way; the sender's host is lost",
          partial(sending, make_tamper=_always_flipped, arrives=False), refused("nobody has a copy of shard 1")),
    _kind("frame header altered", "one bit of a frame's header flipped; the sender's host is lost",
          partial(sending, make_tamper=_data(flipped("header"))), _PEER),
    _kind("frame JSON altered", "one bit of a request's JSON flipped; the sender's host is lost",
          partial(sending, make_tamper=lambda: once(FrameKind.REQUEST, flipped("text"))), _PEER),
    _kind("frame repeated", "a frame arrives twice; the sender's host is lost",
          partial(sending, make_tamper=_data(lambda frame: bytes(frame) * 2)), _PEER),
    _kind("frame missing", "a frame does not arrive; the sender's host is lost",
          partial(sending, make_tamper=_data(lambda _: b"")), _PEER),
    _kind("connection cut", "it breaks off in the middle of a frame; the sender's host is lost",
          partial(sending, make_tamper=_data(lambda _: None)), _PEER),
    _kind("altered while recovering", "a host is lost, and a bit flipped on the way back",
          partial(fetching, make_tamper=_data(flipped("payload"))), _PEER),
    _kind("altered while recovering, always", "and so at every try",
          partial(fetching, make_tamper=_always_flipped), refused("altered or forged on the way")),
    _kind("cut while recovering", "a host is lost, and the connection to its peer breaks off in a frame",
          partial(fetching, make_tamper=_data(lambda _: None)), _PEER),
    _kind("conversation replayed", "all that a sender said is said again by somebody else", replayed_elsewhere,
          _MEMORY),
    _kind("oversized lengths, stranger", "frames of 2 GiB of JSON and 4 EiB of payload, before the handshake",
          lambda path: said(path, header(1, 1 << 31, 0), header(1, 10, 1 << 62), header(9, 0, 0)), _MEMORY),
    _kind("oversized lengths, peer", "the same, and shards of 8 TiB, from one who knows the secret", oversized,
          _MEMORY),
    _kind("garbage, stranger", "random bytes from clients that do not know the secret",
          partial(garbage, knows_secret=False), _MEMORY),
    _kind("garbage, peer", "requests without sense from clients that know it", partial(garbage, knows_secret=True),
          _MEMORY),
    _kind("silent callers", "80 connections that say nothing, or half a greeting, and stay", silence, _MEMORY),
    _kind("wrong secret", "a reader with another secret, by TCP and by the local socket",
          another_secret, refused("another secret.*another secret")),
    _kind("senseless peer", "where the peer's holder should be, somebody answers nonsense", senseless_peer, _MEMORY),
    _kind("lying peer", "a host is lost, and its peer sends zeros with the right name and no digests",
          partial(lying_peer, make_manifest=_empty), refused("another version")),
    _kind("lying peer, consistent", "zeros, with the digests that zeros have",
          partial(lying_peer, make_manifest=_consistent), refused("another version")),
)  # fmt: skip
