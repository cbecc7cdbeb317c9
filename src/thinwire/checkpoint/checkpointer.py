"""The front end: a checkpoint after every step in the memory of this host and of its peers, and the way back."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.checkpoint.agreement import FAILURES, Agreement, Divergence
from thinwire.checkpoint.cycle import Cycle
from thinwire.checkpoint.dcp.tier import PersistentTier, parse_seconds
from thinwire.checkpoint.group import PrivateGroup, gather_json, on_all, private_group, restart_hint, run_id_of
from thinwire.checkpoint.pacing.gaps import Pacer
from thinwire.checkpoint.pacing.governor import Governor
from thinwire.checkpoint.records import AgeAlarm, Notices, VersionRecord
from thinwire.checkpoint.registration import Registration
from thinwire.checkpoint.restore import Restorer
from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.comm.lane import Group
from thinwire.errors import ThinwireError
from thinwire.holder.version import topology_digest

_FLUSH_POLL_SECONDS = 0.002
_EXIT_SECONDS = 10.0


class Checkpointer:
    """A keeper of this rank's newest state in the memory of this host and of its peers (GEMINI, SOSP'23).

    Call `restore` once, before training, and `step` after every optimizer step; both on all ranks. A failure of a
    checkpoint is counted and warned of, and training goes on.

    Args:
        model: the model to keep; taken out of DDP if wrapped in it. It may be sharded by FSDP2 (``fully_shard``).
        optimizer: its optimizer, or a list, tuple or dict of several; likewise all that has ``state_dict`` and
            ``load_state_dict``: ``scheduler``, ``scaler``, the ``synchronizer`` that `thinwire.attach` returned, and
            ``data``, the position in the data.
        every: steps between two checkpoints, at least.
        max_overhead: share of the time of training that checkpoints may cost, such as 0.02. Where one after every step
            costs more, as measured while training, they are made less often. "auto" is 5 % or 10 ms a step, whichever
            is more; None never makes them less often.
        replicas: copies of each state, including the one on its own machine.
        run_id: names the run, the same after a restart. Default: the environment's THINWIRE_RUN_ID, or that of
            ``torchrun --rdzv-id``.
        persistent: a directory that all ranks see, for a checkpoint on a disk every ``persistent_every`` (seconds, or
            a text such as "3h"), of which the newest ``persistent_keep`` are kept; it is read when the memory of all
            hosts has no version, or only older ones.
        holder_socket: path of this host's holder (`thinwire holder`); default $THINWIRE_HOLDER. If all ranks are on
            one host, one is started where there is none.
        process_group: the ranks that train together; default all.
        timeout: how long ranks wait for each other; default 30 minutes.
        max_age_steps: `step` raises ThinwireError when the newest checkpoint that all ranks have is older than that.
            Without it there is a warning (docs/guides/checkpoints.md says when).
        on_divergence: whether `step` raises ThinwireError or there is a warning ("raise", "warn") when ranks that had
            the same parameters and optimizer state have not any more: silent corruption.
        overlap: copy parameters and the optimizer's state while the next iteration computes; ``optimizer.step`` waits
            for it. Pass False if anything else writes to them between `step` and the next ``optimizer.step``; a version
            that was written to meanwhile is dropped, if torch notices (it does not with ``.data``).
        domain: name of what this host may be lost together with, such as its rack or its zone; default
            $THINWIRE_DOMAIN. Copies of a state go to hosts of other domains; a warning names those that cannot.
        compress: "lossless" codes float tensors beside the training, and keeps and sends versions in fewer bytes: a
            third less of bfloat16 weights. Every bit comes back. The same on all ranks; any may restore any version.

    Raises:
        ValueError: on all ranks: a state that cannot be stored, no run_id, a host without a holder, or fewer machines
            than replicas (on a single machine there is a warning instead, and one replica).

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
        every: int = 1,
        max_overhead: float | str | None = "auto",
        replicas: int = 2,
        run_id: str | None = None,
        persistent: str | Path | None = None,
        persistent_every: str | float = "3h",
        persistent_keep: int = 2,
        holder_socket: str | Path | None = None,
        process_group: Group = None,
        timeout: timedelta | None = None,
        max_age_steps: int | None = None,
        on_divergence: str = "raise",
        overlap: bool = True,
        domain: str | None = None,
        compress: str | None = None,
    ) -> None:
        if every < 1 or persistent_keep < 1:
            raise ValueError(f"every={every}, persistent_keep={persistent_keep}: both are 1, 2, ...")
        if on_divergence not in ("raise", "warn"):
            raise ValueError(f"on_divergence={on_divergence!r}: it is 'raise' or 'warn'")
        if compress not in (None, "lossless"):
            raise ValueError(f"compress={compress!r}: it is 'lossless' or None")
        every_seconds, run_id = parse_seconds(persistent_every), run_id_of(run_id)
        governor = Governor(max_overhead, every, max_age_steps and max_age_steps // 2)
        training = TrainingState(model, optimizer, scheduler, scaler, synchronizer, data)
        timeout = timeout or timedelta(minutes=30)
        own = private_group(process_group, timeout)
        self._group = own.process_group
        self._rank, num_tensors = dist.get_rank(self._group), len(training.module.state_dict())
        try:
            if len(told := set(gather_json(compress, self._group))) > 1:
                raise ValueError(
                    f"compress is {' on some ranks and '.join(map(repr, told))} on others: pass all the same"
                )
            state = on_all(self._group, training.describe, ValueError)
            about = {"world_size": dist.get_world_size(self._group), "state": state}
            registration = Registration(holder_socket, run_id, about, replicas, num_tensors, self._group, domain)
        except Exception:
            own.destroy()
            raise
        self._training, self._registration, self._tier = training, registration, None
        self._notices = Notices(self._rank)
        if persistent is not None:
            named, group = {**about, "topology": topology_digest(about)}, private_group(process_group, timeout)
            self._tier = PersistentTier(persistent, every_seconds, persistent_keep, named, group, self._notices)
        self._governor = governor
        watched = hasattr(synchronizer, "watch_lane")
        sampler = None if watched else registration.sampler()
        self._pacer = Pacer(
            lambda n: self._agreement.grant(n), every, watched, lambda: self._agreement.revoke(), sampler
        )
        if watched:
            synchronizer.watch_lane(self._pacer.note_busy)
        raises = on_divergence == "raise"
        self._agreement = Agreement(registration, self._group, self._tier, self._pacer, self._notices, governor, raises)
        self._restorer = Restorer(training, registration, self._tier, self._group, run_id, about, self._notices, every)
        codes = compress is not None
        if codes and find_spec("numba") is None:
            self._notices.add("versions are not coded, which takes numba: pip install 'thinwire[cpu]'")
        self._cycle = Cycle(training, self._agreement, self._notices, about, governor, overlap, codes)
        self._run_id, self._max_age_steps, self._first = run_id, max_age_steps, 0
        self._alarm = AgeAlarm(every)
        # Also at the exit of the process: a thread that comes back from C++ after Python has gone aborts the process.
        self._end = weakref.finalize(self, _end, self._cycle, self._pacer, self._tier, registration, synchronizer, own)
        if self._rank == 0 and (hint := restart_hint()):
            warnings.warn(hint, stacklevel=2)

    def __repr__(self) -> str:
        newest = self._agreement.keep
        kept = f"all ranks have step {newest}" if newest >= 0 else "no step that all ranks have"
        return f"<Checkpointer of run {self._run_id!r}, rank {self._rank}: {self.steps} steps, {kept}>"

    def __enter__(self) -> Checkpointer:
        return self

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
            step: restore this step, from the memory or the disk. Newer ones are given up.

        Raises:
            ValueError: on all ranks: there are versions of the run, and none can be restored; there is none of
                ``step``; or another trainer uses the versions to give up.
            ThinwireError: the versions could not be loaded.
        """
        if fresh and step is not None:
            raise ValueError(f"restore(fresh=True, step={step}): pass one of them")
        cycle, agreement = self._cycle, self._agreement
        cycle.settle()
        cycle.drop_turn()
        agreement.keep, agreement.divergence = -1, Divergence()  # training from here on is another history
        try:  # the worker has nothing to do now, so the group is free
            restored = self._restorer.start_afresh() if fresh else self._restorer.restore(step)
            agreement.attempt, cycle.started = restored.attempt, True
            if restored.step is not None:
                cycle.step = self._first = restored.step
                agreement.keep = restored.step if restored.in_slots else -1
        finally:
            self._notices.deliver(stacklevel=2)
        return restored.step

    def step(self) -> None:
        """Make a checkpoint if one is due. Call it after every optimizer step, with the state as it is to be restored.

        When it returns, everything may change except parameters and the optimizer's state: those change in the next
        ``optimizer.step``, which waits until they are copied (see ``overlap``).

        Raises:
            ValueError: on all ranks: the state of a rank cannot be stored; or this is the first step, there was no
                `restore`, and there are versions of the run.
            ThinwireError: the newest checkpoint that all ranks have is more than ``max_age_steps`` old; or, on all
                ranks, they have not the same parameters any more (``on_divergence``).
        """
        cycle = self._cycle
        seconds = self._pacer.note_step(self._governor.is_loaded)
        self._governor.needs_free = self._pacer.is_profiling
        if seconds is not None:
            self._governor.note_iteration(seconds)
        if not cycle.started:
            self._agreement.attempt = cycle.do(self._restorer.begin).attempt
            cycle.started = True
        cycle.checkpoint()
        newest, reason = max(self._agreement.keep, self._first), cycle.broken or cycle.records.last_reason
        spread = max(self._pacer.iterations_needed, self._governor.every)
        old = self._alarm.check(cycle.step, newest, spread)
        if old:
            self._notices.add(f"{old}: {reason}")
        self._notices.deliver(stacklevel=2)
        age = cycle.step - newest
        if self._max_age_steps is not None and age > self._max_age_steps:
            raise ThinwireError(
                f"the newest checkpoint that all ranks have is {age} steps old, and max_age_steps is"
                f" {self._max_age_steps}: {reason}"
            )

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
            raise ValueError("persist_now needs Checkpointer(persistent=DIRECTORY), and restore() or step() before it")
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
        try:
            while registration.registered and registration.client is not None:
                registration.client.grant_all()
                status = registration.client.status()
                complete = [(version["attempt"], version["step"]) for version in status["versions"]]
                is_there = newest is None or (attempt, newest) in complete
                if is_there and status["newest_local"] == status["newest_replicated"]:
                    return True
                if time.monotonic() > deadline:
                    return False
                time.sleep(_FLUSH_POLL_SECONDS)
        except FAILURES as error:
            self._agreement.lose(error)
        return False

    def records(self) -> list[VersionRecord]:
        """Return the costs of the last 1,000 checkpoints."""
        return self._cycle.records.all()

    def stats(self) -> dict[str, float | str]:
        """Return the statistics of this rank, with slash names, for any metrics logger (docs/reference/stats.md).

        Seconds are medians over the versions that were written (`VersionRecord`); ``checkpoint/bound_*`` are the least
        cost of a version at the measured speed (`thinwire.lab.studies.checkpoint_bounds`). ``checkpoint/grants`` and
        ``checkpoint/schedule`` are texts for people: which bytes of the last version were granted when (Algorithm 2).
        """
        records, agreement, pacer, tier = self._cycle.records, self._agreement, self._pacer, self._tier
        found, replicas, diverged = records.stats(), self._registration.replicas, agreement.divergence.diverged
        cpu_seconds = self._cycle.cpu_seconds + agreement.holder_cpu_seconds
        bounds: dict[str, float] = {}
        if (num_bytes := records.coded_bytes) and (copying := found["checkpoint/copy_seconds"]):
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
            "checkpoint/cpu_seconds": cpu_seconds / max(1.0, found["checkpoint/versions"]),
            **found,
            "checkpoint/dropped": float(agreement.status.get("dropped", 0)),
            "checkpoint/replicated_step": float(agreement.keep),
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
            self._tier.join()
        self._end()


def _end(
    cycle: Cycle,
    pacer: Pacer,
    tier: PersistentTier | None,
    registration: Registration,
    synchronizer: Any,
    group: PrivateGroup,
) -> None:
    """End the threads of a Checkpointer, in bounded time: those that wait for another rank are broken off."""
    if hasattr(synchronizer, "watch_lane"):
        synchronizer.watch_lane(None)
    ended = cycle.close()
    group.shut_down()  # other ranks do not wait for this one any more
    if not ended:
        cycle.close()
    pacer.close()
    if tier is not None:
        tier.close(_EXIT_SECONDS)
    registration.close()
    group.destroy()
