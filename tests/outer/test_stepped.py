"""Rounds in step with training, of ranks that are threads: counts, failures, states in flight, lost buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from loopback import LoopbackExchange
from tests.outer.driven import Rank, on_ranks
from thinwire import compress
from thinwire.outer import diloco
from thinwire.outer.anchors import Anchors


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


def test_a_fragment_lands_before_it_is_launched_again() -> None:
    def run(network: LoopbackExchange) -> None:
        rank = Rank(network, diloco(every=2, delay=2, mix=0.5, lr=1.0, momentum=0.0))
        for _ in range(6):
            rank.step()
        # at 4 the anchor goes to 2 and the parameters from 4 to 3, which differ by 1: at 6 they are 3, and 5 goes to 4
        assert torch.equal(rank.anchor, torch.full((64, 64), 3.0))
        assert torch.equal(rank.value, torch.full((64, 64), 4.0))

    on_ranks(run)
