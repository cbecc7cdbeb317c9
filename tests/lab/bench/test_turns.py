"""Methods in turns: each as often as the others, what warms up does not count, and times of all ranks together."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.comm.hosts import HOST_VARIABLE
from thinwire.lab.bench.turns import HostsBenchmark, Turns, quantile, seconds_of_runs
from thinwire.lab.testbed.network import Link
from thinwire.lab.testbed.rank import RankContext


def context(rank: int, told: list[Any]) -> RankContext:
    return RankContext(rank, 8, rank, 0, told.append)


@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 4))
def test_methods_run_in_turns_and_the_first_turns_do_not_count(repeat: int, warm_up: int, count: int) -> None:
    methods, told, calls = [f"method {number}" for number in range(count)], [], []

    def run(method: str) -> int:
        calls.append(method)
        return len(calls)

    runs = Turns(repeat, warm_up).run(context(0, told), methods, run)
    assert calls == told == methods * (warm_up + repeat)
    assert list(runs) == methods
    for index, method in enumerate(methods, 1):
        assert runs[method] == [turn * count + index for turn in range(warm_up, warm_up + repeat)]
    benchmark = HostsBenchmark(methods=tuple(methods), repeat=repeat, warm_up=warm_up)
    assert benchmark.num_runs == len(calls)


def test_neighbours_pretend_to_share_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    Turns(1).share_hosts(context(5, []))
    assert HOST_VARIABLE not in os.environ, "hosts of their own"
    hosts = []
    for rank in range(5):
        monkeypatch.setenv(HOST_VARIABLE, "")
        Turns(1, ranks_per_host=2).share_hosts(context(rank, []))
        hosts.append(os.environ[HOST_VARIABLE])
    assert hosts == ["0", "0", "1", "1", "2"]


@pytest.mark.parametrize("change", [{"hosts": 0}, {"ranks_per_host": 0}, {"repeat": 0}, {"methods": ()}])
def test_numbers_below_one_are_refused(change: dict[str, Any]) -> None:
    HostsBenchmark(methods=("zen",)).check_numbers()
    with pytest.raises(ValueError, match="hosts, ranks per host, repeats and methods must be at least one"):
        HostsBenchmark(**{"methods": ("zen",), **change}).check_numbers()


def test_a_negative_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="turns before those that count are at least 0, not -1"):
        HostsBenchmark(methods=("zen",), warm_up=-1).check_numbers()


def test_conditions_are_those_of_the_run() -> None:
    benchmark = HostsBenchmark(hosts=3, ranks_per_host=2, methods=("zen",), repeat=7, warm_up=1, link=Link(100.0))
    assert benchmark.world_size == 6
    found = benchmark.environment(seed=5)
    assert {key: found[key] for key in ("hosts", "link_nominal_mbit", "repeat", "warm_up", "seed", "in_job")} == {
        "hosts": 3, "link_nominal_mbit": 100.0, "repeat": 7, "warm_up": 1, "seed": 5, "in_job": False,
    }  # fmt: skip


def test_a_run_lasts_from_the_first_start_to_the_last_end() -> None:
    """Two ranks, three runs of each."""
    times = [[(0.0, 2.0), (10.0, 11.0), (5.0, 6.0)], [(0.5, 1.0), (9.0, 12.0), (5.0, 6.5)]]
    assert seconds_of_runs(times) == [2.0, 3.0, 1.5]
    with pytest.raises(ValueError, match="zip"):
        seconds_of_runs([[(0.0, 1.0)], []])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_quantiles_are_between_the_least_and_the_most(values: list[float]) -> None:
    ranked = sorted(values)
    assert quantile(values, 0.0) == ranked[0]
    assert quantile(values, 1.0) == ranked[-1]
    middle = quantile(values, 0.5)
    half = len(ranked) // 2
    expected = ranked[half] if len(ranked) % 2 else (ranked[half - 1] + ranked[half]) / 2
    assert middle == pytest.approx(expected, rel=1e-9, abs=1e-9)
