"""Shards in the memory of a holder, with two slots each, within a budget of memory.

The budget is limited by the memory that this machine and its control groups have left. This module knows nothing of
sockets.
"""

import contextlib
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from thinwire.checkpoint.holder.slots import Slot, SlotSize, SlotView, choose_slot
from thinwire.checkpoint.holder.version import Manifest, ShardId, Version
from thinwire.errors import CorruptMessageError, ThinwireError

log = logging.getLogger("thinwire.checkpoint.holder")

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
    with contextlib.suppress(OSError, ValueError):  # not mounted here, or "max"
        return [int(limit.read_text()) - int(usage.read_text())]
    return []


class Changes(threading.Condition):
    """A lock for what others wait to see changed."""

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Hold it for a change; those who wait look again afterwards."""
        with self:
            yield
            self.notify_all()


SLOTS_PER_SHARD = 2


@dataclass(eq=False)
class Holding:
    """A slot and its content. ``manifest`` is set exactly while the slot is complete, since ``sealed_at``.

    Its bytes were compared last at ``read_at``.

    ``mapped``: the sessions of trainers that have the slot mapped, so that its memory could not be freed.
    ``pieces``: lengths in bytes, by which to compare the payload with another version (`slots.runs_of`).
    """

    slot: Slot
    number: int
    mapped: set[object] = field(default_factory=set)
    manifest: Manifest | None = None
    layout: bytes = b""
    pieces: tuple[int, ...] = ()
    writing: bool = False
    readers: int = 0
    sealed_at: float = 0.0
    read_at: float = 0.0

    @property
    def busy(self) -> bool:
        return self.writing or self.readers > 0

    @property
    def digest(self) -> str:
        """Name of its version; empty if there is none."""
        return self.manifest.version.digest if self.manifest is not None else ""


@dataclass(frozen=True)
class Assignment:
    """Agreement of the ranks of a run on what this host keeps, from the versions that all of them have surveyed.

    Args:
        placed: the shards that belong here from now on.
        wanted: digests of the versions to go back to that stay here, or come: of the ``placed`` shards, and of those
            that other hosts fetch from here. Empty once all copies are where they belong (`Store.release`).
        attempt: of the trainers that agreed; what they write is never evicted.
        chosen: (attempt, step) to go back to. Copies of it beyond those that are wanted are evicted last.
    """

    placed: frozenset[ShardId] = frozenset()
    wanted: frozenset[str] = frozenset()
    attempt: int = 0
    chosen: tuple[int, int] = (-1, -1)


@dataclass(eq=False)
class Gathering:
    """A version of what a group has in common, while ``members`` ranks of this host write it, each its part.

    ``published``: what follows for each rank that is done, to be called with whether the version is complete.
    ``manifests`` is what they say; all have to say the same.
    """

    order: tuple[int, int]
    holding: Holding
    members: int
    manifests: set[Manifest] = field(default_factory=set)
    published: dict[int, Callable[[bool], None]] = field(default_factory=dict)


class Replica(Protocol):
    """What a shard knows of its copy on a peer: `thinwire.checkpoint.holder.replication.Replicator`."""

    def has(self, digest: str) -> bool: ...
    def is_settled(self, digest: str) -> bool: ...
    def lacking(self) -> Collection[object]: ...
    def bytes_per_second(self) -> float | None: ...
    def status(self) -> dict[str, Any]: ...
    def stop(self) -> None: ...


@dataclass(eq=False)
class Shard:
    """The slots of one shard on this host, each with room for ``size``; one that is smaller grows when it is written.

    ``trainer``: the session that is connected as its owner. ``sender``: the connection on which a peer registered it
    last. ``receiver``: the one on which a version is arriving.
    ``keep``: (attempt, step) of the newest version that the trainer says is complete everywhere, or that it went on
    from. ``attempt``: of the trainer that wrote last. ``failed``: the last version that was published and did not
    become one. ``gathering``: the one that several ranks write together; ``writers``: their sessions, each with its
    attempt.
    """

    id: ShardId
    size: SlotSize
    holdings: list[Holding]
    role: str = "replica"
    trainer: object | None = None
    sender: Any = None
    receiver: Any = None
    gathering: Gathering | None = None
    writers: dict[object, int] = field(default_factory=dict)
    keep: tuple[int, int] | None = None
    attempt: int = 0
    replicas: Mapping[str, Replica] = field(default_factory=dict)
    last_error: str = ""
    failed: tuple[int, int] | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of memory that it has, or is promised."""
        return sum(max(self.size.total_bytes, holding.slot.size.total_bytes) for holding in self.holdings)

    def complete(self) -> list[tuple[Holding, Manifest]]:
        """Return the complete versions, newest last."""
        result = [(holding, holding.manifest) for holding in self.holdings if holding.manifest is not None]
        return sorted(result, key=lambda each: each[1].order)

    def find(self, digest: str) -> Holding | None:
        return next((holding for holding in self.holdings if digest and holding.digest == digest), None)

    def is_everywhere(self, manifest: Manifest) -> bool:
        """Return whether all replicas have a version."""
        return all(replica.has(manifest.version.digest) for replica in self.replicas.values())

    def newest(self, replicated: bool = False) -> int | None:
        """Return the step of the newest complete version, or of the newest that all replicas have too."""
        steps = (m.step for _, m in reversed(self.complete()) if not replicated or self.is_everywhere(m))
        return next(steps, None)

    def order_of(self, step: int, attempt: int) -> tuple[int, int] | None:
        """Return the order of the version that a trainer in its ``attempt`` means: its own, or the one it went on from.

        There may be others of that step: of an attempt that was given up.
        """
        orders = [manifest.order for _, manifest in self.complete()]
        meant = [(attempt, step), self.keep] if self.keep is not None and self.keep[1] == step else [(attempt, step)]
        return next((order for order in meant if order in orders), None)

    def is_wanted(self, manifest: Manifest) -> bool:
        """Return whether training may go back to this version: not before ``keep``, nor left by a former attempt."""
        keep = self.keep
        return manifest.order == keep or (manifest.attempt >= self.attempt and (keep is None or manifest.order > keep))

    def is_safe(self, attempt: int) -> bool:
        """Return whether all replicas have a version that a trainer in its ``attempt`` wrote, or went on from."""
        meant = [m for _, m in self.complete() if m.order == self.keep or m.attempt == attempt]
        return any(map(self.is_everywhere, meant))

    def is_superseded(self, order: tuple[int, int]) -> bool:
        """Return whether a version from a peer is useless here: its owner lives here, or all slots hold newer ones.

        So a sender that was left behind, with versions of an attempt that was given up, cannot replace the versions of
        the training that goes on.
        """
        newer = all(holding.manifest is not None and holding.manifest.order > order for holding in self.holdings)
        return self.trainer is not None or newer

    def is_free(self) -> bool:
        """Return whether a version could be written now if all owners had everywhere the versions that this one has."""
        orders = [manifest.order for _, manifest in self.complete() if self.is_everywhere(manifest)]
        keep = [self.keep] if self.keep is not None else []
        return choose_slot(self.views(), max(orders + keep, default=None)) is not None

    def unmap(self, session: object) -> None:
        """Note that a trainer has the slots mapped no more."""
        for holding in self.holdings:
            holding.mapped.discard(session)

    def views(self) -> list[SlotView]:
        return [self._view(holding) for holding in self.holdings]

    def _view(self, holding: Holding) -> SlotView:
        if holding.manifest is None:
            return SlotView(None, holding.busy)
        settled = all(replica.is_settled(holding.digest) for replica in self.replicas.values())
        return SlotView(holding.manifest.order, holding.busy, settled or not self.is_wanted(holding.manifest))


