"""The trainer's side of a holder: register a shard, write versions straight into shared memory, read them back."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import CorruptMessageError, LostPeerError, ThinwireError
from thinwire.holder.faultpoint import reach
from thinwire.holder.frames import Connection, Frame, FrameKind
from thinwire.holder.slots import Slot, SlotSize
from thinwire.holder.version import Manifest, ShardId, Version, field, stored_steps, topology_digest

DEFAULT_LAYOUT_BYTES = 1 << 20
_SLOW_SECONDS = 600.0  # for requests that read or move whole versions
_LOOK_SECONDS = 30.0  # for what the holder asks of another one first


class SlotWriter:
    """A slot that is being written. It counts only after ``publish``; ``abandon``, or dying, leaves no trace."""

    def __init__(self, client: HolderClient, slot: Slot, number: int, step: int) -> None:
        self._client, self._number, self.step = client, number, step
        self.slot = slot
        self.payload: memoryview = slot.payload()
        self._room_bytes = len(self.payload)

    def publish(
        self,
        layout: bytes,
        payload_bytes: int | None = None,
        wait: bool = False,
        shared_bytes: int = 0,
        pieces: Sequence[int] = (),
    ) -> None:
        """Publish the first ``payload_bytes`` of the payload (default all) as a version described by ``layout``.

        All owners should have the first ``shared_bytes`` of them alike: they get a digest of their own. ``pieces`` are
        lengths: a piece that is the same as the one of that number in the version before is not sent again.

        Returns at once; the holder computes the digests, even if this process dies now. With ``wait``, returns when
        the version is complete on this host. Raises ValueError if it does not fit, ThinwireError if it failed.
        """
        num_bytes = self._room_bytes if payload_bytes is None else payload_bytes
        content = {"slot": self._number, "step": self.step, "payload_bytes": num_bytes, "wait": wait}
        content |= {"shared_bytes": shared_bytes, "pieces": list(pieces)}
        reach("publish")
        self._client.request("publish", content, layout, seconds=_SLOW_SECONDS if wait else None)
        reach("published")

    def abandon(self) -> None:
        """Give the slot back, empty."""
        self._client.request("abandon", {"slot": self._number})


class SlotReader:
    """A mapped version that is not overwritten until ``close``. Writing to ``payload`` changes a private copy only.

    Example: with client.open(version) as reader: state = restore(reader.layout, reader.payload)
    """

    def __init__(self, slot: Slot, manifest: Manifest, layout: bytes, on_close: Any) -> None:
        self._slot, self._on_close = slot, on_close
        self.manifest, self.layout = manifest, layout
        self.payload: memoryview = slot.payload(manifest.payload_bytes)

    def __enter__(self) -> SlotReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def verify(self) -> None:
        """Raise CorruptMessageError if the payload does not match its digests now."""
        self._slot.verify()

    def close(self) -> None:
        """Let the version be overwritten from now on, so views of ``payload`` must not be used any more."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            with contextlib.suppress(BufferError):
                self.payload.release()
            self._slot.close()
            on_close()


