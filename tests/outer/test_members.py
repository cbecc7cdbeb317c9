"""Ranks that die, are late, or come: who takes part, what a newcomer gets, and that nobody waits for ever.

A job of these tests is a loop of rounds that count: each rank adds the number of ranks of every round that it finished.
So ranks that lost or repeated a round have another sum than the others.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from clocks import wait_until
from injected import stop
from thinwire.comm.channel import Subject
from thinwire.comm.lane import Lane
from thinwire.compress import error_feedback, top_k
from thinwire.errors import CorruptMessageError, LostPeerError, ThinwireError
from thinwire.lab.testbed.launch import run_ranks
from thinwire.lab.testbed.rank import RankContext
from thinwire.outer import Members, OuterRecipe, diloco, local_sgd, members
from thinwire.outer.members import Roll, hand_over

pytestmark = pytest.mark.ranks

TIMEOUT = timedelta(seconds=8)
GRACE_SECONDS = 1.0


@dataclass
class Job:
    """What a process does: the rank that it has, and what befalls it.

    Args:
        waits: seconds after the death of an earlier process of this rank before it comes; None to come at once.
        killed_at: the number of a round, and a point of it: "before", "prepared", "meeting" of those that are left, or
            "admitting" a newcomer.
        stopped_at: the round before which it stops for ``stop_seconds``.
    """

    rank: int
    waits: float | None = None
    killed_at: tuple[int, str] | None = None
    stopped_at: int | None = None
    stop_seconds: float = 0.0
    world_size: int = 3
    min_ranks: int = 1
    rounds: int = 40
    recipe: str = "a"
    pause: float = 0.02


@dataclass
class Counter:
    """The state of a rank: rounds, and the sum over rounds of their ranks."""

    done: int = 0
    total: torch.Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64))
    prepared: tuple[int, int] | None = None  # the number of a round that is not landed, and its ranks

    def land(self, number: int, ranks: int) -> None:
        assert self.done == number, f"round {number} after {self.done}"
        self.done, self.prepared = number + 1, None
        self.total += torch.tensor([ranks, ranks * number])


def run(context: RankContext, port: int, jobs: list[Job]) -> dict[str, Any]:
    job = jobs[context.rank]
    store = begin(port, job)
    mine = Members(store, job.rank, job.world_size, timedelta(seconds=20))
    counter, log, slowest = Counter(), [], 0.0

    def finished() -> int:
        return counter.done + (counter.prepared is not None)

    def enter(lane: Lane, roll: Roll) -> None:
        if lane.rank not in roll.new and counter.prepared is not None and finished() <= roll.done:
            counter.land(*counter.prepared)
        counter.prepared = None
        lane.channel(Subject("attach", job.recipe)).open()
        state = hand_over(lane, roll, {"done": counter.done, "total": counter.total})
        if state:
            counter.done, counter.total = state["done"], state["total"]

    def average(lane: Lane) -> tuple[int, bool]:
        number = counter.done
        channel = lane.channel(Subject("round", str(number)))
        told = channel.gather_numbers([float(mine.asked(lane))])
        counter.prepared = number, len(told)
        if job.killed_at == (number, "prepared"):
            die(store, job.rank)
        lane.channel(Subject("end of round", str(number))).open()
        return len(told), any(asked for (asked,) in told)

    mine.prepare(enter, job.min_ranks, TIMEOUT)
    lane = mine.enter()
    while counter.done < job.rounds:
        number = counter.done
        if job.killed_at == (number, "before"):
            die(store, job.rank)
        if job.stopped_at == number:
            job.stopped_at = None
            stop(job.stop_seconds)
        started = time.monotonic()
        try:
            ranks, asked = lane.submit(average).wait()
            counter.land(number, ranks)
        except ThinwireError as error:
            if job.killed_at == (number, "meeting"):
                die(store, job.rank)
            lane, asked = mine.go_on(lane, finished, error), False
            log.append(("regrouped", list(lane.exchange.global_ranks)))
        if asked:
            if job.killed_at is not None and job.killed_at[1] == "admitting":
                die(store, job.rank)
            lane = mine.go_on(lane, finished)
            log.append(("admitted", list(lane.exchange.global_ranks)))
        slowest = max(slowest, time.monotonic() - started)
        time.sleep(job.pause)
    lane.submit(lambda lane: lane.channel(Subject("the end", "")).open()).wait()
    return {"total": counter.total.tolist(), "log": log, "slowest": slowest, "left out": mine.times_left_out}


def begin(port: int, job: Job) -> dist.TCPStore:
    """The store of the test; who takes the place of a process that dies waits for that."""
    members.GRACE_SECONDS = GRACE_SECONDS
    store = dist.TCPStore("127.0.0.1", port)
    if job.waits is not None:
        store.wait([f"death of {job.rank}"])
        time.sleep(job.waits)
    return store


def die(store: dist.Store | None = None, rank: int = 0) -> None:
    if store is not None:
        store.set(f"death of {rank}", "")
    os.kill(os.getpid(), signal.SIGKILL)


def play(jobs: list[Job], seconds: float = 60.0) -> list[Any]:
    """The values of the jobs, and the exit status of those that died."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = run_ranks(
        run, store.port, jobs, world_size=len(jobs), check=False, timeout_seconds=seconds, init_process_group=False
    )
    return [outcome.value if outcome.exit_code == 0 and outcome.error is None else outcome for outcome in outcomes]


