"""States in parts, made whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.checkpoint.state.states import load_into
from thinwire.checkpoint.state.coding import tensors_of
from thinwire.checkpoint.state.decode import prepare
from thinwire.checkpoint.state.encode import flatten
from thinwire.checkpoint.state.layout import ShardPart, StateLayout, TensorSlice, write
from thinwire.checkpoint.state.sharding import fill, plan_moves


class Stored:
    """A tensor that ranks stored in parts, cut along one dimension, and one that each has for itself."""

    def __init__(self, whole: Tensor, dim: int, cuts: Sequence[int]) -> None:
        edges = [0, *sorted(cuts), whole.shape[dim]]
        self.layouts: dict[int, StateLayout] = {}
        self.parts: list[list[Tensor]] = []
        for owner, (start, end) in enumerate(pairwise(edges)):
            piece, own = whole.narrow(dim, start, end - start), torch.tensor(float(owner))
            offset = [0] * whole.dim()
            offset[dim] = start
            part = ShardPart(tuple(whole.shape), tuple(offset), (f"shard {dim}",), ("dp",))
            slices = (
                TensorSlice("weight", "float32", tuple(piece.shape), 0, 4 * piece.numel(), part),
                TensorSlice("own", "float32", (), 64 * (1 + piece.numel() // 16), 4),
            )
            tree = {"dict": [["weight", {"tensor": 0}], ["own", {"tensor": 1}]]}
            self.layouts[owner] = StateLayout(tree, slices, slices[1].offset + 4)
            self.parts.append([piece, own])

    def tensors(self, owner: int, numbers: Sequence[int]) -> list[Tensor]:
        return [self.parts[owner][number] for number in numbers]


shapes = st.tuples(st.integers(1, 9), st.integers(1, 5))


@given(shapes, st.integers(0, 1), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 3))
def test_parts_cut_anywhere_make_the_whole(
    mesh: DeviceMesh, shape: tuple[int, int], dim: int, cuts: list[int], rank: int
) -> None:
    """Into a DTensor that is there, or one that is made; what is not in parts is that of one old rank."""
    whole = torch.randn(shape)
    stored = Stored(whole, dim, [min(cut, shape[dim]) for cut in cuts])
    like = rank % len(stored.layouts)
    other = distribute_tensor(torch.zeros(shape), mesh, [Shard(1 - dim)])
    for state in ({"weight": other}, {"mesh": other}):
        loaded, targets = prepare(state, stored.layouts[like])
        fill(plan_moves(targets, stored.layouts, like), stored.tensors)
        assert isinstance(loaded["weight"], DTensor)
        assert torch.equal(loaded["weight"].full_tensor(), whole)
        assert loaded["own"] == like
    assert torch.equal(other.full_tensor(), whole)


def test_a_part_that_nobody_has_is_missed(mesh: DeviceMesh) -> None:
    stored = Stored(torch.randn(9, 2), 0, [3, 5])
    state = {"weight": distribute_tensor(torch.zeros(9, 2), mesh, [Shard(0)])}
    _, targets = prepare(state, stored.layouts[0])
    del stored.layouts[1]
    with pytest.raises(ValueError, match="weight: some of its elements are in no shard"):
        plan_moves(targets, stored.layouts, 0)


def test_a_dtensor_is_stored_as_its_part_and_loaded_in_place(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)])
    layout, tensors = flatten({"weight": tensor})
    assert StateLayout.from_bytes(layout.to_bytes()) == layout
    assert layout.slices[0].part == ShardPart((5, 3), (0, 0), ("shard 0",), ("dp",))
    buffer = memoryview(bytearray(layout.payload_bytes))
    write(layout.slices, tensors, buffer)
    expected = tensor.full_tensor().clone()
    with torch.no_grad():
        tensor.zero_()
    assert load_into({"weight": tensor}, layout, tensors_of(layout, buffer))["weight"] is tensor
    assert torch.equal(tensor.full_tensor(), expected)
    with pytest.raises(ValueError, match="0 meshes"):
        load_into({"weight": torch.zeros(5, 3)}, layout, tensors_of(layout, buffer))
