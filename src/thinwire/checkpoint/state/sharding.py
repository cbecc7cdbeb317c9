"""Tensors that ranks hold in parts (DTensors of FSDP2 and tensor parallelism), also on another number of ranks.

Parts are cut again by the resharding of torch.distributed.checkpoint. Everything else comes from one of the old ranks,
the one of the same number or, if there were fewer, of this number modulo theirs: under DDP that is the same on all of
them, except for values private to a rank.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from thinwire.checkpoint.holder.faultpoint import reach
from thinwire.checkpoint.state.layout import ShardPart, StateLayout

try:
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError:  # FSDP2 over tensor parallelism is described by it, and by nothing public
    _StridedShard = None

Targets = list[tuple[int, Tensor]]  # index of a slice, and the tensor to fill from it


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, in the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def narrow(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return the box of ``lengths`` elements from ``offsets`` on, as a view."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def part_of(tensor: DTensor) -> ShardPart:
    """Return the position of this rank's part of a tensor. Raises ValueError for pending sums."""
    mesh = tensor.device_mesh
    if any(isinstance(placement, Partial) for placement in tensor.placements) or mesh.get_coordinate() is None:
        raise ValueError(f"a DTensor with placements {tensor.placements} on {mesh} has no part of this rank to store")
    (chunk,) = tensor.__create_chunk_list__()
    placements = tuple(map(_text, tensor.placements))
    return ShardPart(tuple(tensor.shape), tuple(chunk.offsets), placements, mesh.mesh_dim_names)


def _text(placement: Placement) -> str:
    if _StridedShard is not None and isinstance(placement, _StridedShard):
        return f"strided {placement.dim} {placement.split_factor}"
    if isinstance(placement, Shard):
        return f"shard {placement.dim}"
    if isinstance(placement, Replicate):
        return "replicate"
    raise ValueError(f"a DTensor with placement {placement} cannot be stored")


def _placement(text: str) -> Placement:
    if text == "replicate":
        return Replicate()
    if match := re.fullmatch(r"shard (\d{1,4})", text):
        return Shard(int(match[1]))
    if (match := re.fullmatch(r"strided (\d{1,4}) (\d{1,9})", text)) and _StridedShard is not None:
        return _StridedShard(int(match[1]), split_factor=int(match[2]))
    raise ValueError(f"unknown placement {text!r}")


def empty_of(part: ShardPart, dtype: torch.dtype, meshes: Iterable[DeviceMesh]) -> DTensor:
    """Return an uninitialized DTensor of that kind, on one of a training's meshes, for one that it does not have yet.

    Raises ValueError unless there is exactly one such mesh.
    """
    fitting = [mesh for mesh in meshes if (mesh.mesh_dim_names, mesh.ndim) == (part.mesh, len(part.placements))]
    if len(fitting) != 1:
        raise ValueError(
            f"there are {len(fitting)} meshes with dimensions {part.mesh} for a tensor of shape {list(part.shape)}"
            " that the training does not have yet: make one optimizer step before restore, so that it has it"
        )
    placements = [_placement(text) for text in part.placements]
    return empty_dtensor(*part.shape, dtype=dtype, device_mesh=fitting[0], placements=placements)


@dataclass(frozen=True)
class Move:
    """Elements of a stored slice that go into a tensor of this rank; without ``box``, all of them."""

    owner: int
    number: int
    target: Tensor
    box: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None  # source offsets, target offsets, lengths


def plan_moves(targets: Targets, layouts: Mapping[int, StateLayout], like: int) -> list[Move]:
    """Return the moves that fill ``targets``, which `decode.prepare` made from the layout of rank ``like``.

    ``layouts`` are from all ranks that stored the state. Raises ValueError for elements that no rank has stored.
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


def fill_own(targets: Targets, layout: StateLayout, tensors: Sequence[Tensor]) -> None:
    """Fill the targets of a state that this rank stored. Raises ValueError for parts that are not in it."""
    fill(plan_moves(targets, {0: layout}, 0), lambda _, numbers: (tensors[number] for number in numbers))


def fill(moves: Sequence[Move], tensors_of: Callable[[int, Sequence[int]], Iterable[Tensor]]) -> None:
    """Make all moves, one old rank after the other.

    ``tensors_of`` returns the tensors of the slices of these indices, from the state of a rank that stored it.
    """
    of_owner: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        of_owner[move.owner].append(move)
    for owner, its_moves in sorted(of_owner.items()):
        stored = tensors_of(owner, [move.number for move in its_moves])
        with torch.no_grad():
            for move, tensor in zip(its_moves, stored, strict=True):
                if move.box is None:
                    local_of(move.target).copy_(tensor)
                else:
                    source, target, lengths = move.box
                    narrow(move.target, target, lengths).copy_(narrow(tensor, source, lengths))
                reach("load")