class Store:
    """All shards of a host. ``changed`` is the lock for all of them, and is notified when a version comes or goes.

    Memory is allocated without it: for gigabytes that takes seconds, and those who ask for a status do not wait.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.shards: dict[ShardId, Shard] = {}
        self.bytes_sent = 0  # to all peers
        self.plans: dict[str, Assignment] = {}
        self.changed = Changes()
        self._registering, self._gathering = threading.Lock(), threading.Lock()
        self._fetching: set[str] = set()
        self._slot_number = 0

    @property
    def used_bytes(self) -> int:
        with self.changed:
            return sum(shard.total_bytes for shard in self.shards.values())

    def of_run(self, run_id: str) -> list[Shard]:
        """Return the shards of a run; call it with the lock held."""
        return [shard for shard in self.shards.values() if shard.id.run_id == run_id]

    def assign(self, run_id: str, plan: Assignment) -> None:
        """Adopt what the ranks of a run agreed on, and stop sending what trainers before them left here."""
        with self.changed:
            self.plans[run_id] = plan
            left = [shard for shard in self.of_run(run_id) if shard.trainer is None]
            senders = [sender for shard in left for sender in shard.replicas.values()]
            for shard in left:
                shard.replicas = {}
        for sender in senders:
            sender.stop()

    def release(self, run_id: str, topologies: Collection[str]) -> None:
        """Free the shards of these topologies that are not placed here, now that all copies are where they belong.

        The shards that are placed here get their second slots, as far as there is room.
        """
        with self._registering:
            with self.changed:
                plan = self.plans[run_id] = replace(self._plan(run_id), wanted=frozenset())
                left = [shard for shard in self.of_run(run_id) if shard.id.topology in topologies]
                stale = [shard for shard in left if shard.id not in plan.placed and shard.trainer is None]
            for shard in stale:
                self.remove(shard)
            self._fill_up(run_id)

    def wants(self, version: Version) -> bool:
        """Return whether the ranks go back to that version and it stays here, or comes."""
        return version.digest in self._plan(version.shard.run_id).wanted

    def chosen(self, run_id: str, attempt: int) -> tuple[int, int] | None:
        """Return the attempt and step that trainers in their ``attempt`` go back to, while copies of it move."""
        plan = self._plan(run_id)
        return plan.chosen if plan.wanted and plan.attempt == attempt else None

    def is_placed(self, shard_id: ShardId) -> bool:
        """Return whether a shard belongs here, as far as the ranks of its run have said where shards do."""
        return shard_id.run_id not in self.plans or shard_id in self._plan(shard_id.run_id).placed

    def _plan(self, run_id: str) -> Assignment:
        return self.plans.get(run_id, Assignment())

    def register(self, shard_id: ShardId, size: SlotSize, evict: bool = True) -> Shard:
        """Return the shard, with room for at least that size in its slots; versions in smaller ones stay for now.

        It has two slots, but for the time in which copies move to where the ranks have placed them: then one, until
        there is room for a second. Raises BudgetError.
        """
        with self._registering:
            shard = self.shards.get(shard_id) or Shard(shard_id, size, [])
            larger, count = shard.size.covering(size), len(shard.holdings)
            lacking = max(0, (1 if self._plan(shard_id.run_id).wanted else SLOTS_PER_SHARD) - count)
            growth = (larger.total_bytes - shard.size.total_bytes) * count
            self._make_room(shard_id, growth + lacking * larger.total_bytes, evict)
            added = self._allocate(larger, lacking)
            with self.changed:
                shard.size, shard.holdings = larger, shard.holdings + added
                self.shards[shard_id] = shard
            self._fill_up(shard_id.run_id)
            return shard

    def fill_up(self, shard: Shard) -> str:
        """Return why the shard has no second slot, or an empty text: it gets one if there is room now."""
        if len(shard.holdings) < SLOTS_PER_SHARD:
            if not self._registering.acquire(blocking=False):  # somebody allocates
                return ""
            try:
                self._fill_up(shard.id.run_id)
            finally:
                self._registering.release()
        if len(shard.holdings) == SLOTS_PER_SHARD or self._plan(shard.id.run_id).wanted:
            return ""
        return f"{shard.id} is not saved: for a second slot it needs {self._shortage(shard.size.total_bytes)}"

    def _fill_up(self, run_id: str) -> None:
        """Give second slots to the shards that are placed here and have one, once all owners have that one. What they
        have in common may be kept with each of them, and then it is no shard.
        """
        plan = self._plan(run_id)
        shards = [self.shards[shard_id] for shard_id in plan.placed if shard_id in self.shards]
        if all(shard_id in self.shards for shard_id in plan.placed if shard_id.owner >= 0):
            with contextlib.suppress(BudgetError):
                for shard in shards:
                    while len(shard.holdings) < SLOTS_PER_SHARD:
                        self._make_room(shard.id, shard.size.total_bytes, evict=not plan.wanted)
                        added = self._allocate(shard.size, 1)
                        with self.changed:
                            shard.holdings = shard.holdings + added

    def _make_room(self, shard_id: ShardId, needed: int, evict: bool) -> None:
        """Evict what nobody goes back to, until so many bytes are available. Raises BudgetError."""
        with self.changed.change():
            while needed > 0 and self.used_bytes + needed > self.budget_bytes:
                result = self._evictable(shard_id.run_id) if evict else []
                if not result:
                    raise BudgetError(f"{shard_id} needs {self._shortage(needed)}")
                shard, holding = result[0]
                shard.holdings = [other for other in shard.holdings if other is not holding]
                holding.slot.close()
                if not shard.holdings:
                    del self.shards[shard.id]

    def _evictable(self, run_id: str) -> list[tuple[Shard, Holding]]:
        """Slots of the run that may be freed, the first one first: no version that is wanted, or in use.

        Of a shard that is placed here only the second slot, while the copies move. Without a plan there is none.
        """
        plan, result = self._plan(run_id), []
        for shard in self.of_run(run_id) if run_id in self.plans else ():
            placed = shard.id in plan.placed
            if shard.trainer is not None and not placed:
                continue
            free = [h for h in shard.holdings if not (h.busy or h.mapped or h.digest in plan.wanted)]
            if placed:
                old = [h for h in free if h.manifest is None or h.manifest.attempt < plan.attempt]
                free = old if plan.wanted and len(shard.holdings) == SLOTS_PER_SHARD else []
            orders = [holding.manifest.order if holding.manifest else (-1, -1) for holding in free]
            ranked = [(order == plan.chosen, order) for order in orders]
            several = sorted(zip(ranked, [shard] * len(free), free, strict=True), key=lambda each: each[0])
            result += several[:1] if placed else several
        return [(shard, holding) for _, shard, holding in sorted(result, key=lambda each: each[0])]

    def _shortage(self, needed: int) -> str:
        available = self.budget_bytes - self.used_bytes
        runs = ", ".join(sorted({repr(held.run_id) for held in self.shards})) or "none"
        return (
            f"{needed:,} bytes, available are {available:,} of the memory budget of {self.budget_bytes:,};"
            f" runs held: {runs}. Start the holder with a larger --memory-budget, or free a run that has ended"
        )

    def _allocate(self, size: SlotSize, count: int) -> list[Holding]:
        holdings: list[Holding] = []
        try:
            for _ in range(count):
                with self.changed:
                    self._slot_number = number = self._slot_number + 1
                holdings.append(Holding(Slot.allocate(size), number))
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
        digest: str = "",
    ) -> Holding | None:
        """Return a slot to write to, its content dropped; None if none may be overwritten (``choose_slot``).

        ``recovering``: versions that are not settled yet belong to a history that was given up. A version whose
        ``digest`` the ranks want here replaces any other; one from a peer never replaces a wanted one. Raises
        BudgetError if the slot has to grow and there is no memory.
        """
        with self.changed:
            wanted, views = self._plan(shard.id.run_id).wanted, shard.views()
            kept = [holding.digest in wanted for holding in shard.holdings]
            if digest in wanted:
                orders = {i: views[i].order or (-1, -1) for i in range(len(views)) if not (kept[i] or views[i].busy)}
                index = min(orders, key=lambda i: orders[i], default=None)
            else:
                peers = before is not None
                views = [
                    replace(view, settled=view.settled or recovering, busy=view.busy or (peers and is_kept))
                    for view, is_kept in zip(views, kept, strict=True)
                ]
                index = choose_slot(views, keep, before)
            if index is None or self.shards.get(shard.id) is not shard:
                return None
            holding, size = shard.holdings[index], shard.size
            holding.manifest, holding.layout, holding.writing = None, b"", True
            if holding.slot.size.covering(size) == holding.slot.size:
                holding.slot.begin()
                return holding
            holding.slot.close()
        return self._larger(shard, holding, size)

    def _larger(self, shard: Shard, holding: Holding, size: SlotSize) -> Holding | None:
        """Replace a slot, which was freed to be written, by one of that size; None if the shard has gone meanwhile."""
        added: list[Holding] = []
        try:
            added = self._allocate(size, 1)
        finally:
            with self.changed.change():
                shard.holdings = [other for other in shard.holdings if other is not holding] + added
                holding.writing = False
                for larger in added:
                    larger.writing = True
                    larger.slot.begin()
        if self.shards.get(shard.id) is shard:
            return added[0]
        added[0].slot.close()
        return None

    def seal(self, holding: Holding, manifest: Manifest, layout: bytes, pieces: tuple[int, ...] = ()) -> None:
        """Make the content of the slot a version."""
        holding.slot.publish(manifest, layout)
        with self.changed.change():
            holding.manifest, holding.layout, holding.writing = manifest, layout, False
            holding.pieces = pieces
            holding.sealed_at = holding.read_at = time.monotonic()

    def gather(self, shard: Shard, order: tuple[int, int], members: int) -> Gathering | None:
        """Return the version of that order that the ranks of this host write together, begun by the first of them.

        None if no slot may be overwritten, if not all of them are connected, or if they have given it up, or are at a
        later one. An earlier one is given up.
        """

        def may_begin() -> bool:
            is_new = shard.failed is None or shard.failed < order
            return is_new and list(shard.writers.values()).count(order[0]) >= members

        with self._gathering:
            with self.changed:
                if shard.gathering is not None and shard.gathering.order < order:
                    self.end_gathering(shard, False)
                begins = shard.gathering is None and may_begin()
            holding = self.begin(shard, shard.keep) if begins else None
            with self.changed:
                if holding is not None and may_begin():
                    shard.gathering = Gathering(order, holding, members)
                elif holding is not None:  # given up meanwhile, or one of them has died
                    self.abandon(holding)
                gathering = shard.gathering
                return gathering if gathering is not None and gathering.order == order else None

    def contribute(
        self, shard: Shard, gathering: Gathering, owner: int, manifest: Manifest, then: Callable[[bool], None]
    ) -> None:
        """Note that a rank has written its part, and have it follow ``then`` once the version is complete, or is not.

        It is complete when all have written theirs, and all have the same digests of the whole.
        """
        with self.changed:
            if shard.gathering is not gathering:
                then(False)
                return
            gathering.published[owner] = then
            gathering.manifests.add(manifest)
            if len(gathering.published) == gathering.members:
                if is_complete := len(gathering.manifests) == 1:
                    self.seal(gathering.holding, manifest, b"")
                self.end_gathering(shard, is_complete)

    def give_up(self, shard: Shard, order: tuple[int, int]) -> None:
        """Have the ranks of this host write no version of that order together: one of them will not write its part."""
        with self.changed:
            if shard.gathering is not None and shard.gathering.order <= order:
                self.end_gathering(shard, False)
            shard.failed = max(order, shard.failed or order)

    def end_gathering(self, shard: Shard, is_complete: bool) -> None:
        with self.changed:
            gathering, shard.gathering = shard.gathering, None
            if gathering is not None:
                self.abandon(gathering.holding)
                shard.failed = shard.failed if is_complete else gathering.order
                for then in gathering.published.values():
                    then(is_complete)

    @contextlib.contextmanager
    def fetching(self, version: Version) -> Iterator[bool]:
        """Wait until nobody else fetches that version, and have others wait in turn; whether one has brought it."""
        digest = version.digest
        with self.changed:
            waits = digest in self._fetching
            self.changed.wait_for(lambda: digest not in self._fetching)
            self._fetching.add(digest)
            shard = self.shards.get(version.shard)
            brought = waits and shard is not None and shard.find(digest) is not None
        try:
            yield brought
        finally:
            with self.changed.change():
                self._fetching.discard(digest)

    def abandon(self, holding: Holding) -> None:
        """Drop an unfinished version."""
        with self.changed.change():
            if holding.writing:
                holding.slot.clear()
                holding.writing = False

    def reading(self, version: Version) -> AbstractContextManager[Holding]:
        """Keep the slot with exactly this version from being overwritten. Raises ThinwireError if it is not here."""
        return self._pinned(self.pin(version))

    def pin(self, version: Version) -> Holding:
        with self.changed:
            shard = self.shards.get(version.shard)
            holding = shard.find(version.digest) if shard is not None else None
            if holding is not None:
                holding.readers += 1
                return holding
        raise ThinwireError(f"{version.shard}, step {version.step}: no such complete version here")

    def base(self, shard: Shard, digest: str | None = None) -> AbstractContextManager[Holding | None]:
        """Keep the version of that digest, or the newest one, from being overwritten; None if there is none."""
        with self.changed:
            result = [holding for holding, _ in shard.complete() if digest in (None, holding.digest)]
            if (holding := result[-1] if result else None) is not None:
                holding.readers += 1
        return contextlib.nullcontext() if holding is None else self._pinned(holding)

    @contextlib.contextmanager
    def _pinned(self, holding: Holding) -> Iterator[Holding]:
        try:
            yield holding
        finally:
            self.unpin(holding)

    def unpin(self, holding: Holding) -> None:
        with self.changed.change():
            holding.readers -= 1

    def verified(self, run_id: str, verify: bool) -> list[Version]:
        """Return the complete versions of a run; with ``verify``, only those whose slots match their digests."""
        with self.changed:
            held = [(shard.role, manifest) for shard in self.of_run(run_id) for _, manifest in shard.complete()]
            listed = [manifest.listed(role) for role, manifest in held]
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
        with self.changed.change():
            shard = self.shards.get(version.shard)
            holding = shard.find(version.digest) if shard is not None else None
            if shard is not None and holding is not None:
                holding.manifest, shard.last_error = None, reason
                holding.slot.clear()

    def forget(self, run_id: str, topology: str | None = None) -> int:
        """Free the shards of a run, or one topology of it; return their number. Raises ValueError if one is in use."""
        with self._registering:
            with self.changed:
                shards = [shard for shard in self.of_run(run_id) if topology in (None, shard.id.topology)]
                used = [shard for shard in shards if shard.trainer is not None]
            if used:
                raise ValueError(f"{used[0].id} is in use by a trainer")
            for shard in shards:
                self.remove(shard)
            if topology is None:
                self.plans.pop(run_id, None)
            return len(shards)

    def remove(self, shard: Shard) -> None:
        """Free the memory of a shard, stopping all senders and receivers of it."""
        with self.changed.change():
            self.shards.pop(shard.id, None)
        if shard.receiver is not None:
            shard.receiver.close()
        for replica in shard.replicas.values():
            replica.stop()
        with self.changed:
            self.changed.wait_for(lambda: not any(h.busy for h in shard.holdings), 1.0)
            for holding in shard.holdings:
                holding.slot.close()

    def close(self) -> None:
        for shard in list(self.shards.values()):
            self.remove(shard)


_SCRUB_BYTES_PER_SECOND = 100e6
SCRUB_SECONDS = 300.0  # from when a version was complete, or was read last; in a training most are gone by then
_SCRUB_LOOK_SECONDS = 1.0
_SCRUB_NICENESS = 19


class Scrubber:
    """A thread that compares the versions of a store with their digests in idle time, one after the other, so that a
    bit that flips in memory is found before somebody needs the copy.

    It is the last thread that gets a processor, reads 100 MB/s at most (0.1 s of a core each second; a CRC-32 of 1 GB
    takes 0.3 to 1 s), and holds nobody up: it keeps no slot from being overwritten, and looks afterwards whether one
    was. It calls ``mend(shard, manifest)`` after it has discarded an altered one. ``bytes_read`` and ``damaged`` count.
    """

    def __init__(self, store: Store, mend: Callable[[Shard, Manifest], None]) -> None:
        self._store, self._mend = store, mend
        self._stopping = threading.Event()
        self.bytes_read = self.damaged = 0
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # 0 is this thread, not the process
            os.setpriority(os.PRIO_PROCESS, 0, _SCRUB_NICENESS)
        while not self._stopping.wait(_SCRUB_LOOK_SECONDS):
            for shard, holding, manifest in self._due():
                if (reason := self._altered(holding, manifest)) and self._discard(shard, holding, manifest, reason):
                    self._mend(shard, manifest)

    def _due(self) -> list[tuple[Shard, Holding, Manifest]]:
        before = time.monotonic() - SCRUB_SECONDS
        with self._store.changed:
            held = [(shard, *each) for shard in self._store.shards.values() for each in shard.complete()]
        return [each for each in held if each[1].read_at <= before]

    def _altered(self, holding: Holding, manifest: Manifest) -> str:
        """What does not match its digests, or empty. It may have been overwritten meanwhile."""
        try:
            for number, expected in enumerate(manifest.chunk_crcs):
                if (
                    self._stopping.wait(manifest.chunk_bytes / _SCRUB_BYTES_PER_SECOND)
                    or holding.manifest is not manifest
                ):
                    return ""
                start = number * manifest.chunk_bytes
                end = min(start + manifest.chunk_bytes, manifest.payload_bytes)
                with holding.slot.payload(manifest.payload_bytes) as payload, payload[start:end] as chunk:
                    result = zlib.crc32(chunk)
                self.bytes_read += end - start
                if result != expected:
                    return f"chunk {number} of its {len(manifest.chunk_crcs)} was altered in memory"
            if holding.slot.read()[0].version.digest != manifest.version.digest:
                return "its header is of another version"
        except CorruptMessageError as error:
            return str(error)
        except ValueError:  # its memory is freed
            return ""
        holding.read_at = time.monotonic()
        return ""

    def _discard(self, shard: Shard, holding: Holding, manifest: Manifest, reason: str) -> bool:
        """Whether it is still there, altered: what is written to meanwhile has no manifest, or another one."""
        with self._store.changed:
            if holding.manifest is not manifest or shard.find(manifest.version.digest) is not holding:
                return False
            self.damaged += 1
            text = f"{shard.id}, step {manifest.step}: {reason}"
            self._store.discard(manifest.version, text)
        log.warning("%s; it is no copy any more", text)
        return True
