"""The front end: a checkpoint after every step in the memory of this host and of its peers, and the way back."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.checkpoint.bounds import Hardware, copy_seconds, network_seconds
from thinwire.checkpoint.choice import Choice
from thinwire.checkpoint.client import SlotWriter
from thinwire.checkpoint.dcp import PersistentTier, parse_seconds
from thinwire.checkpoint.gaps import Pacer
from thinwire.checkpoint.layout import Layout, flatten
from thinwire.checkpoint.recovery import least, load_shard, survey
from thinwire.checkpoint.registration import Registration
from thinwire.checkpoint.snapshot import Copier, Training
from thinwire.checkpoint.version import topology_digest
from thinwire.errors import ThinwireError
from thinwire.lane import Group, resolve_group

logger = logging.getLogger("thinwire")

_TRIES = 3  # of a restore, each with what is left after the failure before
_RETRY_STEPS = 10  # until slots are asked for again that were refused
_RECORDS = 1000
_FAILURES = (ThinwireError, ValueError, OSError, RuntimeError)


@dataclass(frozen=True)
class VersionRecord:
    """What one checkpoint took on this rank. ``skipped`` says why there is none, or is empty.

    ``blocking_seconds`` is how long `Checkpointer.step` took, ``copy_seconds`` the part of it that copied the state.
    """

    step: int
    num_bytes: int = 0
    copy_seconds: float = 0.0
    blocking_seconds: float = 0.0
    skipped: str = ""


class Checkpointer:
    """Keeps the newest state of this rank in the memory of this host and of its peers (GEMINI, SOSP'23).

    Call `restore` once, before training, and `step` after every optimizer step; both on all ranks. A failure of a
    checkpoint is counted and warned of, and training goes on.

    Args:
        model: of which the state is kept; out of DDP if it is in it.
        optimizer: and everything else that has ``state_dict`` and ``load_state_dict``: ``scheduler``, ``scaler``, the
            ``synchronizer`` that `thinwire.attach` returned, and ``data``, the position in the data.
        every: steps between two checkpoints.
        replicas: copies of each state, that of its own machine included.
        run_id: names the run, the same after a restart. Default: the environment's THINWIRE_RUN_ID, or that of
            ``torchrun --rdzv-id``.
        persistent: a directory that all ranks see, for a checkpoint on a disk every ``persistent_every`` (seconds, or
            a text such as "3h"); it is read when the memory of all hosts has nothing.
        holder_socket: of the holder of this host (`thinwire holder`); default $THINWIRE_HOLDER. If all ranks are on
            one host, one is started where there is none.
        process_group: the ranks that train together; default all.
        timeout: how long ranks wait for each other; default 30 minutes.
        max_age_steps: `step` raises ThinwireError when the newest checkpoint that all ranks have is older than that.

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
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        synchronizer: Any = None,
        data: Any = None,
        every: int = 1,
        replicas: int = 2,
        run_id: str | None = None,
        persistent: str | Path | None = None,
        persistent_every: str | float = "3h",
        holder_socket: str | Path | None = None,
        process_group: Group = None,
        timeout: timedelta | None = None,
        max_age_steps: int | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every}: a checkpoint is made every 1, 2, ... steps")
        every_seconds = parse_seconds(persistent_every)
        self._training = Training(model, optimizer, scheduler, scaler, synchronizer, data)
        self._every, self._max_age_steps, self._run_id = every, max_age_steps, run_id or _run_id()
        description = self._training.describe()
        parent = resolve_group(process_group)
        self._group = _new_group(parent, timeout or timedelta(minutes=30))
        self._rank, world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._topology = {"world_size": world_size, "state": description}
        num_tensors = len(self._training.module.state_dict())
        try:
            self._registration = Registration(
                holder_socket, self._run_id, self._topology, replicas, num_tensors, self._group
            )
        except Exception:
            dist.destroy_process_group(self._group)
            raise
        self._tier = None
        if persistent is not None:
            tier_group = _new_group(parent, timeout or timedelta(minutes=30))
            self._tier = PersistentTier(persistent, every_seconds, topology_digest(self._topology), tier_group)
        self._copier, self._pacer = Copier(), Pacer(self._grant, every, watched=hasattr(synchronizer, "watch_lane"))
        if hasattr(synchronizer, "watch_lane"):
            synchronizer.watch_lane(self._pacer.note_busy)
        self._records: deque[VersionRecord] = deque(maxlen=_RECORDS)
        self._steps, self._skipped, self._versions = 0, 0, 0
        self._attempt: int | None = None
        self._first = 0  # step that was restored
        self._keep, self._register_at = -1, 0
        self._status: dict[str, Any] = {}
        self._broken = ""
        self._warned: set[str] = set()
        self._to_warn: list[str] = []

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps(self) -> int:
        """Optimizer steps of the run so far, those before a restore included."""
        return self._steps

    def restore(self) -> int | None:
        """Go back to the newest step of which every rank's state is there, and say after how many steps it is.

        In place, and the same on all ranks. None if there is nothing, so that training starts anew; a warning says why
        if there are versions of the run that cannot be taken. Call it on all ranks, before the first `step`.

        Raises:
            ValueError: there are only versions of another number of ranks or of another model.
            ThinwireError: what was found could not be loaded, in three tries.
        """
        registration = self._registration
        failure, failed = "", False
        for _ in range(_TRIES):
            found = survey(
                registration.client, registration.holders, self._run_id, topology_digest(self._topology), self._group
            )
            if self._attempt is None:
                self._attempt = found.attempt
            if found.choice.step is None:
                step = self._restore_persistent()
                if step is None and failed:
                    break
                if step is None:
                    self._refuse(found.seen, found.choice.reasons)
                return step
            failure = ""
            try:
                self._load(found.choice)
            except _FAILURES as error:
                failure = f"rank {self._rank}: {error}"
                logger.warning("step %s was not restored: %s", found.choice.step, failure)
            if least([not failure], self._group) == [1]:
                self._steps = self._first = self._keep = found.choice.step
                return found.choice.step
            failed = True  # not a fresh start any more: some of it may be loaded
        raise ThinwireError(
            f"a checkpoint of run {self._run_id!r} was not restored: {failure or 'another rank failed'}"
        )

    def _restore_persistent(self) -> int | None:
        """From the disk: the newest that all ranks can read."""
        tier = self._tier
        steps = tier.candidates() if tier is not None else []
        for step in steps:
            assert tier is not None
            done = True
            try:
                layout, tensors = tier.read(step)
                self._training.load(layout, tensors)
            except _FAILURES as error:
                done = False
                logger.warning("rank %s: step %s in %s was not restored: %s", self._rank, step, tier.directory, error)
            if tier.agree(done):
                self._steps = self._first = step
                return step
        if steps:  # not a fresh start: some of it may be loaded
            raise ThinwireError(f"none of the steps {steps} in the persistent directory could be read; see the log")
        return None

    def _load(self, choice: Choice) -> None:
        registration, attempt = self._registration, self._attempt
        assert attempt is not None
        registration.register(choice.versions[self._rank].payload_bytes, attempt)
        assert registration.client is not None
        load_shard(registration.client, choice, self._rank, registration.here, self._training)

    def _refuse(self, seen: int, reasons: tuple[str, ...]) -> None:
        """There is nothing to restore; say so if that is a surprise."""
        if not seen:
            return
        text = f"no checkpoint of run {self._run_id!r} can be restored: {'; '.join(reasons)}"
        if any("topology" in reason for reason in reasons) and not any("nobody has" in reason for reason in reasons):
            raise ValueError(
                f"{text}. Start as many ranks of the same model as before, or free the old run's memory with:"
                f" thinwire holder --forget {self._run_id}"
            )
        warnings.warn(f"{text}. Training starts anew", stacklevel=3)

    def step(self) -> None:
        """Call it after every optimizer step. When it returns, the state is copied and may change.

        Raises:
            ThinwireError: the newest checkpoint that all ranks have is more than ``max_age_steps`` old.
        """
        started = time.perf_counter()
        self._steps += 1
        self._pacer.note_step()
        if self._steps % self._every == 0 and not self._broken:
            record = self._attempt_version()
            seconds = time.perf_counter() - started
            self._records.append(
                VersionRecord(self._steps, record.num_bytes, record.copy_seconds, seconds, record.skipped)
            )
            self._versions += not record.skipped
            self._skipped += bool(record.skipped)
        while self._to_warn:
            warnings.warn(f"rank {self._rank}: {self._to_warn.pop(0)}", stacklevel=2)
        age = self._steps - max(self._keep, self._first)
        if self._max_age_steps is not None and age > self._max_age_steps:
            raise ThinwireError(
                f"the newest checkpoint that all ranks have is {age} steps old, and max_age_steps is"
                f" {self._max_age_steps}: {self._broken or self._last_reason()}"
            )

    def _attempt_version(self) -> VersionRecord:
        try:
            return self._version()
        except _FAILURES as error:  # of the group of the ranks: they cannot agree on anything any more
            self._broken = f"the ranks cannot agree any more: {error}"
            self._warn(f"no more checkpoints: {self._broken}")
            return VersionRecord(self._steps, skipped=self._broken)

    def _version(self) -> VersionRecord:
        """One checkpoint. Ranks decide together, twice, so that all of them write a version or none does."""
        if self._attempt is None:
            registration = self._registration
            self._attempt = survey(
                registration.client, registration.holders, self._run_id, topology_digest(self._topology), self._group
            ).attempt
        reason, captured, replicated = self._prepare()
        due = self._tier is not None and self._tier.is_due()
        ready, registered, all_have, due = least(
            [not reason, self._registration.registered, replicated, due], self._group
        )
        if not ready:
            return self._skip(reason or "another rank cannot make one")
        self._keep = max(self._keep, all_have)
        assert captured is not None
        layout, tensors = captured
        if not registered and not self._register(layout.payload_bytes):
            return self._skip("there are no slots")
        writer = self._slot()
        if least([writer is not None], self._group) != [1]:
            self._abandon(writer)
            self._offer(0)
            return self._skip("no slot is free on all ranks: older versions are still on their way")
        assert writer is not None
        return self._write(writer, layout, tensors, bool(due))

    def _prepare(self) -> tuple[str, tuple[Layout, list[torch.Tensor]] | None, int]:
        """Why this rank cannot make a checkpoint, or ''; the state; the newest step that all its replicas have."""
        registration, replicated = self._registration, -1
        if not registration.reconnect() or registration.client is None:
            return "the holder of this host is gone", None, replicated
        try:
            captured = flatten(self._training.capture(self._steps))
            if registration.registered:
                self._status = registration.client.status()
                newest = self._status.get("newest_replicated")
                replicated = -1 if newest is None else int(newest)
                if captured[0].payload_bytes > registration.room_bytes:
                    return (
                        f"the state has grown beyond its slots of {registration.room_bytes:,} bytes",
                        None,
                        replicated,
                    )
            return "", captured, replicated
        except ThinwireError as error:
            self._lose(error)
            return f"the holder of this host is gone: {error}", None, replicated
        except _FAILURES as error:
            return str(error), None, replicated

    def _register(self, payload_bytes: int) -> bool:
        """Whether all ranks have slots now; if not, it is tried again some steps later."""
        if self._steps < self._register_at:
            return False
        assert self._attempt is not None
        try:
            self._registration.register(payload_bytes, self._attempt)
            return True
        except ValueError as error:
            self._register_at = self._steps + _RETRY_STEPS * self._every
            self._warn(f"no slots for checkpoints: {error}")
            return False

    def _slot(self) -> SlotWriter | None:
        client = self._registration.client
        try:
            return None if client is None else client.slot(self._steps, self._keep if self._keep >= 0 else None)
        except _FAILURES as error:
            self._lose(error)
            return None

    def _write(self, writer: SlotWriter, layout: Layout, tensors: list[torch.Tensor], persist: bool) -> VersionRecord:
        started = time.perf_counter()
        try:
            self._copier.copy(layout, tensors, writer.payload)
            seconds = time.perf_counter() - started
            if persist and self._tier is not None:
                self._tier.save(self._steps, layout, writer.payload)
            writer.publish(layout.to_bytes(), layout.payload_bytes)
        except ValueError as error:
            self._abandon(writer)
            return self._skip(str(error))
        except _FAILURES as error:
            self._lose(error)
            return self._skip(f"it was not published: {error}")
        self._offer(layout.payload_bytes)
        return VersionRecord(self._steps, layout.payload_bytes, seconds)

    def _offer(self, num_bytes: int) -> None:
        """Have the version sent, and what is pending from before, in the gaps of the network."""
        client = self._registration.client
        if client is None or not self._registration.peers:
            return
        pending = int(self._status.get("bytes_pending", 0))
        try:
            client.revoke()
            self._pacer.offer(pending + num_bytes * len(self._registration.peers), self._link_bytes_per_second())
        except _FAILURES as error:
            self._lose(error)

    def _grant(self, num_bytes: int) -> None:
        """On the pacer's thread."""
        client = self._registration.client
        if client is not None:
            client.grant(num_bytes)

    def _abandon(self, writer: SlotWriter | None) -> None:
        if writer is not None:
            try:
                writer.abandon()
            except _FAILURES as error:
                self._lose(error)

    def _lose(self, error: Exception) -> None:
        self._registration.lost()
        self._warn(f"the holder of this host is lost, and training goes on without checkpoints: {error}")

    def _skip(self, reason: str) -> VersionRecord:
        logger.info("rank %s: no checkpoint of step %s: %s", self._rank, self._steps, reason)
        return VersionRecord(self._steps, skipped=reason)

    def _warn(self, text: str) -> None:
        """At the end of the step, once for each text: a warning may be an error, and the ranks are agreeing now."""
        logger.warning("rank %s, step %s: %s", self._rank, self._steps, text)
        if text not in self._warned:
            self._warned.add(text)
            self._to_warn.append(text)

    def _last_reason(self) -> str:
        return next((record.skipped for record in reversed(self._records) if record.skipped), "replicas are behind")

    def _link_bytes_per_second(self) -> float | None:
        """What sending took so far, over all peers; None before anything was sent."""
        replicas: list[dict[str, Any]] = list(self._status.get("replicas", {}).values())
        seconds = sum(float(replica["seconds_sending"]) for replica in replicas)
        return sum(int(replica["bytes_sent"]) for replica in replicas) / seconds if seconds > 0 else None

    def records(self) -> list[VersionRecord]:
        """What the last 1,000 checkpoints took."""
        return list(self._records)

    def stats(self) -> dict[str, float | str]:
        """Of this rank. Slash names, for any metrics logger; ``checkpoint/grants`` is a text for people.

        ``checkpoint/bytes`` are of one version, ``checkpoint/replicated_step`` is the newest that all ranks had
        everywhere when the last one was made, ``checkpoint/blocking_seconds`` and ``checkpoint/copy_seconds`` are
        medians. ``checkpoint/bound_network_seconds`` and ``checkpoint/bound_copy_seconds`` are the least that a
        version can take at the speed that was measured (`thinwire.checkpoint.bounds`), ``checkpoint/idle_seconds`` of
        an iteration is what there is for it; ``checkpoint/iterations_needed`` is over how many of them it is spread.
        """
        written = [record for record in self._records if not record.skipped]
        num_bytes = written[-1].num_bytes if written else 0
        copying = median(record.copy_seconds for record in written) if written else 0.0
        return {
            "checkpoint/versions": float(self._versions),
            "checkpoint/skipped": float(self._skipped),
            "checkpoint/dropped": float(self._status.get("dropped", 0)),
            "checkpoint/steps": float(self._steps),
            "checkpoint/replicated_step": float(self._keep),
            "checkpoint/persistent_step": float(self._tier.saved_step if self._tier is not None else -1),
            "checkpoint/replicas": float(self._registration.replicas),
            "checkpoint/bytes": float(num_bytes),
            "checkpoint/bytes_sent": float(self._status.get("bytes_sent", 0)),
            "checkpoint/blocking_seconds": median(r.blocking_seconds for r in written) if written else 0.0,
            "checkpoint/copy_seconds": copying,
            "checkpoint/iteration_seconds": self._pacer.iteration_seconds,
            "checkpoint/idle_seconds": self._pacer.idle_seconds,
            "checkpoint/iterations_needed": self._pacer.iterations_needed,
            **self._bounds(num_bytes, copying),
            "checkpoint/grants": self._pacer.how,
        }

    def _bounds(self, num_bytes: int, copying: float) -> dict[str, float]:
        speed, ranks = self._link_bytes_per_second(), self._registration.local_ranks
        if not num_bytes or not copying:
            return {}
        hardware = Hardware(ranks, (speed or float("inf")) * ranks, num_bytes / copying)
        replicas = self._registration.replicas
        return {
            "checkpoint/bound_network_seconds": network_seconds(num_bytes * ranks, replicas, hardware),
            "checkpoint/bound_copy_seconds": copy_seconds(num_bytes * ranks, replicas, hardware),
        }

    def close(self) -> None:
        """End it. What the holders have stays there, and goes on to the peers; twice does nothing."""
        if self._group is None:
            return
        synchronizer = self._training.synchronizer
        if hasattr(synchronizer, "watch_lane"):
            synchronizer.watch_lane(None)
        self._pacer.close()
        self._registration.close()
        if self._tier is not None:
            self._tier.close()
        group, self._group = self._group, None
        try:
            dist.destroy_process_group(group)
        except (RuntimeError, ValueError, AssertionError) as error:
            logger.debug("the group of the checkpointer: %s", error)


def _run_id() -> str:
    """Of the environment; torchrun's default id is the same for every job, so it names none."""
    found = os.environ.get("THINWIRE_RUN_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "")
    if found in ("", "none"):
        raise ValueError(
            "a run needs a name that is the same after a restart: pass run_id=, set THINWIRE_RUN_ID, or start with"
            " torchrun --rdzv-id NAME"
        )
    return found


def _new_group(parent: dist.ProcessGroup, timeout: timedelta) -> Any:
    """A Gloo group of the same ranks: nothing else may interleave with what the ranks agree on."""
    ranks = dist.get_process_group_ranks(parent)
    some = len(ranks) < dist.get_world_size()
    return dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=some)
