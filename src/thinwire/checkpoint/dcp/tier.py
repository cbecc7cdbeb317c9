"""The persistent tier: a checkpoint on a disk at long intervals, in the background.

DIRECTORY/step-00000042/    plain torch.distributed.checkpoint, see `disk`
"""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from thinwire.checkpoint.dcp.disk import DiskShards, read_about, write_shards
from thinwire.checkpoint.group import failures_of, gather_json
from thinwire.checkpoint.state.layout import StateLayout, views
from thinwire.errors import ThinwireError
from thinwire.holder.faultpoint import reach
from thinwire.holder.version import start_order

logger = logging.getLogger("thinwire")

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
        every_seconds: seconds between two checkpoints, by the clock of rank 0.
        keep: number of checkpoints to keep; older ones are deleted.
        about: names of the training: ``topology``, ``state`` and ``world_size``.
        group: Gloo group of all ranks, used only by the thread that saves.
    """

    def __init__(
        self, directory: str | Path, every_seconds: float, keep: int, about: dict[str, Any], group: dist.ProcessGroup
    ) -> None:
        self.directory = Path(directory)
        self._every_seconds, self._keep, self._about, self._group = every_seconds, keep, about, group
        self._rank = dist.get_rank(group)
        self._thread: threading.Thread | None = None
        self._last = time.monotonic()
        self.obstacle = ""  # why no slot may be overwritten now
        self.saved_step = -1
        self.last_error = ""

    def is_due(self) -> bool:
        """Return whether this rank would save now: the last save is done, and on rank 0 the interval is over."""
        busy = self._thread is not None and self._thread.is_alive()
        return not busy and (self._rank != 0 or time.monotonic() - self._last >= self._every_seconds)

    def save(self, step: int, attempt: int, take: Take) -> None:
        """Save the result of ``take``, layout and payload of the slot, in the background.

        Call it on all ranks, for the same step. Until ``take`` has returned, ``obstacle`` says that slots must be left
        alone.
        """
        self._last = time.monotonic()
        self.obstacle = f"step {step} is being copied for the disk"
        self._thread = threading.Thread(target=self._save, args=(step, attempt, take), name="persist", daemon=True)
        self._thread.start()

    def _save(self, step: int, attempt: int, take: Take) -> None:
        partial, final = self.directory / f"step-{step:08d}.partial", self._path(step)
        try:
            text, payload = self._taken(take)
            layout = StateLayout.from_bytes(text)
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            dist.barrier(self._group)
            about = {**self._about, "step": step, "attempt": attempt}
            write_shards(partial, about, layout, views(layout, payload), self._group)
            if self._rank == 0:
                shutil.rmtree(final, ignore_errors=True)
                partial.rename(final)
                for old in self._expired():
                    shutil.rmtree(self._path(old), ignore_errors=True)
            self.saved_step = step
        except (Exception, CheckpointException) as error:  # a full disk is no reason to stop training
            self.last_error = f"step {step} was not saved to {self.directory}: {type(error).__name__}: {error}"
            logger.warning("%s", self.last_error)

    def _taken(self, take: Take) -> tuple[bytes, memoryview]:
        """Raises ThinwireError on all ranks if one of them has nothing to save."""
        taken, reason = None, ""
        try:
            taken = take()
        except (ThinwireError, ValueError, OSError) as error:
            reason = str(error)
        finally:
            self.obstacle = ""
        failed = failures_of(reason, self._group)
        if failed or taken is None:
            raise ThinwireError(failed)
        return taken

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

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

    def survey(self) -> list[dict[str, Any]]:
        """Return the descriptions of the checkpoints that rank 0 sees, highest step first; collective."""
        return gather_json(self._readable() if self._rank == 0 else [], self._group)[0]

    def open(self, about: dict[str, Any]) -> DiskShards:
        """Open the states of a checkpoint listed by `survey`; not collective. Raises ThinwireError for altered ones."""
        reach("disk", self._rank, about["step"])
        return DiskShards(self._path(about["step"]), about)

    def close(self) -> None:
        """Wait until the running save is done, then close."""
        if self._thread is not None:
            self._thread.join()
        dist.destroy_process_group(self._group)
