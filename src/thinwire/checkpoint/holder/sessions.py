"""Sessions of a holder with its callers: local trainers, and the holders of peers."""

import contextlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

from thinwire.checkpoint.holder.faultpoint import reach
from thinwire.checkpoint.holder.frames import Connection, Frame, FrameKind
from thinwire.checkpoint.holder.replication import Grants, Replicator, parse_address, receive_payload, send_payload
from thinwire.checkpoint.holder.slots import SlotSize
from thinwire.checkpoint.holder.start import RunMarker, birth_of
from thinwire.checkpoint.holder.store import Assignment, BudgetError, Gathering, Holding, Shard
from thinwire.checkpoint.holder.version import MAX_LAYOUT_BYTES, MAX_PAYLOAD_BYTES, Manifest, ShardId, Version
from thinwire.checkpoint.holder.version import field as get
from thinwire.errors import CorruptMessageError, LostPeerError, ThinwireError

log = logging.getLogger("thinwire.checkpoint.holder")

_UNWANTED_SECONDS = 0.5  # for the sending of an unwanted version to end
_TAKEOVER_SECONDS = 3.0  # until the predecessor of a trainer, or of a sender, is noticed as gone
_LOOK_SECONDS = 0.1  # between looks at whether it lives
_MOST_SOURCES = 4096  # to ask
_VERIFY_SECONDS = 600.0  # for one of them to compare all of its bytes with digests


Operation = Callable[[Any, dict[str, Any], bytes], "dict[str, Any] | None"]
"""It returns the JSON of the reply; None for an empty one."""