def check(found: list[Any], dead: set[int], slack: float = 2.5) -> None:
    """All that live finished all rounds with the same sum, and no call took long."""
    values = [value for place, value in enumerate(found) if place not in dead]
    assert all(isinstance(value, dict) for value in values), found
    assert len({tuple(value["total"]) for value in values}) == 1, values
    assert max(value["slowest"] for value in values) < slack * TIMEOUT.total_seconds(), values


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_is_killed_in_a_round_and_comes_back() -> None:
    found = play([Job(0), Job(1), Job(2, killed_at=(10, "prepared")), Job(2, waits=0.5)])
    check(found, {2})
    assert [what for what, _ in found[0]["log"]] == ["regrouped", "admitted"]
    assert found[0]["log"][-1] == ("admitted", [0, 1, 2])
    assert found[3]["log"] == []


SLOW = pytest.mark.slow, pytest.mark.timeout(300)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=SLOW) for seed in range(6)])
def test_ranks_are_killed_anywhere(seed: int) -> None:
    """One or two of five, at rounds and points that are drawn; some come back, and some of these are killed again."""
    draw = random.Random(seed)
    jobs = [Job(rank, world_size=5, rounds=60, pause=0.05) for rank in range(5)]
    dead = set()
    points = ["before", "prepared", "meeting", "admitting"]
    for rank in draw.sample(range(5), draw.choice([1, 2])):
        jobs[rank].killed_at = draw.randrange(5, 15), draw.choice(points[:2])
        dead.add(rank)
    other = draw.choice([rank for rank in range(5) if rank not in dead])
    jobs[other].killed_at = jobs[min(dead)].killed_at[0], draw.choice(points[2:])  # while others meet
    for rank in sorted(dead):
        jobs.append(Job(rank, waits=draw.uniform(1.0, 4.0), world_size=5, rounds=60))
    found = play(jobs, 120.0)
    dead |= {place for place, value in enumerate(found) if getattr(value, "exit_code", 0) == -signal.SIGKILL}
    check(found, dead, slack=4.0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_stops_is_left_out_and_comes_back() -> None:
    """Longer than the timeout: it goes on from what the others have."""
    found = play(
        [Job(0, rounds=60, pause=0.2), Job(1, rounds=60, pause=0.2), Job(2, rounds=60, stopped_at=5, stop_seconds=12.0)]
    )
    check(found, set())
    assert [value["left out"] for value in found] == [0, 0, 1]
    assert ("admitted", [0, 1, 2]) in found[0]["log"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_newcomer_that_runs_another_recipe_is_left_out() -> None:
    newcomer = Job(2, waits=2.0, recipe="b")
    found = play(
        [Job(0, rounds=120, pause=0.1), Job(1, rounds=120, pause=0.1), Job(2, killed_at=(3, "before")), newcomer]
    )
    assert "MismatchError" in found[3].error
    assert "ranks disagree" in found[3].error
    check(found, {2, 3})
    assert found[0]["log"][-1][1] == [0, 1]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_too_few_ranks_are_left() -> None:
    found = play([Job(0, min_ranks=3), Job(1, min_ranks=3), Job(2, min_ranks=3, killed_at=(5, "before"))])
    for rank in (0, 1):
        assert f"LostPeerError: rank {rank}: 2 of 3 ranks are left, and min_ranks=3 are needed" in found[rank].error


# --- an outer loop


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 4, sparse=True)
        self.rest = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.rest(self.table(ids).flatten(1))


def train(context: RankContext, port: int, jobs: list[Job], recipe: OuterRecipe, options: dict[str, Any]) -> Any:
    """Train until the job's step, by the count that newcomers take from the others; then end together."""
    job = jobs[context.rank]
    store = begin(port, job)
    group = Members(store, job.rank, job.world_size, timedelta(seconds=30))
    torch.manual_seed(context.rank)  # a newcomer draws other parameters than those that it takes
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = thinwire.outer.attach(model, optimizer, recipe, process_group=group, timeout=TIMEOUT, **options)
    draws, losses, steps, slowest = torch.Generator().manual_seed(job.rank), [], 0, 0.0
    watched: list[float] = []  # as a Checkpointer does
    sync.watch_lane(lambda started, ended: watched.append(sync.stats()["outer/inner_steps"]))
    while sync.stats()["outer/inner_steps"] < job.rounds:
        ids = torch.randint(200, (8, 2), generator=draws)
        optimizer.zero_grad()
        loss = (model(ids) - ids.double().mean(1, keepdim=True).float() / 100 + 1).square().mean()
        loss.backward()
        started = time.monotonic()
        optimizer.step()
        slowest = max(slowest, time.monotonic() - started)
        losses.append(float(loss.detach()))
        steps += 1
        if job.killed_at is not None and steps == job.killed_at[0]:
            die(store, job.rank)
        if job.stopped_at == steps:
            stop(job.stop_seconds)
        time.sleep(job.pause)
    sync.synchronize()
    found = torch.cat([entry.detach().double().reshape(-1) for entry in model.parameters()]).tolist()
    stats = sync.stats()
    sync.detach()
    late = sum(losses[-20:]) / 20
    return {"parameters": found, "loss": late, "steps": steps, "stats": stats, "slowest": slowest, "watched": watched}


def play_training(jobs: list[Job], recipe: OuterRecipe, options: dict[str, Any]) -> list[Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = run_ranks(
        train, store.port, jobs, recipe, options,
        world_size=len(jobs), check=False, timeout_seconds=90, init_process_group=False,
    )  # fmt: skip
    return [outcome.value if outcome.exit_code == 0 and outcome.error is None else outcome for outcome in outcomes]


def check_training(found: list[Any], dead: set[int]) -> None:
    values = [value for place, value in enumerate(found) if place not in dead]
    assert all(isinstance(value, dict) for value in values), found
    assert all(value["parameters"] == values[0]["parameters"] for value in values), "not the same bits"
    assert max(value["slowest"] for value in values) < 2.5 * TIMEOUT.total_seconds()
    assert all(value["loss"] < 0.3 for value in values), [value["loss"] for value in values]


STREAMING = diloco(every=8, fragments=2, delay=3, mix=0.5, min_ranks=1)
SPARSE = diloco(every=8, momentum=0.0, nesterov=False, lr=1.0, fragments=2, delay=5, min_ranks=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        pytest.param(STREAMING, {}, id="streaming"),
        pytest.param(local_sgd(every=8, min_ranks=1), {}, marks=SLOW, id="local"),
        pytest.param(SPARSE, {"dense": error_feedback(top_k(0.1), decay=0.95)}, marks=SLOW, id="sparse"),
    ],
)
def test_a_rank_of_an_outer_loop_is_killed_and_comes_back(recipe: OuterRecipe, options: dict[str, Any]) -> None:
    jobs = [Job(rank, rounds=200, pause=0.01) for rank in range(3)]
    jobs[2].killed_at = 21, ""
    found = play_training([*jobs, Job(2, waits=0.0, rounds=200, pause=0.01)], recipe, options)
    check_training(found, {2})
    assert found[0]["steps"] == found[1]["steps"] == 200
    assert 0 < found[3]["steps"] < 200
    assert all(found[rank]["watched"][-1] > 180 for rank in (0, 1, 3)), "the lanes of later generations are watched"
    assert found[0]["stats"]["outer/lost_steps"] == 0


@pytest.mark.slow
def test_a_rank_comes_back_while_another_waits_for_the_end() -> None:
    jobs = [Job(0, rounds=16, pause=0.01), *(Job(rank, rounds=200, pause=0.02) for rank in (1, 2))]
    jobs[2].killed_at = 30, ""
    found = play_training([*jobs, Job(2, waits=0.0, rounds=200, pause=0.01)], STREAMING, {})
    values = [value for place, value in enumerate(found) if place != 2]
    assert all(isinstance(value, dict) for value in values), found
    assert all(value["parameters"] == values[0]["parameters"] for value in values), "not the same bits"
    assert 0 < found[3]["steps"] < 200


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_rank_of_an_outer_loop_that_stops_loses_its_steps_and_says_so() -> None:
    jobs = [Job(rank, rounds=200, pause=0.15) for rank in range(3)]
    jobs[1].stopped_at, jobs[1].stop_seconds = 30, 11.0
    found = play_training(jobs, STREAMING, {})
    check_training(found, set())
    assert [value["stats"]["outer/lost_steps"] > 0 for value in found] == [False, True, False]


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=SLOW) for seed in range(4)])
def test_ranks_of_an_outer_loop_are_killed_anywhere(seed: int) -> None:
    draw = random.Random(seed)
    jobs = [Job(rank, rounds=240, world_size=4, pause=0.02) for rank in range(4)]
    dead = draw.sample(range(4), 2)
    for rank in dead:
        jobs[rank].killed_at = draw.randrange(20, 60), ""
    back = [Job(rank, waits=draw.uniform(1.0, 3.0), rounds=240, world_size=4, pause=0.02) for rank in dead]
    check_training(play_training([*jobs, *back], draw.choice([STREAMING, SPARSE]), {}), set(dead))


