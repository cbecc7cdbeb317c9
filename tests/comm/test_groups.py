"""How ranks meet to make private groups, whatever torch names groups, and how such groups are kept and end."""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clocks import PATIENCE
from thinwire.comm import groups
from thinwire.comm.c10d import default_store
from thinwire.comm.connections import PrivateGroup, shut_down_groups
from thinwire.comm.lane import Lane
from thinwire.comm.notes import Notes
from thinwire.errors import CorruptHeaderError, LostPeerError, ThinwireError, raising
from thinwire.lab.testbed.launch import RankContext, run_ranks

MEET = timedelta(seconds=10)


class _Ends:
    """A group that notes on which thread it ends."""

    def __init__(self, threads: queue.SimpleQueue[str]) -> None:
        self._threads = threads

    def __del__(self) -> None:
        self._threads.put(threading.current_thread().name)


@pytest.mark.parametrize("is_shut_down", [False, True])
def test_a_group_that_was_shut_down_ends_on_another_thread(is_shut_down: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's works of it may never fail, and its end waits for them; a group that is whole ends at once."""
    threads: queue.SimpleQueue[str] = queue.SimpleQueue()
    has_let_go = threading.Event()
    waits = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: not has_let_go.wait(PATIENCE)})
    monkeypatch.setattr(groups, "time", waits)
    held: list[Any] = [_Ends(threads)]
    if is_shut_down:
        shut_down_groups.add(held[0])
    groups.let_go(held.pop())
    has_let_go.set()
    ended = threads.get(timeout=PATIENCE)
    assert ended == ("thinwire-ending" if is_shut_down else threading.current_thread().name)


def _meets_under_other_names(context: RankContext) -> list[list[list[float]]]:
    """Every name of a group that this rank has from torch is another one than on any other rank."""
    some = dist.new_group([0, 2])
    assert some is not None, "it is the one that means nobody on the other ranks"
    numbers, met = count(), []
    with pytest.MonkeyPatch.context() as patch:
        own = lambda *args, **kwargs: f"of rank {context.rank}: {next(numbers)}"  # noqa: E731
        patch.setattr(dist.distributed_c10d, "_process_group_name", own)
        for parent in (None, some, some, None):
            if context.rank != 1 or parent is None:
                dist.new_group([context.rank], use_local_synchronization=True)
                lane = Lane(parent, MEET)
                lane.native_group()
                met.append(lane.agree("rank", [float(context.rank)]))
                lane.close()
                groups.private_group(parent, MEET).destroy()
    return met


@pytest.mark.ranks
def test_no_name_that_torch_gives_a_group_decides_whether_ranks_meet() -> None:
    """Torch counts groups another way in each version; ranks with other counts waited until the timeout."""
    everyone, some = [[0.0], [1.0], [2.0]], [[0.0], [2.0]]
    first, second, third = run_ranks(_meets_under_other_names, world_size=3, timeout_seconds=60)
    assert first.value == third.value == [everyone, some, some, everyone]
    assert second.value == [everyone, everyone]


def _meets_alone(context: RankContext) -> str:
    store, others = default_store(), ["rank 0 is done", "rank 1 is done"]
    if context.rank == 2:
        store.wait(others, MEET)
        return ""
    with pytest.raises(LostPeerError) as caught:
        groups.private_group(None, timedelta(seconds=0.5))
    store.set(others[context.rank], "")
    store.wait(others, MEET)  # it hosts the store
    return str(caught.value)


@pytest.mark.ranks
def test_ranks_that_wait_for_one_that_does_not_come_name_it_within_the_timeout() -> None:
    first, second, _ = run_ranks(_meets_alone, world_size=3, timeout_seconds=60)
    assert first.value == second.value
    assert first.value.startswith("rank 2 stopped answering")


def _has_its_group(context: RankContext) -> bool:
    """Rank 0 takes the group of native sums once rank 1 has its own, or, as it should be, cannot have it yet."""
    first, store, has_waited = Lane(dist.group.WORLD, MEET), default_store(), list[bool]()
    first.native_group()
    first.close()  # both groups are kept for the next lane
    lane = Lane(dist.group.WORLD, MEET)
    take = groups.take_group

    def late(*arguments: Any) -> PrivateGroup:
        if context.rank == 0:
            with pytest.raises(RuntimeError, match="timeout"):
                store.wait(["rank 1 has it"], timedelta(seconds=1))
            has_waited.append(True)
        return take(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "take_group", late)
        lane.native_group()
    if context.rank == 1:
        store.set("rank 1 has it", "")
    dist.barrier()
    lane.close()
    return has_waited == [True] * (context.rank == 0)


