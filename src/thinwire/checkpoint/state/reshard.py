"""Resharding of a state that another number of ranks stored: every rank builds its part from theirs.

Tensors held in parts (DTensors of FSDP2) are cut again, by the resharding of torch.distributed.checkpoint. Everything
else comes from one of the old ranks, the one of the same number or, if there were fewer, of this number modulo theirs:
under DDP that is the same on all of them, except for values private to a rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from thinwire.checkpoint.state.chunks import narrow
from thinwire.checkpoint.state.decode import Targets
from thinwire.checkpoint.state.layout import StateLayout
from thinwire.checkpoint.state.sharding import local_of, part_of


class Shards(Protocol):
    """Interface of the stored states of all ranks."""

    def tensors(self, owner: int, numbers: Sequence[int]) -> list[Tensor]:
        """Return the tensors of the slices of these indices, from the state of rank ``owner``."""
        ...


@dataclass(frozen=True)
class Move:
    """Elements of a stored slice that go into a tensor of this rank; without ``box``, all of them."""

    owner: int
    number: int
    target: Tensor
    box: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None  # source offsets, target offsets, lengths


def plan_moves(targets: Targets, layouts: Mapping[int, StateLayout], like: int) -> list[Move]:
    """Return the moves that fill ``targets``, which `decode.prepare` made from the layout of rank ``like``.

    Args:
        layouts: the layouts of all ranks that stored the state.

    Raises:
        ValueError: elements that no rank has stored.
    """
    holders: dict[str, dict[tuple[int, ...], tuple[int, int]]] = defaultdict(dict)
    for owner in sorted(layouts, key=lambda owner: owner != like):  # rank like first, so equal parts come from it
        for number, item in enumerate(layouts[owner].slices):
            if item.part is not None and item.nbytes:
                holders[item.path].setdefault((*item.part.offset, *item.shape), (owner, number))
    moves = []
    for number, target in targets:
        if isinstance(target, DTensor):
            moves += _moves_into(target, layouts[like].slices[number].path, holders)
        else:
            moves.append(Move(like, number, target))
    return moves


def _moves_into(
    target: DTensor, path: str, holders: Mapping[str, Mapping[tuple[int, ...], tuple[int, int]]]
) -> list[Move]:
    local, part, boxes = local_of(target), part_of(target), list(holders[path])
    if not local.numel():
        return []
    dims = target.dim()
    chunks = [ChunkStorageMetadata(Size(box[:dims]), Size(box[dims:])) for box in boxes]
    stored = TensorStorageMetadata(TensorProperties(target.dtype), target.size(), chunks)
    here = [ChunkStorageMetadata(Size(part.offset), local.size())]
    items = create_read_items_for_chunk_list(path, stored, here)
    if sum(math.prod(item.lengths) for item in items) != local.numel():
        raise ValueError(f"{path}: some of its elements are in no shard")
    moves = []
    for item in items:
        assert item.storage_index.index is not None
        owner, number = holders[path][boxes[item.storage_index.index]]
        moves.append(Move(owner, number, local, (item.storage_offsets, item.dest_offsets, item.lengths)))
    return moves


def fill(moves: Sequence[Move], shards: Shards) -> None:
    """Make all moves, one old rank after the other."""
    of_owner: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        of_owner[move.owner].append(move)
    for owner, its_moves in sorted(of_owner.items()):
        stored = shards.tensors(owner, [move.number for move in its_moves])
        with torch.no_grad():
            for move, tensor in zip(its_moves, stored, strict=True):
                if move.box is None:
                    local_of(move.target).copy_(tensor)
                else:
                    source, target, lengths = move.box
                    narrow(move.target, target, lengths).copy_(narrow(tensor, source, lengths))
