"""Jobs of a lane that begin while the one before waits for peers, and groups that meet whatever torch names groups."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clocks import PATIENCE
from thinwire.comm import lane as lane_module
from thinwire.comm import notes as notes_module
from thinwire.comm.c10d import default_store, unregistered_group
from thinwire.comm.channel import Subject
from thinwire.comm.connections import PrivateGroup, shut_down_groups
from thinwire.comm.lane import Lane, private_group
from thinwire.comm.notes import ATTACH, Notes
from thinwire.comm.process_group import lost_peer
from thinwire.errors import CorruptHeaderError, LostPeerError, PeerError, ThinwireError, raising
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.sums import lossless

TIMEOUT = timedelta(seconds=30)


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
    monkeypatch.setattr(lane_module, "time", waits)
    groups: list[Any] = [_Ends(threads)]
    if is_shut_down:
        shut_down_groups.add(groups[0])
    lane_module.let_go(groups.pop())
    has_let_go.set()
    ended = threads.get(timeout=PATIENCE)
    assert ended == ("thinwire-ending" if is_shut_down else threading.current_thread().name)


def _begins_while_the_first_waits(context: RankContext) -> tuple[list[str], list[float]]:
    lane, seen, first_waits = Lane(timeout=TIMEOUT), list[str](), threading.Event()
    second_begun = threading.Event()
    tensors = [torch.full((1000,), float(context.rank + 1)) for _ in range(2)]

    def begin_sum(number: int, lane: Lane) -> Callable[[], int]:
        channel = lane.channel(Subject(f"bucket {number}", "1000 values"))
        channel.begin_open()
        complete = lossless.begin(tensors[number], channel)
        seen.append(f"begin {number}")
        second_begun.set() if number else None
        return complete

    def complete(number: int, lane: Lane, finish: Callable[[], int]) -> None:
        if number == 0:
            first_waits.set()
            assert second_begun.wait(PATIENCE), "the second job did not begin while the first one runs"
        finish()
        seen.append(f"end {number}")

    futures = [lane.submit(partial(complete, 0), begin=partial(begin_sum, 0))]
    assert first_waits.wait(PATIENCE)
    futures.append(lane.submit(partial(complete, 1), begin=partial(begin_sum, 1)))
    for future in futures:
        future.wait()
    lane.close()
    return seen, [float(tensor[0]) for tensor in tensors]


def test_a_job_begins_while_the_one_before_waits_for_peers() -> None:
    for outcome in run_ranks(_begins_while_the_first_waits, world_size=2):
        assert outcome.value == (["begin 0", "begin 1", "end 0", "end 1"], [3.0, 3.0])


def _goes_on_without_a_thread(context: RankContext) -> tuple[list[str], object, object]:
    """The first job waits for a lost peer and is given up, and comes back while the third one runs."""
    lane, begun = Lane(timeout=TIMEOUT), list[str]()
    runs, returns, third_runs, third_returns = (threading.Event() for _ in range(4))

    def wait_for(event: threading.Event, other: threading.Event, lane: Lane) -> str:
        event.set()
        assert other.wait(PATIENCE)
        return "done"

    given_up = lane.submit(partial(wait_for, runs, returns))
    assert runs.wait(PATIENCE)
    first_thread = lane._thread
    second = lane.submit(lambda lane, result: result, begin=lambda lane: begun.append("second"))
    third = lane.submit(partial(wait_for, third_runs, third_returns))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane._waits, "look", lambda: {0})
        patch.setattr(lane._own, "lost", lambda: {0})
        lane.look()
    with pytest.raises(LostPeerError):
        given_up.wait()
    assert third_runs.wait(PATIENCE)
    returns.set()
    first_thread.join(PATIENCE)
    third_returns.set()
    lane.submit(lambda lane: None).wait()  # the jobs before it are over
    return begun, second.done() and second.value(), third.done() and third.value()


@pytest.mark.ranks
def test_jobs_behind_one_that_was_given_up_begin_once_and_are_completed() -> None:
    (outcome,) = run_ranks(_goes_on_without_a_thread, world_size=1)
    assert outcome.value == (["second"], None, "done")


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
                private_group(parent, MEET).destroy()
    return met


MEET = timedelta(seconds=10)


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
        private_group(None, timedelta(seconds=0.5))
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
    take = lane_module._take_group

    def late(*arguments: Any) -> PrivateGroup:
        if context.rank == 0:
            with pytest.raises(RuntimeError, match="timeout"):
                store.wait(["rank 1 has it"], timedelta(seconds=1))
            has_waited.append(True)
        return take(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_module, "_take_group", late)
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
        lane_module._idle_groups[parent] = [_Numbered(one) for one in numbers]  # type: ignore[misc]
        taken.append([lane_module._take_group(parent, (MEET, False), Notes(None, 0, ())).number for _ in numbers])
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
    return met, any(group is one for one in lane_module._idle_groups[dist.group.WORLD])  # type: ignore[index]


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
    monkeypatch.setattr(lane_module, "device_of", lambda _: torch.device("cpu"))
    monkeypatch.setattr(lane_module, "_all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [4, 7])
    with pytest.raises(CorruptHeaderError, match="rank 7 announces"):
        lane_module._gather(b"addresses", group, MEET)


def _alone() -> Lane:
    return Lane(PrivateGroup(partial(unregistered_group, dist.HashStore(), [0], 0, TIMEOUT)))


def _waits(lane: Lane, name: str) -> Callable[[], None]:
    """The lane has a job that has begun, has opened a conversation, and waits for the function that is returned."""
    runs, goes_on = threading.Event(), threading.Event()

    def job(lane: Lane, begun: object) -> None:
        runs.set()
        assert goes_on.wait(PATIENCE)

    future = lane.submit(job, begin=lambda lane: lane.channel(Subject(name, "")))
    assert runs.wait(PATIENCE)
    return lambda: (goes_on.set(), future.wait())[1]


def test_a_note_says_what_the_job_that_runs_is_about() -> None:
    lane, said = _alone(), list[str]()
    go_on = _waits(lane, "bucket 0")
    second = lane.submit(
        lambda lane, begun: said.append(lane._note("", None, ()).doing),
        begin=lambda lane: lane.channel(Subject("bucket 1", "")),
    )
    said.append(lane._note("", None, ()).doing)
    go_on()
    second.wait()
    said.append(lane._note("", None, ()).doing)
    lane.close()
    assert said == ["bucket 0", "bucket 1", ATTACH], "no job runs while the training thread waits for something else"


def test_who_received_a_report_is_not_named_before_the_rank_that_sent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 reports to rank 0 alone, and leaves its own note only once rank 0 has left one."""
    monkeypatch.setattr(notes_module, "READ_SECONDS", PATIENCE)
    monkeypatch.setattr(notes_module, "MOST_SECONDS", 2 * PATIENCE)
    store, connections, has_raised = dist.HashStore(), dist.HashStore(), threading.Event()

    def job(lane: Lane) -> None:
        channel = lane.channel(Subject("table", ""))
        channel.open()
        if lane.rank < 2:
            channel.among([0, 1]).attempt(raising(MemoryError()) if lane.rank == 1 else lambda: None)
            channel.among([0, 1]).open()
        lane.channel(Subject("next table", "")).open()

    def fails(rank: int) -> BaseException | None:
        make = partial(unregistered_group, connections, list(range(4)), rank, TIMEOUT)
        lane = Lane(PrivateGroup(make), TIMEOUT, notes=Notes(store, rank, range(4)))
        if rank == 1:
            leave = lane.notes.leave
            lane.notes.leave = lambda note: (has_raised.wait(PATIENCE), leave(note))[1]  # type: ignore[method-assign]
        try:
            lane.submit(job).wait()
        except Exception as error:
            return error
        finally:
            if rank == 0:
                has_raised.set()
            lane.close()

    with ThreadPoolExecutor(4) as pool:
        reported, failed, *others = pool.map(fails, range(4))
    assert type(reported) is PeerError
    assert type(failed) is MemoryError
    assert [(type(error), error.rank) for error in others] == [(LostPeerError, 1)] * 2


