"""A checkpoint of all ranks in a directory, as plain torch.distributed.checkpoint (DCP), with digests.

    .metadata  thinwire.json  __0_0.distcp ...

Tensors that are the same on all ranks are stored once, and parts of a DTensor as parts of one tensor, both under their
names in the state (``model.layer.weight``), so any reader of DCP finds them, on any number of ranks. Tensors that
differ are stored as ``rank1.optimizer...``.

Neither DCP nor torch.load compares the bytes with a digest: one flipped bit of a weight comes back unnoticed (tried
with torch 2.13). So ``thinwire.json``, written last, has the digests of ``.metadata`` and of each rank's
``rank1.digests``, and those have the digests of all tensors that the rank needs. A tensor that does not match is not
loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, StorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from thinwire.checkpoint.group import describe, gather_json
from thinwire.checkpoint.state.layout import DTYPES, ShardPart, StateLayout
from thinwire.errors import CorruptMessageError, ThinwireError
from thinwire.holder.slots import parse_json
from thinwire.holder.version import field


class PartsPlanner(DefaultSavePlanner):
    """Planner that saves tensors by name; ``parts`` are those of which several ranks save parts under one name."""

    def __init__(self, parts: Mapping[str, ShardPart]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(name, tensor) for name, tensor in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]

    def _item(self, name: str, tensor: Tensor) -> WriteItem:
        part = self._parts.get(name)
        offset = Size(part.offset if part is not None else [0] * tensor.dim())
        whole = tensor.size() if part is None else Size(part.shape)
        data = TensorWriteData(ChunkStorageMetadata(offset, tensor.size()), TensorProperties(tensor.dtype), whole)
        kind = WriteItemType.TENSOR if part is None else WriteItemType.SHARD
        return WriteItem(MetadataIndex(name, offset), kind, tensor_data=data)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A box to read into ``tensor``: the elements of the named tensor from ``offset`` on, in its shape."""

    name: str
    offset: tuple[int, ...]
    tensor: Tensor


def read_chunks(reader: StorageReader, metadata: Metadata, wanted: Sequence[Wanted]) -> None:
    """Fill all of ``wanted`` from the stored parts, combined by DCP's resharding.

    Raises KeyError for names that are not stored, ValueError for values that are no tensors.
    """
    planner = _Planner(metadata, wanted)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()


class _Planner(DefaultLoadPlanner):
    def __init__(self, metadata: Metadata, wanted: Sequence[Wanted]) -> None:
        super().__init__()
        self._metadata, self._wanted = metadata, wanted

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for number, each in enumerate(self._wanted) for item in self._items(number, each)])

    def _items(self, number: int, wanted: Wanted) -> list[ReadItem]:
        stored = self._metadata.state_dict_metadata[wanted.name]
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"{wanted.name} is not a tensor")
        chunk = ChunkStorageMetadata(Size(wanted.offset), wanted.tensor.size())
        return [
            dataclasses.replace(item, dest_index=MetadataIndex(wanted.name, chunk.offsets, number))
            for item in create_read_items_for_chunk_list(wanted.name, stored, [chunk])
        ]

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None
        return self._wanted[index.index].tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")


_ABOUT, _METADATA = "thinwire.json", ".metadata"
_FIELDS = (
    ("topology", str), ("state", str), ("world_size", int), ("attempt", int), ("metadata", str), ("digests", list)
)  # fmt: skip


def write_shards(
    directory: Path, layout: StateLayout, tensors: Sequence[Tensor], group: dist.ProcessGroup
) -> list[str]:
    """Write the state of each rank to an empty directory that all ranks see, and return digests for `write_about`;
    collective.

    Raises ThinwireError on all ranks, with the error of the system, if one cannot write.
    """
    rank = dist.get_rank(group)
    state = _named(layout, tensors, rank, group)
    parts = {name: item.part for name, item in zip(_names(layout), layout.slices, strict=True) if item.part is not None}
    try:
        dcp.save(state, storage_writer=_Writer(str(directory)), process_group=group, planner=PartsPlanner(parts))
    except CheckpointException as error:
        raise ThinwireError(_why_not(error, directory, state, parts, group)) from error
    return gather_json(_digest(state[_own(rank, "digests")]), group)


def write_about(directory: Path, about: dict[str, Any], digests: list[str]) -> None:
    """Write the file that makes the others a checkpoint, last and once; not collective.

    ``about`` has step, attempt, topology, state and world_size.
    """
    about |= {"metadata": _digest_of((directory / _METADATA).read_bytes()), "digests": digests}
    with (directory / _ABOUT).open("w") as file:
        file.write(json.dumps({**about, "digest": _digest_of(_canonical(about))}))
        file.flush()
        os.fsync(file.fileno())


