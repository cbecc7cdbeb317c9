"""torch.distributed.checkpoint into the memory of hosts, and out of it."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from holders import SECRET, running_holders
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


def saved(socket: str) -> dict[str, object]:
    """The newest state in memory, and its step."""
    state: dict[str, object] = {"weights": torch.zeros(4), "losses": None}
    reader = MemoryReader("dcp", holder_socket=socket)
    dcp.load(state, storage_reader=reader)
    reader.close()
    return {"step": reader.step, **state, "weights": state["weights"].tolist()}  # type: ignore[attr-defined]


def test_values_that_grow_beyond_the_room_for_them_get_more_room(alone: None, socket: str) -> None:
    """As a list of losses does. The save that did not fit raised, and with it ended the training."""
    writer = MemoryWriter("dcp", replicas=1, holder_socket=socket)
    losses: list[float] = []
    for step, count in ((1, 1), (2, 2000)):
        losses += [0.1 * each for each in range(count)]
        dcp.save({"weights": torch.full((4,), float(step)), "losses": losses}, storage_writer=writer)
    writer.close()
    assert saved(socket) == {"step": 2, "weights": [2.0] * 4, "losses": losses}


def test_a_number_names_one_state(alone: None, socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two states of one number are copies that differ, which nobody reads, and none of them is ever overwritten."""
    writer = MemoryWriter("dcp", replicas=1, holder_socket=socket)

    def save(value: float, number: int | None = None) -> None:
        state = {"weights": torch.full((4,), value), "losses": None}
        dcp.save(state, storage_writer=writer, checkpoint_id=number)

    save(1.0, 7)
    for number in (7, 6):
        with pytest.raises(ValueError, match=f"checkpoint_id='{number}'.* a number that grows"):
            save(2.0, number)
    publish = MemoryWriter._publish
    monkeypatch.setattr(MemoryWriter, "_publish", lambda *args: publish(*args) or "no")  # as of one rank of several
    with pytest.raises(CheckpointException, match="step 8 was not saved: rank 0: no"):
        save(3.0)
    monkeypatch.setattr(MemoryWriter, "_publish", publish)
    save(4.0)
    assert saved(socket) == {"step": 9, "weights": [4.0] * 4, "losses": None}
    writer.close()
    writer = MemoryWriter("dcp", replicas=1, holder_socket=socket)
    save(5.0, 7)
    assert saved(socket) == {"step": 7, "weights": [5.0] * 4, "losses": None}
    writer.close()


def test_values_may_take_all_of_what_a_layout_may_have(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots have room for twice the first layout, and no holder gave that for one of more than 32 MiB."""
    monkeypatch.setenv("THINWIRE_SECRET", SECRET)
    with running_holders(tmp_path, "200MB", "a") as (socket,):
        writer = MemoryWriter("dcp", replicas=1, holder_socket=socket)
        state = {"weights": torch.ones(4), "losses": "0" * (33 << 20)}
        dcp.save(state, storage_writer=writer)
        writer.close()
        assert saved(socket) == {"step": 1, **state, "weights": [1.0] * 4}
