"""Sessions of a holder with its callers: local trainers, and the holders of peers."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.errors import CorruptMessageError, LostPeerError, ThinwireError
from thinwire.holder.frames import Connection, Frame, FrameKind
from thinwire.holder.replication import Grants, Replicator, parse_address, receive_payload, send_payload
from thinwire.holder.slots import SlotSize
from thinwire.holder.store import BudgetError, Holding, Places, Shard
from thinwire.holder.version import MAX_LAYOUT_BYTES, MAX_PAYLOAD_BYTES, Manifest, ShardId, Version
from thinwire.holder.version import field as get

if TYPE_CHECKING:
    from thinwire.holder.server import Holder

log = logging.getLogger("thinwire.holder")

_UNWANTED_SECONDS = 0.5  # for the sending of an unwanted version to end
_TAKEOVER_SECONDS = 3.0  # until the predecessor of a trainer, or of a sender, is noticed as gone
_LOOK_SECONDS = 0.1  # between looks at whether it lives
_EXITING = 0x4  # in the flags of a process (PF_EXITING of <linux/sched.h>): its memory may take long to free


Operation = Callable[[Any, dict[str, Any], bytes], "dict[str, Any] | None"]
"""It returns the JSON of the reply, or None if it has replied itself."""


class Session:
    """One connection, served by one thread. A malformed frame ends it; a request that cannot be met does not."""

    operations: ClassVar[dict[str, Operation]] = {}
    with_layout: ClassVar[set[str]] = set()

    def __init__(self, holder: Holder, connection: Connection) -> None:
        self.holder, self.store, self.connection = holder, holder.store, connection

    def serve(self) -> None:
        try:
            while True:
                self._handle(self.connection.receive())
        except LostPeerError as error:
            log.debug("%s ended: %s", type(self).__name__, error)
        except Exception as error:
            self.holder.refuse(self.connection.peer, f"{type(self).__name__}, {type(error).__name__}: {error}")
        finally:
            self.connection.close()
            self.end()

    def end(self) -> None:
        """Clean up when the other side is gone."""

    def cast(self, content: dict[str, Any]) -> None:
        raise CorruptMessageError("nothing to cast here")

    def _handle(self, frame: Frame) -> None:
        if frame.kind == FrameKind.CAST and frame.payload_bytes == 0:
            return self.cast(frame.json)
        name = frame.json.get("op")
        operation = self.operations.get(name) if isinstance(name, str) else None
        if frame.kind != FrameKind.REQUEST or operation is None:
            raise CorruptMessageError(f"no such request: {frame.kind.name} {str(name)[:40]!r}")
        payload = self.connection.read_payload(frame, MAX_LAYOUT_BYTES if name in self.with_layout else 0)
        try:
            reply = operation(self, frame.json, payload)
        except LostPeerError:  # so the connection is of no more use
            raise
        except (ValueError, ThinwireError) as error:
            if self.connection.is_closed:  # by what came on it: a forged payload, say
                raise
            return self.connection.send_error(error)
        if reply is not None:
            self.connection.send(FrameKind.REPLY, reply)
        return None

    def inventory(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        verify = isinstance(self, TrainerSession) and get(request, "verify", bool)  # a peer does it when it reads one
        versions = self.store.verified(get(request, "run_id", str, 1, 256), verify)
        return {"versions": [version.to_json() for version in versions]}


def _birth(pid: int) -> str:
    """When a process started, in ticks since the boot; empty if it is ending, gone, or not seen from here."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" or int(fields[5]) & _EXITING else fields[18]


