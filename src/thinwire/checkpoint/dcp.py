"""The persistent tier: now and then a checkpoint on a disk, as plain torch.distributed.checkpoint, in the background.

    DIRECTORY/step-00000042/    .metadata  thinwire.json  __0_0.distcp ...

Tensors that are the same on all ranks are stored once, under the names that they have in the state
(``model.layer.weight``), so any reader of DCP finds them; what differs is ``rank1.optimizer...``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from thinwire.checkpoint.layout import Layout, views
from thinwire.checkpoint.recovery import gather_json, least
from thinwire.errors import ThinwireError

logger = logging.getLogger("thinwire")

KEPT = 2
_ABOUT = "thinwire.json"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str | float) -> float:
    """Seconds of a text such as ``3h``, ``30m`` or ``90s``, or of a number. Raises ValueError.

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
    """Saves copies of the state of all ranks to a directory that all of them see, and reads them back.

    Args:
        directory: of this training alone; the newest two checkpoints are kept.
        every_seconds: between two of them, by the clock of rank 0.
        topology: checkpoints of another one are not loaded.
        group: of Gloo, of all ranks, used by nothing else: it is for the thread that saves.
    """

    def __init__(self, directory: str | Path, every_seconds: float, topology: str, group: dist.ProcessGroup) -> None:
        self.directory = Path(directory)
        self._every_seconds, self._topology, self._group = every_seconds, topology, group
        self._rank = dist.get_rank(group)
        self._thread: threading.Thread | None = None
        self._last = time.monotonic()
        self.saved_step = -1
        self.last_error = ""

    def is_due(self) -> bool:
        """Whether this rank would save now: the last one is done, and on rank 0 it is time."""
        busy = self._thread is not None and self._thread.is_alive()
        return not busy and (self._rank != 0 or time.monotonic() - self._last >= self._every_seconds)

    def save(self, step: int, layout: Layout, payload: memoryview) -> None:
        """Copy a slot, and save the copy in the background. On all ranks, for the same step."""
        copy = torch.frombuffer(payload, dtype=torch.uint8)[: layout.payload_bytes].clone()
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._save, args=(step, layout, copy), name="persist", daemon=True)
        self._thread.start()

    def _save(self, step: int, layout: Layout, copy: Tensor) -> None:
        partial, final = self.directory / f"step-{step:08d}.partial", self._path(step)
        try:
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                about = {"step": step, "topology": self._topology, "world_size": dist.get_world_size(self._group)}
                (partial / _ABOUT).write_text(json.dumps(about))
            dist.barrier(self._group)
            state = self._named(layout, views(layout, copy.numpy().data))
            dcp.save(state, checkpoint_id=str(partial), process_group=self._group)
            if self._rank == 0:
                shutil.rmtree(final, ignore_errors=True)
                partial.rename(final)
                for old in self._steps()[KEPT:]:
                    shutil.rmtree(self._path(old), ignore_errors=True)
            self.saved_step = step
        except (Exception, CheckpointException) as error:  # a full disk is no reason to stop training
            self.last_error = f"step {step} was not saved to {self.directory}: {type(error).__name__}: {error}"
            logger.warning("%s", self.last_error)

    def _named(self, layout: Layout, tensors: list[Tensor]) -> dict[str, Tensor]:
        """What this rank saves: what all ranks have the same under its own name, the rest under that of the rank."""
        digests = {item.path: _digest(tensor) for item, tensor in zip(layout.slices, tensors, strict=True)}
        gathered = gather_json(digests, self._group)
        state = {self._own("layout"): torch.frombuffer(bytearray(layout.to_bytes()), dtype=torch.uint8)}
        for item, tensor in zip(layout.slices, tensors, strict=True):
            same = all(each.get(item.path) == digests[item.path] for each in gathered)
            state[item.path if same else self._own(item.path)] = tensor
        return state

    def _own(self, path: str) -> str:
        return f"rank{self._rank}.{path}"

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def _steps(self) -> list[int]:
        """Of complete checkpoints, newest first."""
        found = [re.fullmatch(r"step-(\d{8,})", path.name) for path in self.directory.glob("step-*")]
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def candidates(self) -> list[int]:
        """Steps that can be loaded, newest first, as rank 0 sees them; collective.

        Raises ValueError, on all ranks, if there are only checkpoints of another number of ranks or another model.
        """
        abouts: list[dict[str, Any]] = []
        for step in self._steps() if self._rank == 0 else []:
            try:
                abouts.append(json.loads((self._path(step) / _ABOUT).read_text()))
            except (OSError, ValueError) as error:
                logger.warning("%s is not a checkpoint: %s", self._path(step), error)
        abouts = gather_json(abouts, self._group)[0]
        steps = [about["step"] for about in abouts if about["topology"] == self._topology]
        if abouts and not steps:
            raise ValueError(
                f"{self.directory} has checkpoints of {abouts[0]['world_size']} ranks, and this is another number of"
                f" ranks, {dist.get_world_size(self._group)}, or another model: start as before, or give another"
                " directory"
            )
        return steps

    def read(self, step: int) -> tuple[Layout, list[Tensor]]:
        """The state of this rank; not collective. Raises ThinwireError for files that are missing or altered."""
        try:
            return self._read(dcp.FileSystemReader(str(self._path(step))))
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            reason = f"{type(error).__name__}: {error}".splitlines()[-1]
            raise ThinwireError(f"{self._path(step)} cannot be read: {reason}") from error

    def _read(self, reader: dcp.FileSystemReader) -> tuple[Layout, list[Tensor]]:
        stored = reader.read_metadata().state_dict_metadata
        name = self._own("layout")
        layout = Layout.from_bytes(self._load([name], stored, reader)[name].numpy().tobytes())
        names = [self._own(item.path) if self._own(item.path) in stored else item.path for item in layout.slices]
        state = self._load(names, stored, reader)
        return layout, [state[name] for name in names]

    @staticmethod
    def _load(names: list[str], stored: dict[str, Any], reader: dcp.FileSystemReader) -> dict[str, Tensor]:
        state: dict[str, Any] = {}
        for name in names:
            described = stored[name]
            if not isinstance(described, TensorStorageMetadata):
                raise ValueError(f"{name} is not a tensor")
            state[name] = torch.empty(described.size, dtype=described.properties.dtype)
        dcp.load(state, storage_reader=reader, no_dist=True)
        return state

    def agree(self, done: bool) -> bool:
        """Whether all ranks have done it; collective."""
        return least([done], self._group) == [1]

    def close(self) -> None:
        """Wait until what is being saved is saved."""
        if self._thread is not None:
            self._thread.join()
        dist.destroy_process_group(self._group)


def _digest(tensor: Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(flat.data, digest_size=16).hexdigest()