def _in_a_long_step(context: RankContext, port: int) -> tuple[float, float, list[float]]:
    """Rank 2 dies, rank 1 notices first, which hangs up, and goes on once rank 0 has waited long for both."""
    members.GRACE_SECONDS = GRACE_SECONDS
    store = dist.TCPStore("127.0.0.1", port)
    mine = Members(store, context.rank, 3, timedelta(seconds=30))
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync: Any = thinwire.outer.attach(model, optimizer, local_sgd(every=4, min_ranks=1), process_group=mine)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.arange(16).view(8, 2) + context.rank).square().mean().backward()
            optimizer.step()

    train(5)
    lane = sync._lane
    if context.rank == 0:
        lane.is_watched = False
        store.set("token", mine._token)
        store.wait(["hung up"])
        wait_until(lambda: len(lane._own.lost()) == 2)
        lane.is_watched = True
    elif context.rank == 1:
        store.set("is in its step", "")
        wait_until(lambda: lane.is_broken)
        store.set("hung up", "")
        looks = f"thinwire/{mine.number + 1}/{store.get('token').decode()}"
        many = 4 * GRACE_SECONDS / members.POLL_SECONDS
        wait_until(lambda: store.add(looks, 0) > many or mine._last() != mine._generation)
    else:
        store.wait(["is in its step", "token"])
        die()
    train(7)
    sync.synchronize()
    found = torch.cat([entry.detach().double().reshape(-1) for entry in model.parameters()]).tolist()
    stats = sync.stats()
    return stats["outer/lost_steps"], stats["outer/ranks"], found


