"""The choice of "auto" by prices of recent batches: stable, recalled, and what steps may show to be faster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.comm.machine import Machine
from thinwire.sums.cost import Demand
from thinwire.sums.named import DENSE
from thinwire.sums.scheme import Communication, Scheme
from thinwire.tune.prices import HOPELESS, Price, offers_of, price, rivals
from thinwire.tune.window import WINDOW_STEPS, Window

FAST = Machine(2e-3, 3e-4, 2e-9, 2e-9, 1e-5, 1e-8, 1e-10, 1e-8, 1e-10, 1e-8, 1e-10)
WORDS = Demand(4, 119_788, 128, 4, 2_314, 2_640)


def by_bytes(demand: Demand, machine: Machine | None = None) -> list[Price]:
    return sorted(offers_of(demand, machine), key=lambda offer: offer.weighted_bytes)


@given(st.integers(2, 16), st.floats(1.0, 50_000), st.floats(1.0, 3.0), st.sampled_from([1e-9, 1e-8, 1e-7]))
def test_all_that_may_be_tried_add_in_the_order_of_ranks(
    world_size: int, held: float, growth: float, byte_seconds: float
) -> None:
    demand = Demand(world_size, 100_000, 64, 4, held, min(100_000.0, held * growth))
    offers = by_bytes(demand, replace(FAST, byte_seconds=byte_seconds))
    tried = rivals(offers)
    schemes = [offer.scheme for offer in tried]
    assert all(isinstance(point, Scheme) and point.communication is Communication.POINT_TO_POINT for point in schemes)
    assert len(tried) != 1
    assert not tried or schemes[0] == offers[0].scheme
    seconds = [offer.seconds or 0.0 for offer in tried]
    assert all(one <= HOPELESS * min(seconds) for one in seconds[1:])


def test_where_bytes_decide_or_are_few_nothing_is_tried() -> None:
    assert rivals(by_bytes(WORDS, FAST))
    assert rivals(by_bytes(WORDS, replace(FAST, byte_seconds=8e-8))) == []
    assert rivals(by_bytes(replace(WORDS, held=10, union=20), FAST)) == []


def window_of(demands: list[Demand], machine: Machine | None = FAST) -> Window:
    window = Window()
    for demand in demands:
        window.know(machine, ())
        window.observe(demand)
    return window


def test_nothing_is_tried_where_there_are_hardly_any_zeros() -> None:
    window = window_of([replace(WORDS, held=WORDS.num_rows, union=WORDS.num_rows)] * 3)
    assert window.choice == DENSE
    assert window.rivals() == []
    assert window.explain() == "dense: 4 ranks, density 100.00%"
    assert window_of([WORDS]).rivals()


def test_equal_batches_take_one_scheme() -> None:
    window = Window()
    for step in range(3 * WINDOW_STEPS):
        window.know(None, ())
        choice = window.observe(WORDS)
        assert step == 0 or choice == window.choice
    assert window.choice == by_bytes(WORDS)[0].scheme


@pytest.mark.parametrize("stream", ["alternating", "uniform", "long-tailed"])
def test_the_choice_changes_seldom_and_is_the_best_of_the_window(stream: str) -> None:
    shares = torch.rand(150, generator=torch.Generator().manual_seed(1)).tolist()
    sizes = {
        "alternating": [9000.0, 2000.0] * 75,
        "uniform": [500 + 7500 * share for share in shares],
        "long-tailed": [min(20_000.0, 500 / (1.001 - share)) for share in shares],
    }[stream]
    window, choices = Window(), []
    slow = replace(FAST, byte_seconds=4e-8, reduced_byte_seconds=4e-8)
    for held in sizes:
        window.know(slow, ())
        choices.append(window.observe(Demand(4, 200_000, 32, 4, held, 3.5 * held)))
    changes = sum(one != other for one, other in zip(choices[WINDOW_STEPS:], choices[WINDOW_STEPS + 1 :], strict=False))
    assert changes <= 2
    best = min(sum(price(offer.scheme, one).sent_bytes for one in window.demands) for offer in window.offers())
    assert sum(price(choices[-1], one).sent_bytes for one in window.demands) <= 1.1 * best


def test_what_another_run_learned_of_batches_is_recalled() -> None:
    window = window_of([replace(WORDS, held=held, union=1.2 * held) for held in (100.0, 2000.0, 100.0)], None)
    again = Window()
    again.recall(window.choice, window.demands)
    assert again.demands == window.demands
    assert again.observe(WORDS) == window.observe(WORDS)
    assert again.observe(replace(WORDS, world_size=2)) is not None
    assert len(again.sizes) == 1, "batches of other ranks say nothing"


def test_no_rows_and_no_columns_are_no_trouble() -> None:
    for demand in (replace(WORDS, held=0.0, union=0.0), replace(WORDS, width=0)):
        window = window_of([demand])
        assert math.isfinite(window.offers()[0].sent_bytes) if demand.width else window.choice == DENSE
