"""What a rank does when it fails: its peers hear of it at once, and nothing of the group stays behind."""

from __future__ import annotations

import gc
import os
import socket
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.errors import LostPeerError, ThinwireError
from thinwire.lane import Lane
from thinwire.sync.channel import Subject
from thinwire.testbed.launch import RankContext, run_ranks

TIMEOUT = timedelta(seconds=30)
LIMIT_SECONDS = 15.0  # for what otherwise takes the timeout, on a busy machine too


def _connections() -> int:
    """How many TCP sockets this process has that are connected or listen."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with duplicate:
            found += duplicate.family in (socket.AF_INET, socket.AF_INET6)
    return found


def _holds_an_error(context: RankContext) -> tuple[int, int, float, str]:
    """Rank 0 fails in a job, keeps the error, and lives on; the others wait for it."""
    before = _connections()
    lane = Lane(timeout=TIMEOUT)
    lane.native_group()
    assert _connections() > before

    def job(lane: Lane) -> None:
        channel = lane.channel(Subject("a tensor", "of all"))
        channel.open()
        if context.rank == 0:
            raise RuntimeError("in the middle")
        channel.open()

    started = time.monotonic()
    with pytest.raises(RuntimeError, match="in the middle" if context.rank == 0 else "peer died, gave up") as caught:
        lane.submit(job).wait()
    seconds = time.monotonic() - started
    with pytest.raises(ThinwireError, match="stopped after an earlier failure"):
        lane.submit(lambda lane: lane.channel(Subject("the next", "")).open()).wait()
    deadline = time.monotonic() + 5.0
    while _connections() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    left = _connections()
    dist.barrier()  # nobody's process ends before
    return before, left, seconds, str(caught.value)


def test_a_failure_in_the_middle_hangs_up_although_the_error_is_kept() -> None:
    for outcome in run_ranks(_holds_an_error, world_size=3, timeout_seconds=60):
        before, left, seconds, _ = outcome.value
        assert left == before
        assert seconds < LIMIT_SECONDS


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, fails: bool) -> Tensor:  # type: ignore[override]
        ctx.fails = fails
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.fails:
            raise ValueError("in backward")
        return gradient, None


class _Model(nn.Module):
    """A failure below the output layer, whose gradient is there already, or above all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 16, sparse=True)
        self.out = nn.Linear(16, 4)
        self.fails = {"below": False, "above": False}

    def forward(self, ids: Tensor) -> Tensor:
        below = _Failing.apply(self.table(ids), self.fails["below"])
        return _Failing.apply(self.out(below), self.fails["above"])


def _fails_in_backward(context: RankContext, kind: str, where: str) -> tuple[float, list[str]]:
    torch.manual_seed(0)
    module = _Model()
    model = DistributedDataParallel(module) if kind == "ddp" else module
    thinwire.attach(model, "zen", timeout=TIMEOUT)
    model(torch.arange(40)).sum().backward()
    module.fails[where] = context.rank == 1
    started = time.monotonic()
    errors = []
    for _ in range(2):
        try:
            model(torch.arange(40)).sum().backward()
        except (RuntimeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        module.fails[where] = False
    seconds = time.monotonic() - started
    dist.barrier()
    return seconds, errors


@pytest.mark.parametrize("where", ["below", "above"])
@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_an_exception_in_backward_of_one_rank_reaches_all(kind: str, where: str) -> None:
    outcomes = run_ranks(_fails_in_backward, kind, where, world_size=2, timeout_seconds=60)
    for outcome in outcomes:
        seconds, errors = outcome.value
        assert seconds < LIMIT_SECONDS
        assert len(errors) == 2, "a caught exception must not let the next steps be averaged with other steps of peers"
        assert ("in backward" in errors[0]) == (outcome.rank == 1)
    if kind == "plain":
        assert "an exception ended a backward pass of rank 1" in outcomes[1].value[1][1]


def _watched_badly(context: RankContext) -> None:
    model = DistributedDataParallel(_Model())
    sync = thinwire.attach(model, "zen", timeout=TIMEOUT)
    sync.watch_lane(lambda started, ended: 1 / 0)  # type: ignore[arg-type,return-value]
    for _ in range(3):
        model(torch.arange(40)).sum().backward()
    sync.detach()


def test_a_watcher_that_raises_stops_nothing() -> None:
    run_ranks(_watched_badly, world_size=2, timeout_seconds=60)


def _keeps_nothing(context: RankContext) -> bool:
    lane = Lane(timeout=TIMEOUT)
    held = torch.zeros(10)
    gone = weakref.ref(held)
    lane.submit(lambda lane, held=held: held.sum()).wait()
    lane.submit(lambda lane: None).wait()
    lane.submit(lambda lane: None).wait()
    del held
    gc.collect()
    return gone() is None


def test_a_lane_that_waits_holds_nothing_of_its_last_job() -> None:
    assert all(outcome.value for outcome in run_ranks(_keeps_nothing, world_size=2))


def _leaves_by_exit(context: RankContext) -> tuple[float, str]:
    lane = Lane(timeout=TIMEOUT)

    def job(lane: Lane) -> None:
        if context.rank == 0:
            raise SystemExit(3)
        lane.channel(Subject("a tensor", "")).open()

    started = time.monotonic()
    with pytest.raises(ThinwireError) as caught:
        lane.submit(job).wait()
    seconds = time.monotonic() - started
    dist.barrier()
    return seconds, type(caught.value).__name__


def test_a_job_that_leaves_by_system_exit_hangs_up() -> None:
    outcomes = run_ranks(_leaves_by_exit, world_size=2, timeout_seconds=60)
    assert all(outcome.value[0] < LIMIT_SECONDS for outcome in outcomes)
    assert outcomes[1].value[1] == LostPeerError.__name__


def _in_a_pair(context: RankContext) -> int:
    """Ranks 2 and 3 have a group of their own, and rank 2 is in one more group than rank 3."""
    dist.new_group([0, 1, 2])
    pair = dist.new_group([2, 3], timeout=timedelta(seconds=10))
    synchronized = 0
    if context.rank >= 2:
        for _ in range(2):
            model = DistributedDataParallel(_Model(), process_group=pair)
            sync = thinwire.attach(model, "zen")
            model(torch.arange(40)).sum().backward()
            lane = sync._lane
            lane.break_off("so that the next one needs another group")
            lane.close()
            synchronized += 1
    dist.barrier()
    return synchronized


def test_ranks_of_a_subgroup_that_are_in_different_numbers_of_groups() -> None:
    outcomes = run_ranks(_in_a_pair, world_size=4, timeout_seconds=60)
    assert [outcome.value for outcome in outcomes] == [0, 0, 2, 2]
