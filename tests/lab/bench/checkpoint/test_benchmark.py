"""`thinwire bench checkpoint` on two hosts of this machine: trainings that are killed go on as if nothing was."""

from __future__ import annotations

import pytest

from checkpoint_kills import FaultCampaign
from tests.lab.bench.checkpoint.results import check_method, measure_on_two_hosts
from thinwire.lab.bench.checkpoint.methods import NONE, THINWIRE
from thinwire.lab.bench.checkpoint.work import TrainingWork

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_a_killed_training_goes_on_as_if_nothing_had_happened() -> None:
    work = TrainingWork(state_bytes=200_000, compute_seconds=0.06)
    result, _ = measure_on_two_hosts(work=work, methods=(NONE, THINWIRE), steps=3, repeat=1, kills=1)
    plain, ours = result["rows"]
    assert plain["overhead_ratio"] == 1.0
    assert plain["blocking_ms_per_gb"] is plain["wasted_seconds"] is plain["restore_bitwise_equal"] is None
    assert 150_000 < ours["state_bytes"] < 300_000
    assert ours["link_mbit"] is ours["recovery_link_share"] is result["environment"]["bounds"] is None
    check_method(ours, kills=1)
    assert ours["iterations_lost"] <= 2.0, "the last step, or the one before"


def test_random_kills_end_in_restores_that_are_right() -> None:
    lines: list[str] = []
    result = FaultCampaign(4, seed=3, on_fault=lines.append).run()
    assert result["problems"] == []
    assert sum(result["faults"].values()) == 4
    assert sum(result["verdict"].values()) == 0
    assert all("seed 3" in line for line in lines)
