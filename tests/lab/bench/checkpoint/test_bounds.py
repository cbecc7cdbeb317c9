"""Bounds against the worked cases of the paper and of published machines; the page of the docs against the script."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_capacity import restore_local_seconds, restore_replaced_seconds, seconds_to_loss
from thinwire.lab.bench.checkpoint.bounds import (
    Hardware,
    copy_seconds,
    high_frequency_wasted_seconds,
    interval_iterations,
    network_seconds,
    strawman_wasted_seconds,
    wasted_seconds,
)

ROOT = Path(__file__).parents[4]
A100 = Hardware(devices=8, network_bytes_per_second=50e9, copy_bytes_per_second=12.6e9)
H100 = Hardware(devices=8, network_bytes_per_second=400e9, copy_bytes_per_second=50e9)
DAY = 86400.0


def close(expected: float) -> object:
    return pytest.approx(expected, rel=0.02)


def test_100_billion_parameters_on_16_machines() -> None:
    """75 GB a machine: 1.5 s to send and to copy, which fits into each iteration."""
    network, copy = network_seconds(75_000_000_000, 2, A100), copy_seconds(75_000_000_000, 2, A100)
    assert network == 1.5
    assert copy == close(2 * 9.4 / 12.6)
    assert interval_iterations(network, copy, 65, 10) == 1
    assert restore_local_seconds(75_000_000_000, A100) == close(9.4 / 12.6)
    assert restore_replaced_seconds(75_000_000_000, Hardware(8, 50e9, 23e9)) == close(1.5 + 9.4 / 23)


def test_70_billion_parameters_on_16_machines() -> None:
    size = 52_500_000_000
    assert network_seconds(size, 2, H100) == close(0.131)
    assert copy_seconds(size, 2, H100) == close(2 * 6.6 / 50)
    assert network_seconds(size, 2, Hardware(8, 8 * 3e9, 50e9)) == close(2.2), "over Gloo, 3 GB/s a process"


def test_more_replicas_send_and_copy_more() -> None:
    size = 1_000_000
    assert [network_seconds(size, m, A100) / network_seconds(size, 2, A100) for m in (1, 2, 3)] == [0, 1, 2]
    assert [copy_seconds(size, m, A100) * 12.6e9 * 8 / size for m in (1, 2, 3)] == pytest.approx([1, 2, 3])


# Interval


@pytest.mark.parametrize(
    ("sending", "copying", "idle", "interval"),
    [(1.5, 1.5, 10, 1), (10, 1.5, 10, 1), (10.1, 1.5, 10, 2), (0.1, 65.1, 10, 2), (95, 1.5, 5, 19), (0, 0, 0, 1)],
)
def test_the_interval_is_what_sending_and_copying_allow(
    sending: float, copying: float, idle: float, interval: int
) -> None:
    assert interval_iterations(sending, copying, 65, idle) == interval


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0.01, 100), st.floats(0.01, 1))
def test_the_interval_fits_and_a_shorter_one_does_not(
    sending: float, copying: float, iteration: float, idle_share: float
) -> None:
    idle = idle_share * iteration
    interval = interval_iterations(sending, copying, iteration, idle)

    def fits(iterations: int, slack: float) -> bool:
        return sending <= iterations * idle * slack and copying <= iterations * iteration * slack

    assert fits(interval, 1 + 1e-9)
    assert interval == 1 or not fits(interval - 1, 1 - 1e-9)


@pytest.mark.parametrize(("iteration", "idle"), [(0, 0), (1, 2), (1, -1), (math.nan, 1)])
def test_times_that_cannot_be_are_refused(iteration: float, idle: float) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        interval_iterations(1, 1, iteration, idle)


def test_a_network_that_is_never_idle_is_said() -> None:
    with pytest.raises(ValueError, match="never idle"):
        interval_iterations(1.0, 0.0, iteration_seconds=1, idle_seconds=0)
    assert interval_iterations(0.0, 0.0, iteration_seconds=1, idle_seconds=0) == 1, "nothing is sent"


# Wasted time


@pytest.mark.parametrize(
    ("state_bytes", "transfer_seconds", "wasted_minutes"),
    [(3.4e12, 1360, 57), (6.4e12, 2560, 107), (6.5e12, 2600, 109)],
)
def test_a_remote_store_of_20_gbit(state_bytes: float, transfer_seconds: float, wasted_minutes: float) -> None:
    """Gopher 280B, MT-NLG 530B and PaLM 540B: 23, 43 and 44 minutes a checkpoint, 57 and 108 to 110 wasted."""
    wasted = high_frequency_wasted_seconds(round(state_bytes), 20e9 / 8)
    assert wasted == 2.5 * transfer_seconds
    assert wasted / 60 == close(wasted_minutes)


def test_the_figure_of_the_paper() -> None:
    """GPT-2 100B: 1.6 minutes; HighFreq about 23, torch.save of a replica (81 s) included."""
    assert wasted_seconds(65, 65, 0) == 1.5 * 65
    transfer = 1.2e12 / (20e9 / 8)
    assert transfer == 480
    assert wasted_seconds(transfer + 81, transfer + 81, transfer + 81) / 60 == close(23.4)
    assert strawman_wasted_seconds(1_200_000_000_000, 20e9 / 8) == 480 + 5400 + 480
    assert strawman_wasted_seconds(10**14, 20e9 / 8) == 2.5 * 40_000, "a store too slow for every 3 hours"


def test_high_frequency_waits_for_the_end_of_an_iteration() -> None:
    assert high_frequency_wasted_seconds(1000, 10, iteration_seconds=65) == 100 + 65 + 100
    assert high_frequency_wasted_seconds(1000, 1000, iteration_seconds=65) == 1 + 32.5 + 1
    assert high_frequency_wasted_seconds(1000, 10) == 250


# Losses


def test_a_thousand_machines_lose_a_pair_in_640_days() -> None:
    assert seconds_to_loss(1000, 2, DAY / 0.015, 600) / DAY == close(640)


def test_losses_scale_as_in_a_disk_array() -> None:
    one = seconds_to_loss(12, 1, DAY, 60)
    assert one == pytest.approx(DAY / 12), "without replicas, any failure"
    for replicas in (2, 3, 4):
        expected = DAY**replicas / (12 * 60 ** (replicas - 1))
        assert seconds_to_loss(12, replicas, DAY, 60) == pytest.approx(expected)
    assert seconds_to_loss(13, 2, DAY, 60) == pytest.approx(DAY**2 / (16 * 60)), "5 groups and a ring of 3: 8 pairs"


# The page


def test_the_page_has_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "benchmarks" / "checkpoint_capacity.py"), run_name="__main__")
    printed = capsys.readouterr().out.strip()
    assert printed.count("\n| 1000 |") == 6
    page = (ROOT / "docs" / "evidence" / "checkpoint-capacity.md").read_text()
    assert page.strip().endswith(printed), "run: python benchmarks/checkpoint_capacity.py, and put it at the page's end"
