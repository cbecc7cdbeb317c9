"""Results of `bench checkpoint`: made by hand, and measured on two hosts of this machine."""

from __future__ import annotations

from typing import Any

from thinwire.lab.bench.checkpoint.benchmark import run
from thinwire.lab.bench.checkpoint.methods import NONE, THINWIRE
from thinwire.lab.bench.checkpoint.overhead import Block, OverheadRecord
from thinwire.lab.bench.checkpoint.recovery import Recovery
from thinwire.lab.bench.checkpoint.rows import (
    baselines,
    bounds_of,
    row_of,
)
from thinwire.lab.bench.checkpoint.settings import CheckpointBenchmark
from thinwire.lab.bench.checkpoint.traffic import TrafficSample, timeline

STATE_BYTES = 2_000_000
RECOVERY = Recovery((0.3, 0.5, 0.4), 0.9, (0.4, 1.1, 0.7), 10e6, True)
GAPS: dict[str, float | str] = {
    "checkpoint/idle_seconds": 0.8,
    "checkpoint/copy_seconds": 0.001,
    "checkpoint/coded_bytes": 1_400_000.0,
    "checkpoint/grants": "in 1 idle timespans of each iteration",
}


def blocks(method: str, seconds: float, blocking: float, versions: int, safe: float | None) -> list[Block]:
    """Two turns of four iterations, the second on a machine that is twice as slow."""
    return [
        Block(
            method,
            turn,
            (seconds * (turn + 1),) * 4,
            (blocking,) * 4,
            versions,
            safe and safe * (turn + 1),
            cpu_seconds=1.0 + 0.2 * versions,
        )
        for turn in range(2)
    ]


def records(ranks: int = 2, versions: int = 4) -> list[OverheadRecord]:
    own = [*blocks(NONE, 1.0, 0.0, 0, None), *blocks(THINWIRE, 1.01, 0.004, versions, 0.2)]
    return [OverheadRecord(STATE_BYTES, [*own, *blocks("dcp_sync", 1.5, 0.5, 4, None)], GAPS) for _ in range(ranks)]


def result(link_mbit: float | None = 100.0, idle: float = 0.8, traced: bool = False) -> dict[str, Any]:
    measured = records()
    for record in measured:
        record.gaps = {**GAPS, "checkpoint/idle_seconds": idle}
    methods = (NONE, THINWIRE, "dcp_sync")
    made: dict[str, Any] = {
        "environment": {
            "job": "synthetic", "replicas": 2, "compute_seconds": 0.8, "iterations": 8,
            "bounds": bounds_of(measured, methods, 2, link_mbit), **baselines(measured, methods, link_mbit),
        },
        "rows": [row_of(method, measured, None if method == NONE else RECOVERY, link_mbit) for method in methods],
    }  # fmt: skip
    if traced:
        samples = [[TrafficSample(0.01 * i, 10_000 * i, 5000 * i) for i in range(100)] for _ in measured]
        made["timeline"] = timeline(samples, [[(0.1, 0.12), (0.5, 0.51)] for _ in measured])
    return made


def measure_on_two_hosts(**options: Any) -> tuple[dict[str, Any], int]:
    """The result, and how often progress was told."""
    benchmark = CheckpointBenchmark(hosts=2, timeout_seconds=100.0, **options)
    done: list[str] = []
    result = run(benchmark, done.append)
    assert len(done) == benchmark.parts
    return result, len(done)


def check_method(row: dict[str, Any], kills: int) -> None:
    """Of one method that makes checkpoints, in memory or on a disk."""
    assert row["blocking_ms_per_gb"] > 0
    if kills == 0:
        assert row["restore_bitwise_equal"] is row["iterations_lost"] is row["wasted_seconds"] is None
        return
    assert row["restore_bitwise_equal"] is True
    assert 0.0 <= row["iterations_lost"] < 6.0
    assert row["recovery_seconds_processes"] > 0.0
    assert row["recovery_seconds_host"] > 0.0
    if row["interval_iterations"] is None:  # on a machine that is busy, few iterations may be without any checkpoint
        assert (row["method"], row["wasted_seconds"]) == (THINWIRE, None)
    else:
        assert row["wasted_seconds"] > row["recovery_seconds_host"]
