"""Jobs of a lane that begin while the one before waits for peers, and what is said where it breaks off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from clocks import PATIENCE
from thinwire.comm import notes as notes_module
from thinwire.comm.c10d import unregistered_group
from thinwire.comm.channel import Subject
from thinwire.comm.connections import PrivateGroup
from thinwire.comm.lane import Lane
from thinwire.comm.notes import ATTACH, Notes
from thinwire.comm.process_group import lost_peer
from thinwire.errors import LostPeerError, PeerError, ThinwireError, raising
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.sums import lossless

TIMEOUT = timedelta(seconds=30)


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
