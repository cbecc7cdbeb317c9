"""The holders' memory as a storage that torch.distributed.checkpoint (DCP) writes to and reads from.

A rank saves a version like the Checkpointer does: layout and raw bytes. DCP's metadata is not stored; the reader
builds it from the layouts of all ranks, on any number of ranks. Values that are no tensors are stored as JSON, so the
pickles that DCP makes of them do not leave the process.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from thinwire.checkpoint.agreement import Agreement
from thinwire.checkpoint.group import check_alike, failures_of, gather_json, on_all, private_group, run_id_of
from thinwire.checkpoint.holder.client import SlotWriter
from thinwire.checkpoint.holder.version import StoredStep
from thinwire.checkpoint.options import Storage
from thinwire.checkpoint.pacing.gaps import Pacer
from thinwire.checkpoint.records import Notices
from thinwire.checkpoint.recovery import ForeignShards, foreign_steps, gather_layouts, is_whole, survey
from thinwire.checkpoint.registration import Registration
from thinwire.checkpoint.state.decode import unflatten
from thinwire.checkpoint.state.encode import Encoded, StateEncoder
from thinwire.checkpoint.state.layout import DTYPES, StateLayout, write
from thinwire.checkpoint.state.sharding import narrow
from thinwire.comm.groups import Group
from thinwire.errors import CorruptMessageError, ThinwireError

STATE = "dcp"  # in the layout's ``about``, where a Checkpointer has the digest of its model


class MemoryStorage:
    """The ranks of a `MemoryWriter` or `MemoryReader`, their registration, and the step that DCP asked for."""

    def __init__(self, storage: Storage, leases: bool) -> None:
        self._group: Any = private_group(storage.process_group, storage.timeout).process_group
        self._about = {"world_size": dist.get_world_size(self._group), "state": STATE}
        try:
            check_alike({"replicas": storage.replicas}, self._group)
            self._run_id = on_all(self._group, lambda: run_id_of(storage.run_id), ValueError)
            self._registration = Registration(storage, self._run_id, self._about, self._group, leases)
        except Exception:
            dist.destroy_process_group(self._group)
            raise
        self._given: int | None = None
        self._saved_step = -1  # of this writer

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        given = None if checkpoint_id is None else str(checkpoint_id)
        if given is not None and not (self.validate_checkpoint_id(given) and int(given) > self._saved_step):
            raise ValueError(
                f"checkpoint_id={given!r}: in memory a checkpoint is named by its step, a number that grows; to save an"
                " earlier one, close the writer and make another"
            )
        self._given = None if given is None else int(given)

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return str(checkpoint_id).isdecimal()

    def close(self) -> None:
        """Close the storage; saved versions stay. A second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            self._registration.close()
            dist.destroy_process_group(group)


_TURN_SECONDS = 60.0
_POLL_SECONDS = 0.005


