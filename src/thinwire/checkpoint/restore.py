"""Restoring the newest available state: from the memory of this host, of a peer, or from the disk."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from thinwire.checkpoint.choice import Choice, choose
from thinwire.checkpoint.dcp.tier import DiskShards, PersistentTier
from thinwire.checkpoint.group import on_all
from thinwire.checkpoint.records import Notices
from thinwire.checkpoint.recovery import (
    ForeignShards,
    Survey,
    foreign_steps,
    gather_layouts,
    is_whole,
    load_shard,
    survey,
)
from thinwire.checkpoint.registration import Registration
from thinwire.checkpoint.state.sharding import Move, fill, plan_moves
from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.errors import ThinwireError
from thinwire.holder.faultpoint import reach
from thinwire.holder.version import NONCE_BITS, StoredStep, Version, next_attempt, start_order, topology_digest

logger = logging.getLogger("thinwire")

_TRIES = 3  # of versions in memory, each with those left after the failure before
_MEMORY, _DISK = 1, 0
_UNFINISHED = 2  # checkpoints that a crash may cost at any time: a shard has two slots
_RELEASE_SECONDS = 3.0


@dataclass(frozen=True)
class Restored:
    """The restored step (None for a fresh start), and the attempt of new versions, which names this start of the run.

    ``in_slots``: whether the version is in the slots of all ranks now.
    """

    step: int | None
    attempt: int
    in_slots: bool = False


@dataclass(frozen=True)
class _Candidate:
    """``order``: newest last; a version in memory goes before the same step on the disk."""

    order: tuple[tuple[int, int], int]
    attempt: int
    step: int
    where: str
    load: Callable[[], None]
    is_foreign: bool = False

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
        every: int = 1,
    ) -> None:
        self._training, self._registration, self._tier, self._group = training, registration, tier, group
        self._run_id, self._topology, self._notices, self._every = run_id, topology, notices, every
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._attempt: int | None = None

    def survey(self) -> Survey:
        """Gather the versions in the memory of all hosts; collective."""
        registration, topology = self._registration, topology_digest(self._topology)
        placed = registration.placed()
        found = survey(registration, self._run_id, topology, self._group, placed)
        self._want(found.choice)
        return found

    def _want(self, choice: Choice) -> None:
        """Have the holders keep the versions of a choice while they make room."""
        registration = self._registration
        registration.wanted = {h: choice.wanted_at(h, owners) for h, owners in registration.placed().items()}
        registration.chosen = None if choice.step is None else (choice.attempt, choice.step)

    def begin(self) -> Survey:
        """Survey for a training that begins without a restore; collective.

        Raises ValueError if there is something to restore.
        """
        found = self.survey()
        candidates, reasons, on_disk = self._candidates(found, None)
        if candidates:
            newest = max(candidates, key=lambda candidate: candidate.order)
            raise ValueError(
                f"run {self._run_id!r} has a checkpoint of step {newest.step}, which the first step would overwrite:"
                " call restore() before it, restore(fresh=True) to give it up, or take another run_id"
            )
        self._begin_anew(found, reasons, on_disk)
        return found

    def start_afresh(self) -> Restored:
        """Give up all versions of the run that this job can reach, saying which; collective.

        Raises ValueError if a trainer uses one of them, ThinwireError if those on the disk cannot be set aside.
        """
        found = self.survey()
        on_disk, unreadable = self._tier.survey() if self._tier is not None else ([], [])
        steps = sorted({version.step for version in self._seen(found)} | {about["step"] for about in on_disk})
        if steps or unreadable:
            self._tell(f"the run {self._run_id!r} starts anew, and gives up its steps {_listed(steps)}")
        self._want(Choice(None))
        self._forget()
        if self._tier is not None:
            self._tier.give_up()
        return Restored(None, found.attempt)

    def _forget(self) -> None:
        """Free the versions of the run on the hosts of this job; collective. Raises ValueError if one is in use."""
        registration = self._registration
        if registration.registered:
            registration.close()
        registration.reconnect()
        deadline = time.monotonic() + _RELEASE_SECONDS  # in which a holder notices that a trainer is gone

        def forget() -> None:
            while registration.client is not None and registration.is_first:
                try:
                    registration.client.forget(self._run_id)
                    return
                except (ThinwireError, ValueError):
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.05)

        try:
            on_all(self._group, forget)
        except ThinwireError as error:
            raise ValueError(f"the versions of run {self._run_id!r} cannot be given up: {error}") from error

    def restore(self, step: int | None = None) -> Restored:
        """Load the newest state that all ranks can have, or that of ``step``, in place; collective.

        Raises ValueError if there are only versions that cannot be restored, or none of ``step``; ThinwireError if none
        of them can be loaded.
        """
        self._attempt, failure, spoiled, tries = None, "", set(), 0
        while tries < _TRIES:
            found = self.survey()
            if self._attempt is None:
                self._attempt = found.attempt
            candidates, reasons, on_disk = self._candidates(found, step)
            left = [each for each in candidates if each.where not in spoiled and step in (None, each.step)]
            if not left:
                if step is not None and not failure:
                    steps = _listed(sorted({candidate.step for candidate in candidates}))
                    raise ValueError(f"run {self._run_id!r} has no step {step} to restore; it has {steps}")
                if not (candidates or failure):
                    self._begin_anew(found, reasons, on_disk)
                break
            newest = max(left, key=lambda candidate: candidate.order)
            failure = self._load(newest)
            if not failure:
                self._say_what_is_left(newest, found, reasons)
                attempt = max(self._attempt, next_attempt([newest.attempt], self._attempt % (1 << NONCE_BITS)))
                in_slots = not newest.on_disk and not newest.is_foreign
                return Restored(newest.step, attempt, in_slots)
            tries += not newest.on_disk
            spoiled |= {newest.where} if newest.on_disk else set()
        if failure:  # not a fresh start any more: some of it may be loaded
            raise ThinwireError(f"a checkpoint of run {self._run_id!r} was not restored: {failure}")
        return Restored(None, self._attempt or 0)

    def _say_what_is_left(self, restored: _Candidate, found: Survey, reasons: list[str]) -> None:
        """Report newer versions that the training will overwrite, beyond those that any crash leaves unfinished."""
        order = restored.order[0]
        newer = {v.step for v in self._seen(found) if start_order(v.attempt, v.step) > order}
        if newer and max(newer) - restored.step > _UNFINISHED * self._every:
            self._tell(
                f"step {restored.step} was restored {restored.where}; newer ones are given up, steps"
                f" {_listed(sorted(newer))}: {'; '.join(reasons) or 'another one was asked for'}"
            )

    def _tell(self, text: str) -> None:
        """Once for the job."""
        if self._rank == 0:
            self._notices.add(text)

    def _seen(self, found: Survey) -> list[Version]:
        return [v for versions in found.inventories.values() for v in versions if v.shard.run_id == self._run_id]

    def _load(self, candidate: _Candidate) -> str:
        """Why some ranks could not, the same on all of them, or empty; collective."""
        try:
            on_all(self._group, candidate.load)
        except ThinwireError as error:
            logger.warning("step %s %s was not restored: %s", candidate.step, candidate.where, error)
            return str(error)
        return ""

    def _candidates(self, found: Survey, step: int | None) -> tuple[list[_Candidate], list[str], list[str]]:
        """All versions that can be restored, and why others cannot, in memory and on the disk; collective.

        Of those of other topologies only the newest that is newer than all of this one, unless a ``step`` is asked for.
        """
        candidates, reasons = [], list(found.choice.reasons)
        topology, holders = topology_digest(self._topology), self._registration.holders
        placed = self._registration.placed()
        steps = sorted({version.step for version in self._seen(found)}) if step is not None else []
        choices = [choose(found.inventories, holders, self._run_id, topology, placed, each) for each in steps]
        for choice in choices if step is not None else [found.choice]:
            if choice.step is not None:
                order, load = start_order(choice.attempt, choice.step), partial(self._load_choice, choice)
                candidates.append(_Candidate((order, _MEMORY), choice.attempt, choice.step, "from memory", load))
        newest = max((candidate.order[0] for candidate in candidates), default=(-1, -1))
        for version in foreign_steps(found.inventories, self._run_id, topology):
            if version.order > newest or step is not None:
                layouts = gather_layouts(version, self._registration, self._group)
                if is_whole(layouts, self._topology):
                    where, load = f"of {len(layouts)} ranks, from memory", partial(self._load_foreign, version, layouts)
                    order = (version.order, _MEMORY)
                    candidates.append(_Candidate(order, version.attempt, version.step, where, load, True))
                    if step is None:
                        break
                else:
                    reasons.append(self._why_not(version, layouts))
        disk, others = self._on_disk()
        return candidates + disk, reasons, others

    def _load_choice(self, choice: Choice) -> None:
        registration, attempt = self._registration, self._attempt
        assert attempt is not None
        self._want(choice)
        registration.register(choice.versions[self._rank].payload_bytes, attempt)
        assert registration.client is not None
        load_shard(registration.client, choice, self._rank, registration.here, self._training)
        if choice.certified is not None:
            alike = "" if choice.certified else "not "
            newer = "".join(f"; {reason}" for reason in choice.reasons if "of ranks differ" in reason)
            logger.info("step %s: parameters are %sthe same on all ranks%s", choice.step, alike, newer)

    def _load_foreign(self, version: StoredStep, layouts: dict[int, Any]) -> None:
        like, registration = self._like(len(layouts)), self._registration

        def prepare() -> tuple[dict[str, Any], list[Move]]:
            state, targets = self._training.prepare(layouts[like])
            return state, plan_moves(targets, layouts, like)

        state, moves = on_all(self._group, prepare)
        copies = [version.digest for copy in version.copies.values() for version in copy.values()]
        registration.wanted = dict.fromkeys(registration.holders, copies)
        registration.chosen, registration.left = (version.attempt, version.step), version.topology
        assert self._attempt is not None
        registration.place(self._attempt)
        shards = ForeignShards(version, {move.owner for move in moves}, registration, self._group)
        with contextlib.closing(shards):
            fill(moves, shards)
            shards.verify()
        self._adopt(state, len(layouts))

    def _on_disk(self) -> tuple[list[_Candidate], list[str]]:
        candidates, reasons = [], []
        readable, unreadable = self._tier.survey() if self._tier is not None else ([], [])
        for about in readable:
            assert self._tier is not None
            if about["state"] == self._topology["state"]:
                order = (start_order(about["attempt"], about["step"]), _DISK)
                where = f"in {self._tier.directory}, step {about['step']}"
                load = partial(self._read, about)
                candidates.append(_Candidate(order, about["attempt"], about["step"], where, load))
            else:
                reasons.append(f"step {about['step']} in {self._tier.directory} is of another model")
        if unreadable and self._tier is not None:
            reasons.append(f"steps {_listed(unreadable)} in {self._tier.directory} cannot be read")
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

    def _why_not(self, version: StoredStep, layouts: dict[int, Any]) -> str:
        states = {layout.about.get("state") for layout in layouts.values()}
        sizes = {layout.about.get("world_size") for layout in layouts.values()}
        if states != {self._topology["state"]}:
            return f"step {version.step} is of topology {version.topology}: of another model, or other parts"
        missing = sorted(set(range(max((int(size or 0) for size in sizes), default=0))) - set(layouts))
        return (
            f"step {version.step} is of topology {version.topology}, of {max(map(str, sizes))} ranks, and nobody here"
            f" has shard {', '.join(map(str, missing[:8]))} of it"
        )

    def _begin_anew(self, found: Survey, reasons: list[str], on_disk: list[str]) -> None:
        """Decide on a fresh start, where nothing can be restored; collective. Raises ValueError if it loses something.

        A run whose newest step anywhere is the first or the second that it keeps is at its beginning: before all ranks
        have a step everywhere there is no third one, because each shard has two slots. A crash costs as many steps at
        any time, so such a run starts anew with a notice. Whether one of these steps was complete is not asked: only
        the ranks that died know.
        """
        seen, why = self._seen(found), "; ".join(reasons + on_disk)
        if not why and not seen:
            if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # perhaps the holders died with the workers
                self._tell(
                    f"the workers were started again, and nobody has a checkpoint of run {self._run_id!r}, so training"
                    " starts anew: what it did before is lost if there were checkpoints (persistent= outlives holders)"
                )
            return
        text = f"no checkpoint of run {self._run_id!r} can be restored: {why}"
        if seen and not on_disk and max(version.step for version in seen) <= _UNFINISHED * self._every:
            self._tell(f"{text}. It was at its beginning, so training starts anew")
            self._forget()
            return
        raise ValueError(
            f"{text}. {self._where_else(found)}Training does not start anew by itself, because that would overwrite"
            " what is left. Start as many ranks of the same model as before, on the same hosts; or restore(step=...)"
            " an older step where there is one; or give the run up with restore(fresh=True)"
        )

    def _where_else(self, found: Survey) -> str:
        """Where the missing shards of the newest step were, as its other shards tell; collective."""
        for version in foreign_steps(found.inventories, self._run_id, "")[:1]:
            layouts = gather_layouts(version, self._registration, self._group)
            told = next(iter(layouts.values())).about if layouts else {}
            holders, here = told.get("holders", []), set(self._registration.holders)
            missing = [(owner, holder) for owner, holder in enumerate(holders) if owner not in layouts]
            away = sorted({holder for _, holder in missing if holder not in here})
            if missing:
                where = f"the hosts at {', '.join(away[:8])}, which are not part of this job" if away else "lost hosts"
                shards = _listed([owner for owner, _ in missing])
                return f"Shards {shards} of step {version.step} were on {where}. "
        return ""


def _listed(numbers: Sequence[int]) -> str:
    more = f" ... {numbers[-1]}" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more or "none"
