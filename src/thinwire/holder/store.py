"""Shards in the memory of a holder, with two slots each, within a budget of memory.

The budget is limited by the memory that this machine and its control groups have left. This module knows nothing of
sockets.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from thinwire.errors import CorruptMessageError, ThinwireError
from thinwire.holder.slots import Slot, SlotSize, SlotView, choose_slot
from thinwire.holder.version import Manifest, ShardId, Version

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class BudgetError(ValueError):
    """Raised when the holder has no room; the message gives the bytes needed and available."""


def parse_bytes(text: str) -> int:
    """Parse a size in bytes such as ``64GiB``, ``64G``, ``500 MB`` or ``1000``. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"unknown size {text!r}; legal forms: '64GiB', '500MB', '1000000'")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory available without swapping: MemAvailable, or less if a control group allows less."""
    meminfo = (root / "proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(match[1]) * 1024 if match else 0
    return max(0, min([available, *_left_in_control_groups(root)]))


def _left_in_control_groups(root: Path) -> list[int]:
    """Limit less usage of each memory control group of this process, up to the root; versions 1 and 2."""
    left = []
    path = root / "proc/self/cgroup"
    for line in path.read_text().splitlines() if path.exists() else []:
        _, controllers, group = line.split(":", 2)
        if controllers == "memory":
            mount, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif controllers == "":
            mount, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        else:
            continue
        inner = mount / group.strip("/")
        for directory in [inner, *inner.parents]:
            left += _left(directory / limit, directory / usage)
            if directory == mount:
                break
    return left


def _left(limit: Path, usage: Path) -> list[int]:
    try:
        return [int(limit.read_text()) - int(usage.read_text())]
    except (OSError, ValueError):  # not mounted here, or "max"
        return []


SLOTS_PER_SHARD = 2


class Replica(Protocol):
    """Interface between a shard and a sender of its versions to a peer."""

    def is_settled(self, digest: str) -> bool: ...
    def has(self, digest: str) -> bool: ...
    def stop(self) -> None: ...


@dataclass(eq=False)
class Holding:
    """A slot and its content. ``manifest`` is set exactly while the slot is complete, since ``sealed_at``."""

    slot: Slot
    number: int
    manifest: Manifest | None = None
    layout: bytes = b""
    writing: bool = False
    readers: int = 0
    sealed_at: float = 0.0

    @property
    def busy(self) -> bool:
        return self.writing or self.readers > 0


@dataclass(eq=False)
class Shard:
    """The slots of one shard on this host.

    ``trainer``: the session that is connected as its owner. ``receiver``: the connection on which a version is
    arriving. ``keep``: (attempt, step) of the newest version that the trainer says is complete everywhere, or that it
    went on from. ``attempt``: of the trainer that wrote last.
    """

    id: ShardId
    size: SlotSize
    holdings: list[Holding]
    role: str = "replica"
    trainer: object | None = None
    receiver: Any = None
    keep: tuple[int, int] | None = None
    attempt: int = 0
    replicas: dict[str, Replica] = field(default_factory=dict)
    last_error: str = ""

    def complete(self) -> list[Holding]:
        """Return the complete versions, newest last."""
        found = [holding for holding in self.holdings if holding.manifest is not None]
        return sorted(found, key=lambda holding: holding.manifest.order if holding.manifest else ())

    def newest(self, replicated: bool = False) -> int | None:
        """Return the step of the newest complete version, or of the newest that all replicas have too."""
        for holding in reversed(self.complete()):
            manifest = holding.manifest
            if manifest and (not replicated or all(r.has(manifest.version.digest) for r in self.replicas.values())):
                return manifest.step
        return None

    def order_of(self, step: int, attempt: int) -> tuple[int, int] | None:
        """Return the order of the version that a trainer in its ``attempt`` means: its own, or the one it went on from.

        There may be others of that step: of an attempt that was given up.
        """
        orders = [holding.manifest.order for holding in self.complete() if holding.manifest]
        meant = [(attempt, step), self.keep] if self.keep is not None and self.keep[1] == step else [(attempt, step)]
        return next((order for order in meant if order in orders), None)

    def is_wanted(self, manifest: Manifest) -> bool:
        """Return whether training may go back to this version: not before ``keep``, nor left by a former attempt."""
        keep = self.keep
        return manifest.order == keep or (manifest.attempt >= self.attempt and (keep is None or manifest.order > keep))

    def is_superseded(self, order: tuple[int, int]) -> bool:
        """Return whether a version from a peer is useless here: its owner lives here, or all slots hold newer ones.

        So a sender that was left behind, with versions of an attempt that was given up, cannot replace the versions of
        the training that goes on.
        """
        newer = all(holding.manifest is not None and holding.manifest.order > order for holding in self.holdings)
        return self.trainer is not None or newer

    def is_free(self) -> bool:
        """Return whether a version could be written now if all owners had everywhere the versions that this one has."""
        orders = [
            holding.manifest.order
            for holding in self.complete()
            if holding.manifest and all(r.has(holding.manifest.version.digest) for r in self.replicas.values())
        ]
        keep = [self.keep] if self.keep is not None else []
        return choose_slot(self.views(), max(orders + keep, default=None)) is not None

    def views(self) -> list[SlotView]:
        return [self._view(holding) for holding in self.holdings]

    def _view(self, holding: Holding) -> SlotView:
        if holding.manifest is None:
            return SlotView(None, holding.busy)
        digest = holding.manifest.version.digest
        settled = all(replica.is_settled(digest) for replica in self.replicas.values())
        return SlotView(holding.manifest.order, holding.busy, settled or not self.is_wanted(holding.manifest))


class Store:
    """All shards of a host. ``changed`` is the lock for all of them, and is notified when a version comes or goes."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.shards: dict[ShardId, Shard] = {}
        self.bytes_sent = 0  # to all peers
        self.changed = threading.Condition()
        self._registering = threading.Lock()
        self._slot_number = 0

    @property
    def used_bytes(self) -> int:
        with self.changed:
            return sum(shard.size.total_bytes * len(shard.holdings) for shard in self.shards.values())

    def register(self, shard_id: ShardId, size: SlotSize) -> Shard:
        """Return the shard, with slots of at least that size; existing slots stay, with their content.

        Raises BudgetError, ValueError if there are complete versions in slots that are too small.
        """
        with self._registering:
            shard = self.shards.get(shard_id)
            if shard is not None:
                room = shard.size
                if room.payload_bytes >= size.payload_bytes and room.layout_bytes >= size.layout_bytes:
                    return shard
                if shard.complete() or any(holding.busy for holding in shard.holdings):
                    raise ValueError(f"{shard_id} is held in slots for {room}, too small for {size}; forget it first")
                self.remove(shard)
            self._check_budget(shard_id, SLOTS_PER_SHARD * size.total_bytes)
            holdings = self._allocate(size)
            with self.changed:
                self.shards[shard_id] = shard = Shard(shard_id, size, holdings)
            return shard

    def _check_budget(self, shard_id: ShardId, needed: int) -> None:
        used = self.used_bytes
        if used + needed > self.budget_bytes:
            runs = ", ".join(sorted({repr(held.run_id) for held in self.shards})) or "none"
            raise BudgetError(
                f"{shard_id} needs {needed:,} bytes, available are {self.budget_bytes - used:,} of the memory budget of"
                f" {self.budget_bytes:,}; runs held: {runs}. Forget a run, or start the holder with a larger"
                " --memory-budget"
            )

    def _allocate(self, size: SlotSize) -> list[Holding]:
        holdings: list[Holding] = []
        try:
            for _ in range(SLOTS_PER_SHARD):
                self._slot_number += 1
                holdings.append(Holding(Slot.allocate(size), self._slot_number))
        except OSError as error:
            for holding in holdings:
                holding.slot.close()
            raise BudgetError(f"no shared memory for a slot of {size.total_bytes:,} bytes: {error}") from error
        return holdings

    def begin(
        self,
        shard: Shard,
        keep: tuple[int, int] | None,
        before: tuple[int, int] | None = None,
        recovering: bool = False,
    ) -> Holding | None:
        """Return a slot to write to, its content dropped; None if none may be overwritten (``choose_slot``).

        ``recovering``: versions that are not settled yet belong to a history that was given up.
        """
        with self.changed:
            views = [replace(view, settled=True) for view in shard.views()] if recovering else shard.views()
            index = choose_slot(views, keep, before)
            if index is None or self.shards.get(shard.id) is not shard:
                return None
            holding = shard.holdings[index]
            holding.manifest, holding.layout, holding.writing = None, b"", True
            holding.slot.begin()
            return holding

    def seal(self, holding: Holding, manifest: Manifest, layout: bytes) -> None:
        """Make the content of the slot a version."""
        holding.slot.publish(manifest, layout)
        with self.changed:
            holding.manifest, holding.layout, holding.writing = manifest, layout, False
            holding.sealed_at = time.monotonic()
            self.changed.notify_all()

    def abandon(self, holding: Holding) -> None:
        """Drop an unfinished version."""
        with self.changed:
            if holding.writing:
                holding.slot.clear()
                holding.writing = False
            self.changed.notify_all()

    @contextmanager
    def reading(self, version: Version) -> Iterator[Holding]:
        """Keep the slot with exactly this version from being overwritten. Raises ThinwireError if it is not here."""
        holding = self.pin(version)
        try:
            yield holding
        finally:
            self.unpin(holding)

    def pin(self, version: Version) -> Holding:
        with self.changed:
            shard = self.shards.get(version.shard)
            for holding in shard.holdings if shard else []:
                if holding.manifest is not None and holding.manifest.version.digest == version.digest:
                    holding.readers += 1
                    return holding
        raise ThinwireError(f"{version.shard}, step {version.step}: no such complete version here")

    def unpin(self, holding: Holding) -> None:
        with self.changed:
            holding.readers -= 1
            self.changed.notify_all()

    def verified(self, run_id: str, verify: bool) -> list[Version]:
        """Return the complete versions of a run; with ``verify``, only those whose slots match their digests."""
        with self.changed:
            shards = [shard for shard in self.shards.values() if shard.id.run_id == run_id]
            listed = [h.manifest.listed(shard.role) for shard in shards for h in shard.complete() if h.manifest]
        return [version for version in listed if not verify or self.verify(version)]

    def verify(self, version: Version) -> bool:
        """Return whether this host has that version unaltered; an altered one is discarded."""
        try:
            with self.reading(version) as holding:
                manifest, _ = holding.slot.verify()
            if manifest.version.digest == version.digest:
                return True
            raise CorruptMessageError(f"{version.shard}, step {version.step}: the slot holds another version")
        except CorruptMessageError as error:
            self.discard(version, str(error))
        except ThinwireError:
            pass
        return False

    def discard(self, version: Version, reason: str) -> None:
        with self.changed:
            shard = self.shards.get(version.shard)
            for holding in shard.holdings if shard else []:
                if shard and holding.manifest and holding.manifest.version.digest == version.digest:
                    holding.manifest, shard.last_error = None, reason
                    holding.slot.clear()
            self.changed.notify_all()

    def forget(self, run_id: str, topology: str | None = None) -> int:
        """Free the shards of a run, or one topology of it; return their number. Raises ValueError if one is in use."""
        with self._registering:
            with self.changed:
                shards = [
                    shard
                    for shard in self.shards.values()
                    if shard.id.run_id == run_id and topology in (None, shard.id.topology)
                ]
                used = [shard for shard in shards if shard.trainer is not None]
            if used:
                raise ValueError(f"{used[0].id} is in use by a trainer")
            for shard in shards:
                self.remove(shard)
            return len(shards)

    def remove(self, shard: Shard) -> None:
        """Free the memory of a shard, stopping all senders and receivers of it."""
        with self.changed:
            self.shards.pop(shard.id, None)
            self.changed.notify_all()
        if shard.receiver is not None:
            shard.receiver.close()
        for replica in shard.replicas.values():
            replica.stop()
        deadline = time.monotonic() + 1.0
        with self.changed:
            self.changed.wait_for(
                lambda: not any(h.busy for h in shard.holdings), max(0.0, deadline - time.monotonic())
            )
            for holding in shard.holdings:
                holding.slot.close()

    def close(self) -> None:
        for shard in list(self.shards.values()):
            self.remove(shard)
