"""Ranks that die, are late, or come: who takes part, what a newcomer gets, and that nobody waits for ever.

A job of these tests is a loop of rounds that count: each rank adds the number of ranks of every round that it finished.
So ranks that lost or repeated a round have another sum than the others.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.comm.channel import Subject
from thinwire.comm.lane import Lane
from thinwire.errors import ThinwireError
from thinwire.lab.testbed.launch import run_ranks
from thinwire.lab.testbed.rank import RankContext
from thinwire.outer import Members, members
from thinwire.outer.members import Roll, hand_over

TIMEOUT = timedelta(seconds=8)
GRACE_SECONDS = 1.0


@dataclass
class Job:
    """What a process does: the rank that it has, and what befalls it.

    Args:
        waits: seconds before it comes.
        killed_at: the number of a round and a point in it: "before", "in", "prepared", "after", or "meeting".
        stopped_at: the round before which it stops for ``stop_seconds``.
    """

    rank: int
    waits: float = 0.0
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
    members.GRACE_SECONDS = GRACE_SECONDS
    job = jobs[context.rank]
    time.sleep(job.waits)
    mine = Members(dist.TCPStore("127.0.0.1", port), job.rank, job.world_size, timedelta(seconds=20))
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
        if job.killed_at == (number, "in"):
            Killer.at = 2
        told = channel.gather_numbers([float(mine.asked(lane))])
        counter.prepared = number, len(told)
        if job.killed_at == (number, "prepared"):
            die()
        lane.channel(Subject("end of round", str(number))).open()
        return len(told), any(asked for (asked,) in told)

    lane = mine.enter(enter, job.min_ranks, TIMEOUT)
    while counter.done < job.rounds:
        number = counter.done
        if job.killed_at == (number, "before"):
            die()
        if job.stopped_at == number:
            job.stopped_at = None
            stop(job.stop_seconds)
        started = time.monotonic()
        try:
            ranks, asked = lane.submit(average).wait()
            counter.land(number, ranks)
        except ThinwireError as error:
            if job.killed_at == (number, "meeting"):
                die()
            lane, asked = mine.regroup(lane, error, finished), False
            log.append(("regrouped", list(lane.exchange.global_ranks)))
        if asked:
            if job.killed_at is not None and job.killed_at[1] == "admitting":
                die()
            lane = mine.admit(lane, finished)
            log.append(("admitted", list(lane.exchange.global_ranks)))
        slowest = max(slowest, time.monotonic() - started)
        time.sleep(job.pause)
    lane.submit(lambda lane: lane.channel(Subject("the end", "")).open()).wait()
    return {"total": counter.total.tolist(), "log": log, "slowest": slowest, "left out": mine.times_left_out}


class Killer:
    at = 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(seconds: float) -> None:
    """Stop this process as SIGSTOP does, for so long."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


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


def test_a_rank_is_killed_in_a_round_and_comes_back() -> None:
    found = play([Job(0), Job(1), Job(2, killed_at=(10, "prepared")), Job(2, waits=2.0)])
    check(found, {2})
    assert found[0]["log"] == [("regrouped", [0, 1]), ("admitted", [0, 1, 2])]
    assert found[3]["log"] == []
