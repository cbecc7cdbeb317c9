"""Baselines by torch.distributed.checkpoint to a directory: synchronous, and asynchronous on its own thread.

A rank's state is a shard of its own, as it is under ZeRO or FSDP, so its tensors are named after the rank: nothing is
left out because another rank has the same. The tree of names and numbers is another tensor, so nothing is pickled.
"""

import shutil
import time
import warnings
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from thinwire.checkpoint.group import private_group
from thinwire.checkpoint.state.encode import flatten
from thinwire.checkpoint.state.layout import StateLayout
from thinwire.checkpoint.state.snapshot import TrainingState
from thinwire.lab.bench.checkpoint.methods import CheckpointMethod, Destination

_KEPT = 2
_TIMEOUT = timedelta(minutes=30)
_METADATA = ".metadata"  # written last: without it there is no checkpoint


class DcpSync(CheckpointMethod):
    """A synchronous checkpoint: every rank waits for its end."""

    name = "dcp_sync"

    def __init__(self, training: TrainingState, destination: Destination, rank: int) -> None:
        self._training, self._rank = training, rank
        self._directory = Path(destination.directory) / f"{destination.run_id}-{self.name}"
        self._directory.mkdir(exist_ok=True)
        self._group = private_group(None, _TIMEOUT).process_group

    def step(self, step: int) -> bool:
        dcp.save(self._state(step), checkpoint_id=self._path(step), process_group=self._group)
        self._remove_old(before=step)
        return True

    def restore(self) -> int | None:
        newest: list[int | None] = [max(self._steps(), default=None) if self._rank == 0 else None]
        dist.broadcast_object_list(newest, group=self._group)
        step = newest[0]
        if step is not None:
            layout, tensors = self._read(dcp.FileSystemReader(self._path(step)))
            self._training.load(layout, tensors)
        return step

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def _state(self, step: int) -> dict[str, Tensor]:
        layout, tensors = flatten(self._training.capture(step))
        named = {self._own(item.path): tensor for item, tensor in zip(layout.slices, tensors, strict=True)}
        return named | {self._own("layout"): torch.frombuffer(bytearray(layout.to_bytes()), dtype=torch.uint8)}

    def _read(self, reader: dcp.FileSystemReader) -> tuple[StateLayout, list[Tensor]]:
        stored = reader.read_metadata().state_dict_metadata
        name = self._own("layout")
        layout = StateLayout.from_bytes(_load([name], stored, reader)[name].numpy().tobytes())
        names = [self._own(item.path) for item in layout.slices]
        state = _load(names, stored, reader)
        return layout, [state[name] for name in names]

    def _own(self, path: str) -> str:
        return f"rank{self._rank}.{path}"

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"

    def _steps(self) -> list[int]:
        return [int(path.parent.name.removeprefix("step-")) for path in self._directory.glob(f"step-*/{_METADATA}")]

    def _remove_old(self, before: int) -> None:
        """On rank 0, once ``before`` is complete; also removes steps that were trained before a restart."""
        if self._rank == 0:
            for step in sorted(set(self._steps()) - {before})[: 1 - _KEPT]:
                shutil.rmtree(self._path(step), ignore_errors=True)


class DcpAsync(DcpSync):
    """A checkpoint staged in memory at the step and written by a thread, for which the next step waits if necessary."""

    name = "dcp_async"

    def __init__(self, training: TrainingState, destination: Destination, rank: int) -> None:
        super().__init__(training, destination, rank)
        self._pending: Future[Any] | None = None
        self._pending_step = -1
        self._seconds: list[float] = []

    def step(self, step: int) -> bool:
        started = time.perf_counter()
        self._wait()
        saving = dcp.async_save(self._state(step), checkpoint_id=self._path(step), process_group=self._group)
        assert isinstance(saving, Future)
        saving.add_done_callback(lambda _: self._seconds.append(time.perf_counter() - started))
        self._pending, self._pending_step = saving, step
        return True

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None
            self._remove_old(before=self._pending_step)

    def finish(self) -> float | None:
        self._wait()
        return self._seconds[-1] if self._seconds else None

    def close(self) -> None:
        self._wait()
        super().close()


def _load(names: list[str], stored: dict[str, Any], reader: dcp.FileSystemReader) -> dict[str, Tensor]:
    state: dict[str, Any] = {}
    for name in names:
        described = stored[name]
        assert isinstance(described, TensorStorageMetadata)
        state[name] = torch.empty(described.size, dtype=described.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of no_dist, which is meant
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state
