"""torch.distributed.checkpoint into the memory of hosts, and out of it."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.checkpoint.dcp.sharded import Sharded, same
from thinwire.checkpoint import MemoryReader, MemoryWriter
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks


def through_dcp(context: RankContext, sockets: list[str]) -> None:
    """Drop-in: saved by 4 ranks, loaded by 3 and by 4, numbers and nested tensors and all."""
    first_three = dist.new_group([0, 1, 2])
    socket = sockets[context.rank]
    four = Sharded(dist.group.WORLD, seed=1)
    writer = MemoryWriter("dcp", holder_socket=socket)
    extra = {"epoch": 3, "rate": 0.1, "names": ["a", ("b", 2.5)], "of_all": torch.arange(5.0), "raw": b"\xff"}
    four.train(1)
    for step in (1, 2):
        extra["epoch"] += 1
        dcp.save({**four.state(), "extra": extra}, storage_writer=writer, checkpoint_id=step)
    stored = four.whole()
    four.train(1)
    dcp.save({**four.state(), "extra": {**extra, "epoch": 6}}, storage_writer=writer)
    with pytest.raises(CheckpointException, match=r"extra\.bad is not made of dict"):
        dcp.save({**four.state(), "extra": {"bad": Fraction(1, 2)}}, storage_writer=writer)
    writer.close()
    groups = [dist.group.WORLD, first_three] if context.rank < 3 else [dist.group.WORLD]
    for group in groups:
        again = Sharded(group, seed=2)
        again.train(1)
        found = {**again.state(), "extra": {**extra, "epoch": 0, "rate": 0.0, "of_all": torch.zeros(5)}}
        reader = MemoryReader("dcp", holder_socket=socket, process_group=group)
        dcp.load(found, storage_reader=reader, checkpoint_id=2, process_group=group)
        again.model.load_state_dict(found["model"]), again.optimizer.load_state_dict(found["optimizer"])
        assert same(again.whole(), stored)
        assert torch.equal(found["extra"].pop("of_all"), extra["of_all"])
        assert found["extra"] == {key: value for key, value in extra.items() if key != "of_all"}
        dcp.load({"extra": (newest := {"epoch": 0})}, storage_reader=reader, process_group=group)
        assert (reader.step, newest["epoch"]) == (3, 6)
        with pytest.raises(CheckpointException, match="no step 7 of run 'dcp'"):
            dcp.load(found, storage_reader=reader, checkpoint_id=7, process_group=group)
        reader.close()


@pytest.mark.slow
def test_dcp_saves_to_and_loads_from_the_memory_of_hosts(sockets: list[str]) -> None:
    run_ranks(through_dcp, sockets, world_size=4, timeout_seconds=100)
