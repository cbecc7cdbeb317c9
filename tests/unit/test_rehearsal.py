"""Rehearsals: who is tried, in which steps, and what of it all costs; with a machine and a clock of the test's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.comm.machine import Machine
from thinwire.sync.choose import (
    ALIKE,
    CANDIDATES,
    HOPELESS,
    MAX_REHEARSALS,
    MAX_STEPS,
    Demand,
    Price,
    Rehearsal,
    explain,
    explained,
    prices,
    ranked,
    to_rehearse,
)
from thinwire.sync.experience import WINDOW_STEPS, Experience
from thinwire.sync.named import AGSPARSE_CODED, COLUMN_SPLIT, ZEN, name_of
from thinwire.sync.scheme import Communication, Scheme

FAST = Machine(2e-3, 3e-4, 2e-9, 2e-9, 1e-5, 1e-8, 1e-10, 1e-8, 1e-10, 1e-8, 1e-10)
WORDS = Demand(4, 119_788, 128, 4, 2_314, 2_640)
STEPS = 150


@given(st.integers(2, 16), st.floats(1.0, 50_000), st.floats(1.0, 3.0), st.sampled_from([1e-9, 1e-8, 1e-7]))
def test_all_that_are_tried_add_in_the_order_of_ranks(
    world_size: int, held: float, growth: float, byte_seconds: float
) -> None:
    demand = Demand(world_size, 100_000, 64, 4, held, min(100_000.0, held * growth))
    offers = prices(demand, replace(FAST, byte_seconds=byte_seconds))
    seconds = {offer.scheme: offer.seconds or 0.0 for offer in offers}
    tried = to_rehearse(offers)
    assert all(isinstance(point, Scheme) and point.communication is Communication.POINT_TO_POINT for point in tried)
    assert all(seconds[point] <= HOPELESS * seconds[tried[0]] for point in tried)
    assert len(tried) != 1


def test_a_slow_link_and_few_bytes_are_not_rehearsed() -> None:
    assert to_rehearse(prices(WORDS, FAST))
    assert to_rehearse(prices(WORDS, replace(FAST, byte_seconds=8e-8))) == []
    assert to_rehearse(prices(replace(WORDS, held=10, union=20), FAST)) == []


def test_each_point_gets_one_step_of_alike_batches() -> None:
    rehearsal = Rehearsal([ZEN, COLUMN_SPLIT], 100.0)
    tried = [
        rehearsal.next(held, lambda point: True) for held in (100.0, 101.0 * ALIKE, 99.0 / ALIKE, 100.0 * ALIKE, 100.0)
    ]
    assert tried == [ZEN, None, None, COLUMN_SPLIT, None]
    assert rehearsal.is_over


def test_a_rehearsal_whose_batches_do_not_come_again_ends() -> None:
    rehearsal = Rehearsal([ZEN], 100.0)
    for _ in range(MAX_STEPS):
        assert not rehearsal.is_over
        assert rehearsal.next(1000.0, lambda point: True) is None
    assert rehearsal.is_over


# --- what is taken


def offers(**seconds: float) -> list[Price]:
    return [
        replace(offer, seconds=seconds[name_of(offer.scheme)], is_measured=True)
        for offer in prices(WORDS, FAST)
        if name_of(offer.scheme) in seconds
    ]


def test_what_was_measured_to_be_faster_is_taken_and_stays() -> None:
    both = offers(column_split=0.04, zen=0.02)
    assert ranked(both)[0].scheme is ZEN
    assert ranked(both, ZEN)[0].scheme is ZEN
    assert ranked(both, COLUMN_SPLIT)[0].scheme is ZEN
    assert ranked(offers(column_split=0.04, zen=0.0395))[0].scheme is COLUMN_SPLIT, "bytes decide between those alike"


def test_it_says_what_it_measured() -> None:
    text = explained(ranked(offers(column_split=0.04, zen=0.02)), WORDS)
    assert text.startswith("zen (")
    assert "in 20.0 ms, measured) rather than column_split" in text
    assert "measured" not in explain(WORDS, FAST)


# --- a stream of batches on a machine that is not as estimated

STREAMS: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 3000.0,
    "uniform": lambda share: 500 + 7500 * share,
    "long-tailed": lambda share: min(20_000.0, 500 / (1.001 - share)),
}


def sizes(stream: str, seed: int) -> list[float]:
    if stream == "alternating":
        return [9000.0, 2000.0] * (STEPS // 2)
    shares = torch.rand(STEPS, generator=torch.Generator().manual_seed(seed)).tolist()
    return [STREAMS[stream](share) for share in shares]


def train(held: list[float], truth: Callable[[Scheme, Demand], float]) -> tuple[list[float], list[Demand], int]:
    """Seconds of each step under "auto", which knows FAST, where schemes really take what ``truth`` says."""
    learned, seconds, demands = Experience(), [], []
    for rows in held:
        demand = Demand(4, 200_000, 32, 4, rows, 3.5 * rows)
        taken = (learned.take(rows) if learned.is_timed else learned.choice) or prices(demand, FAST)[0].scheme
        seconds.append(truth(taken, demand))
        demands.append(demand)
        learned.know(FAST, ())
        if learned.is_told:
            learned.learn(taken, demand, seconds[-1])
        learned.observe(demand)
        points = learned.hopeful(demand)
        if points:
            learned.begin(Rehearsal(points, demand.held))
    return seconds, demands, learned.rehearsals


@cache
def estimates(demand: Demand) -> dict[str, float]:
    return {name_of(offer.scheme): offer.seconds or 0.0 for offer in prices(demand, FAST)}


def off_by(factors: dict[Scheme, float]) -> Callable[[Scheme, Demand], float]:
    def truth(scheme: Scheme, demand: Demand) -> float:
        return estimates(demand)[name_of(scheme)] * factors.get(scheme, 1.0)

    return truth


@pytest.mark.parametrize("common", [0.8, 3.0])
@pytest.mark.parametrize("stream", ["constant", "alternating", "uniform", "long-tailed"])
def test_no_window_costs_much_more_than_by_its_best_fixed_scheme(stream: str, common: float) -> None:
    """Trials included, of those that a clock may choose between, where all takes so many times what was estimated."""
    truth = off_by(dict.fromkeys(CANDIDATES, common))
    seconds, demands, rehearsals = train(sizes(stream, 1), truth)
    alike = [scheme for scheme in CANDIDATES if scheme.communication is Communication.POINT_TO_POINT]
    best = {scheme: [truth(scheme, demand) for demand in demands] for scheme in alike}
    assert rehearsals <= MAX_REHEARSALS
    for start in range(1, STEPS - 50):
        window = slice(start, start + 50)
        fixed = min(sum(own[window]) for own in best.values())
        assert sum(seconds[window]) <= 1.05 * fixed, (start, rehearsals)


def test_equal_batches_take_one_scheme() -> None:
    learned = Experience()
    for step in range(3 * WINDOW_STEPS):
        learned.know(None, ())
        choice = learned.observe(WORDS)
        assert step == 0 or choice == learned.choice
        assert not learned.is_timed, "there is no machine to measure with"
    assert learned.choice == prices(WORDS)[0].scheme


def test_another_machine_is_noticed_and_rehearsed_again() -> None:
    slow = [1.0]
    truth = off_by({})
    learned = Experience()
    begun = 0
    for step in range(1200):
        if step == 400:
            slow[0] = 5.0
        taken = (learned.take(WORDS.held) if learned.is_timed else learned.choice) or ZEN
        learned.know(FAST, ())
        if learned.is_told:
            learned.learn(taken, WORDS, slow[0] * truth(taken, WORDS))
        learned.observe(WORDS)
        points = learned.hopeful(WORDS)
        if points:
            learned.begin(Rehearsal(points, WORDS.held))
            begun += 1
            assert step < 10 or step > 400
    assert 1 <= begun <= 2 * MAX_REHEARSALS
    assert learned.rehearsals < begun


def test_what_another_run_learned_of_batches_is_recalled() -> None:
    learned, again = Experience(), Experience()
    for held in (100.0, 2000.0, 100.0):
        learned.observe(replace(WORDS, held=held, union=1.2 * held))
    again.recall(learned.choice, learned.demands)
    assert again.demands == learned.demands
    assert again.observe(WORDS) == learned.observe(WORDS)
    assert again.observe(replace(WORDS, world_size=2)) is not None
    assert len(again.window) == 1, "batches of other ranks tell nothing"


def test_no_rows_and_no_columns_and_no_ranks_are_no_trouble() -> None:
    for demand in (
        replace(WORDS, held=0.0, union=0.0),
        replace(WORDS, width=0),
        Demand.of([], 10, 4, 4),
        Demand.of([3.0], 10, 4, 4),
    ):
        learned = Experience()
        learned.know(FAST, ())
        if demand.world_size > 1:
            learned.observe(demand)
            assert math.isfinite(learned.offers()[0].sent_bytes) if demand.width else learned.choice.is_dense
    assert AGSPARSE_CODED in CANDIDATES