class HolderClient:
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
        try:
            connection.greet(secret)
        except LostPeerError as error:
            connection.close()
            hint = f"; if it is stopped: kill -CONT {pid}" if pid else ""
            raise LostPeerError(
                f"the holder at {socket_path}, process {pid}, does not answer: {error}{hint}"
            ) from error
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def __enter__(self) -> HolderClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, as if this process had died: complete versions stay, and go on to the peers."""
        self._connection.close()
        for slot in self._slots.values():
            slot.close()
        self._slots = {}

    def request(
        self, op: str, content: dict[str, Any] | None = None, payload: bytes = b"", seconds: float | None = None
    ) -> dict[str, Any]:
        """Send one request to the holder and return the JSON of its answer; its errors are raised here."""
        with self._lock:
            frame = self._connection.request(op, content or {}, payload, seconds)
            if frame.payload_bytes or frame.descriptors:
                _close_all(frame)
                raise CorruptMessageError(f"the holder's answer to {op!r} has more than was asked for")
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
    ) -> None:
        """Register this process as the owner of a shard, with two slots here and two on each of ``replicas``.

        While copies move to where `place` says, a shard may begin with one. A shard that was here with less room gets
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
        content |= {"attempt": attempt, "replicas": list(replicas)}
        answer = self.request("hello", content, seconds=_SLOW_SECONDS)
        self.shard, self.unreachable = shard, field(answer, "unreachable", dict)

    def slot(self, step: int, keep_step: int | None = None) -> SlotWriter | None:
        """Return a slot for the version of ``step``, or None if none may be overwritten now: then skip the version.

        ``keep_step`` is the newest step that all owners have everywhere; that version is never overwritten, older ones
        may be, newer ones once all replicas have them or are given up. It is remembered for later calls, and for the
        replicas. A writer that was neither published nor abandoned before is abandoned.
        """
        with self._lock:
            frame = self._connection.request("slot", {"step": step, "keep_step": keep_step})
            answer = frame.json
            if answer.get("slot") is None:
                return None
            number, numbers = field(answer, "slot", int), field(answer, "slots", list)
            if len(frame.descriptors) != (number not in self._slots) or frame.payload_bytes:
                _close_all(frame)
                raise CorruptMessageError("the holder did not hand over the slot")
            for freed in set(self._slots) - set(numbers):
                self._slots.pop(freed).close()
            for descriptor in frame.descriptors:
                self._slots[number] = Slot(descriptor, SlotSize.from_json(answer))
            return SlotWriter(self, self._slots[number], number, step)

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
        content = {"run_id": run_asked_for(run_id, self.shard), "verify": verify}
        answer = self.request("inventory", content, seconds=_SLOW_SECONDS)
        return [Version.from_json(version) for version in field(answer, "versions", list)]

    def fetch(self, version: Version, source: str, evict: bool = True) -> dict[str, Any]:
        """Fetch a version from the holder at ``source`` (``host:port``) into a slot here, checking every digest.

        With ``evict``, what nobody goes back to makes room (`place`). Returns ``bytes`` and ``seconds``; 0 bytes if it
        is here already. Raises BudgetError as a ValueError if there is no room, ThinwireError if the source does not
        have it or is lost, CorruptMessageError if its bytes are wrong; then nothing has changed but the slot is empty.
        """
        content = {"version": version.to_json(), "source": source, "evict": evict}
        return self.request("fetch", content, seconds=_SLOW_SECONDS)

    def prefetch(
        self, run_id: str, owners: Collection[int], world_size: int, addresses: Iterable[str]
    ) -> dict[str, Any]:
        """Bring the shards of ``owners`` to this host, of the newest step that the holders have whole among them.

        It rebuilds copies while no trainer runs: on a host that has just joined, or on any other after a host was lost
        for good. Call it on each host, in any order; it needs no `hello`. What is here already is not moved again. It
        takes free memory only: nothing is evicted, and what does not fit is left to the next `restore`, which finds
        what was brought. A trainer may restore at the same time: of two who fetch one version, one waits for the other.

        Args:
            run_id: the run.
            owners: ranks whose shards are placed on this host: those of `thinwire.checkpoint.registration.placed_at`.
            world_size: number of ranks of the run; a step is whole if the shard of each of them is somewhere.
            addresses: addresses (``host:port``) of the holders of all hosts; one that does not answer is left out.

        Returns ``step`` (None if no step is whole), ``bytes`` that were moved, and ``missing``: for each owner whose
        shard could not be brought, why. Raises LostPeerError if the holder of this host is gone.

        Example: client.prefetch("my-run", owners=[0, 3], world_size=4, addresses=["10.0.0.1:7411", "10.0.0.2:7411"])
        """
        for stored in stored_steps({address: self._look(run_id, address) for address in ["", *addresses]}):
            if set(stored.copies) == set(range(world_size)) and not stored.unlike:
                return {"step": stored.step, **self._bring({owner: stored.copies[owner] for owner in owners})}
        return {"step": None, "bytes": 0, "missing": {}}

    def _look(self, run_id: str, address: str) -> list[Version]:
        """The versions of a run on this host, or on another, without comparing their bytes with digests."""
        if not address:
            return self.inventory(run_id, verify=False)
        try:
            answer = self.request("look", {"run_id": run_id, "source": address}, seconds=_LOOK_SECONDS)
        except LostPeerError:  # this host's
            raise
        except (ThinwireError, ValueError):
            return []
        return [Version.from_json(version) for version in field(answer, "versions", list)]

    def _bring(self, copies: dict[int, dict[str, Version]]) -> dict[str, Any]:
        moved, missing = 0, {}
        for owner, copy in sorted(copies.items()):
            reason = ""
            for source, version in copy.items():  # "", this host, is the first
                if not source:
                    break
                try:
                    moved += int(self.fetch(version, source, evict=False)["bytes"])
                    break
                except LostPeerError:
                    raise
                except (ThinwireError, ValueError) as error:
                    reason = str(error)
            else:
                missing[owner] = reason
        return {"bytes": moved, "missing": missing}

    def join(self, run_id: str, job: str) -> None:
        """Take a lease of a run for a job, until this connection ends. All ranks of a job give the same ``job``.

        Raises ValueError, after 3 seconds in which it may end, if a trainer of another job with that run is connected.
        """
        self.request("join", {"run_id": run_id, "job": job})

    def place(
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

    def open(self, version: Version) -> SlotReader:
        """Map the version's layout and payload. Raises ThinwireError if it is not on this host.

        The payload was compared with its digests when the inventory was made; ``SlotReader.verify`` does it now.
        """
        with self._lock:
            frame = self._connection.request("open", {"version": version.to_json()})
            if len(frame.descriptors) != 1 or frame.payload_bytes:
                _close_all(frame)
                raise CorruptMessageError("the holder did not hand over the slot")
            slot = Slot(frame.descriptors[0], SlotSize.from_json(frame.json), writable=False)
        handle = field(frame.json, "handle", int)

        def on_close() -> None:
            with contextlib.suppress(ThinwireError):
                self.request("close", {"handle": handle})

        try:
            manifest, layout = slot.read()
            if manifest.version.digest != version.digest:
                raise CorruptMessageError(f"{version.shard}, step {version.step}: the slot holds another version")
        except BaseException:
            slot.close()
            on_close()
            raise
        return SlotReader(slot, manifest, layout, on_close)

    def forget(self, run_id: str, topology: str | None = None) -> int:
        """Free all memory of a run (or of one topology of it) on this host and return the number of shards freed.

        Raises ValueError while a trainer uses one.
        """
        return field(self.request("forget", {"run_id": run_id, "topology": topology}), "shards", int)

    def reload(self) -> int:
        """Have the holder read its secret and certificates again and return the number of secrets; nothing is lost.

        Raises ValueError, without any change there, if it cannot.
        """
        return field(self.request("reload"), "secrets", int)

    def stop_holder(self) -> None:
        """Ask the holder to send pending versions for a few seconds, and end. It may be gone before it answers."""
        with contextlib.suppress(LostPeerError):
            self.request("stop")


def run_asked_for(run_id: str | None, shard: ShardId | None) -> str:
    """Return the run that was named, or else that of the registered shard. Raises ValueError if there is neither."""
    if run_id is not None:
        return run_id
    if shard is None:
        raise ValueError("say which run, or call hello first")
    return shard.run_id


def _close_all(frame: Frame) -> None:
    for descriptor in frame.descriptors:
        os.close(descriptor)