def test_a_job_that_had_begun_when_the_lane_broke_off_names_the_rank_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own error says no more than that connections are closed."""
    lane, truth = _alone(), LostPeerError("rank 1 failed")
    truth.rank = 1
    go_on = _waits(lane, "bucket 0")
    monkeypatch.setattr(lane.notes, "truth", lambda: truth)
    second = lane.submit(
        lambda lane, begun: raising(lost_peer(RuntimeError("Connection closed"), 0, 2))(),
        begin=lambda lane: lane.channel(Subject("bucket 1", "")),
    )
    lane.lost_to(RuntimeError("Connection closed"))
    go_on()
    with pytest.raises(LostPeerError, match="rank 1 failed") as caught:
        second.wait()
    assert caught.value.rank == 1
    lane.close()


def test_whoever_meets_a_lane_that_breaks_off_names_the_rank_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As training does whose collective failed while the lane's thread leaves its note."""
    lane, leaves, goes_on = _alone(), threading.Event(), threading.Event()
    leave = lane.notes.leave

    def slowly(note: notes_module.Note) -> None:
        leaves.set()
        assert goes_on.wait(PATIENCE)
        leave(note)
        truth = LostPeerError("rank 1 failed")
        truth.rank = 1
        monkeypatch.setattr(lane.notes, "truth", lambda: truth)

    monkeypatch.setattr(lane.notes, "leave", slowly)
    error = lost_peer(RuntimeError("Connection closed"), 0, 2)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(lane.break_off, str(error), error)
        assert leaves.wait(PATIENCE)
        checked = pool.submit(lane.check, "a collective")
        goes_on.set()
        with pytest.raises(LostPeerError, match=r"rank 1 failed\. rank 0, a collective: not synchronized") as caught:
            checked.result(PATIENCE)
    assert caught.value.rank == 1
    lane.close()


def test_an_interrupt_while_a_job_begins_breaks_the_lane_in_the_turn_of_the_job() -> None:
    lane = _alone()
    go_on = _waits(lane, "bucket 0")

    def interrupted(lane: Lane) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lane.submit(lambda lane, begun: None, begin=interrupted)
    assert not lane.is_broken
    go_on()
    with pytest.raises(ThinwireError, match="KeyboardInterrupt"):
        lane.submit(lambda lane: lane.check("bucket 2")).wait()
    lane.close()


def test_nobody_waits_for_the_end_of_a_group_that_broke() -> None:
    """Gloo waits there for works, some of which fail at the timeout only; all other ranks had raised by then."""
    lane, may_end, ended = _alone(), threading.Event(), threading.Event()

    class Group:
        def shut_down(self) -> None:
            pass

        def destroy(self) -> None:
            pass

        def __del__(self) -> None:
            may_end.wait(PATIENCE)
            ended.set()

    def exits(lane: Lane) -> None:
        raise SystemExit(3)

    lane.adopt(Group())  # type: ignore[arg-type]
    with pytest.raises(ThinwireError, match="SystemExit"):
        lane.submit(exits).wait()
    lane.close()
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(PATIENCE)
