"""What a rank does when it fails: its peers hear of it at once, and nothing of the group stays behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.comm.channel import Subject
from thinwire.comm.lane import LOOK_SECONDS, Lane
from thinwire.comm.process_group import EVERYONE, Exchange, Stream
from thinwire.errors import LostPeerError, ThinwireError
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

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
    with pytest.raises(RuntimeError, match="in the middle") as caught:
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
        before, left, seconds, error = outcome.value
        assert left == before
        assert seconds < LIMIT_SECONDS
        if outcome.rank > 0:
            assert re.match(r"rank 0 \(host .+\) failed in a tensor: RuntimeError: in the middle; ", error), error


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


@pytest.mark.few(2)
@pytest.mark.parametrize("where", ["below", "above"])
@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_an_exception_in_backward_of_one_rank_reaches_all(kind: str, where: str) -> None:
    outcomes = run_ranks(_fails_in_backward, kind, where, world_size=2, timeout_seconds=60)
    for outcome in outcomes:
        seconds, errors = outcome.value
        assert seconds < LIMIT_SECONDS
        assert len(errors) == 2, "a caught exception must not let the next steps be averaged with other steps of peers"
        assert ("LostPeerError: rank 1 (host" in errors[0]) == (outcome.rank == 0)
        assert "ValueError: in backward" in errors[0]
    if kind == "plain":
        assert "an exception ended a backward pass of rank 1" in outcomes[1].value[1][1]
        assert all("Call detach() and attach again" in outcome.value[1][1] for outcome in outcomes)


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


def _messages_in_a_subgroup(context: RankContext) -> list[str]:
    """What rank 3 reads when rank 1 means something else, reports an error, and fails in the middle."""
    pair = dist.new_group([1, 3], timeout=TIMEOUT)
    found: list[str] = []
    if context.rank in (1, 3):
        is_first = context.rank == 1

        def refuses() -> None:
            if is_first:
                raise ValueError("no such scheme")

        def opens(lane: Lane) -> None:
            lane.channel(Subject("a tensor", "in float32" if is_first else "in float16")).open()

        def reports(lane: Lane) -> None:
            channel = lane.channel(Subject("a tensor", "of both"))
            channel.attempt(refuses)
            channel.open()

        def fails(lane: Lane) -> None:
            channel = lane.channel(Subject("a tensor", "of both"))
            channel.open()
            if is_first:
                raise RuntimeError("in the middle")
            channel.open()

        lanes = [Lane(pair) for _ in range(3)]
        for lane, job in zip(lanes, (opens, reports, fails), strict=True):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                lane.submit(job).wait()
            found.append(str(caught.value))
            lane.close()
    dist.barrier()
    return found


def test_messages_name_global_ranks_in_a_subgroup() -> None:
    """Ranks 1 and 3 are ranks 0 and 1 of their group, which are in no log."""
    mismatch, reported, lost = run_ranks(_messages_in_a_subgroup, world_size=4, timeout_seconds=60)[3].value
    assert re.search("rank 3, a tensor.*rank 3: in float16.*rank 1: in float32", mismatch, re.DOTALL), mismatch
    assert reported == "rank 3, a tensor: rank 1 reports: no such scheme"
    assert re.match(r"rank 1 \(host .+\) failed in a tensor: RuntimeError: in the middle; 1 rank waited", lost), lost
    assert "rank 0" not in mismatch + reported + lost


LARGE_BYTES = 100_000_000  # some of it is under way for all of 50 ms


def _swaps(lane: Lane) -> None:
    sizes = [0 if rank == lane.rank else LARGE_BYTES for rank in range(lane.world_size)]
    lane.exchange.swap([torch.zeros(size, dtype=torch.uint8) for size in sizes], sizes)


def _streams(lane: Lane) -> None:
    others = [rank for rank in range(lane.world_size) if rank != lane.rank]
    with Stream(lane.exchange, tag=7) as stream:
        receives = [stream.receive(rank, LARGE_BYTES, torch.Tensor.numel) for rank in others]
        for rank in others:
            stream.send(rank, lambda: torch.zeros(LARGE_BYTES, dtype=torch.uint8))
        for receive in receives:
            receive()


def _ends_in_the_middle(context: RankContext, job: Callable[[Lane], None], how: str) -> tuple[float, float]:
    lane = Lane(timeout=TIMEOUT)
    lane.submit(lambda lane: None).wait()
    dist.barrier()
    started = time.monotonic()

    def end() -> None:
        time.sleep(0.05)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        lane.break_off("in the middle of a message")

    if context.rank == 1:
        threading.Thread(target=end, daemon=True).start()
    with pytest.raises(LostPeerError):
        lane.submit(job).wait()
    failed = time.monotonic() - started
    with pytest.raises(ThinwireError, match="stopped after an earlier failure"):
        lane.submit(lambda lane: lane.check("the next")).wait()
    return failed, time.monotonic() - started


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["killed", "hangs up"])
@pytest.mark.parametrize("job", [_swaps, _streams])
def test_a_rank_that_ends_in_the_middle_of_large_messages(job: Callable[[Lane], None], how: str) -> None:
    outcomes = run_ranks(_ends_in_the_middle, job, how, world_size=3, check=False, timeout_seconds=60)
    living = [outcome for outcome in outcomes if how == "hangs up" or outcome.rank != 1]
    assert all(max(outcome.value) < LIMIT_SECONDS for outcome in living), [outcome.error for outcome in living]


class _NeverDone:
    """A work of which Gloo has forgotten to wake whoever waits."""

    def wait(self) -> None:
        threading.Event().wait()


def _waits_for_what_is_gone(context: RankContext, of_everyone: bool) -> str:
    lane = Lane(timeout=TIMEOUT)
    lane.submit(lambda lane: None).wait()
    dist.barrier()
    if context.rank == 1:
        lane.break_off("a reason of its own")
        dist.barrier()
        return ""

    def waits(lane: Lane) -> None:
        lane.exchange.waits.wait(_NeverDone(), EVERYONE if of_everyone else 1)  # type: ignore[attr-defined,arg-type]

    future, queued = lane.submit(waits), lane.submit(lambda lane: lane.check("the next"))
    with pytest.raises(LostPeerError) as caught:
        future.wait()
    with pytest.raises(ThinwireError, match="stopped after an earlier failure"):
        queued.wait()
    lane.close()
    dist.barrier()
    return str(caught.value)


@pytest.mark.few(1)
@pytest.mark.parametrize("of_everyone", [False, True])
def test_a_wait_for_a_peer_that_is_gone_ends_although_gloo_does_not_end_it(of_everyone: bool) -> None:
    outcomes = run_ranks(_waits_for_what_is_gone, of_everyone, world_size=3, timeout_seconds=TIMEOUT.seconds - 5)
    for outcome in (outcomes[0], outcomes[2]):
        assert re.match(r"rank 1 \(host .+\) failed in attach: a reason of its own; ", outcome.value), outcome.value


def _waits_for_who_is_late(context: RankContext) -> bool:
    """Rank 1 is done and gone while rank 0 still waits for rank 2."""
    lane = Lane(timeout=TIMEOUT)
    late = threading.Event()

    def swaps(lane: Lane) -> int:
        if lane.rank == 2:
            late.wait(8 * LOOK_SECONDS)
        target, source = {0: (None, 2), 1: (None, None), 2: (0, None)}[lane.rank]
        data = torch.ones(10 if target is not None else 0, dtype=torch.uint8)
        return lane.exchange.swap_with(target, data, source, 10 if source is not None else 0).numel()

    future = lane.submit(swaps)
    if context.rank == 1:
        future.wait()
        lane.break_off("this rank is done")
    is_whole = future.wait() == (10 if context.rank == 0 else 0)
    dist.barrier()
    return is_whole


def test_a_peer_that_is_done_and_gone_fails_nobody_who_waits_for_another() -> None:
    assert all(outcome.value for outcome in run_ranks(_waits_for_who_is_late, world_size=3, timeout_seconds=60))


def _never_answered(context: RankContext, kind: str) -> tuple[float, str]:
    """Rank 0 waits in a job of backward for a work that Gloo forgot, while rank 1 hangs up."""
    torch.manual_seed(0)
    module = _Model()
    model = DistributedDataParallel(module) if kind == "ddp" else module
    sync = thinwire.attach(model, "zen", timeout=TIMEOUT)
    for _ in range(2):  # DDP itself talks before its second step
        model(torch.arange(40)).sum().backward()
    dist.barrier()
    if context.rank == 1:
        sync._lane.break_off("a reason of its own")
        dist.barrier()
        return 0.0, ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "swap_records", lambda self, outgoing: self.waits.wait(_NeverDone(), 1))
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"rank 1 .*: a reason of its own") as caught:
            model(torch.arange(40)).sum().backward()
    seconds = time.monotonic() - started
    dist.barrier()
    return seconds, type(caught.value).__name__


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_backward_ends_although_gloo_does_not_end_a_wait_of_its_job(kind: str) -> None:
    outcomes = run_ranks(_never_answered, kind, world_size=2, timeout_seconds=TIMEOUT.seconds - 5)
    assert outcomes[0].value[0] < LIMIT_SECONDS


def _attaches_again_alone(context: RankContext) -> str:
    """Rank 1 raises before its backward sends anything, and attaches again, while rank 0 waits for its gradients."""
    model = DistributedDataParallel(_Model())
    sync = thinwire.attach(model, "zen", timeout=TIMEOUT)
    for _ in range(2):  # DDP itself talks before its second step
        model(torch.arange(40)).sum().backward()

    def goes_on() -> None:
        if context.rank == 1:
            sync.detach()
            thinwire.attach(model, "zen", timeout=TIMEOUT)
        model(torch.arange(40)).sum().backward()

    with pytest.raises(ThinwireError) as caught:
        goes_on()
    dist.barrier()
    return str(caught.value)


def test_a_rank_that_attaches_again_alone_is_an_error_and_ends_no_process() -> None:
    outcomes = run_ranks(_attaches_again_alone, world_size=2, timeout_seconds=TIMEOUT.seconds - 5)
    texts = [outcome.value for outcome in outcomes]
    ways = "made another call", "made a different call", "failed in"
    assert all("rank" in text and any(way in text for way in ways) for text in texts), texts
