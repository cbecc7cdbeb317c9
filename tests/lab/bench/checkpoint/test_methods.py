"""`thinwire bench checkpoint` on two hosts of this machine: methods in turn, then trainings that are killed."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint_kills import FaultCampaign
from thinwire.lab.bench.checkpoint.benchmark import CheckpointBenchmark, run
from thinwire.lab.bench.checkpoint.methods import METHODS, NONE, THINWIRE
from thinwire.lab.bench.checkpoint.work import TrainingWork

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def measure(**options: Any) -> tuple[dict[str, Any], int]:
    """The result, and how often progress was told."""
    benchmark = CheckpointBenchmark(hosts=2, timeout_seconds=100.0, **options)
    done: list[str] = []
    result = run(benchmark, done.append)
    assert len(done) == benchmark.parts
    return result, len(done)


def check(row: dict[str, Any], kills: int) -> None:
    """Of one method that makes checkpoints, in memory or on a disk."""
    assert row["blocking_ms_per_gb"] > 0
    if kills == 0:
        assert row["restore_bitwise_equal"] is row["iterations_lost"] is row["wasted_seconds"] is None
        return
    assert row["restore_bitwise_equal"] is True
    assert 0.0 <= row["iterations_lost"] < 6.0
    assert row["recovery_seconds_processes"] > 0.0
    assert row["wasted_seconds"] > row["recovery_seconds_host"] > 0.0


def test_a_killed_training_goes_on_as_if_nothing_had_happened() -> None:
    work = TrainingWork(state_bytes=200_000, compute_seconds=0.06)
    result, _ = measure(work=work, methods=(NONE, THINWIRE), steps=3, repeat=1, kills=1)
    plain, ours = result["rows"]
    assert plain["overhead_ratio"] == 1.0
    assert plain["blocking_ms_per_gb"] is plain["wasted_seconds"] is plain["restore_bitwise_equal"] is None
    assert 150_000 < ours["state_bytes"] < 300_000
    assert ours["link_mbit"] is ours["recovery_link_share"] is result["environment"]["bounds"] is None
    check(ours, kills=1)
    assert ours["iterations_lost"] <= 2.0, "the last step, or the one before"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("job", ["synthetic", "lstm"])
def test_all_methods_on_all_jobs(job: str) -> None:
    work = TrainingWork(job, state_bytes=500_000, compute_seconds=0.05)
    result, _ = measure(work=work, steps=3, repeat=2, kills=1)
    assert [row["method"] for row in result["rows"]] == list(METHODS)
    for row in result["rows"][1:]:
        check(row, kills=1)


def test_random_kills_end_in_restores_that_are_right() -> None:
    lines: list[str] = []
    result = FaultCampaign(4, seed=3, on_fault=lines.append).run()
    assert result["problems"] == []
    assert sum(result["faults"].values()) == 4
    assert sum(result["verdict"].values()) == 0
    assert all("seed 3" in line for line in lines)
