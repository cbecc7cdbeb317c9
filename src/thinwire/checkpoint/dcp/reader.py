"""The holders' memory as a storage that torch.distributed.checkpoint (DCP) reads from, on any number of ranks."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from thinwire.checkpoint.dcp.storage import STATE, MemoryStorage
from thinwire.checkpoint.foreign import ForeignShards, ForeignVersion, foreign_versions, gather_layouts, is_whole
from thinwire.checkpoint.recovery import survey
from thinwire.checkpoint.state.chunks import narrow
from thinwire.checkpoint.state.decode import unflatten
from thinwire.checkpoint.state.layout import DTYPES, StateLayout
from thinwire.comm.lane import Group
from thinwire.errors import CorruptMessageError, ThinwireError


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
            items = [
                (str(name), Size(shape), Size(offset), int(number))
                for (name, shape, offset), number in zip(tree["items"], tree["chunks"], strict=True)
            ]
            return cls(layout, dict(tree["values"]), items, dict(tree["planner_data"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptMessageError(f"not a checkpoint of DCP: {error}") from error


class MemoryReader(MemoryStorage, StorageReader):
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
        super().__init__(run_id, 1, holder_socket, process_group, timeout, leases=False)
        self._version: ForeignVersion | None = None
        self._saved: Mapping[int, _Saved] = {}
        self._places: dict[MetadataIndex, tuple[int, int]] = {}  # owner, index of the slice

    @property
    def step(self) -> int | None:
        """Step that was read last, or None before the first read."""
        return None if self._version is None else self._version.step

    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        """Build the metadata from the layouts of all ranks; collective."""
        registration, reasons = self._registration, []
        given, self._given = self._given, None  # DCP says nothing when it wants the newest
        found = survey(registration.client, registration.holders, self._run_id, "", self._group)
        for version in foreign_versions(found.inventories, self._run_id, ""):
            if given in (None, version.step):
                layouts = gather_layouts(version, registration, self._group)
                if is_whole(layouts, {"state": STATE}):
                    self._version = version
                    self._saved = {owner: _Saved.of(layout) for owner, layout in layouts.items()}
                    return self._metadata()
                reasons.append(f"step {version.step}: only shards {sorted(layouts)} are here")
        wanted = "no checkpoint" if given is None else f"no step {given}"
        raise ThinwireError(f"{wanted} of run {self._run_id!r} in the memory of these hosts; {'; '.join(reasons[:8])}")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has set up the reader on every rank."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._version is not None, "DCP reads the metadata first"
        needed = {self._places[item.storage_index][0] for item in plan.items if self._has_tensors(item)}
        shards = ForeignShards(self._version, needed, self._registration, self._group)
        try:
            for item in plan.items:
                self._read(item, planner, shards)
            shards.verify()
        finally:
            shards.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _metadata(self) -> Metadata:
        metadata = Metadata({}, planner_data={})
        self._places = {}
        for owner, saved in self._saved.items():
            for name, shape, offset, number in saved.items:
                where = saved.layout.slices[number]
                properties = TensorProperties(DTYPES[where.dtype])
                stored = metadata.state_dict_metadata.setdefault(name, TensorStorageMetadata(properties, shape, []))
                assert isinstance(stored, TensorStorageMetadata)
                stored.chunks.append(ChunkStorageMetadata(offset, Size(where.shape)))
                self._places[MetadataIndex(name, offset)] = owner, number
            for name in saved.values:
                metadata.state_dict_metadata[name] = BytesStorageMetadata()
                self._places[MetadataIndex(name)] = owner, -1
            metadata.planner_data.update(saved.planner_data)
        return metadata

    def _has_tensors(self, item: ReadItem) -> bool:
        if item.type != LoadItemType.BYTE_IO:
            return True
        owner, _ = self._places[item.storage_index]
        return _contains_number(self._saved[owner].values[item.storage_index.fqn])

    def _read(self, item: ReadItem, planner: LoadPlanner, shards: ForeignShards) -> None:
        owner, number = self._places[item.storage_index]
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
