"""The trainer's side of a holder: register a shard, write versions straight into shared memory, read them back."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.checkpoint.holder.faultpoint import reach
from thinwire.checkpoint.holder.frames import Connection, Frame, FrameKind, closed_on_error
from thinwire.checkpoint.holder.slots import Slot, SlotSize
from thinwire.checkpoint.holder.version import (
    MAX_LAYOUT_BYTES,
    Manifest,
    ShardId,
    Version,
    field,
    preferred,
    stored_steps,
    topology_digest,
)
from thinwire.errors import CorruptMessageError, LostPeerError, PeerError, ThinwireError

DEFAULT_LAYOUT_BYTES = 1 << 20
_SLOW_SECONDS = 600.0  # for requests that read, move or free whole versions
_LOOK_SECONDS = 10  # patience with a holder that is asked by another one


class Common(NamedTuple):
    """What a rank has in common with the others of its ``group``: bytes, and the ranks of this host that write them."""

    group: int
    payload_bytes: int
    members: int


class SlotWriter:
    """A slot that is being written. It counts only after ``publish``; ``abandon``, or dying, leaves no trace."""

    def __init__(self, client: HolderClient, slot: Slot, number: int, step: int, common: Slot | None = None) -> None:
        self._client, self._number, self.step = client, number, step
        self.slot = slot
        self.payload: memoryview = slot.payload()
        self.common = common.payload() if common is not None else None
        self._room_bytes = len(self.payload)

    def publish(
        self,
        layout: bytes,
        payload_bytes: int | None = None,
        wait: bool = False,
        pieces: Sequence[int] = (),
        alike: Manifest | None = None,
    ) -> None:
        """Publish the first ``payload_bytes`` of the payload (default all) as a version described by ``layout``.

        ``pieces`` are lengths: a piece that is the same as the one of that number in the version before is not sent
        again. ``alike`` is of the bytes that ranks of a group should have alike: its digest is compared. They are
        the first ones of the payload, and not digested again; or, if `hello` said so, they are in ``common`` instead,
        and the version becomes complete together with those of the other ranks of this host.

        Returns at once; the holder computes the digests, even if this process dies now. With ``wait``, returns when
        the version is complete on this host. Raises ValueError if it does not fit, ThinwireError if it failed.
        """
        num_bytes = self._room_bytes if payload_bytes is None else payload_bytes
        content: dict[str, Any] = {"slot": self._number, "step": self.step, "payload_bytes": num_bytes, "wait": wait}
        content |= {"pieces": list(pieces), "alike": alike and alike.to_json()}
        reach("publish")
        self._client.request("publish", content, layout, seconds=_SLOW_SECONDS if wait else None)
        reach("published")

    def abandon(self) -> None:
        """Give the slot back, empty."""
        self._client.request("abandon", {"slot": self._number})


class SlotReader(contextlib.AbstractContextManager["SlotReader"]):
    """A mapped version that is not overwritten until ``close``. Writing to ``payload`` changes a private copy only.

    What its owner has in common with other ranks is in ``common``, if it is kept there.

    Example: with client.open(version) as reader: state = restore(reader.layout, reader.payload)
    """

    def __init__(self, slot: Slot, manifest: Manifest, layout: bytes, on_close: Any) -> None:
        self._slot, self._on_close = slot, on_close
        self.manifest, self.layout = manifest, layout
        self.payload: memoryview = slot.payload(manifest.payload_bytes)
        self._beside: SlotReader | None = None

    @property
    def common(self) -> memoryview | None:
        return self._beside.payload if self._beside is not None else None

    def __exit__(self, *_: object) -> None:
        self.close()

    def verify(self) -> None:
        """Raise CorruptMessageError if the payload does not match its digests now."""
        for reader in filter(None, (self, self._beside)):
            reader._slot.verify()

    def close(self) -> None:
        """Let the version be overwritten from now on, so views of ``payload`` must not be used any more."""
        if self._beside is not None:
            self._beside.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            with contextlib.suppress(BufferError):
                self.payload.release()
            self._slot.close()
            on_close()


class HolderClient(contextlib.AbstractContextManager["HolderClient"]):
    """A connection to the holder of this host; thread-safe. Every call raises LostPeerError once the holder is gone.

    Example:
        client = HolderClient.connect(socket_path, secret)
        client.hello("my-run", {"machines": [0, 1]}, owner=0, payload_bytes=1 << 30, replicas=["10.0.0.2:7411"])
        writer = client.slot(step=1)
        if writer is not None:
            writer.payload[:5] = b"hello"
            writer.publish(layout=b"{}")
            client.grant_all()
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._slots: dict[int, Slot] = {}
        self._num_slots = 0
        self.shard: ShardId | None = None
        self.unreachable: dict[str, str] = {}

    @classmethod
    def connect(cls, socket_path: str | Path, secret: bytes, timeout_seconds: float = 10.0) -> HolderClient:
        """Connect to the holder that listens at ``socket_path``.

        Raises LostPeerError if no holder listens there, PeerError if it has another secret.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # with a timeout of Python's own, a full queue of callers would be an error at once
        limit = struct.pack("ll", *divmod(int(timeout_seconds * 1e6), 10**6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            sock.connect(str(socket_path))
        except OSError as error:
            sock.close()
            raise LostPeerError(f"no holder at {socket_path} ({error}); start one with: thinwire holder") from error
        connection = Connection(sock, timeout_seconds, take_descriptors=True)
        pid = connection.peer_pid
        with closed_on_error(connection):
            try:
                connection.greet(secret)
            except PeerError as error:
                what = "does not answer" if isinstance(error, LostPeerError) else "refuses"
                text = f"the holder at {socket_path}, process {pid}, {what}: {error}"
                stop = f"to end one of an earlier start or release: thinwire holder --stop --pid {pid}"
                hint = f"; {stop}; to wake one: kill -CONT {pid}" if pid else ""
                raise type(error)(text + hint) from error
        return cls(connection)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, as if this process had died: complete versions stay, and go on to the peers."""
        self._connection.close()
        for slot in self._slots.values():
            slot.close()
        self._slots = {}

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed or was lost."""
        return self._connection.is_closed

    def request(
        self, op: str, content: dict[str, Any] | None = None, payload: bytes = b"", seconds: float | None = None
    ) -> dict[str, Any]:
        """Send one request to the holder and return the JSON of its answer; its errors are raised here."""
        with self._lock:
            frame = self._connection.request(op, content or {}, payload, seconds)
            _check(frame, 0, f"the holder's answer to {op!r} has more than was asked for")
            return frame.json

    def hello(
        self,
        run_id: str,
        topology: dict[str, Any],
        owner: int,
        payload_bytes: int,
        replicas: list[str] | tuple[str, ...] = (),
        attempt: int = 0,
        layout_bytes: int = DEFAULT_LAYOUT_BYTES,
        common: Common | None = None,
    ) -> None:
        """Register this process as the owner of a shard, with two slots here and two on each of ``replicas``.

        ``common`` is what it has in common with other ranks: two slots for all of those on this host, which are not
        sent.

        While copies move to where `assign` says, a shard may begin with one. A shard that was here with less room gets
        more: each of its slots grows when it is overwritten next, so that no version is lost.

        ``topology`` is any JSON object; versions of different topologies never mix. ``layout_bytes`` is the room for
        the layout beside each payload. Versions of the shard that are here stay, and are sent to replicas that lack
        them. Nothing is sent before a grant. Peers that cannot be reached now are in ``unreachable`` and are tried
        again later.

        Raises ValueError, with the bytes needed and available, if a holder has no room, or if another living trainer
        owns the shard.
        """
        shard = ShardId(run_id, topology_digest(topology), owner)
        content = {"shard": shard.to_json(), "payload_bytes": payload_bytes, "layout_bytes": layout_bytes}
        content |= {"attempt": attempt, "replicas": list(replicas), "common": common and common._asdict()}
        answer = self.request("hello", content, seconds=_SLOW_SECONDS)
        self.shard, self.unreachable = shard, field(answer, "unreachable", dict)
        self._num_slots = 2 if common is None else 4

    def slot(self, step: int, keep_step: int | None = None) -> SlotWriter | None:
        """Return a slot for the version of ``step``, or None if none may be overwritten now: then skip the version.

        ``keep_step`` is the newest step that all owners have everywhere; that version is never overwritten, older ones
        may be, newer ones once all replicas have them or are given up. It is remembered for later calls, and for the
        replicas. A writer that was neither published nor abandoned before is abandoned.
        """
        with self._lock:
            seconds = _SLOW_SECONDS if len(self._slots) < self._num_slots else None  # one may have to grow
            frame = self._connection.request("slot", {"step": step, "keep_step": keep_step}, seconds=seconds)
            answer = frame.json
            if answer.get("slot") is None:
                return None
            given = [field(answer, name, dict) for name in ("slot", "common") if name in answer]
            numbers = [field(each, "number", int) for each in given]
            new = [each for each in given if each["number"] not in self._slots]
            _check(frame, len(new), "the holder did not hand over the slot")
            for freed in set(self._slots) - {number for each in given for number in field(each, "numbers", list)}:
                self._slots.pop(freed).close()
            for each, descriptor in zip(new, frame.descriptors, strict=True):
                self._slots[each["number"]] = Slot(descriptor, SlotSize.from_json(each))
            slot, *common = (self._slots[number] for number in numbers)
            return SlotWriter(self, slot, numbers[0], step, *common)

    def leave(self, step: int) -> None:
        """Say that this rank writes no version of that step, so that those of this host write none together."""
        self.request("leave", {"step": step})

    def grant(self, num_bytes: int) -> None:
        """Let the holder send this much more of the shard's versions to its peers, over all of them together."""
        self._cast({"op": "grant", "bytes": num_bytes})

    def grant_all(self) -> None:
        """Let the holder send all pending versions, until ``revoke``."""
        self._cast({"op": "grant_all"})

    def revoke(self) -> None:
        """Revoke the granted bytes that are not yet sent; bytes in the network's buffers go on."""
        self._cast({"op": "revoke"})

    def _cast(self, content: dict[str, Any]) -> None:
        with self._lock:
            self._connection.send(FrameKind.CAST, content)

    def status(self) -> dict[str, Any]:
        """Return the status of this shard: newest_local and newest_replicated (steps or None), free (whether ``slot``
        gives one), writing, bytes_pending, bytes_sent, dropped, last_error, versions, and replicas by address."""
        return self.request("status")

    def holder_status(self) -> dict[str, Any]:
        """Return the status of the holder: pid, address (for peers), budget_bytes, used_bytes, traffic, shards."""
        return self.request("holder_status")

    def inventory(self, run_id: str | None = None, verify: bool = True) -> list[Version]:
        """Return the complete versions of a run (default: of hello) on this host; with ``verify``, only those whose
        bytes match their digests now."""
        run = run_id if run_id is not None or self.shard is None else self.shard.run_id
        if run is None:
            raise ValueError("say which run, or call hello first")
        content = {"run_id": run, "verify": verify}
        answer = self.request("inventory", content, seconds=_SLOW_SECONDS)
        return [Version.from_json(version) for version in field(answer, "versions", list)]

    def fetch(self, version: Version, *sources: str, evict: bool = True) -> dict[str, Any]:
        """Fetch a version from the holders at ``sources`` (``host:port``) into a slot here, in stripes from all of them
        that have it, checking every digest.

        With ``evict``, what nobody goes back to makes room (`assign`). Returns ``bytes`` and ``seconds``; 0 bytes if it
        is here already. Raises BudgetError as a ValueError if there is no room, ThinwireError if no source has it and
        lives, CorruptMessageError if its bytes are wrong; then nothing has changed but the slot is empty.
        """
        content = {"version": version.to_json(), "sources": list(sources), "evict": evict}
        return self.request("fetch", content, seconds=_SLOW_SECONDS)

    def prefetch(
        self, run_id: str, owners: Collection[int], world_size: int, addresses: Iterable[str]
    ) -> dict[str, Any]:
        """Bring the shards of ``owners`` to this host, of the step that a restart goes back to: the newest that the
        holders have whole among them, or a certified one if ranks differ in newer ones.

        It rebuilds copies while no trainer runs: on a host that has just joined, or on any other after a host was lost
        for good. Call it on each host, in any order; it needs no `hello`. What is here already is not moved again. It
        takes free memory only: nothing is evicted, and what does not fit is left to the next `restore`, which finds
        what was brought. A trainer may restore at the same time: of two who fetch one version, one waits for the other.

        Args:
            run_id: the run.
            owners: ranks whose shards are placed on this host, see `thinwire.checkpoint.registration.holders_of`.
            world_size: number of ranks of the run; a step is whole if the shard of each of them is somewhere.
            addresses: addresses (``host:port``) of the holders of all hosts; one that does not answer is left out.

        Returns ``step`` (None if no step is whole), ``bytes`` that were moved, and ``missing``: for each owner whose
        shard could not be brought, why. Raises LostPeerError if the holder of this host is gone.

        Example: client.prefetch("my-run", owners=[0, 3], world_size=4, addresses=["10.0.0.1:7411", "10.0.0.2:7411"])
        """
        here = self.inventory(run_id, verify=False)  # at the address ""
        stored = stored_steps({"": here, **self.look(run_id, addresses)[0]})
        ranks = set(range(world_size))
        whole = [each for each in stored if set(each.copies) == ranks and not (each.unlike or each.lacking)]
        result = preferred(whole, lambda each: each.certified)
        if result is None:
            return {"step": None, "bytes": 0, "missing": {}}
        moved, missing = 0, {}
        for owner in sorted(owners):
            version, holders = next(iter(result.copies[owner].values())), tuple(result.copies[owner])
            common = version.common
            wanted = [(version, holders)] + ([(common, result.common[common.digest])] if common is not None else [])
            for each, sources in wanted:
                try:
                    moved += int(self.fetch(each, *sources, evict=False)["bytes"]) if "" not in sources else 0
                except LostPeerError:
                    raise
                except (ThinwireError, ValueError) as error:
                    missing[owner] = str(error)
        return {"step": result.step, "bytes": moved, "missing": missing}

    def look(
        self, run_id: str, addresses: Iterable[str], seconds: int = _LOOK_SECONDS, verify: bool = False
    ) -> tuple[dict[str, list[Version]], dict[str, str]]:
        """Return the versions of a run on other hosts, by the addresses of their holders, and why others say nothing.

        This host's holder asks all of them at once, with a patience of ``seconds`` for each. With ``verify`` they
        compare the bytes with their digests first; else that is done when a version is fetched.
        """
        result: dict[str, list[Version]] = {}
        silent: dict[str, str] = {}
        asked = sorted(set(addresses))
        content = {"run_id": run_id, "sources": asked, "seconds": seconds, "verify": verify}
        answers = field(self.request("look", content, seconds=_SLOW_SECONDS), "answers", list, len(asked), len(asked))
        for address, answer in zip(asked, answers, strict=True):
            if isinstance(answer, str):
                silent[address] = answer
            else:
                result[address] = [Version.from_json(version) for version in field(answer, "versions", list)]
        return result, silent

    def layout(self, version: Version, source: str) -> bytes:
        """Return the layout of a version that the holder at ``source`` has. Raises ThinwireError if it has not."""
        with self._lock:
            asked = {"version": version.to_json(), "source": source}
            frame = self._connection.request("layout", asked, seconds=_SLOW_SECONDS)
            return self._connection.read_payload(frame, MAX_LAYOUT_BYTES)

    def join(self, run_id: str, job: str) -> None:
        """Take a lease of a run for a job, until this connection ends. All ranks of a job give the same ``job``.

        Raises ValueError, after 3 seconds in which it may end, if a trainer of another job with that run is connected.
        """
        self.request("join", {"run_id": run_id, "job": job})

    def assign(
        self,
        run_id: str,
        placed: Iterable[ShardId],
        wanted: Iterable[str],
        attempt: int,
        chosen: tuple[int, int] | None = None,
    ) -> None:
        """Tell the holder which shards of a run belong here, and the digests of the versions that stay, or come, until
        `release`. All else of the run may be evicted when memory is needed.

        Call it once for each host, before any rank says `hello`, with what all ranks have agreed on: ``attempt`` is
        that of the versions that they will write, ``chosen`` the attempt and step that they go back to.
        """
        shards = [shard.to_json() for shard in placed]
        content = {"run_id": run_id, "placed": shards, "wanted": list(wanted), "attempt": attempt, "chosen": chosen}
        self.request("place", content)

    def release(self, run_id: str, topologies: Iterable[str]) -> None:
        """Free the shards of these topologies that are not placed here: all copies are where they belong."""
        self.request("release", {"run_id": run_id, "topologies": list(topologies)}, seconds=_SLOW_SECONDS)

    def keep(self, version: Version) -> None:
        """Mark the version of its shard from which training goes on: it is kept until a later ``keep_step`` says that a
        newer one is everywhere.

        Raises ThinwireError if it is not on this host.
        """
        self.request("keep", {"version": version.to_json()})

    def open(self, version: Version, with_common: bool = True) -> SlotReader:
        """Map the version's layout and payload, and what its owner has in common with other ranks.

        Raises ThinwireError if it is not on this host. The payload was compared with its digests when the inventory was
        made; ``SlotReader.verify`` does it now.
        """
        with self._lock:
            frame = self._connection.request("open", {"version": version.to_json()})
            _check(frame, 1, "the holder did not hand over the slot")
            slot = Slot(frame.descriptors[0], SlotSize.from_json(frame.json), writable=False)
        handle = field(frame.json, "handle", int)

        def on_close() -> None:
            with contextlib.suppress(ThinwireError):
                self.request("close", {"handle": handle})

        try:
            manifest, layout = slot.read()
            if manifest.version.digest != version.digest:
                raise CorruptMessageError(f"{version.shard}, step {version.step}: the slot holds another version")
            reader = SlotReader(slot, manifest, layout, on_close)
            if with_common and (common := manifest.version.common) is not None:
                reader._beside = self.open(common)
        except BaseException:
            slot.close()
            on_close()
            raise
        return reader

    def forget(self, run_id: str, topology: str | None = None) -> int:
        """Free all memory of a run (or of one topology of it) on this host and return the number of shards freed.

        Raises ValueError while a trainer uses one.
        """
        content = {"run_id": run_id, "topology": topology}  # to free 25 GB takes more than 10 s
        return field(self.request("forget", content, seconds=_SLOW_SECONDS), "shards", int)

    def reload(self) -> int:
        """Have the holder read its secret and certificates again and return the number of secrets; nothing is lost.

        Raises ValueError, without any change there, if it cannot.
        """
        return field(self.request("reload"), "secrets", int)

    def stop_holder(self) -> None:
        """Ask the holder to send pending versions for a few seconds, and end. It may be gone before it answers."""
        with contextlib.suppress(LostPeerError):
            self.request("stop")


def _check(frame: Frame, num_descriptors: int, otherwise: str) -> None:
    """Raise CorruptMessageError unless an answer has that many descriptors, and no payload; then none stays open."""
    if len(frame.descriptors) != num_descriptors or frame.payload_bytes:
        for descriptor in frame.descriptors:
            os.close(descriptor)
        raise CorruptMessageError(otherwise)
