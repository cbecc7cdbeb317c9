"""What the timeline leaves out: kept by compressor, added to all of its ways, and not carried to other links unseen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measured import measurement, option
from thinwire.comm.process_group import ring_all_reduce_bytes
from thinwire.lab.planning.calibrate import best_of_codecs
from thinwire.lab.planning.measurement import BELIEVED, Measurement
from thinwire.lab.planning.planner import STOCK, best_option, best_plan, price_options
from thinwire.lab.planning.speeds import COPIES, Extra, Fit
from thinwire.plan.plan import Group
from thinwire.plan.profile import Linear

TOP_K = "top_k:density=0.01"
COMPRESSORS = (TOP_K, "bf16")
PLAIN = measurement()


def with_extra(seconds: float, compressor: str = TOP_K, exchange: str = "all_gather") -> Measurement:
    return replace(PLAIN, extras=(Extra(compressor, exchange, seconds),))


def seconds_by_name(measured: Measurement) -> dict[str, float]:
    return {way.name: way.seconds for way in price_options(measured, COMPRESSORS)}


@pytest.mark.slow
@given(st.floats(-1.0, 1.0))
def test_it_is_added_to_all_ways_of_a_compressor_and_no_other(extra: float) -> None:
    before, after = seconds_by_name(PLAIN), seconds_by_name(with_extra(extra))
    assert before.keys() == after.keys()
    for name, seconds in before.items():
        if extra >= 0.0 or not name.startswith(TOP_K):
            assert after[name] == pytest.approx(seconds + (extra if name.startswith(TOP_K) else 0.0))


@pytest.mark.slow
@given(st.floats(-1.0, 0.0), st.floats(1.0, 10_000.0))
def test_nothing_is_faster_than_backward_the_wire_or_what_can_be_believed(extra: float, mbit: float) -> None:
    plain = measurement(mbit, alpha=1e-6)
    told = replace(plain, extras=(Extra(TOP_K, "all_gather", extra), Extra(STOCK, "all_reduce", extra)))
    before, stock = seconds_by_name(plain), price_options(told, COMPRESSORS)[0]
    for way in price_options(told, COMPRESSORS):
        assert way.seconds >= math.fsum(plain.backward_seconds) * (1 - 1e-9)
        assert way.seconds >= (1 - BELIEVED) * before[way.name] * (1 - 1e-9)
        assert way.timeline_seconds == pytest.approx(before[way.name])
    assert stock.seconds >= ring_all_reduce_bytes(sum(plain.size_bytes), 8) * 8e-6 / mbit * (1 - 1e-9)


def test_a_training_much_faster_than_its_parts_is_doubtful() -> None:
    assert with_extra(-0.001).doubts() == []
    assert with_extra(-1.0).doubts() == [f"{TOP_K} (faster in training than its parts)"]


def test_ways_that_end_at_the_same_floor_are_told_apart_by_the_timeline() -> None:
    """As where a correction makes all of them as fast as backward: the plainest timeline is the fastest way."""
    measured = replace(
        measurement(100_000, alpha=1e-9, backward_seconds=1.0), extras=(Extra(TOP_K, "all_gather", -9.0),)
    )
    floor = math.fsum(measured.backward_seconds)
    equal = [option(name, floor, TOP_K, "all_gather", timeline_seconds=floor + late)
             for name, late in (("slow", 0.3), ("fast", 0.1), ("middle", 0.2))]  # fmt: skip
    stock = option(STOCK, 2 * floor, is_plain=True)
    assert best_option(measured, [stock, *equal]).name == "fast"


def test_stock_ddp_has_its_own() -> None:
    measured = replace(PLAIN, extras=(Extra(COPIES, "all_reduce", 0.1), Extra(STOCK, "all_reduce", 0.2)))
    before, after = seconds_by_name(PLAIN), seconds_by_name(measured)
    assert after[STOCK] == pytest.approx(before[STOCK] + 0.2)


def test_that_of_exact_gradients_is_of_stock_ddp_too_where_it_was_not_tried() -> None:
    before, after = seconds_by_name(PLAIN), seconds_by_name(with_extra(0.1, COPIES, "all_reduce"))
    for name, seconds in before.items():
        is_exact = name == STOCK or name.startswith("exact")
        assert after[name] == pytest.approx(seconds + 0.1 if is_exact else seconds)


def test_a_compressor_that_training_shows_to_be_slow_is_not_taken() -> None:
    assert best_plan(PLAIN, (TOP_K,)).choice.startswith(TOP_K)
    assert not best_plan(with_extra(10.0), (TOP_K,)).choice.startswith(TOP_K)


def test_one_way_of_each_compressor_is_tried_its_fastest() -> None:
    gathered = option("c", 1.0, TOP_K, "all_gather")
    found = [
        option("a", 3.0),
        option("b", 2.0),
        gathered,
        option("d", 4.0, TOP_K, "two_shot"),
        replace(gathered, name="e", groups=(Group(("fc.bias",)), *gathered.groups), seconds=0.5),
    ]
    assert [way.name for way in best_of_codecs(found)] == ["b", "e", "d"]


def test_it_is_in_the_file_and_older_files_have_none() -> None:
    measured = with_extra(-0.25)
    assert Measurement.from_json(measured.to_json()) == measured
    older = measured.to_json()
    del older["extras"]
    assert Measurement.from_json(older).extras == ()


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="no time"):
        with_extra(math.nan)


@given(st.floats(1.0, 100_000.0))
def test_on_another_link_that_of_bytes_follows_the_rate_and_that_of_work_never_shrinks(mbit: float) -> None:
    measured = replace(PLAIN, extras=(Extra(COPIES, "all_reduce", 0.1), Extra(TOP_K, "all_gather", 0.1)))
    moved = measured.at(mbit)
    slower = PLAIN.link.mbit / mbit
    assert moved.extra_seconds(None, "all_reduce") == pytest.approx(0.1 * slower)
    assert moved.extra_seconds(TOP_K, "all_gather") == pytest.approx(0.1 * max(1.0, slower))


def test_a_gain_is_not_carried_to_another_link() -> None:
    gained = with_extra(-0.1)
    assert gained.at(gained.link.mbit).extra_seconds(TOP_K, "all_gather") == -0.1
    assert gained.at(10.0).extra_seconds(TOP_K, "all_gather") == 0.0
    assert gained.at(1000.0).extra_seconds(TOP_K, "all_gather") == 0.0


@given(st.floats(1.0, 99.0), st.floats(1e-9, 8e-8))
def test_on_a_slower_link_no_byte_is_cheaper_than_the_wire(mbit: float, beta: float) -> None:
    """Where an all-reduce was measured as cheaper than messages to all, as on a loopback."""
    link = PLAIN.link
    cheap = replace(PLAIN, link=replace(link, all_reduce=Fit(Linear(1e-3, beta)))).at(mbit)
    sent = ring_all_reduce_bytes(sum(cheap.size_bytes), cheap.world_size)
    assert price_options(cheap, ())[0].seconds >= sent * 8e-6 / mbit * (1 - 1e-9)


def test_nothing_is_known_of_what_was_not_tried() -> None:
    assert with_extra(1.0).extra_seconds("bf16", "all_reduce") == 0.0
    assert with_extra(1.0).extra_seconds(TOP_K, "two_shot") == 0.0