@pytest.mark.timeout(120)
def test_a_store_whose_host_has_ended_is_said_at_once() -> None:
    """Torch tries again and again to connect, for as long as the store's own timeout says: five minutes."""
    host = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, 2, timeout=timedelta(seconds=60), wait_for_workers=False)
    del host
    began = time.monotonic()
    with pytest.raises(LostPeerError, match="the store in which ranks meet cannot be reached"):
        Members(client, 0, 2)
    assert time.monotonic() - began < 30.0


def test_a_rank_in_a_long_step_is_waited_for_when_another_one_dies() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = run_ranks(
        _in_a_long_step, store.port, world_size=3, check=False, timeout_seconds=90, init_process_group=False
    )
    assert outcomes[2].exit_code == -signal.SIGKILL
    assert [outcome.error for outcome in outcomes[:2]] == [None, None]
    (lost, ranks, found), other = (outcome.value for outcome in outcomes[:2])
    assert (lost, ranks) == (0.0, 2.0)
    assert other == (0.0, 2.0, found)


def _in_a_process_group(context: RankContext) -> list[float]:
    members.GRACE_SECONDS = GRACE_SECONDS
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = thinwire.outer.attach(model, optimizer, local_sgd(every=2, min_ranks=2), timeout=TIMEOUT)
    for step in range(8):
        if context.rank == 1 and step == 4:
            die()
        optimizer.zero_grad()
        model(torch.arange(16).view(8, 2) + context.rank).square().mean().backward()
        optimizer.step()
    sync.synchronize()
    assert sync.stats()["outer/ranks"] == 2
    assert "2 ranks" in repr(sync)
    return torch.cat([entry.detach().double().reshape(-1) for entry in model.parameters()]).tolist()


