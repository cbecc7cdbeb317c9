"""Jobs of a lane that begin while the one before waits for peers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch

from thinwire.comm.channel import Subject
from thinwire.comm.lane import Lane
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
            assert second_begun.wait(5), "the second job did not begin while the first one runs"
        finish()
        seen.append(f"end {number}")

    futures = [lane.submit(partial(complete, 0), begin=partial(begin_sum, 0))]
    assert first_waits.wait(5)
    futures.append(lane.submit(partial(complete, 1), begin=partial(begin_sum, 1)))
    for future in futures:
        future.wait()
    lane.close()
    return seen, [float(tensor[0]) for tensor in tensors]


def test_a_job_begins_while_the_one_before_waits_for_peers() -> None:
    for outcome in run_ranks(_begins_while_the_first_waits, world_size=2):
        assert outcome.value == (["begin 0", "begin 1", "end 0", "end 1"], [3.0, 3.0])
