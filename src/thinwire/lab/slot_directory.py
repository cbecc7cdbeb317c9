"""Slots as files in a tmpfs, in the holder's format: local recovery without a holder and without replicas."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.errors import CorruptMessageError, ThinwireError
from thinwire.holder.client import DEFAULT_LAYOUT_BYTES, SlotReader, run_asked_for
from thinwire.holder.slots import Slot, SlotSize, SlotView, choose_slot
from thinwire.holder.store import SLOTS_PER_SHARD, BudgetError
from thinwire.holder.version import Manifest, ShardId, Version, topology_digest


class FileWriter:
    """A slot that is being written, like ``SlotWriter``; ``publish`` computes the digests in the caller's threads."""

    def __init__(self, slots: SlotDirectory, slot: Slot, step: int) -> None:
        self._slots, self._slot, self.step = slots, slot, step
        self.payload: memoryview = slot.payload()
        self._room_bytes = len(self.payload)

    def publish(self, layout: bytes, payload_bytes: int | None = None, wait: bool = True) -> None:
        """Publish a version like ``SlotWriter.publish``, complete on return. Raises ValueError if it does not fit."""
        num_bytes = self._room_bytes if payload_bytes is None else payload_bytes
        self._slots.publish(self._slot, self.step, num_bytes, layout)

    def abandon(self) -> None:
        self._slot.clear()


