"""Rounds in the background on real ranks: unlike speeds, evaluations, ends, failures, states, rows, compression."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from clocks import PATIENCE
from thinwire import compress
from thinwire.comm.lane import Lane
from thinwire.errors import MismatchError, PeerError, ThinwireError
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.outer import pace as paces
from thinwire.outer.average import RoundReport
from thinwire.outer.shadow import ShadowRounds

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROWS, WIDTH = 4000, 8


class Net(nn.Module):
    """A table, a layer, and running statistics."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, 3)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.table(ids)))


class Training:
    """A model under rounds in the background, whose pace leaves the processor to nobody else."""

    def __init__(self, context: RankContext, recipe: Any, make: Callable[[], nn.Module] = Net, **options: Any) -> None:
        paces.LEAST_PATIENCE, paces.SHARE = 0.02, 1.0
        torch.manual_seed(0)
        self.rank, self.count = context.rank, 0
        self.model = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.sync: Any = thinwire.outer.attach(self.model, self.optimizer, recipe, **options)

    @property
    def rounds(self) -> ShadowRounds:
        return self.sync._rounds

    def step(self, rows: int = 50) -> None:
        self.count += 1
        data = torch.Generator().manual_seed(1000 * self.count + self.rank)
        ids = torch.randint(0, rows, (16,), generator=data)
        self.optimizer.zero_grad()
        found = self.model(ids).float()
        (found - (1.0 + self.rank)).square().mean().backward()
        self.optimizer.step()

    def until_rounds(self, count: int, rows: int = 50) -> None:
        """Train until so many more rounds have landed."""
        wanted = self.rounds.landed + count
        while self.rounds.landed < wanted:
            self.step(rows)

    def anchors(self) -> list[Tensor]:
        with self.sync.global_parameters():
            return [entry.detach().clone() for entry in (*self.model.parameters(), *floating(self.model))]