@pytest.mark.ranks
def test_no_rank_goes_on_before_all_have_the_group_of_native_sums() -> None:
    assert all(outcome.value for outcome in run_ranks(_has_its_group, world_size=2, timeout_seconds=60))


class _Numbered:
    """A group of a closed lane."""

    def __init__(self, number: int) -> None:
        self.number, self.kind = number, (MEET, False)

    def lost(self) -> set[int]:
        return set()


def test_ranks_that_closed_lanes_in_different_orders_take_the_same_group() -> None:
    taken = []
    for numbers in ((3, 5), (5, 3)):
        parent: Any = _Numbered(0)
        groups._idle_groups[parent] = [_Numbered(one) for one in numbers]  # type: ignore[misc]
        taken.append([groups.take_group(parent, (MEET, False), Notes(None, 0, ())).number for _ in numbers])
    assert taken == [[3, 5]] * 2


def _ends_a_lane_otherwise(context: RankContext, how: str) -> tuple[list[list[float]] | str, bool]:
    """Rank 1 leaves no idle group, for Ctrl-C in close, or sees that one as lost; what the next lane does."""
    lane, store = Lane(dist.group.WORLD, MEET), default_store()
    lane.submit(lambda lane: None).wait()
    group, is_other = lane._own, context.rank == 1
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        if is_other and how == "interrupted":
            patch.setattr(lane._thread, "is_alive", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                lane.close()
        else:
            lane.close()
        dist.barrier()
        if is_other and how == "seen as lost":
            patch.setattr(group, "lost", lambda: store.wait(["rank 0 took it"], MEET) or {0})
        met: list[list[float]] | str = ""
        try:
            lane = Lane(dist.group.WORLD, MEET)
            store.set(f"rank {context.rank} took it", "")
            met = lane.agree("rank", [float(context.rank)])
        except ThinwireError as error:
            met = type(error).__name__
        lane.close()
        store.set(f"rank {context.rank} is done", "")
        store.wait(["rank 0 is done", "rank 1 is done"], MEET / 2)
    return met, any(group is one for one in groups._idle_groups[dist.group.WORLD])  # type: ignore[index]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "met", "is_kept"),
    [
        ("alike", [[0.0], [1.0]], True),
        ("interrupted", [[0.0], [1.0]], False),
        ("seen as lost", LostPeerError.__name__, False),
    ],
)
def test_ranks_that_see_an_idle_group_differently_meet_in_another_or_raise_at_once(
    how: str, met: object, is_kept: bool
) -> None:
    for outcome in run_ranks(_ends_a_lane_otherwise, how, world_size=2, timeout_seconds=60):
        assert outcome.value == (met, is_kept)


@pytest.mark.parametrize("size", [1 << 60, 0, -1])
def test_a_length_that_no_rank_can_have_is_refused_before_memory_is_taken(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_reduce(tensor: torch.Tensor, *_: object) -> None:
        tensor[1] = size

    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    monkeypatch.setattr(groups, "device_of", lambda _: torch.device("cpu"))
    monkeypatch.setattr(groups, "_all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [4, 7])
    with pytest.raises(CorruptHeaderError, match="rank 7 announces"):
        groups._gather(b"addresses", group, MEET)


def _connects_late(context: RankContext, directory: str) -> bool:
    """Rank 0 takes longer to make the group of a lane; whether it had it when this rank went on."""
    late = Path(directory) / "late"
    make = groups.gloo_group

    def slowly(*args: Any) -> Any:
        group = make(*args)
        if context.rank == 0:
            threading.Event().wait(1.0)
            late.touch()
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "gloo_group", slowly)
        group = groups.private_group(None, MEET)
    was_there = late.exists()
    group.destroy()
    dist.barrier()
    return was_there


@pytest.mark.ranks
def test_no_rank_goes_on_before_all_are_connected(tmp_path: Path) -> None:
    """One that fails and hangs up earlier has others connect to each other in vain, until the timeout."""
    assert all(outcome.value for outcome in run_ranks(_connects_late, str(tmp_path), world_size=3))
