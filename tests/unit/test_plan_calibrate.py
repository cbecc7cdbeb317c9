"""What the timeline leaves out: kept by compressor, added to all of its ways, and not carried to other links unseen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measured import measurement
from thinwire.measure.calibrate import best_of_codecs
from thinwire.plan.measurement import Measurement
from thinwire.plan.planner import STOCK, Way, best_plan, ways
from thinwire.plan.speeds import COPIES, Extra

TOP_K = "top_k:density=0.01"
COMPRESSORS = (TOP_K, "bf16")
PLAIN = measurement()


def with_extra(seconds: float, compressor: str = TOP_K, exchange: str = "all_gather") -> Measurement:
    return replace(PLAIN, extras=(Extra(compressor, exchange, seconds),))


def seconds_by_name(measured: Measurement) -> dict[str, float]:
    return {way.name: way.seconds for way in ways(measured, COMPRESSORS)}


@given(st.floats(-1.0, 1.0))
def test_it_is_added_to_all_ways_of_a_compressor_and_no_other(extra: float) -> None:
    before, after = seconds_by_name(PLAIN), seconds_by_name(with_extra(extra))
    assert before.keys() == after.keys()
    backward = math.fsum(PLAIN.backward_seconds)
    for name, seconds in before.items():
        expected = seconds + extra if name.startswith(TOP_K) else seconds
        assert after[name] == pytest.approx(max(expected, backward)), "never less than backward alone"


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
    groups = ((0,),)
    found = [
        Way("a", groups, (None,), ("all_reduce",), 3.0),
        Way("b", groups, (None,), ("all_reduce",), 2.0),
        Way("c", groups, (TOP_K,), ("all_gather",), 1.0),
        Way("d", groups, (TOP_K,), ("two_shot",), 4.0),
        Way("e", groups, (None, TOP_K), ("all_reduce", "all_gather"), 0.5),
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
def test_on_a_faster_link_that_of_bytes_shrinks_and_that_of_work_stays(mbit: float) -> None:
    measured = replace(PLAIN, extras=(Extra(COPIES, "all_reduce", 0.1), Extra(TOP_K, "all_gather", 0.1)))
    moved = measured.at(mbit)
    assert moved.extra_seconds(None, "all_reduce") == pytest.approx(0.1 * min(1.0, PLAIN.link.mbit / mbit))
    assert moved.extra_seconds(TOP_K, "all_gather") == 0.1


def test_nothing_is_known_of_what_was_not_tried() -> None:
    assert with_extra(1.0).extra_seconds("bf16", "all_reduce") == 0.0
    assert with_extra(1.0).extra_seconds(TOP_K, "two_shot") == 0.0
