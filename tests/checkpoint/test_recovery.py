"""Parts of tensors, cut in any way, are put together to others; and which versions of other topologies there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from states import load_into
from thinwire.checkpoint.holder.version import ShardId, Version
from thinwire.checkpoint.recovery import foreign_steps, gather_layouts, is_whole
from thinwire.checkpoint.state.coding import tensors_of
from thinwire.checkpoint.state.decode import prepare
from thinwire.checkpoint.state.encode import flatten
from thinwire.checkpoint.state.layout import ShardPart, StateLayout, TensorSlice, write
from thinwire.checkpoint.state.sharding import fill, plan_moves


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """Of this process alone."""
    store = Path(tmp_path_factory.mktemp("group")) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


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


def version(owner: int, step: int, topology: str = "old", attempt: int = 0, digest: str = "a" * 16) -> Version:
    return Version(ShardId("run", topology, owner), step, attempt << 32, 100, digest)


def test_versions_of_other_topologies_newest_first() -> None:
    """A later start of the run went on from an earlier one, so its steps are newer whatever their number."""
    inventories = {
        "a:1": [version(0, 9), version(0, 4, "third", attempt=1), version(0, 99, "this", attempt=9)],
        "b:1": [version(1, 9), version(0, 9, digest="b" * 16)],
    }
    newest, older = foreign_steps(inventories, "run", "this")
    assert (newest.topology, newest.step, older.topology, older.step) == ("third", 4, "old", 9)
    assert list(older.copies) == [1], "copies of shard 0 differ, so none of them is one"
    assert foreign_steps(inventories, "other run", "this") == []


def test_a_shard_whose_part_in_common_nobody_has_is_none(mesh: DeviceMesh) -> None:
    """It was overwritten on the last host that had it, say, and a job of another size looks for a step to restore."""
    own = [replace(version(owner, 9), shared="c" * 16, common_bytes=owner * 50) for owner in (0, 1)]
    read = StateLayout(None, (), 0, {"world_size": 2, "state": "s"}).to_bytes()
    client = SimpleNamespace(layout=lambda version, source: read)
    asking: Any = SimpleNamespace(client=client, here="b:1", holders=["b:1"], is_first=True, group=dist.group.WORLD)
    (stored,) = foreign_steps({"a:1": own}, "run", "this")
    assert list(gather_layouts(stored, asking)) == [0]
    common = replace(version(-1, 9), digest="c" * 16)
    (stored,) = foreign_steps({"a:1": [*own, common]}, "run", "this")
    assert list(gather_layouts(stored, asking)) == [0, 1]


def test_only_all_shards_of_the_same_state_are_a_state() -> None:
    def layout(world_size: int, state: str = "s") -> StateLayout:
        return StateLayout(None, (), 0, {"world_size": world_size, "state": state})

    assert is_whole({0: layout(2), 1: layout(2)}, {"state": "s"})
    for layouts in ({}, {0: layout(2)}, {0: layout(2), 2: layout(2)}, {0: layout(2), 1: layout(3)}):
        assert not is_whole(layouts, {"state": "s"})
    assert not is_whole({0: layout(1, "other")}, {"state": "s"})
    assert not is_whole({0: StateLayout(None, (), 0)}, {"state": "s"})
