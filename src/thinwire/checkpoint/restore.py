"""Restoring the newest available state: from the memory of this host, of a peer, or from the disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from thinwire.checkpoint.choice import Choice
from thinwire.checkpoint.dcp.disk import DiskShards
from thinwire.checkpoint.dcp.tier import PersistentTier
from thinwire.checkpoint.foreign import ForeignShards, ForeignVersion, foreign_versions, gather_layouts, is_whole
from thinwire.checkpoint.group import least
from thinwire.checkpoint.records import Notices
from thinwire.checkpoint.recovery import Survey, load_shard, survey
from thinwire.checkpoint.registration import Registration
from thinwire.checkpoint.state.reshard import fill, plan_moves
from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.errors import ThinwireError
from thinwire.holder.faultpoint import reach
from thinwire.holder.version import NONCE_BITS, next_attempt, start_order, topology_digest

logger = logging.getLogger("thinwire")

_TRIES = 3  # of versions in memory, each with those left after the failure before
_MEMORY, _DISK = 1, 0


@dataclass(frozen=True)
class Restored:
    """Result of a restore.

    Args:
        step: the restored step; None for a fresh start.
        attempt: number of this start of the run, for new versions.
        in_slots: whether the version is in the slots of all ranks now.
        foreign: the topology of the restored versions, if it was another one.
    """

    step: int | None
    attempt: int
    in_slots: bool = False
    foreign: str | None = None


@dataclass(frozen=True)
class _Candidate:
    """``order``: newest last; a version in memory goes before the same step on the disk."""

    order: tuple[tuple[int, int], int]
    attempt: int
    step: int
    where: str
    load: Callable[[], None]
    foreign: str | None = None

    @property
    def on_disk(self) -> bool:
        return self.order[1] == _DISK


class Restorer:
    """A restorer of one training. It raises an error on all ranks or on none."""

    def __init__(
        self,
        training: TrainingState,
        registration: Registration,
        tier: PersistentTier | None,
        group: dist.ProcessGroup,
        run_id: str,
        topology: dict[str, Any],
        notices: Notices,
    ) -> None:
        self._training, self._registration, self._tier, self._group = training, registration, tier, group
        self._run_id, self._topology, self._notices = run_id, topology, notices
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._attempt: int | None = None

    def survey(self) -> Survey:
        """Gather the versions in the memory of all hosts; collective."""
        registration, topology = self._registration, topology_digest(self._topology)
        placed = registration.placed()
        found = survey(registration.client, registration.holders, self._run_id, topology, self._group, placed)
        registration.wanted = {holder: found.choice.wanted_at(holder, placed[holder]) for holder in placed}
        registration.chosen = None if found.choice.step is None else (found.choice.attempt, found.choice.step)
        return found

    def restore(self) -> Restored:
        """Load the newest state that all ranks can have, in place; collective.

        Raises ValueError if there are only versions of another model or of too few shards, ThinwireError if none of
        them can be loaded.
        """
        self._attempt, failure, spoiled, tries = None, "", set(), 0
        while tries < _TRIES:
            found = self.survey()
            if self._attempt is None:
                self._attempt = found.attempt
            candidates, reasons = self._candidates(found)
            left = [candidate for candidate in candidates if candidate.where not in spoiled]
            if not left:
                if not candidates:
                    self._refuse(found, reasons)
                break
            newest = max(left, key=lambda candidate: candidate.order)
            failure = self._load(newest)
            if not failure:
                attempt = max(self._attempt, next_attempt([newest.attempt], self._attempt % (1 << NONCE_BITS)))
                in_slots = not newest.on_disk and newest.foreign is None
                return Restored(newest.step, attempt, in_slots, newest.foreign)
            tries += not newest.on_disk
            spoiled |= {newest.where} if newest.on_disk else set()
        if failure:  # not a fresh start any more: some of it may be loaded
            raise ThinwireError(f"a checkpoint of run {self._run_id!r} was not restored: {failure}")
        return Restored(None, self._attempt or 0)

    def _load(self, candidate: _Candidate) -> str:
        """Why one of the ranks could not, or empty; collective."""
        failure = ""
        try:
            candidate.load()
        except (ThinwireError, ValueError, OSError, RuntimeError, KeyError) as error:
            failure = f"rank {self._rank}: {error}"
            logger.warning("step %s %s was not restored: %s", candidate.step, candidate.where, failure)
        done = least([not failure], self._group) == [1]
        return "" if done else failure or "another rank failed"

    def _candidates(self, found: Survey) -> tuple[list[_Candidate], list[str]]:
        """All versions that can be restored, and why others cannot; collective."""
        candidates, reasons = [], list(found.choice.reasons)
        choice = found.choice
        if choice.step is not None:
            order = start_order(choice.attempt, choice.step)
            load = self._loader(choice)
            candidates.append(_Candidate((order, _MEMORY), choice.attempt, choice.step, "from memory", load))
        newest = candidates[0].order[0] if candidates else (-1, -1)
        for version in foreign_versions(found.inventories, self._run_id, topology_digest(self._topology)):
            if version.order > newest:
                layouts = gather_layouts(version, self._registration, self._group)
                if is_whole(layouts, self._topology):
                    candidates.append(self._foreign_candidate(version, layouts))
                    break
                reasons.append(self._why_not(version, layouts))
        disk, others = self._on_disk()
        return candidates + disk, reasons + others

    def _loader(self, choice: Choice) -> Callable[[], None]:
        def load() -> None:
            registration, attempt = self._registration, self._attempt
            assert attempt is not None
            registration.register(choice.versions[self._rank].payload_bytes, attempt)
            assert registration.client is not None
            load_shard(registration.client, choice, self._rank, registration.here, self._training)
            if choice.certified is not None:
                alike = "" if choice.certified else "not "
                newer = "".join(f"; {reason}" for reason in choice.reasons if "of ranks differ" in reason)
                logger.info("step %s: parameters are %sthe same on all ranks%s", choice.step, alike, newer)

        return load

    def _foreign_candidate(self, version: ForeignVersion, layouts: dict[int, Any]) -> _Candidate:
        like = self._like(len(layouts))

        def load() -> None:
            state, moves, error = {}, [], ""
            try:
                state, targets = self._training.prepare(layouts[like])
                moves = plan_moves(targets, layouts, like)
            except (ThinwireError, ValueError) as reason:
                error = str(reason)
            needed = {move.owner for move in moves}
            copies = [version.digest for copy in version.copies.values() for version in copy.values()]
            self._registration.wanted = dict.fromkeys(self._registration.holders, copies)
            self._registration.chosen, self._registration.left = (version.attempt, version.step), version.topology
            assert self._attempt is not None
            self._registration.place(self._attempt)
            shards = ForeignShards(version, needed, self._registration, self._group, error)
            try:
                fill(moves, shards)
                shards.verify()
            finally:
                shards.close()
            self._adopt(state, len(layouts))

        order = (version.order, _MEMORY)
        where = f"of {len(layouts)} ranks, from memory"
        return _Candidate(order, version.attempt, version.step, where, load, version.topology)

    def _on_disk(self) -> tuple[list[_Candidate], list[str]]:
        candidates, reasons = [], []
        for about in self._tier.survey() if self._tier is not None else []:
            assert self._tier is not None
            if about["state"] == self._topology["state"]:
                order = (start_order(about["attempt"], about["step"]), _DISK)
                where = f"in {self._tier.directory}, step {about['step']}"
                candidates.append(
                    _Candidate(order, about["attempt"], about["step"], where, lambda about=about: self._read(about))
                )
            else:
                reasons.append(f"step {about['step']} in {self._tier.directory} is of another model")
        return candidates, reasons

    def _read(self, about: dict[str, Any]) -> None:
        """A checkpoint on the disk, of the same number of ranks or of another."""
        assert self._tier is not None
        reach("disk")
        try:
            self._read_shards(self._tier.open(about))
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            reason = f"{type(error).__name__}: {error}".splitlines()[-1]
            raise ThinwireError(f"it cannot be read: {reason}") from error

    def _read_shards(self, shards: DiskShards) -> None:
        like = self._like(shards.world_size)
        layout = shards.layout(like)
        if shards.world_size == self._world_size:
            self._training.load(layout, shards.tensors(like, range(len(layout.slices))))
            return
        state, targets = self._training.prepare(layout)
        layouts = {owner: shards.layout(owner) for owner in range(shards.world_size)}
        fill(plan_moves(targets, layouts, like), shards)
        self._adopt(state, shards.world_size)

    def _like(self, world_size: int) -> int:
        """The old rank whose values this one uses for everything that is not in parts."""
        return self._rank % world_size

    def _adopt(self, state: dict[str, Any], world_size: int) -> None:
        """Go on with a state of another number of ranks."""
        keep = [] if self._rank < world_size else ["random"]  # two ranks must not draw the same numbers
        synchronizer = self._training.synchronizer
        if synchronizer is not None:
            try:
                synchronizer.load_state_dict(state["synchronizer"])
            except ValueError as error:
                self._notices.add(f"the synchronizer starts anew, with empty memories: {error}")
            keep.append("synchronizer")
        self._training.adopt(state, keep)
        logger.info("rank %s of %s: restored from %s ranks", self._rank, self._world_size, world_size)

    def _why_not(self, version: ForeignVersion, layouts: dict[int, Any]) -> str:
        states = {layout.about.get("state") for layout in layouts.values()}
        sizes = {layout.about.get("world_size") for layout in layouts.values()}
        if states != {self._topology["state"]}:
            return f"step {version.step} is of topology {version.topology}: of another model, or other parts"
        missing = sorted(set(range(max((int(size or 0) for size in sizes), default=0))) - set(layouts))
        return (
            f"step {version.step} is of topology {version.topology}, of {max(map(str, sizes))} ranks, and nobody here"
            f" has shard {', '.join(map(str, missing[:8]))} of it"
        )

    def _refuse(self, found: Survey, reasons: list[str]) -> None:
        """There is no version to restore; report it if that is a surprise."""
        if not found.seen and not any("another model" in reason for reason in reasons):
            return
        text = f"no checkpoint of run {self._run_id!r} can be restored: {'; '.join(reasons)}"
        lost = any("nobody has" in reason for reason in reasons)  # of this very topology
        if not lost and any("topology" in reason or "another model" in reason for reason in reasons):
            raise ValueError(
                f"{text}. Start as many ranks of the same model as before, on the same hosts; or have the run start"
                f" anew: thinwire holder --forget {self._run_id}, and give another persistent directory"
            )
        self._notices.add(f"{text}. Training starts anew")
