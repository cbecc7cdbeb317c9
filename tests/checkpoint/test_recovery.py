"""Parts of tensors, cut in any way, are put together to others; and which versions of other topologies there are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.checkpoint.holder.version import ShardId, Version
from thinwire.checkpoint.recovery import foreign_steps, gather_layouts, is_whole
from thinwire.checkpoint.state.layout import StateLayout


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


@pytest.mark.parametrize("text", [b"{}", b"no JSON", b"\xff"])
def test_a_layout_that_cannot_be_parsed_is_left_out(mesh: DeviceMesh, text: bytes) -> None:
    """A restore ended on all ranks with it, also where another step, or the disk, could be restored."""
    read = StateLayout(None, (), 0, {"world_size": 2, "state": "s"}).to_bytes()
    client = SimpleNamespace(layout=lambda version, source: text if version.shard.owner else read)
    asking: Any = SimpleNamespace(client=client, here="b:1", holders=["b:1"], is_first=True, group=dist.group.WORLD)
    (stored,) = foreign_steps({"a:1": [version(0, 9), version(1, 9)]}, "run", "this")
    assert gather_layouts(stored, asking) == {0: StateLayout.from_bytes(read)}


def test_only_all_shards_of_the_same_state_are_a_state() -> None:
    def layout(world_size: int, state: str = "s") -> StateLayout:
        return StateLayout(None, (), 0, {"world_size": world_size, "state": state})

    assert is_whole({0: layout(2), 1: layout(2)}, {"state": "s"})
    for layouts in ({}, {0: layout(2)}, {0: layout(2), 2: layout(2)}, {0: layout(2), 1: layout(3)}):
        assert not is_whole(layouts, {"state": "s"})
    assert not is_whole({0: layout(1, "other")}, {"state": "s"})
    assert not is_whole({0: StateLayout(None, (), 0)}, {"state": "s"})