class TrainerSession(Session):
    """Session with a process on this host, over the Unix socket; it owns at most one shard."""

    with_layout: ClassVar[set[str]] = {"publish"}

    def __init__(self, holder: Holder, connection: Connection) -> None:
        super().__init__(holder, connection)
        self.shard: Shard | None = None
        self.attempt, self.lease = 0, ("", "")
        self._pid = connection.peer_pid
        self._born = _birth(self._pid)
        self.grants = Grants(self.store.changed)
        self.writing: Holding | None = None
        self.opened: dict[int, Holding] = {}

    def end(self) -> None:
        """Handle the death of a trainer: complete versions are kept, and sent without limit; others are dropped."""
        for holding in self.opened.values():
            self.store.unpin(holding)
        if self.writing is not None:
            self.store.abandon(self.writing)
        self.grants.unlimit()
        with self.store.changed:
            self.holder.joined.discard(self)
            if self.shard is not None and self.shard.trainer is self:
                self.shard.trainer = None
                self.shard.unmap()
            self.store.changed.notify_all()

    @property
    def is_alive(self) -> bool:
        """Whether the trainer lives. Its children may hold the connection open, so its process is asked for too."""
        return not self.connection.hung_up and (not self._born or _birth(self._pid) == self._born)

    def _wait_for(self, rivals: Callable[[], Iterable[Any]]) -> Any:
        """Return one of them that still lives after a while, or None; those that are dead are cut off."""
        deadline = time.monotonic() + _TAKEOVER_SECONDS
        with self.store.changed:
            while True:
                found = [rival for rival in rivals() if rival is not self]
                living = [rival for rival in found if rival.is_alive]
                for rival in found:
                    if rival not in living:
                        rival.connection.close()
                if not living or time.monotonic() > deadline:
                    return next(iter(living), None)
                self.store.changed.wait(_LOOK_SECONDS)

    def join(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        """Take a lease of a run for a job, as long as one of its trainers is connected."""
        run_id, job = get(request, "run_id", str, 1, 256), get(request, "job", str, 1, 256)

        def rivals() -> list[TrainerSession]:
            other = [session for session in self.holder.joined if session.lease != (run_id, job)]
            foreign = [session for session in other if session._pid != self._pid or not self._pid]  # 0: in a container
            return [session for session in foreign if session.lease[0] == run_id]

        with self.store.changed:
            rival = self._wait_for(rivals)
            if rival is not None:
                process = f"process {rival._pid}" if rival._pid else "a process in a container"
                raise ValueError(
                    f"run {run_id!r} is in use by another job, or by another Checkpointer of this one: {process}"
                    f" on {os.uname().nodename}; pass another run_id, or end that process"
                )
            self.lease = run_id, job
            self.holder.joined.add(self)
        return {}

    def place(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        run_id, wanted = get(request, "run_id", str, 1, 256), get(request, "wanted", list)
        placed = frozenset(ShardId.from_json(shard) for shard in get(request, "placed", list))
        if not all(isinstance(digest, str) for digest in wanted):
            raise CorruptMessageError("a digest is no text")
        chosen = _order(request.get("chosen")) or (-1, -1)
        self.store.place(run_id, Places(placed, frozenset(wanted), get(request, "attempt", int), chosen))
        return {}

    def release(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        topologies = [str(topology) for topology in get(request, "topologies", list)]
        self.store.release(get(request, "run_id", str, 1, 256), topologies)
        return {}

    def cast(self, content: dict[str, Any]) -> None:
        if content.get("op") == "grant":
            self.grants.add(get(content, "bytes", int, 0, MAX_PAYLOAD_BYTES))
        elif content.get("op") == "grant_all":
            self.grants.unlimit()
        elif content.get("op") == "revoke":
            self.grants.revoke()
        else:
            raise CorruptMessageError("unknown cast")

    def own(self) -> Shard:
        if self.shard is None:
            raise ValueError("no shard is registered on this connection: call hello first")
        return self.shard

    def hello(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        shard_id, attempt = ShardId.from_json(get(request, "shard", dict)), get(request, "attempt", int)
        addresses = get(request, "replicas", list, 0, 64)
        self._check_peers(addresses)
        if self.shard is not None:
            raise ValueError(f"this connection already belongs to {self.shard.id}")
        shard = self.store.register(shard_id, SlotSize.from_json(request))
        with self.store.changed:
            if self._wait_for(lambda: [shard.trainer] if shard.trainer is not None else []) is not None:
                raise ValueError(f"{shard_id} belongs to another trainer that is connected; end that one first")
            shard.trainer, shard.role, shard.keep = self, "own", self.store.chosen(shard_id.run_id, attempt)
            if shard.keep is not None:  # what is left of before is not sent: it would hold the only slot
                shard.attempt = attempt
            shard.unmap()
            self._end_receiver(shard)
        self.shard, self.attempt = shard, attempt
        self.grants.revoke()
        try:
            unreachable = self._replicate_to(shard, addresses)
        except ValueError:  # so the shard is given up after all; its memory is freed if it holds no version
            with self.store.changed:
                shard.trainer, shard.replicas, self.shard = None, {}, None
            if not shard.complete():
                self.store.remove(shard)
            raise
        return {"payload_bytes": shard.size.payload_bytes, "unreachable": unreachable}

    def _end_receiver(self, shard: Shard) -> None:
        """End a peer's sending that is left over from when the owner lived there: it would hold a slot."""
        if shard.receiver is not None:
            shard.receiver.close()
        self.store.changed.wait_for(lambda: shard.receiver is None, _TAKEOVER_SECONDS)

    def _check_peers(self, addresses: list[Any]) -> None:
        for address in addresses:
            parse_address(address if isinstance(address, str) else "")
            if address == self.holder.address:
                raise ValueError(f"{address} is this holder itself: a replica must be on another host")
        if len(set(addresses)) < len(addresses):
            raise ValueError(f"a replica is named twice in {addresses}")

    def _replicate_to(self, shard: Shard, addresses: list[str]) -> dict[str, str]:
        """Start one sender for each peer; which of them cannot be reached yet, and why."""
        for replica in shard.replicas.values():
            replica.stop()
        call, times = self.holder.call, self.holder.config.times
        senders = {address: Replicator(self.store, shard, address, call, self.grants, times) for address in addresses}
        unreachable = {}
        with ThreadPoolExecutor(max(1, len(senders))) as pool:  # at once: some may be stopped and say nothing
            connected = {address: pool.submit(sender.connect) for address, sender in senders.items()}
        for address, sender in senders.items():
            try:
                connected[address].result()
            except ThinwireError as error:
                unreachable[address] = sender.last_error = str(error)
            except ValueError as error:
                for other in senders.values():
                    other.stop()
                raise ValueError(f"holder {address}: {error}") from error
        with self.store.changed:
            shard.replicas = dict(senders)
        for sender in senders.values():
            sender.start()
        return unreachable

    def slot(self, request: dict[str, Any], _: bytes) -> dict[str, Any] | None:
        shard, keep_step = self.own(), request.get("keep_step")
        get(request, "step", int)
        if self.writing is not None:
            self.store.abandon(self.writing)
            self.writing = None
        with self.store.changed:
            shard.attempt = self.attempt
            if keep_step is not None:
                shard.keep = shard.order_of(get(request, "keep_step", int), self.attempt) or shard.keep
        try:
            self.writing = self.store.begin(shard, shard.keep)
        except BudgetError as error:
            shard.last_error = str(error)
        if self.writing is None:
            return {"slot": None}
        slot, descriptors = self.writing.slot, () if self.writing.mapped else (self.writing.slot.descriptor,)
        self.writing.mapped = True
        content = {"slot": self.writing.number, "slots": [holding.number for holding in shard.holdings]}
        self.connection.send(FrameKind.REPLY, content | slot.size.to_json(), descriptors=descriptors)
        return None

    def publish(self, request: dict[str, Any], layout: bytes) -> dict[str, Any]:
        shard, holding = self.own(), self.writing
        if holding is None or holding.number != get(request, "slot", int):
            raise ValueError("that slot is not being written by this trainer")
        step, payload_bytes = get(request, "step", int), get(request, "payload_bytes", int, 0, MAX_PAYLOAD_BYTES)
        shared_bytes, pieces = get(request, "shared_bytes", int, 0, payload_bytes), get(request, "pieces", list)
        if not all(type(size) is int and size >= 0 for size in pieces) or (pieces and sum(pieces) != payload_bytes):
            raise ValueError(f"the pieces are not those of {payload_bytes} bytes")
        holding.slot.check_room(payload_bytes, len(layout))
        self.writing = None
        said = step, payload_bytes, layout, shared_bytes
        sealed = self.holder.sealing.submit(self._seal, shard, holding, *said, tuple(pieces))
        if request.get("wait") is True:
            manifest = sealed.result()
            if manifest is None:
                raise ThinwireError(f"step {step} was not published: {shard.last_error}")
            return {"version": manifest.listed("own").to_json()}
        return {}

    def _seal(
        self,
        shard: Shard,
        holding: Holding,
        step: int,
        payload_bytes: int,
        layout: bytes,
        shared_bytes: int,
        pieces: tuple[int, ...],
    ) -> Manifest | None:
        try:
            manifest = holding.slot.digest(shard.id, step, self.attempt, payload_bytes, layout, shared_bytes)
            self.store.seal(holding, manifest, layout, pieces)
            return manifest
        except Exception as error:
            shard.last_error = f"step {step}: {error}"
            log.exception("step %s of %s was not sealed", step, shard.id)
            self.store.abandon(holding)
            return None

    def abandon(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        if self.writing is not None and self.writing.number == get(request, "slot", int):
            self.store.abandon(self.writing)
            self.writing = None
        return {}

    def status(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        shard = self.own()
        short = self.store.fill_up(shard)
        return {**self.holder.shard_status(shard), "safe": shard.is_safe(self.attempt), "short": short}

    @contextlib.contextmanager
    def _calling(self, source: str) -> Iterator[Connection]:
        """Call another holder. Raises ThinwireError if it is lost: this trainer's connection is not."""
        try:
            with contextlib.closing(self.holder.call(source)) as connection:
                yield connection
        except LostPeerError as error:
            raise ThinwireError(f"holder {source}: {error}") from error

    def look(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        with self._calling(get(request, "source", str, 1, 300)) as connection:
            asked = {"run_id": get(request, "run_id", str, 1, 256)}
            return {"versions": get(connection.request("inventory", asked).json, "versions", list)}

    def fetch(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        version, source = Version.from_json(get(request, "version", dict)), get(request, "source", str, 1, 300)
        with self.store.fetching(version.digest):
            if self.store.verify(version):
                return {"bytes": 0, "seconds": 0.0}
            started = time.monotonic()
            with self._calling(source) as connection:
                self._fetch(connection, version, source, request.get("evict") is not False)
            seconds = time.monotonic() - started
        self.holder.note("fetched", version.payload_bytes, seconds)
        return {"bytes": version.payload_bytes, "seconds": seconds}

    def _fetch(self, connection: Connection, version: Version, source: str, evict: bool) -> None:
        frame = connection.request("read", {"version": version.to_json()})
        manifest = Manifest.from_json(get(frame.json, "manifest", dict))
        layout = connection.read_payload(frame, MAX_LAYOUT_BYTES)
        if manifest.version.digest != version.digest:
            raise CorruptMessageError(f"holder {source} offers another version than the one that was asked for")
        shard = self.store.register(version.shard, SlotSize.from_json(get(frame.json, "room", dict)), evict)
        with self.holder.into(shard, None, manifest, layout, recovering=True) as holding:
            receive_payload(connection, holding.slot, manifest, self.holder.config.times.timeout_seconds)

    def keep(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        version, shard = Version.from_json(get(request, "version", dict)), self.own()
        with self.store.reading(version), self.store.changed:
            if version.shard != shard.id:
                raise ValueError(f"this connection belongs to {shard.id}, not to {version.shard}")
            shard.keep = version.attempt, version.step
            self._free_unwanted(shard)
        return {}

    def _free_unwanted(self, shard: Shard) -> None:
        """Wait for useless versions that are being sent: each would keep its slot from the next version."""
        self.store.changed.notify_all()
        self.store.changed.wait_for(
            lambda: not any(h.readers and h.manifest and not shard.is_wanted(h.manifest) for h in shard.holdings),
            _UNWANTED_SECONDS,
        )

    def open(self, request: dict[str, Any], _: bytes) -> None:
        version = Version.from_json(get(request, "version", dict))
        holding = self.store.pin(version)
        try:
            descriptor = os.open(f"/proc/self/fd/{holding.slot.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.store.unpin(holding)
            raise
        handle = max(self.opened, default=0) + 1
        self.opened[handle] = holding
        content = {"handle": handle, **holding.slot.size.to_json()}
        try:
            self.connection.send(FrameKind.REPLY, content, descriptors=(descriptor,))
        finally:
            os.close(descriptor)

    def close(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        holding = self.opened.pop(get(request, "handle", int), None)
        if holding is not None:
            self.store.unpin(holding)
        return {}

    def forget(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        topology = get(request, "topology", str, 1, 256) if request.get("topology") is not None else None
        return {"shards": self.store.forget(get(request, "run_id", str, 1, 256), topology)}

    def holder_status(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        return self.holder.status()

    def reload(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        return {"secrets": self.holder.reload()}

    def stop(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        self.holder.stopping.set()
        return {}

    operations: ClassVar[dict[str, Operation]] = {
        "join": join, "place": place, "release": release, "hello": hello, "slot": slot, "publish": publish,
        "abandon": abandon, "status": status, "inventory": Session.inventory, "look": look, "fetch": fetch,
        "keep": keep, "open": open, "close": close, "forget": forget, "holder_status": holder_status,
        "reload": reload, "stop": stop,
    }  # fmt: skip


class PeerSession(Session):
    """Session with the holder of another host, over TCP: it keeps shards here, and reads the versions here."""

    with_layout: ClassVar[set[str]] = {"receive"}

    def register(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        shard_id = ShardId.from_json(get(request, "shard", dict))
        if not self.store.is_placed(shard_id):
            raise ValueError(f"{shard_id} is not placed on this host any more")
        shard = self.store.register(shard_id, SlotSize.from_json(request))
        with self.store.changed:
            versions = [manifest.version.to_json() for _, manifest in shard.complete()]
        return {"versions": versions}

    def receive(self, request: dict[str, Any], layout: bytes) -> dict[str, Any]:
        manifest = Manifest.from_json(get(request, "manifest", dict))
        if (manifest.layout_bytes, manifest.layout_crc) != (len(layout), zlib.crc32(layout)):
            raise CorruptMessageError("the layout was altered on the way here")
        shard = self.store.shards.get(manifest.shard)
        if shard is None:
            raise ThinwireError(f"{manifest.shard} is not registered here")
        self._take_over(shard)
        try:
            if shard.find(manifest.version.digest) is not None:
                return {"have": True}
            wanted = shard.trainer is None and self.store.wants(manifest.version)
            if shard.is_superseded(manifest.order) and not wanted:
                return {"superseded": True}
            started = time.monotonic()
            into = self.holder.into(shard, _order(request.get("keep")), manifest, layout)
            with into as holding, self.store.base(shard) as base:
                self.connection.send(FrameKind.REPLY, {"have": False, "base": base.digest if base is not None else ""})
                payload = base.slot.payload(base.manifest.payload_bytes) if base and base.manifest else None
                receive_payload(self.connection, holding.slot, manifest, None, payload)
            self.holder.note("received", manifest.payload_bytes, time.monotonic() - started)
            return {}
        finally:
            with self.store.changed:
                shard.receiver = None
                self.store.changed.notify_all()

    def _take_over(self, shard: Shard) -> None:
        """End the sender's last call: a sender that calls again has given it up, even if it looks alive here."""
        with self.store.changed:
            if shard.receiver is not None:
                shard.receiver.close()
            if not self.store.changed.wait_for(lambda: shard.receiver is None, _TAKEOVER_SECONDS):
                raise ThinwireError(f"{shard.id} is being received on another connection")
            shard.receiver = self.connection

    def read(self, request: dict[str, Any], _: bytes) -> None:
        with self.store.reading(Version.from_json(get(request, "version", dict))) as holding:
            manifest, layout = holding.slot.read()
            content = {"manifest": manifest.to_json(), "room": holding.slot.size.to_json()}
            self.connection.send(FrameKind.REPLY, content, layout)
            started = time.monotonic()
            send_payload(self.connection, holding.slot, manifest)
        self.holder.note("served", manifest.payload_bytes, time.monotonic() - started)

    operations: ClassVar[dict[str, Operation]] = {
        "register": register, "receive": receive, "read": read, "inventory": Session.inventory,
    }  # fmt: skip


def _order(keep: Any) -> tuple[int, int] | None:
    if keep is None:
        return None
    if not isinstance(keep, list) or [type(part) for part in keep] != [int, int]:
        raise CorruptMessageError("not an attempt and a step")
    return keep[0], keep[1]
