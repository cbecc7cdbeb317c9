"""Buckets that wait for others, and are sent with them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

from loopback import run_ranks
from tests.gradients.fused import LoopbackLane
from thinwire.gradients.buckets import MAX_WAITING_BYTES, Buckets, Sums
from thinwire.gradients.exact import SMALL_TABLE_BYTES, GradientSync
from thinwire.gradients.tables import LookupRows


class FakeLane:
    """Runs nothing until told to; counts jobs."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []

    def submit(self, job: Any, begin: Any = None) -> Future[Any]:
        future: Future[Any] = Future()

        def run(lane: Any) -> None:
            try:
                future.set_result(job(lane) if begin is None else job(lane, begin(lane)))
            except Exception as error:
                future.set_exception(error)
                raise

        self.jobs.append(run)
        return future


def sparse_bucket(parameter: nn.Parameter, rows: int = 4, is_last: bool = False) -> Any:
    ids = torch.arange(rows)[None]
    shape = tuple(parameter.shape)
    gradient = torch.sparse_coo_tensor(ids, torch.ones(rows, shape[1]), shape, check_invariants=False)
    return SimpleNamespace(
        buffer=lambda: gradient, parameters=lambda: [parameter], is_last=lambda: is_last, index=lambda: 0
    )


def dense_bucket(is_last: bool = False) -> Any:
    parameter = nn.Parameter(torch.zeros(10))
    buffer = torch.ones(10)
    return SimpleNamespace(
        buffer=lambda: buffer,
        parameters=lambda: [parameter],
        gradients=lambda: [buffer],
        is_last=lambda: is_last,
        index=lambda: 0,
    )


class Rig:
    """Buckets of some sparse parameters, all of which were seen before."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.parameters = [nn.Parameter(torch.zeros(size, 16)) for size in sizes]
        names = {id(parameter): f"p{place}" for place, parameter in enumerate(self.parameters)}
        self.lane = FakeLane()
        self.gradients = GradientSync("zen")
        lane: Any = self.lane
        self.buckets = Buckets(Sums(self.gradients), LookupRows(nn.Module()), names, lane)

    def first_step(self) -> None:
        for parameter in self.parameters:
            self.buckets.add(sparse_bucket(parameter))
        self.lane.jobs.clear()

    def add(self, place: int, is_last: bool = False) -> Future[Tensor]:
        return self.buckets.add(sparse_bucket(self.parameters[place], is_last=is_last))


def test_no_bucket_waits_the_first_time() -> None:
    rig = Rig([100, 100])
    rig.add(0)
    rig.add(1)
    assert len(rig.lane.jobs) == 2


def test_small_sparse_buckets_wait_for_the_last_one() -> None:
    rig = Rig([100, 100, 100])
    rig.first_step()
    rig.add(0)
    rig.add(1)
    assert not rig.lane.jobs
    rig.add(2, is_last=True)
    assert len(rig.lane.jobs) == 1
    rig.buckets.flush()
    assert len(rig.lane.jobs) == 1, "nothing was left"


@pytest.mark.parametrize("closing", ["dense", "large", "flush"])
def test_small_sparse_buckets_wait_for_one_that_does_not(closing: str) -> None:
    rig = Rig([100, 100, 100_000])
    rig.first_step()
    rig.add(0)
    rig.add(1)
    assert not rig.lane.jobs
    if closing == "dense":
        rig.buckets.add(dense_bucket())
    elif closing == "large":
        rig.add(2)
    else:
        rig.buckets.flush()
    assert len(rig.lane.jobs) == 1
    rig.add(0)
    assert len(rig.lane.jobs) == 1, "the next ones wait again"


def test_no_more_than_so_many_bytes_wait() -> None:
    each = SMALL_TABLE_BYTES
    rig = Rig([each // 64] * 6)
    rig.first_step()
    jobs = []
    for place in range(6):
        rig.add(place)
        jobs.append(len(rig.lane.jobs))
    assert 4 * each == MAX_WAITING_BYTES
    assert jobs == [0, 0, 0, 0, 1, 1]


def test_every_bucket_of_a_job_gets_its_own_mean_or_the_failure() -> None:
    rig = Rig([100, 50])
    rig.first_step()
    futures = [rig.add(0), rig.buckets.add(dense_bucket(is_last=True))]
    done = run_ranks(1, lambda exchange: rig.lane.jobs[0](LoopbackLane(exchange)) or "done")
    assert [outcome.get() for outcome in done] == ["done"]
    assert futures[0].wait().shape == (100, 16)
    assert torch.equal(futures[1].wait(), torch.ones(10))

    rig.lane.jobs.clear()
    futures = [rig.add(0), rig.add(1, is_last=True)]
    with pytest.raises(AttributeError):
        rig.lane.jobs[0](None)  # a lane without anything: any failure will do
    for future in futures:
        with pytest.raises(AttributeError):
            future.wait()