class MemoryWriter(MemoryStorage, dcp.StorageWriter):
    """A DCP writer to the memory of this host and of its peers: ``dcp.save(state,
    storage_writer=MemoryWriter("my-run"))``.

    Make one for all saves of a training, on all ranks. ``checkpoint_id`` is the step, a number that grows (to go back,
    close the writer and make another); without one saves are counted. `torch.distributed.checkpoint.save` returns when
    the version is complete on each host; it goes on to the peers after that. Two versions are kept. A save waits, for
    at most a minute, while the one before is still on its way to the peers.

    Args:
        run_id: names the run, as in `Checkpointer`; take another one than a Checkpointer of the same training.
        replicas: copies of each rank's part, including the one on its own machine.
        holder_socket: path of the holder of this host; default $THINWIRE_HOLDER.
        process_group: the ranks that save; default all.
        timeout: how long ranks wait for each other; default 30 minutes.

    Raises:
        ValueError: as `Checkpointer` does; and in `torch.distributed.checkpoint.save`, for a value that JSON and
            tensors cannot express, and for a step that is not after those that this writer has saved.
        ThinwireError: in `torch.distributed.checkpoint.save`: the holder is lost, or there was no free slot in time.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        replicas: int = 2,
        holder_socket: str | Path | None = None,
        process_group: Group = None,
        timeout: timedelta | None = None,
    ) -> None:
        storage = Storage(run_id, replicas, holder_socket=holder_socket, process_group=process_group, timeout=timeout)
        super().__init__(storage, leases=True)
        self._notices, self._encoder = Notices(dist.get_rank(self._group)), StateEncoder()
        self._pacer = Pacer(lambda num_bytes: self._agreement.grant(num_bytes), every=1, watched=False)
        self._agreement = Agreement(self._registration, self._group, None, self._pacer, self._notices)
        self._step: int | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all ranks do the same, so there is nothing to set up."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        encoded = on_all(self._group, lambda: self._encoder.encode(_state_of(plan, planner)), ValueError)
        self._agreement.sizes, registration = (encoded.payload_bytes, encoded.shared_bytes), self._registration
        registration.layout_bytes = max(registration.layout_bytes, len(encoded.to_bytes(self._agreement.about)))
        self._write(encoded)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return future

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: a checkpoint is complete once all ranks' versions are, so nothing is written last."""

    def close(self) -> None:
        """Close the writer; saved versions stay. A second call does nothing."""
        self._pacer.close()
        super().close()

    def _write(self, encoded: Encoded) -> None:
        if self._step is None:
            surveyed = survey(self._registration)
            steps = [version.step for versions in surveyed.inventories.values() for version in versions]
            self._agreement.attempt, self._step = surveyed.attempt, max(steps, default=0)
        step = self._step + 1 if self._given is None else self._given
        self._given, self._step = None, step  # which no other state gets, also if this one is not saved on all ranks
        self._pacer.note_step()
        failed = failures_of(self._publish(self._slot(step, encoded), encoded), self._group)
        if failed:
            raise ThinwireError(f"step {step} was not saved: {failed}")
        self._saved_step = step

    def _slot(self, step: int, encoded: Encoded) -> SlotWriter:
        """A slot, on all ranks. Raises ThinwireError on all ranks."""
        deadline = time.monotonic() + _TURN_SECONDS
        while True:
            turn = self._agreement.take_turn(step)
            if turn.registers:
                if not self._agreement.register(step, encoded):
                    raise ThinwireError(f"step {step} was not saved: {self._notices.last}")
                continue
            gathered = gather_json([turn.skipped, time.monotonic() > deadline], self._group)
            if turn.writer is not None and not any(skipped for skipped, _ in gathered):
                return turn.writer
            if any(late for _, late in gathered) or self._registration.client is None:
                raise ThinwireError(f"step {step} was not saved: {[skipped for skipped, _ in gathered][:4]}")
            time.sleep(_POLL_SECONDS)

    def _publish(self, writer: SlotWriter, encoded: Encoded) -> str:
        """Why the version of this rank is not complete, or empty."""
        try:
            write(encoded.slices, encoded.tensors, writer.payload)
        except RuntimeError as error:
            self._agreement.abandon(writer)
            return str(error)
        return self._agreement.publish(writer, encoded, (), wait=True)


def _state_of(plan: dcp.SavePlan, planner: dcp.SavePlanner) -> dict[str, Any]:
    """State that a rank saves. ``chunks`` are tensors, ``items`` their names, whole shapes and offsets."""
    values, items, chunks = {}, [], []
    for item in plan.items:
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            values[item.index.fqn] = _plain(item, data)
        else:
            assert isinstance(data, Tensor)
            assert item.tensor_data is not None
            items.append([item.index.fqn, list(item.tensor_data.size), list(item.tensor_data.chunk.offsets)])
            chunks.append(data.detach())
    return {"values": values, "items": items, "chunks": chunks, "planner_data": plan.planner_data or {}}


def _plain(item: dcp.WriteItem, data: io.BytesIO) -> Any:
    """The value that a planner has pickled: the pickle is of this process, and is not sent."""
    data.seek(0)
    try:
        return torch.load(data, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{item.index.fqn} is not made of dict, list, tuple, tensor, int, float, str, bool, None and bytes"
        ) from error


class _Number(int):
    """Index of a slice, in the position of a tensor."""


