"""Restoring the newest available state: from the memory of this host, of a peer, or from the disk."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from thinwire.checkpoint.choice import OTHER_TOPOLOGY, Choice, choose
from thinwire.checkpoint.dcp.tier import DiskShards, PersistentTier, digest_of_shared
from thinwire.checkpoint.group import gather_json, odd_ranks, on_all
from thinwire.checkpoint.holder.faultpoint import reach
from thinwire.checkpoint.holder.start import STANDBYS_VARIABLE, KnownRun
from thinwire.checkpoint.holder.version import NONCE_BITS, StoredStep, Version, next_attempt, preferred, start_order
from thinwire.checkpoint.records import Notices
from thinwire.checkpoint.recovery import (
    ForeignShards,
    Survey,
    ask_outside,
    foreign_steps,
    gather_layouts,
    is_whole,
    load_shard,
    survey,
)
from thinwire.checkpoint.registration import Registration
from thinwire.checkpoint.state.encode import StateEncoder
from thinwire.checkpoint.state.layout import StateLayout, aligned
from thinwire.checkpoint.state.sharding import Move, fill, plan_moves
from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.errors import ThinwireError, logger

_TRIES = 3  # of versions in memory, each with those left after the failure before
_UNFINISHED = 2  # checkpoints that a crash may cost at any time: a shard has two slots
_NEWEST = 3  # steps whose layouts are asked for the holders of their hosts
_RELEASE_SECONDS = 3.0


@dataclass(frozen=True)
class Restored:
    """The restored step (None for a fresh start), and the attempt of new versions, which names this start of the run.

    ``origin`` is the attempt of the fresh start that the training began with, or -1 if that is not known. ``in_slots``:
    whether the version is in the slots of all ranks now. ``certified``: the newest step up to there at which all ranks
    are known to have been the same, or -1.
    """

    step: int | None
    attempt: int
    origin: int
    in_slots: bool = False
    certified: int = -1


@dataclass(frozen=True)
class _Candidate:
    """``certified``: whether ranks have alike what they should; None if nothing of it should be."""

    attempt: int
    step: int
    where: str
    load: Callable[[], None]
    certified: bool | None
    on_disk: bool = False
    is_foreign: bool = False

    @property
    def order(self) -> tuple[tuple[int, int], bool]:
        """Sort key, newest last: a version in memory goes before the same step on the disk."""
        return start_order(self.attempt, self.step), not self.on_disk


class Restorer:
    """A restorer of one training. It raises an error on all ranks or on none."""

    def __init__(
        self,
        training: TrainingState,
        registration: Registration,
        tier: PersistentTier | None,
        notices: Notices,
        every: int = 1,
    ) -> None:
        self._training, self._registration, self._tier, self._group = training, registration, tier, registration.group
        self._run_id, self._notices, self._every = registration.run_id, notices, every
        self._rank, self._world_size = registration.rank, dist.get_world_size(self._group)
        self._attempt = -1
        self._compares = training.keeps_ranks_alike
        # digest of what ranks should have alike, newest certified step before, and their group
        self._loaded: tuple[str, int, int | str] = ("", -1, 0)
        self._known, self._remembers = KnownRun(), False
        self._leaves: tuple[int, int] | None = None  # sort key of a step of choice: newer ones are given up
        self._origin, self._kept_at = -1, ""  # of the training: its fresh start, and the holders of what was restored
        self._origins: dict[str, int] = {}  # of the training that each host remembers, by its holder

    def _want(self, choice: Choice) -> None:
        """Have the holders keep the versions of a choice while they make room."""
        registration = self._registration
        registration.wanted = {h: choice.wanted_at(h, owners) for h, owners in registration.placed().items()}
        registration.chosen = None if choice.step is None else (choice.attempt, choice.step)

    def _look(
        self, step: int | None = None, verify: bool = False
    ) -> tuple[Survey, list[_Candidate], list[str], list[str]]:
        """Survey, also holders outside of the job as long as those inside lack something, and list `_candidates`.

        Collective.
        """
        registration = self._registration
        registration.reconnect()  # after a try that failed: without it only the disk would be left
        marked, standbys = registration.marker.read(), os.environ.get(STANDBYS_VARIABLE, "").split()
        gathered = gather_json([asdict(marked), standbys], self._group)
        self._known = max((KnownRun(each["step"], each["attempt"]) for each, _ in gathered), key=KnownRun.order)
        origins = zip(registration.holders, (each["origin"] for each, _ in gathered), strict=True)
        self._origins = {h: origin for h, origin in origins if origin >= 0 and not self._known.has_given_up(origin)}
        unasked = {str(address) for each, others in gathered for address in (*each["holders"], *others)}
        asked = set(registration.holders)
        surveyed = survey(registration, self._known, self._compares)
        while True:
            self._want(surveyed.choice)
            candidates, reasons, on_disk = self._candidates(surveyed, step)
            lacks = self._lacks(surveyed, candidates, step)
            unasked = (unasked | self._holders_named(surveyed)) - asked if lacks else set()
            if not unasked:
                return surveyed, candidates, reasons, on_disk
            surveyed = ask_outside(surveyed, unasked, registration, verify)
            asked |= unasked

    def _lacks(self, surveyed: Survey, candidates: Sequence[_Candidate], step: int | None) -> bool:
        """Return whether the step that was asked for is missing, or more of the newest steps than any crash costs.

        One version alone after what can be restored is what a crash leaves, however many steps were between: to ask the
        holder of a lost host for it takes seconds.
        """
        if step is not None:
            return all(candidate.step != step for candidate in candidates)
        alike = [each for each in candidates if not (each.on_disk or (self._compares and each.certified is False))]
        newest = max((each.order[0] for each in alike), default=None)
        return newest is None or len(self._given_up(surveyed, newest)) > 1

    def _given_up(self, surveyed: Survey, newest: tuple[int, int], passed: Set[int] = frozenset()) -> set[int]:
        """Steps after the ``newest`` but those ``passed``, if they are more than any crash leaves unfinished."""
        newer = {v.step for v in self._seen(surveyed) if start_order(v.attempt, v.step) > newest} - passed
        return newer if newer and max(newer) - newest[1] > _UNFINISHED * self._every else set()

    def _holders_named(self, surveyed: Survey) -> set[str]:
        """The holders of the hosts that wrote the newest steps, as the layouts of these say; collective."""
        newest = foreign_steps(surveyed.inventories, self._run_id, "")[:_NEWEST]
        layouts = [layout for each in newest for layout in gather_layouts(each, self._registration).values()]
        return {address for layout in layouts for address in _holders_of(layout) if isinstance(address, str)}

    def remember(self, step: int) -> None:
        """Have this host remember that the run has reached a step, once it is beyond its beginning; not collective.

        From the first step on, no later start goes back to what was given up for a step of choice.
        """
        leaves, self._leaves = self._leaves, None
        if leaves is not None and self._tier is not None and self._rank == 0:
            with contextlib.suppress(OSError, ThinwireError):  # the survey has said that nothing can be written
                self._tier.set_aside(leaves)
        if not self._remembers and step > _UNFINISHED * self._every:
            self._remembers = True
            holders = tuple(sorted(set(self._registration.holders)))
            self._mark(KnownRun(step, self._known.attempt, holders, self._origin))

    def _mark(self, known: KnownRun) -> None:
        registration = self._registration
        if registration.is_first and (reason := registration.marker.write(known)):
            self._notices.add(
                f"{os.uname().nodename} cannot remember run {self._run_id!r}, so a restart that gets nothing of it"
                f" would start over in silence: {reason}"
            )

    def begin(self) -> Restored:
        """Survey for a training that begins without a restore; collective.

        Raises ValueError if there is something to restore.
        """
        surveyed, candidates, reasons, on_disk = self._look()
        if candidates:
            newest = self._preferred(candidates)
            raise ValueError(
                f"run {self._run_id!r} has a checkpoint of step {newest.step}, which the first step would overwrite:"
                " call restore() before it, restore(fresh=True) to give it up, or take another run_id"
            )
        self._start_over(surveyed, reasons, on_disk)
        return self._fresh(surveyed.attempt)

    def _fresh(self, attempt: int) -> Restored:
        self._origin = attempt
        return Restored(None, attempt, attempt)

    def start_afresh(self) -> Restored:
        """Give up all versions of the run that this job can reach, saying which; collective.

        Raises ValueError if a trainer uses one of them, ThinwireError if those on the disk cannot be set aside.
        """
        surveyed = self._look()[0]
        on_disk, unreadable = self._tier.survey() if self._tier is not None else ([], [])
        steps = sorted({version.step for version in self._seen(surveyed)} | {about["step"] for about in on_disk})
        if steps or unreadable:
            self._tell(f"the run {self._run_id!r} starts over, and gives up its steps {_listed(steps)}")
        self._want(Choice(None))
        self._forget()
        if self._tier is not None:
            self._tier.give_up()
        self._known, self._remembers = KnownRun(attempt=surveyed.attempt), False
        self._mark(self._known)  # holders outside of the job keep what is given up here
        return self._fresh(surveyed.attempt)

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

        From wherever it is, a certified one goes before newer ones in which ranks differ.

        Raises ValueError if there are only versions that cannot be restored, or none of ``step``; ThinwireError if none
        of them can be loaded.
        """
        self._attempt, failure, spoiled, tries = -1, "", set(), 0
        while tries < _TRIES:
            surveyed, candidates, reasons, on_disk = self._look(step, verify=tries > 0)
            self._attempt = surveyed.attempt if self._attempt < 0 else self._attempt
            left = [each for each in candidates if each.where not in spoiled and step in (None, each.step)]
            if not left:
                if step is not None and not failure:
                    steps = _listed(sorted({candidate.step for candidate in candidates}))
                    raise ValueError(f"run {self._run_id!r} has no step {step} to restore; it has {steps}")
                if not (candidates or failure):
                    self._start_over(surveyed, reasons, on_disk)
                break
            newest = self._preferred(left)
            if not (failure := self._load(newest)):
                self._say_what_is_left(newest, left, surveyed, reasons)
                self._say_who_never_met(newest.step)
                self.remember(newest.step)
                self._leaves = None if step is None else newest.order[0]
                attempt = max(self._attempt, next_attempt([newest.attempt], self._attempt % (1 << NONCE_BITS)))
                in_slots = not newest.on_disk and not newest.is_foreign
                return Restored(newest.step, attempt, self._origin, in_slots, self._certify(newest))
            tries += not newest.on_disk
            spoiled |= {newest.where} if newest.on_disk else set()
        if failure:  # not a fresh start any more: some of it may be loaded
            raise ThinwireError(f"a checkpoint of run {self._run_id!r} was not restored: {failure}")
        return self._fresh(self._attempt)

    def _preferred(self, candidates: list[_Candidate]) -> _Candidate:
        newest_first = sorted(candidates, key=lambda candidate: candidate.order, reverse=True)
        result = preferred(newest_first, lambda candidate: candidate.certified if self._compares else None)
        assert result is not None, "there is a candidate"
        return result

    def _certify(self, restored: _Candidate) -> int:
        """Return the newest step at which all ranks are known to have been the same, or -1; collective.

        If ranks should be alike in what was restored, and are not known to be, that is said.
        """
        digests, steps, groups = zip(*gather_json(self._loaded, self._group), strict=True)
        certified, differ = min(steps), odd_ranks(digests, groups)[1]
        if not self._compares:
            return -1
        if restored.certified is None and not differ and self._world_size > 1:  # whoever wrote it compared nothing
            differ = self._compare()
        if restored.certified is None and not differ:
            return -1
        if restored.certified and not differ:
            logger.info("step %s: parameters and optimizer state are the same on all ranks", restored.step)
            return restored.step
        self._tell(
            f"step {restored.step}, restored {restored.where}, is not certified: "
            + (f"parameters or optimizer state of {differ}" if differ else "it is not known whether all were the same")
            + (f"; step {certified}, at which all were the same, is not available" if certified >= 0 else "")
            + ". Go on from another one with restore(step=...), or say that ranks are meant to differ with"
            " on_divergence='off'"
        )
        return certified

    def _compare(self) -> str:
        """Compare what ranks have now and should have alike; collective. Return a text that names those that differ."""

        def mine() -> tuple[str, str]:
            encoded = StateEncoder(self._training.is_replicated).encode(self._training.capture(0))
            return digest_of_shared(encoded), encoded.alike

        digests, alike = zip(*gather_json(on_all(self._group, mine), self._group), strict=True)
        return odd_ranks(digests, alike)[1]

    def _say_what_is_left(
        self, restored: _Candidate, left: list[_Candidate], surveyed: Survey, reasons: list[str]
    ) -> None:
        """Report newer versions that the training will overwrite: those that are whole and not certified, and others
        beyond those that any crash leaves unfinished."""
        order = restored.order[0]
        if passed := {candidate.step for candidate in left if candidate.order[0] > order}:
            self._tell(
                f"step {restored.step}, which is certified, was restored {restored.where}; newer ones are given up,"
                f" because ranks differ in them, or are not known to be the same: steps {_listed(sorted(passed))}"
            )
        if newer := self._given_up(surveyed, order, passed):
            self._tell(
                f"step {restored.step} was restored {restored.where}; newer ones are given up, steps"
                f" {_listed(sorted(newer))}: {'; '.join(reasons) or 'another one was asked for'}"
            )

    def _say_who_never_met(self, step: int) -> None:
        """Report hosts that took part in another training of this name, which nobody has given up."""
        strangers = sorted(holder for holder, origin in self._origins.items() if origin != self._origin)
        if strangers and self._origin >= 0:
            self._tell(
                f"holder {_listed(strangers)} keeps another training of the name {self._run_id!r}, which never met the"
                f" one of which step {step} was restored: the restored one was kept at {self._kept_at}. If they are"
                " two, end this job and give each a name of its own: from now on what the other one has is overwritten"
            )

    def _tell(self, text: str) -> None:
        """Once for the job."""
        if self._rank == 0:
            self._notices.add(text)

    def _seen(self, surveyed: Survey) -> list[Version]:
        return [v for versions in surveyed.inventories.values() for v in versions if v.shard.run_id == self._run_id]

    def _load(self, candidate: _Candidate) -> str:
        """Why some ranks could not, the same on all of them, or empty; collective."""
        try:
            on_all(self._group, candidate.load)
        except ThinwireError as error:
            logger.warning("step %s %s was not restored: %s", candidate.step, candidate.where, error)
            return str(error)
        return ""

    def _candidates(self, surveyed: Survey, step: int | None) -> tuple[list[_Candidate], list[str], list[str]]:
        """All versions that can be restored, and why others cannot, in memory and on the disk; collective.

        Of other topologies only what is newer than all of this one in which ranks do not differ, down to the
        first in which they do not, unless a ``step`` is asked for.
        """
        candidates, reasons = [], list(surveyed.choice.reasons)
        topology, holders = self._registration.topology, self._registration.holders
        placed, compares = self._registration.placed(), self._compares
        for each in sorted({version.step for version in self._seen(surveyed)}):
            choice = choose(surveyed.inventories, holders, self._run_id, topology, placed, each, compares)
            if choice.step is not None:
                load = partial(self._load_choice, choice)
                candidates.append(_Candidate(choice.attempt, choice.step, "from memory", load, choice.certified))
        alike = [each.order[0] for each in candidates if not (compares and each.certified is False)]
        newest = max(alike, default=(-1, -1))
        others: set[str] = set()  # topologies of other models, which are said once
        for version in foreign_steps(surveyed.inventories, self._run_id, topology):
            if version.order > newest or step is not None:
                layouts = gather_layouts(version, self._registration)
                if is_whole(layouts, self._registration.about):
                    where, load = f"of {len(layouts)} ranks, from memory", partial(self._load_foreign, version, layouts)
                    named = version.attempt, version.step, where, load, version.certified
                    candidates.append(_Candidate(*named, is_foreign=True))
                    if step is None and not (compares and version.certified is False):
                        break
                elif version.topology not in others:
                    reasons.append(self._why_not(version, layouts))
                    others |= {version.topology} if "of another model" in reasons[-1] else set()
        if others:
            reasons = [reason for reason in reasons if OTHER_TOPOLOGY not in reason]
        disk, unread = self._on_disk()
        return candidates + disk, reasons, unread

    def _load_choice(self, choice: Choice) -> None:
        registration = self._registration
        self._want(choice)
        common = [(version.group, version.common_bytes) for version in choice.versions]
        own = choice.versions[self._rank]
        registration.register(own.payload_bytes + aligned(own.common_bytes), self._attempt, common)
        assert registration.client is not None
        layout = load_shard(registration.client, choice, self._rank, registration.here, self._training)
        self._note(own.shared, layout, own.group)

    def _note(self, shared: str, layout: StateLayout, group: int | str) -> None:
        said = [layout.about.get(name) for name in ("certified", "origin")]
        certified, self._origin = (each if type(each) is int else -1 for each in said)
        self._loaded, self._kept_at = (shared, certified, group), _listed(sorted(set(map(str, _holders_of(layout)))))

    def _load_foreign(self, version: StoredStep, layouts: dict[int, Any]) -> None:
        like, registration = self._like(len(layouts)), self._registration

        def prepare() -> tuple[dict[str, Any], list[Move]]:
            state, targets = self._training.prepare(layouts[like])
            return state, plan_moves(targets, layouts, like)

        state, moves = on_all(self._group, prepare)
        copies = [each.digest for copy in version.copies.values() for each in copy.values()] + list(version.common)
        registration.wanted = dict.fromkeys(registration.holders, copies)
        registration.chosen, registration.left = (version.attempt, version.step), version.topology
        registration.assign(self._attempt)
        shards = ForeignShards(version, {move.owner for move in moves}, registration)
        with contextlib.closing(shards):
            fill(moves, shards.tensors)
            shards.verify()
        self._adopt(state, len(layouts))
        loaded = next(iter(version.copies[like].values()))
        self._note(loaded.shared, layouts[like], loaded.group)

    def _on_disk(self) -> tuple[list[_Candidate], list[str]]:
        candidates, reasons = [], []
        readable, unreadable = self._tier.survey() if self._tier is not None else ([], [])
        for about, certified in zip(readable, self._are_certified(readable), strict=True):
            assert self._tier is not None
            if about["state"] == self._registration.about["state"]:
                where, load = f"in {self._tier.directory}, step {about['step']}", partial(self._read, about)
                candidates.append(_Candidate(about["attempt"], about["step"], where, load, certified, on_disk=True))
            else:
                difference = ""
                with contextlib.suppress(Exception, CheckpointException):
                    difference = f": {self._training.difference(self._tier.open(about).layout(0))}"
                reasons.append(f"step {about['step']} in {self._tier.directory} is of another model{difference}")
        if unreadable and self._tier is not None:
            reasons.append(f"steps {_listed(unreadable)} in {self._tier.directory} cannot be read")
        return candidates, reasons

    def _are_certified(self, abouts: Sequence[dict[str, Any]]) -> list[bool | None]:
        """Whether checkpoints on the disk are; collective. One of an earlier release does not say so, so it is not, if
        any rank has something that others should have alike."""
        result = [None if about["world_size"] < 2 else about.get("certified", False) for about in abouts]
        if all(each is None or each is True for each in result):
            return result

        def has_alike() -> bool:
            return StateEncoder(self._training.is_replicated).encode(self._training.capture(0)).shared_bytes > 0

        otherwise = False if any(gather_json(on_all(self._group, has_alike), self._group)) else None
        return [each if each is None or each is True else otherwise for each in result]

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
        else:
            state, targets = self._training.prepare(layout)
            layouts = {owner: shards.layout(owner) for owner in range(shards.world_size)}
            fill(plan_moves(targets, layouts, like), shards.tensors)
            self._adopt(state, shards.world_size)
        self._note(shards.shared(like), layout, shards.alike(like))

    def _like(self, world_size: int) -> int:
        """The old rank whose values this one uses for everything that is not in parts."""
        return self._rank % world_size

    def _adopt(self, state: dict[str, Any], world_size: int) -> None:
        """Go on with a state of another number of ranks."""
        keep = [] if self._rank < world_size else ["random"]  # two ranks must not draw the same numbers
        if (synchronizer := self._training.synchronizer) is not None:
            try:
                synchronizer.load_state_dict(state["synchronizer"])
            except ValueError as error:
                self._notices.add(f"the synchronizer starts over, with empty memories: {error}")
            keep.append("synchronizer")
        self._training.adopt(state, keep)
        logger.info("rank %s of %s: restored from %s ranks", self._rank, self._world_size, world_size)

    def _why_not(self, version: StoredStep, layouts: dict[int, Any]) -> str:
        own = self._registration.about["state"]
        other = next((each for each in layouts.values() if each.about.get("state") != own), None)
        sizes = {layout.about.get("world_size") for layout in layouts.values()}
        if version.lacking:
            return f"nobody has what ranks {_listed(version.lacking)} had in common with others at step {version.step}"
        if not layouts:
            return f"nobody can read what step {version.step} is made of"
        if other is not None:
            with contextlib.suppress(Exception):  # of the parts of this rank's state; others wait for it
                return f"step {version.step} is of another model: {self._training.difference(other)}"
            return f"step {version.step} is of another model"
        missing = sorted(set(range(max((int(size or 0) for size in sizes), default=0))) - set(layouts))
        return f"step {version.step} is of {max(map(str, sizes))} ranks, and nobody has shard {_listed(missing)} of it"

    def _start_over(self, surveyed: Survey, reasons: list[str], on_disk: list[str]) -> None:
        """Decide on a fresh start, where nothing can be restored; collective. Raises ValueError if it loses something.

        A run whose newest step anywhere is the first or the second that it keeps is at its beginning: before all ranks
        have a step everywhere there is no third one, because each shard has two slots. A crash costs as many steps at
        any time, so such a run starts over with a notice. Whether one of these steps was complete is not asked: only
        the ranks that died know.
        """
        seen, why = self._seen(surveyed), "; ".join(reasons + on_disk)
        is_known = self._known.step >= 0  # beyond its beginning, with whatever `every` it was trained
        if not (why or seen or is_known):
            if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # perhaps the holders died with the workers
                self._tell(
                    f"the workers were started again, and nobody has a checkpoint of run {self._run_id!r}, so training"
                    " starts over: what it did before is lost if there were checkpoints (a Disk outlives holders)"
                )
            return
        where = f"; there is none in {self._tier.directory}: is it mounted?" if self._tier is not None else ""
        lost = f"it had reached step {self._known.step}, and no holder here has any of it{where}"
        text = f"no checkpoint of run {self._run_id!r} can be restored: {why or lost}"
        if seen and not (on_disk or is_known) and max(version.step for version in seen) <= _UNFINISHED * self._every:
            self._tell(f"{text}. It was at its beginning, so training starts over")
            self._forget()
            return
        raise ValueError(
            f"{text}. {_asked(surveyed, self._registration.holders)}"
            "Training does not start over by itself, because that would overwrite"
            " what is left. Start as many ranks of the same model as before, on the same hosts; or restore(step=...)"
            " an older step where there is one; or give the run up with restore(fresh=True)"
        )


def _asked(surveyed: Survey, inside: Sequence[str]) -> str:
    """What holders outside of the job said."""
    outside = sorted(set(surveyed.inventories) - set(inside))
    steps = {holder: sorted({v.step for v in surveyed.inventories[holder]}) for holder in outside}
    gathered = [f"{holder} has {'steps ' + _listed(has) if has else 'nothing of it'}" for holder, has in steps.items()]
    gathered += [f"{holder} did not answer ({why})" for holder, why in sorted(surveyed.silent.items())]
    return f"Asked outside of it: {'; '.join(gathered[:8])}. " if gathered else ""


def _holders_of(layout: StateLayout) -> list[Any]:
    """The addresses of the holders of all shards of a version, as one of them says."""
    holders = layout.about.get("holders")
    return holders if isinstance(holders, list) else []


def _listed(items: Sequence[object]) -> str:
    more = f" ... {items[-1]}" if len(items) > 8 else ""
    return ", ".join(map(str, items[:8])) + more or "none"
