"""Tensors and parts of tensors in the storage of torch.distributed.checkpoint (DCP), for writing and reading."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Size, Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from thinwire.checkpoint.state.layout import ShardPart


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


class _Planner(LoadPlanner):
    def __init__(self, metadata: Metadata, wanted: Sequence[Wanted]) -> None:
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

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.index is not None
        return narrow(self._wanted[read_item.dest_index.index].tensor, read_item.dest_offsets, read_item.lengths)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the tensor was filled in place."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:  # the constructor has all arguments
        pass

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan


def narrow(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return the box of ``lengths`` elements from ``offsets`` on, as a view."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
