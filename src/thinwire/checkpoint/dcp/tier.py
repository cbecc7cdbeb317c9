"""The persistent tier: a checkpoint on a disk at long intervals, in the background.

DIRECTORY/step-00000042/            plain torch.distributed.checkpoint, see `disk`
DIRECTORY/step-00000042.partial/    one that is being written
DIRECTORY/step-00000042.given-up/   one that a fresh start has set aside; nothing reads it any more
DIRECTORY/run                       as old as the run; locked while a job writes here
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from thinwire.checkpoint.dcp.disk import DiskShards, read_about, write_about, write_shards
from thinwire.checkpoint.group import PrivateGroup, describe, gather_json, on_all
from thinwire.checkpoint.records import Notices
from thinwire.checkpoint.state.layout import StateLayout, views
from thinwire.errors import ThinwireError
from thinwire.holder.faultpoint import reach
from thinwire.holder.version import start_order

logger = logging.getLogger("thinwire")

_RETRY_SECONDS = 60.0  # at most, until a save that failed is tried again
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Take = Callable[[], tuple[bytes, memoryview]]


def parse_seconds(text: str | float) -> float:
    """Return the seconds of a text such as ``3h``, ``30m`` or ``90s``, or of a number. Raises ValueError.

    Example:
        >>> parse_seconds("3h")
        10800.0
    """
    if isinstance(text, (int, float)):
        return float(text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a time: write it as 90s, 30m, 3h or 1d")
    return float(match[1]) * _UNITS[match[2]]


class PersistentTier:
    """A store of states of all ranks in a directory that all of them see.

    Args:
        directory: directory used by this training alone.
        every_seconds: seconds between two checkpoints, by the clock of rank 0. They count from the newest checkpoint in
            the directory, or from the first start of the run, so that a job that fails more often still saves.
        keep: number of checkpoints to keep; older ones are deleted.
        about: names of the training: ``topology``, ``state`` and ``world_size``.
        group: Gloo group of all ranks, used only by the thread that saves, or while it does not run.
        notices: gets the failures, from rank 0.
    """

    def __init__(
        self,
        directory: str | Path,
        every_seconds: float,
        keep: int,
        about: dict[str, Any],
        group: PrivateGroup,
        notices: Notices,
    ) -> None:
        self.directory = Path(directory)
        self._every_seconds, self._keep, self._about, self._notices = every_seconds, keep, about, notices
        self._own, self._group = group, group.process_group
        self._rank = dist.get_rank(self._group)
        self._thread: threading.Thread | None = None
        self._due_at: float | None = None  # of time.monotonic, on rank 0
        self.obstacle = ""  # why no slot may be overwritten now
        self.saved_step = -1
        self.errors, self.last_error = 0, ""

    def is_due(self) -> bool:
        """Return whether this rank would save now: the last save is done, and on rank 0 the interval is over."""
        if self._rank == 0 and self._due_at is None:
            self._due_at = time.monotonic() + self._every_seconds - self._age_seconds()
        busy = self._thread is not None and self._thread.is_alive()
        return not busy and (self._rank != 0 or time.monotonic() >= (self._due_at or 0.0))

    def _age_seconds(self) -> float:
        """Of the newest checkpoint on the disk, or else of the run; at most an interval. Hosts' clocks differ: it is by
        that of the file system, the time of a file that is made now."""
        with contextlib.suppress(OSError):
            written = [path.stat().st_mtime for path in (*map(self._path, self._steps()), self.directory / "run")]
            try:
                with tempfile.TemporaryFile(dir=self.directory) as clock:
                    now = os.fstat(clock.fileno()).st_mtime
            except OSError:  # nothing can be written: try to save, which says why
                return self._every_seconds
            return min(max(0.0, now - max(written[:-1] or written)), self._every_seconds)
        return 0.0

    def save(self, step: int, attempt: int, take: Take) -> None:
        """Save the result of ``take``, layout and payload of the slot, in the background.

        Call it on all ranks, for the same step; a rank that has nothing to save passes a ``take`` that raises. Until it
        has returned, ``obstacle`` says that slots must be left alone.
        """
        self.obstacle = f"step {step} is being copied for the disk"

        def save() -> None:
            reason = self.save_now(step, attempt, take)
            if reason and self._rank == 0:
                self._notices.add(reason)

        self._thread = threading.Thread(target=save, name="persist", daemon=True)
        self._thread.start()

    def save_now(self, step: int, attempt: int, take: Take) -> str:
        """Save like `save`, and return why it failed, the same on all ranks, or an empty text; collective."""
        self._due_at = time.monotonic() + self._every_seconds
        reason = ""
        try:
            self._save(step, attempt, take)
            self.saved_step = step
        except (Exception, CheckpointException) as error:  # a full disk is no reason to stop training
            reason = f"no checkpoint was saved to {self.directory}: {describe(error)}"
            self.errors, self.last_error = self.errors + 1, f"step {step}: {reason}"
            self._due_at = time.monotonic() + min(self._every_seconds, _RETRY_SECONDS)
        return reason

    def _save(self, step: int, attempt: int, take: Take) -> None:
        partial, final = self._path(step, ".partial"), self._path(step)

        def taken() -> tuple[bytes, memoryview]:
            try:
                return take()
            finally:
                self.obstacle = ""

        text, payload = on_all(self._group, taken)
        layout, about = StateLayout.from_bytes(text), {**self._about, "step": step, "attempt": attempt}
        with contextlib.ExitStack() as stack:
            self._on_rank_0(lambda: [stack.enter_context(self._locked()), self._remove_partial(), partial.mkdir()])
            try:
                digests = write_shards(partial, layout, views(layout, payload), self._group)
                self._on_rank_0(lambda: [write_about(partial, about, digests), self._put_in_place(partial, final)])
            finally:
                if self._rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)

    def _on_rank_0(self, do: Callable[[], Any]) -> None:
        """Raises ThinwireError on all ranks if rank 0 fails; they do not wait for it in vain."""
        on_all(self._group, do if self._rank == 0 else lambda: None)

    def _put_in_place(self, partial: Path, final: Path) -> None:
        if final.exists():  # of the same step, trained once more
            final.rename(self._path(0, ".old.partial"))
        partial.rename(final)
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._remove_partial()
        for old in self._expired():
            shutil.rmtree(self._path(old), ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the directory as long as this process writes to it, so that what others left half-written can go.

        Raises BlockingIOError if another process writes to it. A file system without locks is taken as it is.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "run").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BlockingIOError(error.errno, f"another job writes to {self.directory}") from error
            except OSError as error:
                logger.info("%s cannot be locked: %s", self.directory, error)
            yield

    def _remove_partial(self) -> None:
        """Remove what a killed job left half-written; under the lock."""
        for path in self.directory.glob("step-*.partial"):
            shutil.rmtree(path, ignore_errors=True)

    def _path(self, step: int, suffix: str = "") -> Path:
        return self.directory / f"step-{step:08d}{suffix}"

    def _steps(self) -> list[int]:
        """Steps of complete checkpoints, newest first."""
        found = [re.fullmatch(r"step-(\d{8,})", path.name) for path in self.directory.glob("step-*")]
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def _expired(self) -> list[int]:
        """Steps of all but the newest checkpoints; a directory that is no checkpoint counts as the oldest."""
        orders = {step: (-1, step) for step in self._steps()}
        orders |= {about["step"]: start_order(about["attempt"], about["step"]) for about in self._readable()}
        return sorted(orders, key=lambda step: orders[step], reverse=True)[self._keep :]

    def _readable(self) -> list[dict[str, Any]]:
        abouts: list[dict[str, Any]] = []
        for step in self._steps():
            try:
                abouts.append(read_about(self._path(step), step))
            except (OSError, ThinwireError) as error:
                logger.warning("%s is not a checkpoint: %s", self._path(step), error)
        return abouts

    def survey(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the descriptions of the checkpoints that rank 0 sees, highest step first, and the steps of those that
        it cannot read; collective. It waits for a running save, and starts the clock of the run."""
        self.join()
        readable = []
        if self._rank == 0:
            try:
                with self._locked():
                    self._remove_partial()
            except OSError as error:
                self._notices.add(f"nothing can be saved to {self.directory}: {describe(error)}")
            readable = self._readable()
        known = {about["step"] for about in readable}
        return tuple(gather_json([readable, [step for step in self._steps() if step not in known]], self._group)[0])

    def give_up(self) -> None:
        """Set all checkpoints aside, so that no later start goes back to them; collective.

        Raises ThinwireError on all ranks.
        """
        self._on_rank_0(self._set_aside)

    def _set_aside(self) -> None:
        with self._locked():
            for step in self._steps():
                aside = self._path(step, ".given-up")
                shutil.rmtree(aside, ignore_errors=True)
                self._path(step).rename(aside)
            os.utime(self.directory / "run")

    def open(self, about: dict[str, Any]) -> DiskShards:
        """Open the states of a checkpoint listed by `survey`; not collective. Raises ThinwireError for altered ones."""
        reach("disk", self._rank, about["step"])
        return DiskShards(self._path(about["step"]), about)

    def join(self, seconds: float | None = None) -> None:
        """Wait until the running save is done."""
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self, seconds: float | None = None) -> None:
        """Wait until the running save is done, then close; after ``seconds``, break it off."""
        self.join(seconds)
        self._own.shut_down()
        self.join(seconds)
        self._own.destroy()