@dataclass(frozen=True)
class _Saved:
    """Content of a `MemoryWriter`'s version of one rank, with indices of slices in the positions of tensors."""

    layout: StateLayout
    values: dict[str, Any]
    items: list[tuple[str, Size, Size, int]]  # name, whole shape, offset, index
    planner_data: dict[str, Any]

    @classmethod
    def of(cls, layout: StateLayout) -> _Saved:
        """Parse a layout. Raises CorruptMessageError for a layout of anything else."""
        tree = unflatten(layout, [_Number(number) for number in range(len(layout.slices))])  # type: ignore[misc]
        try:
            named = zip(tree["items"], tree["chunks"], strict=True)
            items = [(str(name), Size(shape), Size(offset), int(number)) for (name, shape, offset), number in named]
            return cls(layout, dict(tree["values"]), items, dict(tree["planner_data"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptMessageError(f"not a checkpoint of DCP: {error}") from error


class MemoryReader(MemoryStorage, dcp.StorageReader):
    """A DCP reader of versions that a `MemoryWriter` of the run saved: ``dcp.load(state,
    storage_reader=MemoryReader("my-run"))``.

    It reads the newest step of which the shards of all ranks that saved it are there, on any hosts, or the step that
    ``checkpoint_id`` names. The number of ranks may differ from when it was saved: DCP reshards. Make it on all ranks,
    and use it on all of them together (not with ``no_dist=True``, except in a job of one rank).

    Args:
        run_id, holder_socket, process_group, timeout: as in `MemoryWriter`.

    Raises:
        ValueError: as `MemoryWriter` does.
        ThinwireError: in `torch.distributed.checkpoint.load` (which turns it into its CheckpointException): there is no
            such step, shards of it are lost, or bytes were altered.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        holder_socket: str | Path | None = None,
        process_group: Group = None,
        timeout: timedelta | None = None,
    ) -> None:
        storage = Storage(run_id, 1, holder_socket=holder_socket, process_group=process_group, timeout=timeout)
        super().__init__(storage, leases=False)
        self._version: StoredStep | None = None
        self._saved: Mapping[int, _Saved] = {}
        self._located: dict[MetadataIndex, tuple[int, int]] = {}  # owner, index of the slice

    @property
    def step(self) -> int | None:
        """Step that was read last, or None before the first read."""
        return None if self._version is None else self._version.step

    def read_metadata(self, *args: Any, **_: Any) -> dcp.Metadata:
        """Build the metadata from the layouts of all ranks; collective."""
        registration, reasons = self._registration, []
        given, self._given = self._given, None  # DCP says nothing when it wants the newest
        surveyed = survey(registration)
        for version in foreign_steps(surveyed.inventories, self._run_id, ""):
            if given in (None, version.step):
                layouts = gather_layouts(version, registration)
                if is_whole(layouts, {"state": STATE}):
                    self._version = version
                    self._saved = {owner: _Saved.of(layout) for owner, layout in layouts.items()}
                    return self._metadata()
                reasons.append(f"step {version.step}: only shards {sorted(layouts)} are here")
        wanted = "no checkpoint" if given is None else f"no step {given}"
        raise ThinwireError(f"{wanted} of run {self._run_id!r} in the memory of these hosts; {'; '.join(reasons[:8])}")

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has set up the reader on every rank."""

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        assert self._version is not None, "DCP reads the metadata first"
        needed = {self._located[item.storage_index][0] for item in plan.items if self._has_tensors(item)}
        shards = ForeignShards(self._version, needed, self._registration)
        with contextlib.closing(shards):
            for item in plan.items:
                self._read(item, planner, shards)
            shards.verify()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _metadata(self) -> dcp.Metadata:
        metadata = dcp.Metadata({}, planner_data={})
        self._located = {}
        for owner, saved in self._saved.items():
            for name, shape, offset, number in saved.items:
                where = saved.layout.slices[number]
                properties = TensorProperties(DTYPES[where.dtype])
                stored = metadata.state_dict_metadata.setdefault(name, dcp.TensorStorageMetadata(properties, shape, []))
                assert isinstance(stored, dcp.TensorStorageMetadata)
                stored.chunks.append(dcp.ChunkStorageMetadata(offset, Size(where.shape)))
                self._located[MetadataIndex(name, offset)] = owner, number
            for name in saved.values:
                metadata.state_dict_metadata[name] = dcp.BytesStorageMetadata()
                self._located[MetadataIndex(name)] = owner, -1
            metadata.planner_data.update(saved.planner_data)
        return metadata

    def _has_tensors(self, item: dcp.ReadItem) -> bool:
        if item.type != LoadItemType.BYTE_IO:
            return True
        owner, _ = self._located[item.storage_index]
        return _contains_number(self._saved[owner].values[item.storage_index.fqn])

    def _read(self, item: dcp.ReadItem, planner: dcp.LoadPlanner, shards: ForeignShards) -> None:
        owner, number = self._located[item.storage_index]
        if item.type == LoadItemType.BYTE_IO:
            saved, name = self._saved[owner], item.storage_index.fqn
            value = saved.values[name]
            if _contains_number(value):
                tensors = shards.tensors(owner, range(len(saved.layout.slices)))
                value = unflatten(saved.layout, tensors)["values"][name]
            pickled = io.BytesIO()
            torch.save(value, pickled)  # the form that planners accept; made in this process
            pickled.seek(0)
            planner.load_bytes(item, pickled)
            return
        (stored,) = shards.tensors(owner, [number])
        target: Tensor = planner.resolve_tensor(item).detach()
        target.copy_(narrow(stored, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)


def _contains_number(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, _Number) or any(map(_contains_number, inner))
