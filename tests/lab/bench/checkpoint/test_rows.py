"""Rows of `bench checkpoint`: fields, ratios, intervals and waste."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.bench.checkpoint.results import RECOVERY, STATE_BYTES, records
from thinwire.lab.bench.checkpoint.methods import NONE, THINWIRE
from thinwire.lab.bench.checkpoint.rows import (
    baselines,
    checkpoint_seconds,
    interval_iterations,
    row_of,
    turn_ratios,
)

FIELDS = [
    "method", "hosts", "link_mbit", "state_bytes", "iteration_seconds_median", "overhead_ratio", "overhead_spread",
    "interval_iterations", "cpu_seconds", "blocking_ms_per_gb", "wasted_seconds", "recovery_seconds_processes",
    "recovery_seconds_host", "recovery_link_share", "iterations_lost", "restore_bitwise_equal",
    "version_bytes", "checkpoint_seconds",
]  # fmt: skip


def test_a_row_has_the_documented_fields_and_figures() -> None:
    row = row_of(THINWIRE, records(), RECOVERY, 100.0)
    assert list(row) == FIELDS
    assert row["overhead_ratio"] == pytest.approx(1.01)
    assert row["overhead_spread"] == pytest.approx([1.01, 1.01])
    assert (row["interval_iterations"], row["cpu_seconds"]) == (1.0, pytest.approx(0.2))
    assert row["iteration_seconds_median"] == pytest.approx((1.01 + 2.02) / 2)
    assert row["blocking_ms_per_gb"] == pytest.approx(4.0 / (STATE_BYTES / 1e9))
    assert row["wasted_seconds"] == pytest.approx(0.3 + row["iteration_seconds_median"] / 2 + 0.9)
    assert (row["recovery_seconds_processes"], row["recovery_seconds_host"]) == (0.4, 0.9)
    assert row["recovery_link_share"] == pytest.approx(0.8)
    assert row["iterations_lost"] == 1.1, "the worst of all kills"
    assert row["restore_bitwise_equal"] is True
    assert (row["version_bytes"], row["checkpoint_seconds"]) == (1_400_000, pytest.approx(0.3))


def test_what_a_method_does_not_have_is_null() -> None:
    plain = row_of(NONE, records(), None, None)
    assert [name for name, value in plain.items() if value is None] == ["link_mbit", *FIELDS[7:]]
    assert row_of(THINWIRE, records(), replace(RECOVERY, fetched_bytes_per_second=None), 9.0)[FIELDS[13]] is None
    alone = [replace(record, blocks=record.blocks[2:4]) for record in records()]
    assert row_of(THINWIRE, alone, RECOVERY, 100.0)["overhead_ratio"] is None
    never = row_of(THINWIRE, records(versions=0), RECOVERY, 100.0)
    assert never["wasted_seconds"] is None


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=9),
    st.lists(st.floats(0.1, 10), min_size=9, max_size=9),
)
def test_what_slows_a_whole_turn_does_not_change_the_ratio(
    turns: list[tuple[float, float]], slower: list[float]
) -> None:
    own, plain = [[a, a, a] for a, _ in turns], [[b, b] for _, b in turns]
    disturbed = [[a * by for a in part] for part, by in zip(own, slower, strict=False)]
    disturbed_plain = [[b * by for b in part] for part, by in zip(plain, slower, strict=False)]
    assert turn_ratios(disturbed, disturbed_plain) == pytest.approx(turn_ratios(own, plain))


def test_intervals_count_what_all_ranks_made() -> None:
    some = records()
    assert interval_iterations(THINWIRE, some) == 1.0
    some[1].blocks[2] = replace(some[1].blocks[2], versions=0)
    assert interval_iterations(THINWIRE, some) == 2.0
    assert interval_iterations(NONE, some) is None
    assert checkpoint_seconds(NONE, some) is None
    assert checkpoint_seconds("dcp_sync", some) == 0.5, "the call itself, where nothing goes on after it"


def test_rarer_checkpoints_to_a_store_waste_what_the_formula_says() -> None:
    """Two hosts, 4 MB in all, 12.5 MB/s: 0.32 s, and every iteration of 1.5 s."""
    found = baselines(records(), (NONE,), 100.0)
    assert found["strawman_wasted_seconds"] == pytest.approx(0.32 + 5400 + 0.32)
    assert found["high_frequency_wasted_seconds"] == pytest.approx(0.32 + 0.75 + 0.32)