class _Writer(dcp.FileSystemWriter):
    """DCP's writer. It raises the error of the system, which torch has in the context of one of its own: DCP pickles
    errors for the other ranks, and the context gets lost."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


def _why_not(
    error: CheckpointException,
    directory: Path,
    state: dict[str, Tensor],
    parts: dict[str, Any],
    group: dist.ProcessGroup,
) -> str:
    """Why nothing was written, for people. Other ranks are taken to have as many bytes of their own as this one."""
    alone = _own(dist.get_rank(group), "")
    shares = [
        tensor.nbytes * (dist.get_world_size(group) if name in parts or name.startswith(alone) else 1)
        for name, tensor in state.items()
    ]
    failed = "; ".join(f"rank {rank}: {describe(each)}" for rank, (each, _) in sorted(error.failures.items())[:4])
    free = os.statvfs(directory.parent)
    return (
        f"{failed} (about {sum(shares):,} bytes are needed; {free.f_bavail * free.f_frsize:,} bytes and"
        f" {free.f_favail:,} files were free beside what was written)"
    )


def _named(layout: StateLayout, tensors: Sequence[Tensor], rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Tensors that a rank saves: parts, and those equal on all ranks, under their own names, others under the
    rank's."""
    names = _names(layout)
    digests = {name: _digest(tensor) for name, tensor in zip(names, tensors, strict=True)}
    gathered = gather_json(digests, group)
    described = layout.to_bytes()
    all_digests = {"layout": _digest_of(described), "tensors": digests}
    state = {_own(rank, "layout"): _as_tensor(described), _own(rank, "digests"): _as_tensor(_canonical(all_digests))}
    for item, name, tensor in zip(layout.slices, names, tensors, strict=True):
        same = item.part is not None or all(each.get(name) == digests[name] for each in gathered)
        if tensor.numel():
            state[name if same else _own(rank, name)] = tensor
    return state


def read_about(directory: Path, step: int) -> dict[str, Any]:
    """Read the description of a checkpoint. Raises OSError, or CorruptMessageError if it is of another step, was
    altered, or lacks a digest."""
    about = parse_json((directory / _ABOUT).read_bytes())
    digest = field(about, "digest", str)
    assert isinstance(about, dict), "field has seen to it"
    described = {name: value for name, value in about.items() if name != "digest"}
    _check(_ABOUT, _digest_of(_canonical(described)), digest)
    if field(about, "step", int) != step:
        raise CorruptMessageError(f"it is of step {about['step']}")
    for name, kind in _FIELDS:
        field(about, name, kind)
    return about


class DiskShards:
    """The states of all ranks of a checkpoint on disk. Any rank may read any of them; nothing is collective.

    Raises OSError, ValueError, KeyError or CorruptMessageError wherever files are missing or altered.
    """

    def __init__(self, directory: Path, about: dict[str, Any]) -> None:
        metadata = _digest_of((directory / _METADATA).read_bytes())
        _check(directory / _METADATA, metadata, about["metadata"])
        self.world_size: int = about["world_size"]
        self._about = about
        self._reader = dcp.FileSystemReader(str(directory))
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        self._layouts: dict[int, StateLayout] = {}
        self._digests: dict[int, dict[str, str]] = {}

    def layout(self, owner: int) -> StateLayout:
        if owner not in self._layouts:
            described, digests = self._whole(_own(owner, "layout")), self._whole(_own(owner, "digests"))
            _check(_own(owner, "digests"), _digest(digests), self._about["digests"][owner])
            expected = json.loads(digests.numpy().tobytes())
            _check(_own(owner, "layout"), _digest(described), expected["layout"])
            self._layouts[owner] = StateLayout.from_bytes(described.numpy().tobytes())
            self._digests[owner] = expected["tensors"]
        return self._layouts[owner]

    def tensors(self, owner: int, numbers: Sequence[int]) -> list[Tensor]:
        """Read the tensors of the slices of these indices."""
        layout = self.layout(owner)
        names, wanted = _names(layout), []
        for number in numbers:
            item = layout.slices[number]
            own = _own(owner, names[number])
            name = own if own in self._metadata.state_dict_metadata else names[number]
            offset = (0,) * len(item.shape) if item.part is None else item.part.offset
            wanted.append(Wanted(name, offset, torch.empty(item.shape, dtype=DTYPES[item.dtype])))
        read_chunks(self._reader, self._metadata, [each for each in wanted if each.tensor.numel()])
        for number, each in zip(numbers, wanted, strict=True):
            _check(each.name, _digest(each.tensor), self._digests[owner][names[number]])
        return [each.tensor for each in wanted]

    def _whole(self, name: str) -> Tensor:
        stored = self._metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            raise CorruptMessageError(f"{name} is not a tensor")
        wanted = Wanted(name, (0,), torch.empty(stored.size, dtype=torch.uint8))
        read_chunks(self._reader, self._metadata, [wanted])
        return wanted.tensor


def _names(layout: StateLayout) -> list[str]:
    """Names of the tensors on the disk: their paths, with a suffix where those are not unique."""
    seen: set[str] = set()
    names = []
    for number, item in enumerate(layout.slices):
        names.append(f"{item.path}#{number}" if item.path in seen else item.path)
        seen.add(names[-1])
    return names


def _own(rank: int, name: str) -> str:
    return f"rank{rank}.{name}"


def _check(name: object, found: str, expected: object) -> None:
    if found != expected:
        raise CorruptMessageError(f"{name} was altered, or is of another checkpoint")


def _canonical(values: Any) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _digest(tensor: Tensor) -> str:
    return _digest_of(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _digest_of(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