class SlotDirectory:
    """A stand-in for ``HolderClient`` for local recovery, on files of a directory such as /dev/shm/thinwire-<run>.

    The files survive every process, and are lost with the host, so ``fetch`` and replicas are refused. They stay until
    ``forget``. For one thread at a time.

    Example: client = SlotDirectory("/dev/shm/thinwire-run-1"); client.hello("run-1", topology, rank, 1 << 30)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.shard: ShardId | None = None
        self.unreachable: dict[str, str] = {}
        self._attempt, self._lock = 0, -1
        self._keep: tuple[int, int] | None = None
        self._slots: list[Slot] = []
        self._readers: dict[str, int] = {}

    def __enter__(self) -> SlotDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the slots and release the shard; the files stay."""
        for slot in self._slots:
            slot.close()
        self._slots = []
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

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
        """Register the owner of a shard like ``HolderClient.hello``.

        Raises ValueError for replicas, for a shard with another living owner, and if the file system has too little
        room.
        """
        if replicas:
            raise ValueError("slots in a directory have no replicas: start a holder on each host, or give replicas=()")
        shard = ShardId(run_id, topology_digest(topology), owner)
        self.close()
        self._lock = self._claim(shard)
        size = SlotSize(payload_bytes, layout_bytes)
        self.shard, self._attempt, self._keep = shard, attempt, None
        paths = [self._path(shard, size, number) for number in range(SLOTS_PER_SHARD)]
        for stale in set(self.path.glob(f"{_name(shard)}.*.slot")) - set(paths):
            stale.unlink()  # for a state of another size, so useless for this one
        self._slots = [self._open(path, size) for path in paths]
        for slot in self._slots:
            if _manifest(slot) is None:
                slot.clear()

    def _claim(self, shard: ShardId) -> int:
        descriptor = os.open(self.path / f"{_name(shard)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise ValueError(f"{shard} belongs to another process that is alive") from error
        os.pwrite(descriptor, json.dumps(shard.to_json()).encode(), 0)  # the owner of the files, for forget
        return descriptor

    def _path(self, shard: ShardId, size: SlotSize, number: int) -> Path:
        return self.path / f"{_name(shard)}.{size.payload_bytes}.{size.layout_bytes}.{number}.slot"

    def _open(self, path: Path, size: SlotSize) -> Slot:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size.total_bytes)
            return Slot(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            free = os.statvfs(self.path)
            raise BudgetError(
                f"{self.path} has no room for a slot of {size.total_bytes:,} bytes, available are"
                f" {free.f_bavail * free.f_frsize:,} ({error.strerror}); in a container, give it more shared memory"
            ) from error

    def slot(self, step: int, keep_step: int | None = None) -> FileWriter | None:
        """Return a slot to write to, or None, like ``HolderClient.slot``."""
        manifests = [_manifest(slot) for slot in self._slots]
        orders = [m.order for m in manifests if m is not None and m.step == keep_step]
        self._keep = max(orders, default=self._keep) if keep_step is not None else self._keep
        views = [
            SlotView(None, False) if m is None else SlotView(m.order, self._readers.get(m.version.digest, 0) > 0)
            for m in manifests
        ]
        index = choose_slot(views, self._keep)
        if index is None:
            return None
        self._slots[index].begin()
        return FileWriter(self, self._slots[index], step)

    def publish(self, slot: Slot, step: int, payload_bytes: int, layout: bytes) -> None:
        """Publish the content of a slot for ``FileWriter.publish``."""
        if self.shard is None:
            raise ValueError("no shard is registered: call hello first")
        slot.publish(slot.digest(self.shard, step, self._attempt, payload_bytes, layout), layout)

    def grant(self, num_bytes: int) -> None:
        """Do nothing: there is no peer to send to."""

    def grant_all(self) -> None:
        """Do nothing: there is no peer to send to."""

    def revoke(self) -> None:
        """Do nothing: there is no peer to send to."""

    def status(self) -> dict[str, Any]:
        """Return the status like ``HolderClient.status``, for a shard without replicas."""
        manifests = sorted((m for m in map(_manifest, self._slots) if m is not None), key=lambda m: m.order)
        newest = manifests[-1].step if manifests else None
        versions = [manifest.listed("own").to_json() for manifest in manifests]
        nothing = {"bytes_pending": 0, "bytes_sent": 0, "dropped": 0, "writing": False, "last_error": ""}
        return {"newest_local": newest, "newest_replicated": newest, "versions": versions, "replicas": {}, **nothing}

    def inventory(self, run_id: str | None = None, verify: bool = True) -> list[Version]:
        """Return the complete versions of a run like ``HolderClient.inventory``."""
        wanted = run_asked_for(run_id, self.shard)
        found = []
        for path in sorted(self.path.glob("*.slot")):
            with contextlib.suppress(CorruptMessageError, OSError), _mapped(path) as slot:
                manifest, _ = slot.verify() if verify else slot.read()
                if manifest.shard.run_id == wanted:
                    found.append(manifest.listed("own"))
        return found

    def fetch(self, version: Version, source: str) -> dict[str, Any]:
        raise ValueError("slots in a directory cannot be filled from another host: start a holder on each host")

    def open(self, version: Version) -> SlotReader:
        """Map a version's layout and payload like ``HolderClient.open``."""
        for path in sorted(self.path.glob(f"{_name(version.shard)}.*.slot")):
            slot = _mapped(path).slot
            with contextlib.suppress(CorruptMessageError):
                manifest, layout = slot.read()
                if manifest.version.digest == version.digest:
                    return SlotReader(slot, manifest, layout, self._reading(version.digest))
            slot.close()
        raise ThinwireError(f"{version.shard}, step {version.step}: no such complete version in {self.path}")

    def _reading(self, digest: str) -> Callable[[], None]:
        self._readers[digest] = self._readers.get(digest, 0) + 1

        def done() -> None:
            self._readers[digest] -= 1

        return done

    def forget(self, run_id: str, topology: str | None = None) -> int:
        """Delete the files of a run that no process has registered and return the number of shards deleted."""
        gone = set()
        for path in sorted(self.path.glob("*.lock")):
            shard = ShardId.from_json(json.loads(path.read_text() or "{}"))
            if shard.run_id == run_id and topology in (None, shard.topology) and shard != self.shard:
                os.close(self._claim(shard))
                for file in (*self.path.glob(f"{_name(shard)}.*.slot"), path):
                    file.unlink()
                gone.add(shard)
        return len(gone)


class _mapped:
    """A slot of a file, mapped read-only as ``slot`` and closed at the end of a ``with``."""

    def __init__(self, path: Path) -> None:
        payload_bytes, layout_bytes = map(int, path.name.split(".")[1:3])
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.slot = Slot(descriptor, SlotSize(payload_bytes, layout_bytes), writable=False)
        except BaseException:
            os.close(descriptor)
            raise

    def __enter__(self) -> Slot:
        return self.slot

    def __exit__(self, *_: object) -> None:
        self.slot.close()


def _name(shard: ShardId) -> str:
    text = json.dumps(shard.to_json(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _manifest(slot: Slot) -> Manifest | None:
    with contextlib.suppress(CorruptMessageError):
        return slot.read()[0]
    return None