def floating(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def same_everywhere(tensors: list[Tensor]) -> bool:
    flat = torch.cat([tensor.double().flatten() for tensor in tensors])
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    return all(torch.equal(other, flat) for other in found)


def signal(name: str) -> None:
    dist.distributed_c10d._get_default_store().set(name, b"1")


def wait_for(name: str) -> None:
    dist.distributed_c10d._get_default_store().wait([name])


def of_unlike_speeds(context: RankContext, algorithm: str, dtype: torch.dtype) -> dict[str, Any]:
    """Rank 0 makes few steps, rank 1 many, rank 2 evaluates while the others go on."""
    training = Training(context, thinwire.outer.shadow_sync(algorithm), lambda: Net(dtype))
    training.until_rounds(3)
    if context.rank == 2:
        before = [entry.detach().clone() for entry in training.model.parameters()]
        with training.sync.global_parameters():
            signal("evaluates")
            wait_for("rounds went on")
        assert all(map(torch.equal, before, training.model.parameters())), "they come back"
    else:
        wait_for("evaluates")
        training.until_rounds(4)
        if context.rank == 0:
            signal("rounds went on")
    for _ in range((2, 40, 5)[context.rank]):
        training.step()
    training.sync.synchronize()
    state = [*training.model.parameters(), *floating(training.model)]
    together = same_everywhere([entry.detach() for entry in state])
    at_anchors = same_everywhere(training.anchors())
    training.until_rounds(2)  # rounds go on after it
    stats = training.sync.stats()
    training.sync.detach()
    training.sync.detach()
    apart = not same_everywhere([entry.detach() for entry in training.model.parameters()])
    steps = training.count
    training.step()  # of a stock model
    return {"together": together, "anchors": at_anchors, "apart": apart, "stats": stats, "steps": steps}


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [
        pytest.param("easgd", torch.float32, marks=pytest.mark.slow),
        ("average", torch.bfloat16),
        pytest.param("bmuf", torch.float64, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_unlike_speeds(algorithm: str, dtype: torch.dtype) -> None:
    for outcome in run_ranks(of_unlike_speeds, algorithm, dtype, world_size=3):
        found = outcome.value
        assert found["together"]
        assert found["anchors"]
        assert found["apart"], "each trains on from the anchors"
        assert found["stats"]["outer/inner_steps"] == found["steps"]
        assert found["stats"]["outer/rounds"] >= 9
        assert found["stats"]["comm/seconds"] > 0


def of_rows(context: RankContext, codec: Any) -> tuple[int, int, list[str]]:
    """Bytes of a round while few rows change, and once none has changed for long; where the model's size goes."""
    training = Training(context, thinwire.outer.shadow_sync("average"), dense=codec)
    training.until_rounds(2)

    def bytes_of_a_round(rows: int) -> int:
        training.sync.synchronize()
        before = training.sync.stats()
        training.until_rounds(15, rows)
        after = training.sync.stats()
        rounds = after["outer/rounds"] - before["outer/rounds"]
        return int((after["comm/bytes_sent"] - before["comm/bytes_sent"]) / rounds)

    few = bytes_of_a_round(20)
    training.until_rounds(10, ROWS)  # from here on many rows are apart from their anchors
    for _ in range(3):
        bytes_of_a_round(5)
    last = bytes_of_a_round(5)
    kinds = [str(row["formats"]) for row in training.sync.table()]
    training.sync.detach()
    return few, last, kinds


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["native", compress.top_k(0.1)])
def test_tables_travel_as_the_rows_that_are_apart(codec: Any) -> None:
    whole = ROWS * WIDTH * 4
    for outcome in run_ranks(of_rows, codec, world_size=2):
        few, last, _ = outcome.value
        assert few < whole / 10
        assert last < whole / 10, "rows that are hardly apart any more do not travel"


def test_rows_leave_although_mixing_cannot_close_the_last_bits() -> None:
    """By ``a + 0.5 (b - a)`` half of all numbers stay a bit away, in every precision."""
    for dtype in (torch.float32, torch.bfloat16):
        anchor = torch.randn(2000, generator=torch.Generator().manual_seed(0)).to(dtype)
        local = (anchor.float() * 1.1).to(dtype)
        for _ in range(200):
            local += (0.5 * (anchor.float() - local.float())).to(dtype)
        assert bool((local != anchor).any())
        apart = (anchor.float() - local.float()).abs()
        assert bool((apart <= anchor.float().abs() * torch.finfo(dtype).eps / 0.5).all())


def of_failures(context: RankContext) -> list[str]:
    """A rank whose averaging raises; one whose parameters overflow; one that trains what was frozen."""
    training = Training(context, thinwire.outer.shadow_sync("average"))
    training.until_rounds(2)
    said = []
    averager = training.rounds.averager
    finite = averager._is_finite
    if context.rank == 1:
        averager._is_finite = lambda *_: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises((PeerError, ZeroDivisionError)) as caught:
        training.until_rounds(10**6)
    averager._is_finite = finite  # type: ignore[method-assign]
    said.append(str(caught.value))
    dist.barrier()
    training.until_rounds(2)  # it surfaced once, and rounds go on
    if context.rank == 0:
        with torch.no_grad():
            training.model.out.bias.fill_(float("nan"))  # type: ignore[union-attr, operator]
    while training.sync.stats()["outer/refused"] == 0:
        training.step()
    training.until_rounds(3)
    assert all(bool(entry.isfinite().all()) for entry in training.model.parameters()), "it took the anchors"
    training.sync.synchronize()
    training.sync.detach()
    return said


def test_failures_surface_at_the_next_step_and_rounds_go_on() -> None:
    outcomes = run_ranks(of_failures, world_size=2)
    assert "division by zero" in outcomes[1].value[0]
    assert "rank 1 reports" in outcomes[0].value[0]


def of_a_lost_rank(context: RankContext) -> str:
    training = Training(context, thinwire.outer.shadow_sync("average"))
    training.until_rounds(2)
    if context.rank == 1:
        return ""
    with pytest.raises(ThinwireError) as caught:
        training.until_rounds(10**6)
    with pytest.raises(ThinwireError):
        training.until_rounds(10**6)
    with pytest.raises(ThinwireError):
        training.sync.detach()
    training.sync.detach()
    training.step()
    return str(caught.value)


def test_a_rank_that_is_gone() -> None:
    outcomes = run_ranks(of_a_lost_rank, world_size=2, check=False)
    assert outcomes[0].error is None, outcomes[0].error
    assert "rank 1" in outcomes[0].value


def of_states(context: RankContext) -> dict[str, Any]:
    """States that ranks save at rounds of their own, which a new training restores."""
    recipe = thinwire.outer.shadow_sync("bmuf")
    first = Training(context, recipe, dense=compress.top_k(0.5))
    first.until_rounds(3 if context.rank == 0 else 1)
    if context.rank == 0:  # without the other one, which trains on
        state, parameters = first.sync.state_dict(), first.model.state_dict()
        signal("saved")
        first.until_rounds(3)
    else:
        wait_for("saved")
        first.until_rounds(3)
        state, parameters = first.sync.state_dict(), first.model.state_dict()
    kept = {name: entry.clone() for name, entry in parameters.items()}
    anchors = {name: entry.clone() for name, entry in state["anchors"].items()}
    gathered = first.sync.gathered().state_dict()
    first.until_rounds(2)
    assert all(torch.equal(state["anchors"][name], entry) for name, entry in anchors.items()), "a copy"
    first.sync.detach()

    again = Training(context, recipe, dense=compress.top_k(0.5))
    again.until_rounds(1)
    again.model.load_state_dict(kept)
    again.sync.load_state_dict(state)
    agreed = same_everywhere(again.anchors())
    steps = again.rounds.steps
    again.until_rounds(3)
    of_rank_0 = again.sync.gathered().of_rank_0(gathered)
    again.sync.gathered().load_state_dict(of_rank_0)
    agreed = agreed and same_everywhere(again.anchors())
    again.sync.synchronize()
    again.sync.detach()
    return {"agreed": agreed, "rounds": state["rounds"], "steps": (steps, state["steps"])}


def test_states_of_unlike_rounds() -> None:
    found = [outcome.value for outcome in run_ranks(of_states, world_size=2)]
    assert found[0]["rounds"] < found[1]["rounds"], "or the test shows nothing"
    for entry in found:
        assert entry["agreed"], "all take the anchors of the one that was furthest"
        assert entry["steps"][0] >= entry["steps"][1]


class AsTheNextOneBegins:
    """The future of a round, done as soon as somebody asks, by when the next round has been noted."""

    def __init__(self, rounds: ShadowRounds) -> None:
        self._rounds, self._future = rounds, rounds._future
        rounds._future = self  # type: ignore[assignment]

    def done(self) -> bool:
        self._future.wait()
        return self._rounds._future is not self or True

    def wait(self) -> None:
        self._future.wait()


def of_one_round_at_a_time(context: RankContext) -> bool:
    """Rounds end and begin wherever the thread of training was stopped; yet it never begins one beside another."""
    training = Training(context, thinwire.outer.shadow_sync("average"))
    rounds, begin, trainer = training.rounds, training.rounds._begin, threading.current_thread()
    resumed: list[str] = []
    rounds._go_on_after = lambda ended: resumed.append("a second round")  # type: ignore[method-assign]
    training.until_rounds(2)
    AsTheNextOneBegins(rounds)
    training.step()
    assert not resumed, "a round was over when the next one had been noted"

    has_begun, submit = threading.Event(), rounds.lane.submit

    def stopped_behind(*job: Any) -> Any:
        future = submit(*job)
        if threading.current_thread() is trainer and not rounds._turn.locked():  # so that the lane begins none
            assert has_begun.wait(60), "the lane makes the round, and begins the next one"
        return future

    def noted() -> None:
        begin()
        if threading.current_thread() is not trainer:
            has_begun.set()

    rounds._begin, rounds.lane.submit = noted, stopped_behind  # type: ignore[method-assign]
    with rounds.stopped():
        pass
    training.until_rounds(2)
    assert not resumed, "a round was noted when the lane had noted the next one"
    training.sync.detach()
    return True


def test_rounds_begin_one_at_a_time() -> None:
    assert all(outcome.value for outcome in run_ranks(of_one_round_at_a_time, world_size=2))


def of_life(context: RankContext) -> None:
    """A model that is freed, two models at once, what is refused, and a parameter that is trained too late."""
    recipe = thinwire.outer.shadow_sync("average")
    training = Training(context, recipe)
    other = Training(context, recipe)
    training.until_rounds(2)
    other.until_rounds(2)
    with pytest.raises(ValueError, match="detach"):
        thinwire.outer.attach(training.model, training.optimizer, recipe)
    with pytest.raises(ThinwireError, match="global_parameters"), training.sync.global_parameters():
        training.step()
    other.model.requires_grad_(False)
    other.sync.detach()
    slow = thinwire.outer.shadow_sync("average", every_seconds=1e6)
    with pytest.raises(ValueError, match="every_seconds"):
        thinwire.outer.attach(other.model.requires_grad_(True), other.optimizer, slow)
    other.model.out.requires_grad_(False)  # type: ignore[union-attr]
    other.sync = thinwire.outer.attach(other.model, other.optimizer, recipe)
    other.until_rounds(1)
    other.model.out.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="frozen"):
        other.step()
    other.sync.detach()
    dist.barrier()
    watched, pace, lane = weakref.ref(training.model), training.rounds.pace, training.sync._lane
    del training
    gc.collect()
    assert watched() is None
    lane.join(20)
    assert pace.is_dropped
    assert not lane._thread.is_alive()
    with pytest.raises(MismatchError):
        Training(context, thinwire.outer.shadow_sync("average", mix=0.5 if context.rank else 0.25))


def test_a_life() -> None:
    run_ranks(of_life, world_size=2)


def of_members(context: RankContext, directory: str) -> tuple[float, bool, int]:
    """Rank 2 goes in the middle of rounds; the others go on; it comes back as if it had been started again."""
    store = dist.FileStore(f"{directory}/store", -1)  # type: ignore[attr-defined]
    recipe = thinwire.outer.shadow_sync("bmuf", min_ranks=2)

    def joined() -> Training:
        members = thinwire.outer.Members(store, context.rank, 3, timeout=timedelta(seconds=30))
        return Training(context, recipe, process_group=members, dense=compress.top_k(0.5))

    training = joined()
    training.until_rounds(3)
    first = training.rounds._members.number  # type: ignore[union-attr]
    if context.rank == 2:
        training.sync._lane.break_off("it is gone")
        training.rounds.drop()
        training = joined()
    while training.rounds.lane.world_size != 3 or training.rounds._members.number == first:  # type: ignore[union-attr]
        training.step()
    training.until_rounds(3)
    training.sync.synchronize()
    flat = torch.cat([one.detach().double().flatten() for one in training.model.parameters()])
    training.sync.detach()
    return float(flat.abs().sum()), bool(flat.isfinite().all()), training.count


@pytest.mark.slow
def test_a_rank_is_lost_and_comes_back(tmp_path: Path) -> None:
    outcomes = run_ranks(of_members, str(tmp_path), world_size=3, init_process_group=False)
    sums = [outcome.value[0] for outcome in outcomes]
    assert sums[0] == sums[1] == sums[2]
    assert all(outcome.value[1] for outcome in outcomes)


def of_a_stuck_thread(context: RankContext, directory: str) -> tuple[int, int, bool, int]:
    """Rank 1 is killed; rank 0 waits for it in a round that only comes back in the middle of a later one."""
    store = dist.FileStore(f"{directory}/store", -1)  # type: ignore[attr-defined]
    members = thinwire.outer.Members(store, context.rank, 2, timeout=timedelta(seconds=60))
    training = Training(context, thinwire.outer.shadow_sync("easgd", min_ranks=1), process_group=members)
    training.until_rounds(1)
    if context.rank == 1:
        while not store.check(["rank 0 waits"]):
            training.step()
        os.kill(os.getpid(), SIGKILL)
    averager, mean, wakes, stuck = training.rounds.averager, training.rounds.averager.mean, threading.Event(), []

    def waits(lane: Lane, differences: dict[str, Tensor], *others: Any) -> RoundReport:
        assert lane._own is not None
        store.set("rank 0 waits", "")
        while not lane._own.lost():
            threading.Event().wait(0.01)
        stuck.append(threading.current_thread())
        lane._waits._now[threading.get_ident()] = (1, -1, time.monotonic())  # Gloo may wake nobody
        averager.mean = goes_on  # type: ignore[method-assign]
        wakes.wait()
        for difference in differences.values():
            difference.fill_(math.nan)
        return RoundReport((1.0, 1.0), (), (0, 0))

    def goes_on(lane: Lane, *arguments: Any) -> RoundReport:
        wakes.set()
        stuck[0].join()
        averager.mean = mean  # type: ignore[method-assign]
        return mean(lane, *arguments)

    averager.mean = waits  # type: ignore[method-assign]
    while training.rounds.lane.world_size > 1:
        training.step()
    finished, landed = training.rounds._finished, training.rounds.landed
    training.until_rounds(3)
    training.sync.detach()
    is_finite = all(bool(one.isfinite().all()) for one in training.model.parameters())
    return training.rounds._finished - finished, training.rounds.landed - landed, is_finite, training.rounds.refusals


@pytest.mark.slow
def test_a_thread_that_is_stuck_in_a_lane_of_before_keeps_no_round_from_being_made(tmp_path: Path) -> None:
    """Nor does it change a later one, or commit anything, when it comes back."""
    alone = {"init_process_group": False, "check": False, "timeout_seconds": PATIENCE}
    outcome = run_ranks(of_a_stuck_thread, str(tmp_path), world_size=2, **alone)[0]
    assert outcome.value is not None, outcome.error
    finished, landed, is_finite, refusals = outcome.value
    assert (is_finite, refusals) == (True, 0)
    assert finished >= landed >= 3, "a round of no steps lands nothing"