def test_ranks_of_a_process_group_go_on_without_one() -> None:
    found = run_ranks(_in_a_process_group, world_size=3, check=False, timeout_seconds=60)
    assert found[1].exit_code == -signal.SIGKILL
    assert found[0].error is None, found[0].error
    assert found[0].value == found[2].value != []


# --- what it reads and is given


@pytest.mark.parametrize(
    "data",
    [
        "", "?", "[]", "{}", "null", '{"number": 1}',
        '{"asks": 0, "began": true, "members": {}, "number": 1}',
        '{"asks": 0, "began": true, "members": {"7": "a"}, "number": 1}',
        '{"asks": 0, "began": true, "members": {"0": "a"}, "number": -1}',
        '{"asks": 0.5, "began": true, "members": {"0": "a"}, "number": 1}',
        '{"asks": 0, "began": true, "members": [[0]], "number": 1}',
        '{"asks": 0, "began": true, "members": {"x": "a"}, "number": 1}',
        "[" * 2_000_000,
    ],
)  # fmt: skip
def test_what_the_store_says_is_checked(data: str) -> None:
    store = dist.HashStore()
    store.set("thinwire/generation", data)
    with pytest.raises(CorruptMessageError, match="the store has something else where Members keep their ranks"):
        Members(store, 0, 3)._last()


def test_bad_arguments_say_what_to_write() -> None:
    store = dist.HashStore()
    with pytest.raises(ValueError, match=r"pass a torch\.distributed\.Store"):
        Members("store", 0, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass a number from 0 to world_size - 1"):
        Members(store, 2, 2)
    with pytest.raises(ValueError, match=r"pass a datetime\.timedelta"):
        Members(store, 0, 2, 30)  # type: ignore[arg-type]


def test_members_serve_one_loop_and_one_rank_alone() -> None:
    store, model = dist.HashStore(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = Members(store, 0, 1)
    sync = thinwire.outer.attach(model, optimizer, local_sgd(every=1), process_group=alone)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    sync.detach()
    with pytest.raises(ValueError, match="attached already"):
        thinwire.outer.attach(model, optimizer, local_sgd(every=1), process_group=alone)


def test_a_store_that_is_gone_is_named() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mine = Members(dist.TCPStore("127.0.0.1", store.port), 0, 2)
    del store
    with pytest.raises(LostPeerError, match="the store in which ranks meet cannot be reached"):
        mine._last()


def _waits_as_long_as_attach_says(context: RankContext) -> None:
    model, others = nn.Linear(2, 2), dist.new_group(timeout=2 * TIMEOUT)
    optimizer, recipe = torch.optim.SGD(model.parameters(), lr=0.1), local_sgd(every=1, min_ranks=1)
    for options, limit in (({"timeout": TIMEOUT}, TIMEOUT), ({}, 2 * TIMEOUT)):
        sync: Any = thinwire.outer.attach(model, optimizer, recipe, process_group=others, **options)
        members = sync._rounds._members
        assert (members.timeout, members._exchange_timeout) == (limit, limit)
        sync.detach()


def test_members_of_a_process_group_wait_as_long_as_attach_or_the_group_says() -> None:
    run_ranks(_waits_as_long_as_attach_says, world_size=2, timeout_seconds=60)


class Hung:
    """A store whose host stands still until it is continued."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.goes_on = store, threading.Event()

    def add(self, key: str, number: int) -> int:
        self.goes_on.wait(20.0)
        return self.store.add(key, number)


def test_training_goes_on_while_the_store_hangs(caplog: pytest.LogCaptureFixture) -> None:
    mine, model = Members(dist.HashStore(), 0, 2, timedelta(seconds=2)), nn.Linear(2, 2)
    optimizer, recipe = torch.optim.SGD(model.parameters(), lr=0.1), local_sgd(every=1, min_ranks=1)
    sync = thinwire.outer.attach(model, optimizer, recipe, process_group=mine)
    hung = mine._store = Hung(mine._store)  # type: ignore[assignment]

    def train(steps: int) -> float:
        started = time.monotonic()
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return time.monotonic() - started

    assert train(5) < 10.0
    assert "cannot be reached (no answer for 0.5 s)" in caplog.text
    hung.goes_on.set()
    mine._store = hung.store
    mine._store.add("asks", 1)  # which it sees once the store is back
    while mine.number == 1:
        train(1)
    sync.detach()
