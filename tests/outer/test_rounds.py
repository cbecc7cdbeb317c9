"""Rounds of ranks that are threads, one job at a time: counts, failures, states in flight, buffers that are gone."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from clocks import PATIENCE
from loopback import LoopbackExchange
from tests.outer.driven import Lane, Rank, on_ranks
from thinwire import compress
from thinwire.comm.groups import beside
from thinwire.comm.process_group import Staging
from thinwire.errors import MismatchError
from thinwire.observe.step import ParameterRecords
from thinwire.outer import diloco, shadow_sync
from thinwire.outer.anchors import Anchors
from thinwire.outer.average import Averager, Entry
from thinwire.outer.loop import _floating_buffers, _untrained
from thinwire.outer.members import Roll
from thinwire.outer.stepped import SteppedRounds

SHADOW = shadow_sync("bmuf", mix=0.5)


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
