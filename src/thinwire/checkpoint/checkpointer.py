"""The front end: a checkpoint after every step in the memory of this host and of its peers, and the way back."""

import os
import time
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.checkpoint.agreement import Agreement, Divergence
from thinwire.checkpoint.cycle import Cycle
from thinwire.checkpoint.dcp.tier import PersistentTier, check_parent
from thinwire.checkpoint.elastic.heartbeat import Heartbeat
from thinwire.checkpoint.group import check_alike, lasting, on_all, private_group, restart_hint, run_id_of
from thinwire.checkpoint.holder.start import AGENT_VARIABLE, socket_path
from thinwire.checkpoint.holder.version import topology_digest
from thinwire.checkpoint.options import CheckpointPolicy, Storage
from thinwire.checkpoint.pacing.gaps import Pacer
from thinwire.checkpoint.pacing.governor import Governor
from thinwire.checkpoint.records import AgeAlarm, Notices, VersionRecord
from thinwire.checkpoint.registration import Registration
from thinwire.checkpoint.restore import Restored, Restorer
from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.errors import ThinwireError

_FLUSH_POLL_SECONDS = 0.002
_EXIT_SECONDS = 10.0


class Checkpointer(AbstractContextManager["Checkpointer"]):
    """A keeper of this rank's newest state in the memory of this host and of its peers (GEMINI, SOSP'23).

    Call `restore` once, before training, and `step` after every optimizer step; both on all ranks. A failure of a
    checkpoint is counted and warned of, and training goes on.

    Args:
        model: the model to keep; taken out of DDP if wrapped in it. It may be sharded by FSDP2 (``fully_shard``).
        optimizer: its optimizer, or a list, tuple or dict of several; likewise all that has ``state_dict`` and
            ``load_state_dict``: ``scheduler``, ``scaler``, the ``synchronizer`` that `thinwire.attach` returned, and
            ``data``, the position in the data.
        policy: when and how versions are made: how often, at which cost, and what happens when ranks differ.
        storage: where versions are kept: the name of the run, the number of copies, a disk, the ranks.

    Raises:
        ValueError: on all ranks: a state that cannot be stored, no run_id, a host without a holder, no parent of the
            directory of `Disk`, or fewer machines than replicas (on a single machine there is a warning instead,
            and one replica).

    Example:
        >>> checkpointer = Checkpointer(model, optimizer)      # doctest: +SKIP
        >>> first = checkpointer.restore() or 0                # doctest: +SKIP
        >>> for step in range(first, num_steps):               # doctest: +SKIP
        ...     train_step(step)
        ...     optimizer.step()
        ...     checkpointer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[Any] | dict[str, Any] | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        synchronizer: Any = None,
        data: Any = None,
        policy: CheckpointPolicy = CheckpointPolicy(),  # noqa: B008 (it is frozen)
        storage: Storage = Storage(),  # noqa: B008
    ) -> None:
        disk = storage.disk

        def check() -> tuple[str, Governor, TrainingState, str]:
            run_id = run_id_of(storage.run_id)
            if disk is not None:
                check_parent(Path(disk.directory))
            most_steps, compares = policy.max_age_steps and policy.max_age_steps // 2, policy.on_divergence != "off"
            training = TrainingState(model, optimizer, scheduler, scaler, synchronizer, data, compares)
            governor = Governor(policy.max_overhead, policy.every, most_steps)
            return run_id, governor, training, training.describe()

        own = private_group(storage.process_group, storage.timeout)  # first: what fails on one rank, fails on all
        self._policy, self._first, self._group = policy, 0, own.process_group
        self._rank = dist.get_rank(self._group)
        try:
            settings = {name: getattr(policy, name) for name in ("every", "max_age_steps", "on_divergence", "compress")}
            check_alike(settings | {"replicas": storage.replicas, "disk": disk and "a Disk"}, self._group)
            run_id, governor, training, state = on_all(self._group, check, ValueError)
            about = {"world_size": dist.get_world_size(self._group), "state": state}
            registration = Registration(storage, run_id, about, self._group)
        except Exception:
            own.destroy()
            raise
        self._run_id, self._training, self._registration, self._tier = run_id, training, registration, None
        self._notices = Notices(self._rank)
        if disk is not None:
            named = {**about, "run": lasting(run_id), "topology": topology_digest(about)}
            group = private_group(storage.process_group, storage.timeout)
            self._tier = PersistentTier(disk, named, group, self._notices)
        self._governor = governor
        watched = hasattr(synchronizer, "watch_lane")
        sampler = None if watched else registration.sampler()
        self._pacer = Pacer(
            lambda n: self._agreement.grant(n), policy.every, watched, lambda: self._agreement.revoke(), sampler
        )
        if watched:
            synchronizer.watch_lane(self._pacer.note_busy)
        raises = policy.on_divergence == "raise"
        self._agreement = Agreement(registration, self._group, self._tier, self._pacer, self._notices, governor, raises)
        self._restorer = Restorer(training, registration, self._tier, self._notices, policy.every)
        codes = policy.compress is not None
        if codes and find_spec("numba") is None:
            self._notices.add("versions are not coded, which takes numba: pip install '.[cpu]' in a checkout")
        self._cycle = Cycle(training, self._agreement, self._notices, governor, policy.overlap, codes)
        self._alarm = AgeAlarm(policy.every)
        self._heartbeat = Heartbeat(socket_path()) if AGENT_VARIABLE in os.environ else None
        ending = ExitStack()  # the last one first
        if self._heartbeat is not None:
            ending.callback(self._heartbeat.close)
        ending.callback(own.destroy)
        ending.callback(registration.close, for_good=True)
        if self._tier is not None:
            ending.callback(self._tier.close, _EXIT_SECONDS)
        ending.callback(self._pacer.close)
        ending.callback(self._cycle.close)  # again: the group that its thread may have waited in is shut down
        ending.callback(own.shut_down)  # other ranks do not wait for this one any more
        ending.callback(self._cycle.close)
        if watched:
            ending.callback(synchronizer.watch_lane, None)
        # Also at the exit of the process: a thread that comes back from C++ after Python has gone aborts the process.
        self._end = weakref.finalize(self, ending.close)
        if self._rank == 0 and (hint := restart_hint()):
            warnings.warn(hint, stacklevel=2)

    def __repr__(self) -> str:
        newest = self._agreement.keep
        kept = f"all ranks have step {newest}" if newest >= 0 else "no step that all ranks have"
        return f"<Checkpointer of run {self._run_id!r}, rank {self._rank}: {self.steps} steps, {kept}>"

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps(self) -> int:
        """Optimizer steps of the run so far, those before a restore included."""
        return self._cycle.step

    def restore(self, fresh: bool = False, step: int | None = None) -> int | None:
        """Restore the newest step of which every rank's state is available, and return the steps done until then.

        It loads in place, the same step on all ranks. None if there is nothing of this run, so that training starts
        afresh; also, with a warning, if the run was at its first two checkpoints and they are not complete. Call it on
        all ranks, before the first `step`.

        The number of ranks may differ from before: docs/guides/checkpoints.md describes the state of each.

        Args:
            fresh: start afresh, whatever there is. A warning says which steps are given up: those in the memory of
                these hosts are freed, those on the disk are set aside under the names ``step-*.given-up``.
            step: restore this step, from the memory or the disk. Newer ones are given up; those on the disk are set
                aside in the next `step`.

        Raises:
            ValueError: on all ranks: there are versions of the run, and none can be restored; there is none of
                ``step``; another trainer uses the versions to give up; or the directory of `Disk` has checkpoints of
                another run.
            ThinwireError: the versions could not be loaded.
        """
        cycle, agreement = self._cycle, self._agreement
        cycle.settle()
        cycle.drop_turn()
        agreement.keep = -1
        try:  # the worker has nothing to do now, so the group is free
            check_alike({"fresh": fresh, "step": step}, self._group)
            if fresh and step is not None:
                raise ValueError(f"restore(fresh=True, step={step}): pass one of them")
            restored = self._restorer.start_afresh() if fresh else self._restorer.restore(step)
            self._begin(restored)
            agreement.divergence = Divergence(restored.certified)  # training from here on is another history
            if restored.step is not None:
                cycle.step = self._first = restored.step
                agreement.keep = restored.step if restored.in_slots else -1
        finally:
            self._notices.deliver(stacklevel=2)
        return restored.step

    def step(self) -> None:
        """Make a checkpoint if one is due. Call it after every optimizer step, with the state as it is to be restored.

        When it returns, everything may change except parameters and the optimizer's state: those change in the next
        ``optimizer.step``, which waits until they are copied (see `CheckpointPolicy`).

        Raises:
            ValueError: on all ranks: the state of a rank cannot be stored; the memory budget of a holder is too small
                for it; or this is the first step, there was no `restore`, and there are versions of the run. On this
                rank: it is closed.
            ThinwireError: the newest checkpoint that all ranks have is older than ``policy.max_age_steps``; or, on all
                ranks, they no longer have the same parameters (``policy.on_divergence``).
        """
        if not self._end.alive:
            raise ValueError("this Checkpointer is closed: make another one to go on")
        cycle = self._cycle
        sends = not self._governor.sends_little
        seconds = self._pacer.note_step(self._governor.is_loaded and sends)
        self._governor.needs_free = self._pacer.is_profiling and sends
        if seconds is not None:
            self._governor.note_iteration(seconds)
        if not cycle.started:
            self._begin(cycle.do(self._restorer.begin))
        cycle.checkpoint()
        if self._heartbeat is not None:
            self._heartbeat.beat(cycle.step)
        self._restorer.remember(self._agreement.keep)
        newest, reason = max(self._agreement.keep, self._first), cycle.broken or cycle.records.last_reason
        spread = max(self._pacer.iterations_needed, self._governor.every)
        if old := self._alarm.check(cycle.step, newest, spread):
            self._notices.add(f"{old}: {reason}")
        self._notices.deliver(stacklevel=2)
        age, most = cycle.step - newest, self._policy.max_age_steps
        if most is not None and age > most:
            raise ThinwireError(
                f"the newest checkpoint that all ranks have is {age} steps old, and max_age_steps is {most}: {reason}"
            )

    def _begin(self, restored: Restored) -> None:
        self._agreement.attempt, self._agreement.origin = restored.attempt, restored.origin
        self._cycle.started = True

    def persist_now(self) -> None:
        """Save the state as it is to the persistent directory, and return when it is on the disk; on all ranks.

        Call it between two steps, after `restore` or a first `step`: before a planned stop, for instance.

        Raises:
            ValueError: there is no persistent directory, or neither `restore` nor `step` was called.
            ThinwireError: on all ranks, with the reason: a rank has nothing to save, or cannot write it.

        Example:
            >>> checkpointer.persist_now()                         # doctest: +SKIP
        """
        if self._tier is None or not self._cycle.started:
            raise ValueError(
                "persist_now needs storage=Storage(disk=Disk(DIRECTORY)), and restore() or step() before it"
            )
        self._cycle.settle()
        self._tier.join()
        if reason := self._tier.save_now(self.steps, self._agreement.attempt, self._cycle.copy):
            raise ThinwireError(reason)

    def flush(self, timeout_seconds: float = 60.0) -> bool:
        """Send pending versions without regard for gaps, wait, and return whether all peers have them.

        For the end of a training, or a pause of it. It concerns this rank alone: it waits for no other rank.
        """
        self._cycle.settle()
        newest, attempt = self._cycle.records.newest_step, self._agreement.attempt
        registration, deadline = self._registration, time.monotonic() + timeout_seconds
        with self._agreement.losing():
            while registration.registered and registration.client is not None:
                registration.client.grant_all()
                status = registration.client.status()
                ended = [[version["attempt"], version["step"]] for version in status["versions"]] + [status["failed"]]
                is_there = newest is None or [attempt, newest] in ended
                if is_there and status["newest_local"] == status["newest_replicated"]:
                    return True
                if time.monotonic() > deadline:
                    return False
                time.sleep(_FLUSH_POLL_SECONDS)
        return False

    def records(self) -> list[VersionRecord]:
        """Return the costs of the last 1,000 checkpoints."""
        return self._cycle.records.all()

    def stats(self) -> dict[str, float | str]:
        """Return the statistics of this rank, with slash names, for any metrics logger (docs/reference/stats.md).

        Seconds are medians over the versions that were written (`VersionRecord`); ``checkpoint/bound_*`` are the least
        cost of a version at the measured speed, each of its bytes copied and sent once. ``checkpoint/grants`` and
        ``checkpoint/schedule`` are texts for people: which bytes of the last version were granted when (Algorithm 2).
        """
        records, agreement, pacer, tier = self._cycle.records, self._agreement, self._pacer, self._tier
        result, replicas, diverged = records.stats(), self._registration.replicas, agreement.divergence.diverged
        cpu_seconds = self._cycle.cpu_seconds + agreement.holder_cpu_seconds
        bounds: dict[str, float] = {}
        if (num_bytes := records.coded_bytes) and (copying := result["checkpoint/copy_seconds"]):
            sent = (replicas - 1) * num_bytes  # a rank sends its shard to its peers, and copies theirs too
            speed = agreement.link_bytes_per_second or float("inf")
            bounds = {
                "checkpoint/bound_network_seconds": sent / speed,
                "checkpoint/bound_copy_seconds": replicas * copying,
            }
        return {
            "checkpoint/steps": float(self._cycle.step),
            "checkpoint/every": float(self._governor.every),
            "checkpoint/overhead": self._governor.overhead,
            "checkpoint/cpu_seconds": cpu_seconds / max(1.0, result["checkpoint/versions"]),
            **result,
            "checkpoint/dropped": float(agreement.status.get("dropped", 0)),
            "checkpoint/replicated_step": float(agreement.keep),
            "checkpoint/at_risk_steps": float(self._cycle.step - max(agreement.keep, self._first)),
            "checkpoint/persistent_step": float(tier.saved_step if tier is not None else -1),
            "checkpoint/persistent_errors": float(tier.errors if tier is not None else 0),
            "checkpoint/persistent_error": tier.last_error if tier is not None else "",
            "checkpoint/certified_step": float(agreement.divergence.certified),
            "checkpoint/diverged_ranks": float(len(diverged)),
            "checkpoint/replicas": float(replicas),
            "checkpoint/bytes_sent": float(agreement.status.get("bytes_sent", 0)),
            "checkpoint/bytes_unchanged": float(agreement.status.get("bytes_unchanged", 0)),
            "checkpoint/iteration_seconds": pacer.iteration_seconds,
            "checkpoint/idle_seconds": pacer.idle_seconds,
            "checkpoint/iterations_needed": float(pacer.iterations_needed),
            **bounds,
            "checkpoint/grants": pacer.how,
            "checkpoint/schedule": pacer.schedule,
        }

    def close(self) -> None:
        """Close the connection. The holders keep their versions and send them on; a second call does nothing.

        It waits for a running save to the persistent directory. At the exit of the process it is done too, but then
        waits for 10 s at most.
        """
        if self._end.alive and self._tier is not None:
            self._cycle.settle()  # the last version's save has begun
            self._tier.join()
        self._end()