class Session:
    """One connection, served by one thread. A malformed frame ends it; a request that cannot be met does not.

    ``holder`` is the `thinwire.checkpoint.holder.server.Holder` that serves it.
    """

    operations: ClassVar[dict[str, Operation]] = {}
    with_layout: ClassVar[set[str]] = set()
    replying: ClassVar[set[str]] = set()  # operations that send the reply themselves

    def __init__(self, holder: Any, connection: Connection) -> None:
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

    def end_receiver(self, shard: Shard) -> bool:
        """End a peer's sending of a shard; return whether it has ended. Call it with the store's lock held."""
        if shard.receiver is not None:
            shard.receiver.close()
        return self.store.changed.wait_for(lambda: shard.receiver is None, _TAKEOVER_SECONDS)

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
        if name not in self.replying:
            self.connection.send(FrameKind.REPLY, reply)
        return None

    def inventory(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        versions = self.store.verified(get(request, "run_id", str, 1, 256), request.get("verify") is True)
        return {"versions": [version.to_json() for version in versions]}


class TrainerSession(Session):
    """Session with a process on this host, over the Unix socket; it owns at most one shard."""

    with_layout: ClassVar[set[str]] = {"publish"}
    replying: ClassVar[set[str]] = {"slot", "layout", "open"}

    def __init__(self, holder: Any, connection: Connection) -> None:
        super().__init__(holder, connection)
        self.shard: Shard | None = None
        self.common: Shard | None = None  # of what it has in common with others, written by ``members`` of this host
        self.members = 0
        self.gathering: Gathering | None = None
        self.attempt, self.lease = 0, ("", "")
        self._pid = connection.peer_pid
        self._born = birth_of(self._pid)
        self.grants = Grants(self.store.changed)
        self.writing: Holding | None = None
        self.opened: dict[int, Holding] = {}

    def end(self) -> None:
        """Handle the death of a trainer: complete versions are kept, and sent without limit; others are dropped."""
        with self.store.changed.change():
            for holding in self.opened.values():
                self.store.unpin(holding)
            self.holder.joined.discard(self)
            for shard in (self.shard, self.common):
                if shard is not None:
                    shard.unmap(self)
                    shard.writers.pop(self, None)
            self._abandon()
            self.grants.unlimit()
            if self.shard is not None and self.shard.trainer is self:
                self.shard.trainer = None

    @property
    def is_alive(self) -> bool:
        """Whether the trainer lives. Its children may hold the connection open, so its process is asked for too."""
        return not self.connection.hung_up and (not self._born or birth_of(self._pid) == self._born)

    def _wait_for(self, rivals: Callable[[], Iterable[Any]]) -> Any:
        """Return one of them that still lives after a while, or None; those that are dead are cut off."""
        deadline = time.monotonic() + _TAKEOVER_SECONDS
        with self.store.changed:
            while True:
                result = [rival for rival in rivals() if rival is not self]
                living = [rival for rival in result if rival.is_alive]
                for rival in result:
                    if rival not in living:
                        rival.connection.close()
                if not living or time.monotonic() > deadline:
                    return next(iter(living), None)
                self.store.changed.wait(_LOOK_SECONDS)

    def join(self, request: dict[str, Any], _: bytes) -> None:
        """Take a lease of a run for a job, as long as one of its trainers is connected."""
        run_id, job = get(request, "run_id", str, 1, 256), get(request, "job", str, 1, 256)

        def rivals() -> list[TrainerSession]:
            other = [session for session in self.holder.joined if session.lease != (run_id, job)]
            foreign = [session for session in other if session._pid != self._pid or not self._pid]  # 0: in a container
            return [session for session in foreign if session.lease[0] == run_id]

        with self.store.changed:
            if (rival := self._wait_for(rivals)) is not None:
                process = f"process {rival._pid}" if rival._pid else "a process in a container"
                raise ValueError(
                    f"run {run_id!r} is in use by another job, or by another Checkpointer of this one: {process}"
                    f" on {os.uname().nodename}; pass another run_id, or end that process"
                )
            self.lease = run_id, job
            self.holder.joined.add(self)

    def assign(self, request: dict[str, Any], _: bytes) -> None:
        run_id, wanted = get(request, "run_id", str, 1, 256), get(request, "wanted", list)
        placed = frozenset(ShardId.from_json(shard) for shard in get(request, "placed", list))
        if not all(isinstance(digest, str) for digest in wanted):
            raise CorruptMessageError("a digest is no text")
        chosen = _order(request.get("chosen")) or (-1, -1)
        self.store.assign(run_id, Assignment(placed, frozenset(wanted), get(request, "attempt", int), chosen))

    def release(self, request: dict[str, Any], _: bytes) -> None:
        topologies = [str(topology) for topology in get(request, "topologies", list)]
        self.store.release(get(request, "run_id", str, 1, 256), topologies)

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
        if (said := request.get("common")) is not None:
            named = shard_id.common_id(get(said, "group", int, 0, 1 << 31))
            room = SlotSize(get(said, "payload_bytes", int, 1, MAX_PAYLOAD_BYTES), 0)
            self.members, self.common = get(said, "members", int, 1, 1 << 20), self.store.register(named, room)
        shard = self.store.register(shard_id, SlotSize.from_json(request))
        with self.store.changed:
            if self._wait_for(lambda: [shard.trainer] if shard.trainer is not None else []) is not None:
                raise ValueError(f"{shard_id} belongs to another trainer that is connected; end that one first")
            kept = shard.keep if shard.attempt == attempt else None  # it registers again, with more room
            shard.trainer, shard.role, shard.keep = self, "own", self.store.chosen(shard_id.run_id, attempt) or kept
            if shard.keep is not None:  # what is left of before is not sent: it would hold the only slot
                shard.attempt = attempt
                if self.common is not None:
                    self.common.keep = shard.keep
            self.end_receiver(shard)  # left over from when the owner lived at that peer: it would hold a slot
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
        if self.common is not None:
            self.common.writers[self] = attempt
        return {"payload_bytes": shard.size.payload_bytes, "unreachable": unreachable}

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
        call, deadline = self.holder.call, self.holder.config.deadline_seconds
        senders = {peer: Replicator(self.store, shard, peer, call, self.grants, deadline) for peer in addresses}
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

    def slot(self, request: dict[str, Any], _: bytes) -> None:
        shard, keep_step = self.own(), request.get("keep_step")
        get(request, "step", int)
        if self.writing is not None or self.gathering is not None:
            self._abandon()
        with self.store.changed:
            shard.attempt = self.attempt
            if keep_step is not None:
                shard.keep = shard.order_of(get(request, "keep_step", int), self.attempt) or shard.keep
        try:
            self.writing = self.store.begin(shard, shard.keep)
            if self.writing is not None and self.common is not None:
                self.common.keep = shard.keep
                self.gathering = self.store.gather(self.common, (self.attempt, request["step"]), self.members)
        except BudgetError as error:
            shard.last_error = str(error)
        if self.writing is None or (self.common is not None and self.gathering is None):
            self._abandon()
            return self.connection.send(FrameKind.REPLY, {"slot": None})
        content: dict[str, Any] = {}
        descriptors: list[int] = []
        given = [("slot", self.writing, shard)]
        if self.common is not None and self.gathering is not None:
            given.append(("common", self.gathering.holding, self.common))
        for name, holding, its in given:
            descriptors += [] if self in holding.mapped else [holding.slot.descriptor]
            holding.mapped.add(self)
            numbers = [each.number for each in its.holdings]
            content[name] = {"number": holding.number, "numbers": numbers, **holding.slot.size.to_json()}
        return self.connection.send(FrameKind.REPLY, content, descriptors=tuple(descriptors))

    def _abandon(self) -> None:
        """Drop what is being written, and the version that ranks of this host write together, unless this one has
        written its part of that."""
        with self.store.changed:
            self.gathering = None
            if self.common is not None and self.shard is not None and (gathering := self.common.gathering) is not None:
                is_past = gathering.order[0] != self.attempt or self.shard.id.owner in gathering.published
                if not is_past:
                    self.store.end_gathering(self.common, False)
        writing, self.writing = self.writing, None
        if writing is not None:
            self.store.abandon(writing)

    def publish(self, request: dict[str, Any], layout: bytes) -> dict[str, Any] | None:
        """Make what was written a version, and with it, if all others of this host have written theirs, what they have
        in common."""
        shard, holding = self.own(), self.writing
        if holding is None or holding.number != get(request, "slot", int):
            raise ValueError("that slot is not being written by this trainer")
        step, payload_bytes = get(request, "step", int), get(request, "payload_bytes", int, 0, MAX_PAYLOAD_BYTES)
        said, pieces = request.get("alike"), get(request, "pieces", list)
        if not all(type(size) is int and size >= 0 for size in pieces) or (pieces and sum(pieces) != payload_bytes):
            raise ValueError(f"the pieces do not add up to {payload_bytes} bytes")
        holding.slot.check_room(payload_bytes, len(layout))
        stated, alike = Manifest.stated(shard.id, step, self.attempt, payload_bytes), None
        if said is not None:
            alike = Manifest.from_json(said)
            group, shared = -1 - alike.shard.owner, alike.version.digest
            if (alike.shard, alike.order) != (shard.id.common_id(group), stated.order):
                raise ValueError(f"what ranks have alike is of {alike.shard}, step {alike.step}")
            # nothing of it is in the payload, or codes, which have other digests, or its first bytes
            whole = 0 if self.gathering or pieces else min(alike.payload_bytes, payload_bytes) // stated.chunk_bytes
            stated = replace(stated, shared=shared, group=group, chunk_crcs=alike.chunk_crcs[:whole])
        if alike is not None and self.gathering is not None:
            sealed = self._contribute(shard, holding, stated, layout, alike, pieces)
        else:
            self.writing = None
            sealed = self.holder.sealing.submit(self._seal, shard, holding, stated, layout, tuple(pieces))
        if request.get("wait") is True:
            if (manifest := sealed.result()) is None:
                raise ThinwireError(f"step {step} was not published: {shard.last_error}")
            return {"version": manifest.listed("own").to_json()}
        return None

    def _contribute(
        self, shard: Shard, holding: Holding, stated: Manifest, layout: bytes, alike: Manifest, pieces: list[int]
    ) -> Future[Manifest | None]:
        """Publish together with the other ranks of this host: all of their versions are sealed, or none."""
        gathering, sealed = self.gathering, Future[Manifest | None]()
        if self.common is None or gathering is None or self.common.id != alike.shard:
            raise ValueError("nothing is written together with other ranks: call hello with what they have in common")
        gathering.holding.slot.check_room(alike.payload_bytes, 0)
        stated = replace(stated, common_bytes=alike.payload_bytes)
        self.writing = self.gathering = None

        def then(is_complete: bool) -> None:
            if is_complete:
                job = self.holder.sealing.submit(self._seal, shard, holding, stated, layout, tuple(pieces))
                job.add_done_callback(lambda job: sealed.set_result(job.result()))
            else:
                shard.failed = stated.order
                shard.last_error = f"step {stated.step}: not all ranks of this host have published it alike"
                self.store.abandon(holding)
                sealed.set_result(None)

        self.store.contribute(self.common, gathering, shard.id.owner, alike, then)
        return sealed

    def _seal(
        self, shard: Shard, holding: Holding, stated: Manifest, layout: bytes, pieces: tuple[int, ...]
    ) -> Manifest | None:
        try:
            manifest = holding.slot.digest(stated, layout)
            self.store.seal(holding, manifest, layout, pieces)
            return manifest
        except Exception as error:
            shard.last_error, shard.failed = f"step {stated.step}: {error}", stated.order
            log.exception("step %s of %s was not sealed", stated.step, shard.id)
            self.store.abandon(holding)
            return None

    def abandon(self, request: dict[str, Any], _: bytes) -> None:
        if self.writing is not None and self.writing.number == get(request, "slot", int):
            self._abandon()

    def leave(self, request: dict[str, Any], _: bytes) -> None:
        """Have the ranks of this host write no version of that step together, also those that have not begun yet."""
        order = self.attempt, get(request, "step", int)
        self._abandon()
        if self.common is not None:
            self.store.give_up(self.common, order)

    def status(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        shard = self.own()
        short = self.store.fill_up(shard) or (self.common and self.store.fill_up(self.common)) or ""
        return {**self.holder.shard_status(shard), "safe": shard.is_safe(self.attempt), "short": short}

    @staticmethod
    @contextlib.contextmanager
    def _calling(source: str) -> Iterator[None]:
        """Call another holder. Raises ThinwireError if it is lost: this trainer's connection is not."""
        try:
            yield
        except LostPeerError as error:
            raise ThinwireError(f"holder {source}: {error}") from error

    def look(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        """What other holders have of a run, all asked at once; or why one did not say."""
        asked = {"run_id": get(request, "run_id", str, 1, 256), "verify": request.get("verify") is True}
        patience, wait = get(request, "seconds", int, 1, 600), _VERIFY_SECONDS if asked["verify"] else None

        def ask(source: Any) -> dict[str, Any] | str:
            try:
                with contextlib.closing(self.holder.call(str(source), patience)) as connection:
                    answer = connection.request("inventory", asked, seconds=wait or patience)
                    return {"versions": get(answer.json, "versions", list)}
            except (ThinwireError, ValueError) as error:
                return str(error).removeprefix(f"holder {source}: ")

        sources = get(request, "sources", list, 0, _MOST_SOURCES)
        with ThreadPoolExecutor(min(64, max(1, len(sources)))) as pool:
            return {"answers": list(pool.map(ask, sources))}

    def layout(self, request: dict[str, Any], _: bytes) -> None:
        """The layout of a version that another holder has."""
        source = get(request, "source", str, 1, 300)
        with self._calling(source), contextlib.closing(self.holder.call(source)) as connection:
            layout = self.holder.offered(connection, Version.from_json(get(request, "version", dict)), source)[2]
        self.connection.send(FrameKind.REPLY, {}, layout)

    def fetch(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        version, sources = Version.from_json(get(request, "version", dict)), get(request, "sources", list, 1, 64)
        if not all(isinstance(source, str) for source in sources):
            raise CorruptMessageError("an address is no text")
        with self._calling(sources[0]):
            num_bytes, seconds = self.holder.fetch(version, sources, request.get("evict") is not False)
        return {"bytes": num_bytes, "seconds": seconds}

    def keep(self, request: dict[str, Any], _: bytes) -> None:
        version, shard = Version.from_json(get(request, "version", dict)), self.own()
        with self.store.reading(version), self.store.changed:
            if version.shard != shard.id:
                raise ValueError(f"this connection belongs to {shard.id}, not to {version.shard}")
            shard.keep = version.attempt, version.step
            if self.common is not None:
                self.common.keep = shard.keep
            self.store.changed.notify_all()
            self.store.changed.wait_for(  # useless versions that are sent would keep their slots from the next one
                lambda: not any(h.readers and h.manifest and not shard.is_wanted(h.manifest) for h in shard.holdings),
                _UNWANTED_SECONDS,
            )

    def open(self, request: dict[str, Any], _: bytes) -> None:
        holding = self.store.pin(Version.from_json(get(request, "version", dict)))
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

    def close(self, request: dict[str, Any], _: bytes) -> None:
        if (holding := self.opened.pop(get(request, "handle", int), None)) is not None:
            self.store.unpin(holding)

    def forget(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        topology = get(request, "topology", str, 1, 256) if request.get("topology") is not None else None
        run_id = get(request, "run_id", str, 1, 256)

        def trainers() -> list[Any]:
            shards = [shard for shard in self.store.of_run(run_id) if topology in (None, shard.id.topology)]
            return [shard.trainer for shard in shards if shard.trainer is not None]

        with self.store.changed:
            if self._wait_for(trainers) is None:  # who has just ended is cut off, and leaves
                self.store.changed.wait_for(lambda: not trainers(), _TAKEOVER_SECONDS)
        shards = self.store.forget(run_id, topology)
        if topology is None:
            RunMarker(self.holder.config.socket_path, run_id).remove()  # what this host remembers of it
        return {"shards": shards}

    def holder_status(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        return self.holder.status()

    def reload(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        return {"secrets": self.holder.reload()}

    def stop(self, request: dict[str, Any], _: bytes) -> None:
        self.holder.stopping.set()

    operations: ClassVar[dict[str, Operation]] = {
        "join": join, "place": assign, "release": release, "hello": hello, "slot": slot, "publish": publish,
        "abandon": abandon, "leave": leave, "status": status, "inventory": Session.inventory, "look": look,
        "fetch": fetch, "layout": layout, "keep": keep, "open": open, "close": close, "forget": forget,
        "holder_status": holder_status, "reload": reload, "stop": stop,
    }  # fmt: skip


class PeerSession(Session):
    """Session with the holder of another host, over TCP: it keeps shards here, and reads the versions here."""

    with_layout: ClassVar[set[str]] = {"receive"}
    replying: ClassVar[set[str]] = {"offer", "read"}

    def register(self, request: dict[str, Any], _: bytes) -> dict[str, Any]:
        shard_id = ShardId.from_json(get(request, "shard", dict))
        if shard_id.owner < 0:
            raise ValueError(f"{shard_id}: bytes that ranks have in common are not sent; each host makes them itself")
        if not self.store.is_placed(shard_id):
            raise ValueError(f"{shard_id} is not placed on this host any more")
        shard = self.store.register(shard_id, SlotSize.from_json(request))
        with self.store.changed:
            shard.sender = self.connection
            versions = [manifest.version.to_json() for _, manifest in shard.complete()]
        return {"versions": versions}

    def receive(self, request: dict[str, Any], layout: bytes) -> dict[str, Any]:
        manifest = Manifest.from_json(get(request, "manifest", dict))
        if (manifest.layout_bytes, manifest.layout_crc) != (len(layout), zlib.crc32(layout)):
            raise CorruptMessageError("the layout was altered on the way here")
        if (shard := self.store.shards.get(manifest.shard)) is None:
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
            with self.store.changed.change():
                shard.receiver = None

    def _take_over(self, shard: Shard) -> None:
        """End the sender's last call: a sender that calls again has given it up, even if it looks alive here."""
        with self.store.changed:
            if not self.end_receiver(shard):
                raise ThinwireError(f"{shard.id} is being received on another connection")
            shard.receiver = self.connection

    def offer(self, request: dict[str, Any], _: bytes) -> None:
        with self.store.reading(Version.from_json(get(request, "version", dict))) as holding:
            manifest, layout = holding.slot.read()
            content = {"manifest": manifest.to_json(), "room": holding.slot.size.to_json()}
            self.connection.send(FrameKind.REPLY, content, layout)

    def read(self, request: dict[str, Any], _: bytes) -> None:
        """Some chunks of a version."""
        first, last = (get(request, name, int, 0, 1 << 32) for name in ("first", "last"))
        with self.store.reading(Version.from_json(get(request, "version", dict))) as holding:
            manifest = holding.slot.read()[0]
            started = time.monotonic()
            self.connection.send(FrameKind.REPLY, {})
            for _piece in send_payload(self.connection, holding.slot, manifest, chunks=(first, last)):
                reach("serve", manifest.shard.owner, manifest.step)
        start, end = manifest.bounds(first, last)
        self.holder.note("served", end - start, time.monotonic() - started)

    operations: ClassVar[dict[str, Operation]] = {
        "register": register, "receive": receive, "offer": offer, "read": read, "inventory": Session.inventory,
    }  # fmt: skip


def _order(keep: Any) -> tuple[int, int] | None:
    if keep is None:
        return None
    if not isinstance(keep, list) or [type(part) for part in keep] != [int, int]:
        raise CorruptMessageError("not an attempt and a step")
    return keep[0], keep[1]
