"""Rehearsals: who is tried, what is made of the times, and that nothing of them reaches gradients or counts."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from thinwire.sync.choose import REHEARSED, choose, explain, prices
from thinwire.sync.demand import Demand
from thinwire.sync.dimensions import Communication
from thinwire.sync.machine import Machine
from thinwire.sync.named import name_of, resolve
from thinwire.sync.rehearsal import DRIFT, MAX_SECONDS, MIN_BYTES, Rehearsal, rehearse, to_rehearse
from thinwire.sync.scheme import Scheme

FAST = Machine(2e-3, 3e-4, 2e-9, 2e-9, 1e-5, 1e-8, 1e-10, 1e-8, 1e-10, 1e-8, 1e-10)
WORDS = Demand(4, 119_788, 128, 4, 2_314, 2_640)


def test_the_best_by_bytes_and_its_rivals_are_tried_where_a_run_is_short() -> None:
    tried = to_rehearse(WORDS, FAST)
    assert prices(WORDS, FAST)[0].scheme in tried
    assert len(tried) > 1


@given(st.integers(2, 16), st.floats(1.0, 50_000), st.floats(1.0, 3.0), st.sampled_from([1e-9, 1e-8, 1e-7]))
def test_all_that_are_tried_add_in_the_order_of_ranks(
    world_size: int, held: float, growth: float, byte_seconds: float
) -> None:
    demand = Demand(world_size, 100_000, 64, 4, held, min(100_000.0, held * growth))
    machine = replace(FAST, byte_seconds=byte_seconds)
    tried = to_rehearse(demand, machine)
    best = prices(demand, machine)[0]
    assert all(isinstance(point, Scheme) and point.communication is Communication.POINT_TO_POINT for point in tried)
    assert not any(point.is_dense for point in tried)
    assert not tried or (best.scheme in tried and best.sent_bytes >= MIN_BYTES and best.seconds <= MAX_SECONDS)


def test_a_slow_link_and_few_bytes_are_not_rehearsed() -> None:
    assert to_rehearse(WORDS, replace(FAST, byte_seconds=8e-8)) == []
    assert to_rehearse(replace(WORDS, held=10, union=20), FAST) == []


def test_the_time_of_a_scheme_is_the_least_of_its_slowest_ranks() -> None:
    points = [resolve("zen"), resolve("column_split")]
    ticks, others = iter(range(100)), iter([5.0, 4.0, 3.0, 6.0, 9.0, 1.0])

    def slowest(seconds: float) -> float:
        return 0.0 if seconds == 0.0 else next(others)

    found = rehearse(points, 10.0, lambda point: None, slowest, lambda: float(next(ticks)))
    assert found.seconds == {"zen": 3.0, "column_split": 1.0}


def test_it_is_forgotten_when_the_rows_are_others() -> None:
    known = Rehearsal(100.0, {})
    for factor, expected in ((1.0, True), (DRIFT, True), (1.0 / DRIFT, True), (2.1 * DRIFT, False), (0.4, False)):
        assert known.is_about(replace(WORDS, held=factor * 100.0)) is expected


def chosen(rehearsed: dict[str, float], current: str | None = None) -> str:
    standing = None if current is None else resolve(current)
    counts = [WORDS.held] * WORDS.world_size
    return name_of(choose(counts, WORDS.num_rows, WORDS.width, 4, WORDS.union, FAST, standing, (), rehearsed))


def test_the_faster_one_is_taken_and_stays() -> None:
    by_bytes = chosen({})
    assert by_bytes == "column_split"
    assert chosen({"column_split": 0.04, "zen": 0.02}) == "zen"
    assert chosen({"column_split": 0.04, "zen": 0.02}, current="zen") == "zen"
    assert chosen({"column_split": 0.04, "zen": 0.02}, current="column_split") == "zen"


def test_bytes_decide_between_times_that_are_alike() -> None:
    share, _ = REHEARSED
    assert chosen({"column_split": 0.04, "zen": 0.04 * (1 - 0.9 * share)}) == "column_split"
    assert chosen({"column_split": 0.04, "zen": 0.04 * (1 - 1.1 * share)}) == "zen"


def test_it_says_what_it_measured() -> None:
    text = explain(WORDS, FAST, (), {"column_split": 0.04, "zen": 0.02})
    assert text.startswith("zen (")
    assert "in 20.0 ms" in text
    assert "in 40.0 ms" in text
