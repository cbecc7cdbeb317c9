"""Conversion between tensors that ranks hold in parts (DTensors of FSDP2 and tensor parallelism) and local tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from thinwire.checkpoint.state.layout import ShardPart

try:
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError:  # FSDP2 over tensor parallelism is described by it, and by nothing public
    _StridedShard = None


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, in the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def part_of(tensor: DTensor) -> ShardPart:
    """Return the position of this rank's part of a tensor. Raises ValueError for pending sums."""
    mesh = tensor.device_mesh
    if any(isinstance(placement, Partial) for placement in tensor.placements) or mesh.get_coordinate() is None:
        raise ValueError(f"a DTensor with placements {tensor.placements} on {mesh} has no part of this rank to store")
    (chunk,) = tensor.__create_chunk_list__()
    names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
    return ShardPart(tuple(tensor.shape), tuple(chunk.offsets), tuple(map(_text, tensor.placements)), names)


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


class Meshes:
    """The meshes of a training's DTensors, to create others on them that it does not have yet."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._found: dict[tuple[tuple[str, ...] | None, int], list[DeviceMesh]] = {}
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                mesh = tensor.device_mesh
                names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
                meshes = self._found.setdefault((names, mesh.ndim), [])
                if mesh not in meshes:
                    meshes.append(mesh)

    def empty(self, part: ShardPart, dtype: torch.dtype) -> DTensor:
        """Return an uninitialized DTensor of that kind. Raises ValueError unless there is exactly one such mesh."""
        meshes = self._found.get((part.mesh, len(part.placements)), [])
        if len(meshes) != 1:
            raise ValueError(
                f"there are {len(meshes)} meshes with dimensions {part.mesh} for a tensor of shape {list(part.shape)}"
                " that the training does not have yet: make one optimizer step before restore, so that it has it"
            )
        placements = [_placement(text) for text in part.placements]
        return empty_dtensor(*part.shape, dtype=dtype, device_mesh=meshes[0], placements=placements)
