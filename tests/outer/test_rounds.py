"""Rounds of ranks that are threads, one job at a time: counts, failures, states in flight, buffers that are gone."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

from clocks import PATIENCE
from loopback import LoopbackExchange, run_ranks
from thinwire import compress
from thinwire.comm.lane import beside
from thinwire.comm.process_group import Staging
from thinwire.compress.assign import Dense
from thinwire.errors import MismatchError
from thinwire.observe.step import ParameterRecords
from thinwire.outer import OuterRecipe, diloco, shadow_sync
from thinwire.outer.anchors import Anchors
from thinwire.outer.average import Averager, Entry
from thinwire.outer.loop import _floating_buffers, _untrained
from thinwire.outer.members import Roll
from thinwire.outer.shadow import ShadowRounds
from thinwire.outer.stepped import SteppedRounds
from threaded import LoopbackLane

SHADOW = shadow_sync("bmuf", mix=0.5)


@dataclass
class Lane(LoopbackLane):
    """Makes rounds in the background only when a test does."""

    timeout_seconds: float = 60.0
    is_watched: bool = False

    def check(self, subject: str) -> None:
        pass

    def submit(self, job: Callable[[Any], Any], before: Callable[[], None] | None = None) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            return super().submit(job) if before is None else future
        except OSError as error:
            future.set_exception(error)  # type: ignore[arg-type]
            return future


@dataclass
class Rank:
    """A matrix and a buffer under rounds, which steps move by what a test says."""

    network: LoopbackExchange
    recipe: OuterRecipe
    compress: Dense = "native"
    parameter: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.zeros(64, 64)))
    buffers: dict[str, Tensor] = field(default_factory=lambda: {"mean": torch.zeros(3)})

    def __post_init__(self) -> None:
        self.lane: Any = Lane(self.network)
        self.averager = Averager(
            self.lane, [Entry("matrix", self.parameter, False)], self.compress, "auto", ParameterRecords()
        )
        self.anchors = Anchors({"matrix": self.parameter}, self.recipe, lambda: self.buffers)
        parts = self.recipe, self.anchors, self.averager, self.lane, Staging(), "", dict
        self.rounds: Any = ShadowRounds(*parts) if self.recipe.in_background else SteppedRounds(*parts)
        self.rounds.meet_in(self.lane, None)

    @property
    def anchor(self) -> Tensor:
        return self.anchors.anchors["matrix"].detach().clone()

    @property
    def value(self) -> Tensor:
        return self.parameter.detach().clone()

    @torch.no_grad()
    def step(self, change: float = 1.0) -> None:
        self.rounds.before_step()
        self.parameter.add_(change)
        self.rounds.after_step()

    def saved(self) -> tuple[Tensor, dict[str, Any]]:
        return self.value, copy.deepcopy(self.rounds.state_dict())

    def again(self, saved: tuple[Tensor, dict[str, Any]]) -> Rank:
        """Another one, which goes on from there."""
        found = Rank(self.network, self.recipe, self.compress, nn.Parameter(saved[0].clone()))
        found.rounds.check_state(saved[1])
        found.rounds.load_state_dict(saved[1])
        return found


def on_ranks(function: Callable[[LoopbackExchange], None], world_size: int = 2) -> None:
    for outcome in run_ranks(world_size, lambda network: (function(network),)):
        outcome.get()


def test_anchors_stay_in_a_round_in_which_nobody_made_a_step() -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, diloco(every=2))
        rank.step()
        rank.step()
        before = rank.anchor
        with torch.no_grad():
            rank.rounds.synchronize()
        assert torch.equal(rank.anchor, before), "momentum would move them"
        assert before.any()

    on_ranks(run)


def test_anchors_stay_in_a_round_in_the_background_in_which_nobody_made_a_step() -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, SHADOW)
        rank.step()
        rank.rounds.round(rank.lane)
        before = rank.anchor
        rank.rounds.round(rank.lane)
        assert torch.equal(rank.anchor, before), "momentum would move them"
        assert before.any()

    on_ranks(run)


@pytest.mark.parametrize("is_restored", [False, True])
def test_ranks_that_are_refused_take_the_anchors_which_stay(is_restored: bool) -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, diloco(every=2, delay=1, mix=0.5))
        for _ in range(3):
            rank.step()
        before = rank.anchor
        rank.step(float("nan"))
        if is_restored:
            rank = rank.again(rank.saved())
        rank.step()
        assert torch.equal(rank.anchor, before)
        assert torch.equal(rank.value, before), "replaced, and not mixed"

    on_ranks(run)


def test_a_full_round_follows_an_early_end_of_rounds() -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, diloco(every=4))
        rank.step()
        with torch.no_grad():
            rank.rounds.synchronize()
        landed = [(rank.step(), rank.rounds.landed)[1] for _ in range(5)]
        assert landed == [1, 1, 1, 2, 2]

    on_ranks(run)


def test_steps_of_a_round_that_failed_count_in_the_next_one() -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, diloco(every=4, lr=1.0, momentum=0.0))
        mean = rank.averager.mean

        def fails(*arguments: Any, **settings: Any) -> None:
            raise OSError("before it")

        rank.averager.mean = fails  # type: ignore[method-assign, assignment]
        for _ in range(3):
            rank.step()
        with pytest.raises(OSError, match="before it"):
            rank.step()
        rank.averager.mean = mean  # type: ignore[method-assign]
        for _ in range(3 if network.rank else 1):
            rank.step()
        with torch.no_grad():
            rank.rounds.synchronize()
        torch.testing.assert_close(rank.value, torch.full((64, 64), (5 * 5 + 7 * 7) / 12))

    on_ranks(run)


def test_a_round_that_failed_leaves_memories_as_they_were() -> None:
    """Its differences are still in the parameters, so a state that is saved then must not owe them, too."""

    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, diloco(every=2, lr=1.0, momentum=0.0), compress.error_feedback(compress.top_k(0.1)))
        mean = rank.averager.mean

        def fails(*arguments: Any, **settings: Any) -> None:
            mean(*arguments, **settings)
            raise OSError("behind the compressor")

        rank.averager.mean = fails  # type: ignore[method-assign, assignment]
        before = copy.deepcopy(rank.averager.state_dict()["compress"]["states"])
        rank.step()
        with pytest.raises(OSError, match="behind"):
            rank.step()
        torch.testing.assert_close(rank.averager.state_dict()["compress"]["states"], before, rtol=0, atol=0)

    on_ranks(run)


def test_means_in_flight_go_to_the_device_of_their_anchors() -> None:
    """States that are gathered, in files or handed over are on the CPU."""

    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, diloco(every=2, delay=1))
        for _ in range(2):
            rank.step()
        state = copy.deepcopy(rank.rounds.state_dict())
        other = Rank(network, rank.recipe, parameter=nn.Parameter(torch.zeros(64, 64, device="meta")))
        other.rounds.check_state(state)
        other.rounds.load_state_dict(state)
        (flight,) = other.rounds._flights
        assert flight.differences["matrix"].device == other.anchor.device

    on_ranks(run)


def test_a_parameter_that_is_unfrozen_behind_a_launch_keeps_its_steps() -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, diloco(every=2, delay=1, lr=1.0, momentum=0.0))
        late = nn.Parameter(torch.zeros(2), requires_grad=False)
        named = {"matrix": rank.parameter, "late": late}
        rank.anchors = rank.rounds.anchors = Anchors(named, rank.recipe, lambda: rank.buffers)
        rank.step()
        rank.step()
        late.requires_grad_(True)
        rank.rounds.before_step()
        with torch.no_grad():
            late.add_(1.0)
            rank.rounds.after_step()
        assert rank.rounds.landed == 1
        assert torch.equal(late.detach(), torch.ones(2)), "what has landed is of before it was trained"

    on_ranks(run)


def test_what_is_in_flight_at_the_end_is_mixed_in() -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, diloco(every=2, delay=1, mix=0.5, lr=1.0, momentum=0.0))
        for _ in range(2):
            rank.step(3.0 if network.rank else 1.0)
        with torch.no_grad():
            rank.rounds.land_all()
        assert torch.equal(rank.value, torch.full((64, 64), 5.0 if network.rank else 3.0))

    on_ranks(run)


def test_who_takes_the_state_of_a_refused_rank_is_not_refused_and_counts_what_is_lost() -> None:
    def run(network: LoopbackExchange) -> None:
        rank, other = (Rank(network, diloco(every=4, delay=3, mix=0.5, momentum=0.0)) for _ in range(2))
        for number in range(5):
            rank.step(float("nan") if number == 3 and network.rank == 0 else 1.0)
        for _ in range(5):
            other.step()
        other.rounds._take(copy.deepcopy(rank.rounds.state_dict()), False)
        assert other.rounds.lost_steps == 5, "four are in flight, and one after it"
        assert other.rounds._since == [0], "steps of the other one are its own"
        assert not other.value.any(), "the anchors, before the round lands"
        for _ in range(2):
            other.step(0.0)
        torch.testing.assert_close(other.anchor, torch.full((64, 64), 0.7 * 4))
        torch.testing.assert_close(other.value, torch.full((64, 64), 0.5 * 0.7 * 4), msg="mixed, on both ranks")

    on_ranks(run)


def test_a_buffer_that_is_gone_on_one_rank_stays_what_it_is() -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, diloco(every=1, mix=0.5))
        rank.buffers["mean"] += 1.0 + network.rank
        rank.step()
        assert torch.equal(rank.anchors.buffers["mean"], torch.full((3,), 1.5))
        assert torch.equal(rank.buffers["mean"], torch.full((3,), (1.0 + network.rank + 1.5) / 2)), "mixed"
        if network.rank == 1:
            del rank.buffers["mean"]
        else:
            rank.buffers["mean"].fill_(5.0)
        rank.step()
        assert torch.equal(rank.anchors.buffers["mean"], torch.full((3,), 1.5))
        assert network.rank == 1 or torch.equal(rank.buffers["mean"], torch.full((3,), 5.0))

    on_ranks(run)


def test_buffers_in_the_background_go_to_their_mean() -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, SHADOW)
        rank.buffers["mean"] += 1.0 + network.rank
        rank.step()
        rank.rounds.round(rank.lane)
        rank.step()
        assert torch.equal(rank.anchors.buffers["mean"], torch.full((3,), 1.5))
        assert torch.equal(rank.buffers["mean"], torch.full((3,), (1.0 + network.rank + 1.5) / 2)), "mixed"

    on_ranks(run)


def test_a_round_that_begins_within_a_step_has_the_copy_of_its_end() -> None:
    """Forward and backward are within a step where the optimizer gets a closure, as Lightning gives it."""

    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, shadow_sync("average", mix=0.5))
        rank.rounds.before_step()
        changed, begun = rank.rounds.pace.changed, threading.Event()
        wait_for = changed.wait_for

        def waits(holds: Callable[[], bool], seconds: float) -> bool:
            begun.set()
            return bool(wait_for(holds, PATIENCE))

        @torch.no_grad()
        def end_step() -> None:
            begun.wait(PATIENCE)
            with changed:  # the next step begins before the thread of the round goes on
                rank.parameter.add_(1.0 + network.rank)
                rank.rounds.after_step()
                rank.rounds.before_step()

        changed.wait_for = waits
        ended = beside("the thread of training", end_step)
        rank.rounds.round(rank.lane)
        begun.set()
        ended.result(PATIENCE)
        assert torch.equal(rank.anchor, torch.full((64, 64), 1.5)), "both count"
        assert rank.rounds.pace.seen == 1

    on_ranks(run)


@pytest.mark.parametrize("is_evaluating", [False, True])
def test_no_copies_are_taken_of_anchors_or_in_the_middle_of_a_step(is_evaluating: bool) -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, shadow_sync("average", mix=0.5))
        rank.step(1.0 + network.rank)
        if network.rank == 0 and not is_evaluating:
            rank.rounds.before_step()
        with rank.rounds.swapped() if network.rank == 0 and is_evaluating else nullcontext():
            rank.rounds.round(rank.lane)
        assert torch.equal(rank.anchor, torch.full((64, 64), 2.0)), "that of rank 1 alone"
        rank.rounds.after_step() if network.rank == 0 and not is_evaluating else None
        rank.rounds.round(rank.lane)
        assert torch.equal(rank.anchor, torch.full((64, 64), 1.0)), "rank 0 counts later by the step that it made"

    on_ranks(run)


def test_a_correction_of_a_buffer_that_is_gone_leaves_its_anchor() -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, SHADOW)
        rank.buffers["mean"] += 1.0 + network.rank
        rank.step()
        rank.rounds.round(rank.lane)
        if network.rank == 1:
            del rank.buffers["mean"]
        rank.step()
        assert torch.equal(rank.anchors.buffers["mean"], torch.full((3,), 1.5)), "the same on both"
        with rank.rounds.swapped():
            rank.rounds.round(rank.lane)
            after = rank.anchors.buffers["mean"].clone()
        assert torch.equal(rank.anchors.buffers["mean"], after)

    on_ranks(run)


def test_a_round_in_the_background_that_fails_takes_back_memories_and_steps() -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, SHADOW, compress.error_feedback(compress.top_k(0.1)))
        rank.step()
        rank.rounds.round(rank.lane)
        with torch.no_grad():
            rank.parameter.mul_(torch.arange(64))
        rank.step()
        before, mean = copy.deepcopy(rank.averager.state_dict()["compress"]["states"]), rank.averager.mean

        def fails(*arguments: Any, **settings: Any) -> None:
            mean(*arguments, **settings)
            raise OSError("after it")

        rank.averager.mean = fails  # type: ignore[method-assign, assignment]
        with pytest.raises(OSError, match="after it"):
            rank.rounds.round(rank.lane)
        torch.testing.assert_close(rank.averager.state_dict()["compress"]["states"], before, rtol=0, atol=0)
        assert rank.rounds.pace.steps - rank.rounds.pace.seen == 1, "the next round counts it"

    on_ranks(run)


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_correction_that_waits_is_saved(is_refused: bool) -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, SHADOW)
        rank.step(1.0 + network.rank)
        rank.rounds.round(rank.lane)
        rank.step(float("nan") if is_refused and network.rank == 0 else 1.0)
        rank.rounds.round(rank.lane)
        again = rank.again(rank.saved())
        for one in (rank, again):
            one.step(0.0)
        assert torch.equal(again.value, rank.value)
        assert rank.rounds.refusals == (is_refused and network.rank == 0), "moments are mended where it is counted"
        assert rank.value.isfinite().all()
        assert not torch.equal(rank.value, torch.full((64, 64), 2.0 + network.rank)), "it was corrected"

    on_ranks(run)


def test_corrections_of_two_rounds_add_up_on_a_rank_that_made_no_step_between_them() -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, shadow_sync("average", mix=0.5))
        rank.step(2.0 if network.rank else 6.0)
        rank.rounds.round(rank.lane)  # the mean is 4: rank 0 goes to 5, rank 1 to 3
        if network.rank == 0:
            rank.step(0.0)
        rank.rounds.round(rank.lane)  # rank 0 alone counts, so the mean is 5: rank 1 goes on to 4
        rank.step(0.0)
        assert torch.equal(rank.value, torch.full((64, 64), 4.0 if network.rank else 5.0))

    on_ranks(run)


def test_a_fragment_lands_before_it_is_launched_again() -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, diloco(every=2, delay=2, mix=0.5, lr=1.0, momentum=0.0))
        for _ in range(6):
            rank.step()
        # at 4 the anchor goes to 2 and the parameters from 4 to 3, which differ by 1: at 6 they are 3, and 5 goes to 4
        assert torch.equal(rank.anchor, torch.full((64, 64), 3.0))
        assert torch.equal(rank.value, torch.full((64, 64), 4.0))

    on_ranks(run)


@pytest.mark.parametrize("kind", ["unfrozen", "frozen again", "other buffer", "finite buffer"])
def test_a_newcomer_takes_what_others_have_unfrozen_and_what_it_cannot_take_is_refused_on_all(kind: str) -> None:
    def run(network: LoopbackExchange) -> None:
        recipe, is_new = diloco(every=4), network.rank == 1
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model.register_buffer("mask", torch.zeros(3 if is_new and kind == "other buffer" else 2, dtype=torch.int64))
        model.register_buffer("least", torch.tensor([0.0 if is_new and kind == "finite buffer" else float("-inf")]))
        model[1].requires_grad_(kind == "frozen again" and is_new)
        named, lane = dict(model.named_parameters()), Lane(network)
        entries = [Entry(name, entry, False) for name, entry in named.items()]
        averager = Averager(lane, entries, "native", "auto", ParameterRecords())  # type: ignore[arg-type]
        buffers, untrained = (partial(one, weakref.ref(model), frozenset()) for one in (_floating_buffers, _untrained))
        rounds: Any = SteppedRounds(recipe, Anchors(named, recipe, buffers), averager, lane, Staging(), "", untrained)
        if kind == "unfrozen" and not is_new:
            model[1].requires_grad_(True)
            rounds.before_step()
        roll = Roll(0, frozenset({1}), 0, True)
        if kind != "unfrozen":
            name = {"frozen again": r"1\.bias", "other buffer": "mask", "finite buffer": "least"}[kind]
            with pytest.raises(MismatchError, match=f"{name} is missing, frozen"):
                rounds.enter(lane, roll)
            return
        rounds.enter(lane, roll)
        assert rounds.anchors.trained(0) == list(named)
        mine = torch.cat([entry.detach().reshape(-1) for entry in named.values()]).tolist()
        assert len({tuple(one) for one in lane.agree("parameters", mine)}) == 1

    on_ranks(run)
