"""`thinwire bench checkpoint`: rows, pairs, bounds, lost iterations and traffic, from made-up measurements."""

from __future__ import annotations

import itertools
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from checkpoint_kills import Killer, RankMessage
from thinwire.lab.bench.checkpoint.benchmark import CheckpointBenchmark
from thinwire.lab.bench.checkpoint.methods import METHODS, NONE, THINWIRE
from thinwire.lab.bench.checkpoint.overhead import Block, OverheadRecord, order_of
from thinwire.lab.bench.checkpoint.recovery import RankRestored, RankStarted, Recovery, Stepped, Watcher
from thinwire.lab.bench.checkpoint.report import build_report, write_picture
from thinwire.lab.bench.checkpoint.rivals import unavailable
from thinwire.lab.bench.checkpoint.rows import (
    ROW,
    baselines,
    bounds_of,
    checkpoint_seconds,
    interval_iterations,
    overhead_ratio,
    row_of,
)
from thinwire.lab.bench.checkpoint.summary import COLUMNS, sentences, table_rows
from thinwire.lab.bench.checkpoint.traffic import TrafficSample, rates, timeline
from thinwire.lab.bench.checkpoint.work import TrainingWork
from thinwire.lab.cli.bench import app as bench
from thinwire.lab.testbed.network import Link

FIELDS = [
    "method", "hosts", "link_mbit", "state_bytes", "iteration_seconds_median", "overhead_ratio", "overhead_spread",
    "interval_iterations", "cpu_seconds", "blocking_ms_per_gb", "wasted_seconds", "recovery_seconds_processes",
    "recovery_seconds_host", "recovery_link_share", "iterations_lost", "restore_bitwise_equal",
    "version_bytes", "checkpoint_seconds",
]  # fmt: skip
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
    assert overhead_ratio(disturbed, disturbed_plain) == pytest.approx(overhead_ratio(own, plain))


def test_intervals_count_what_all_ranks_made() -> None:
    some = records()
    assert interval_iterations(THINWIRE, some) == 1.0
    some[1].blocks[2] = replace(some[1].blocks[2], versions=0)
    assert interval_iterations(THINWIRE, some) == 2.0
    assert interval_iterations(NONE, some) is None
    assert checkpoint_seconds(NONE, some) is None
    assert checkpoint_seconds("dcp_sync", some) == 0.5, "the call itself, where nothing goes on after it"


def test_every_method_is_at_every_place_equally_often() -> None:
    orders = [order_of(METHODS, turn) for turn in range(len(METHODS))]
    assert all(sorted(place) == sorted(METHODS) for place in zip(*orders, strict=True))


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


def test_the_bound_stands_beside_what_was_reached() -> None:
    bound, reached = sentences(result())[:2]
    assert "one checkpoint in every iteration fits" in bound
    assert "0.160 s of a link" in bound
    assert "one in 1.00, safe 0.300 s after the step, 1.88x" in reached
    tight = sentences(result(idle=0.05))[0]
    assert "does NOT allow one checkpoint per iteration, at best one in 4" in tight
    assert "not known" in sentences(result(link_mbit=None))[0]


def test_rarer_checkpoints_to_a_store_waste_what_the_formula_says() -> None:
    """Two hosts, 4 MB in all, 12.5 MB/s: 0.32 s, and every iteration of 1.5 s."""
    found = baselines(records(), (NONE,), 100.0)
    assert found["strawman_wasted_seconds"] == pytest.approx(0.32 + 5400 + 0.32)
    assert found["high_frequency_wasted_seconds"] == pytest.approx(0.32 + 0.75 + 0.32)


@pytest.mark.slow
def test_the_table_and_the_report_show_every_method(tmp_path: Path) -> None:
    cells = table_rows(result()["rows"])
    assert [row[0] for row in cells] == [NONE, THINWIRE, "dcp_sync"]
    assert all(len(row) == len(COLUMNS) for row in cells)
    assert cells[1][1:] == ["1.5150", "1.010", "4.0", "1.96", "0.40", "0.90", "80%", "1.10", "yes"]
    often = "a checkpoint every 1.0 iterations, 1.2 at risk at most, 0.200 s of a core for one"
    assert f"thinwire: {often}, ratio 1.01 to 1.01 by turns." in sentences(result())
    assert "What the links carry" not in build_report(result()).html()
    with pytest.raises(ValueError, match="no picture of the links"):
        write_picture(result(), tmp_path / "links.png")
    pytest.importorskip("matplotlib")
    seldom = result()
    seldom["environment"]["bounds"]["reached_interval_iterations"] = 1.67
    assert "a checkpoint in every 1.67 steps" in build_report(seldom).html()
    page = build_report(result(traced=True)).html()
    assert "+1.0% a step for a checkpoint in every step" in page
    assert "<svg" in page
    assert "host 1" in page
    write_picture(result(traced=True), tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


@given(st.lists(st.tuples(st.integers(0, 50_000), st.floats(0, 1)), min_size=2, max_size=40))
def test_rates_lose_no_byte(steps: list[tuple[int, float]]) -> None:
    """Of what went over the link between the first and the last sample, whatever part of it was checkpoints."""
    link = list(itertools.accumulate(count for count, _ in steps))
    own = list(itertools.accumulate(int(count * share / 1.1) for count, share in steps))
    samples = [TrafficSample(0.01 * i, a, b) for i, (a, b) in enumerate(zip(link, own, strict=True))]
    middles, others, checkpoints = rates(samples, 0.0, samples[-1].at)
    width = samples[-1].at / len(middles)
    total = sum(a + b for a, b in zip(others, checkpoints, strict=True)) * width / 8e-6
    assert total == pytest.approx(link[-1] - link[0], rel=1e-6, abs=1e-3)
    assert min(others) >= 0.0


def told(ranks: int, steps: int) -> list[tuple[int, object]]:
    """What ranks tell that make a step every second; rank r is r tenths late."""
    messages: list[tuple[int, object]] = [(rank, RankRestored(4, 0.5 + rank)) for rank in range(ranks)]
    for step in range(5, 5 + steps):
        messages += [(rank, Stepped(step, 1.0 / step, step + 0.1 * rank)) for rank in range(ranks)]
    return messages


def test_progress_is_what_all_ranks_have_and_a_part_of_the_running_iteration() -> None:
    watcher = Watcher(world_size=2)
    for rank, message in told(2, 3):
        watcher(rank, message)
    watcher(0, Stepped(8, 0.1, 8.0))  # rank 1 did not come so far
    watcher.killed_at = 7.6
    assert watcher.reached() == 7
    assert watcher.progress(1.0) == pytest.approx(7.5)
    assert watcher.progress(0.1) == 8.0, "a late death is not more than one iteration"
    assert watcher.losses()[(1, 6)] == (1 / 6).hex()


def test_all_ranks_are_killed_once_all_have_come_so_far() -> None:
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    lost: list[str] = []
    watcher = Watcher(world_size=2, kill_at=6, also=lambda: lost.append("host"))
    for rank, process in enumerate(processes):
        watcher(rank, RankStarted(process.pid))
    messages = told(2, 2)
    for rank, message in messages[:-1]:
        watcher(rank, message)
    assert [process.poll() for process in processes] == [None, None], "rank 1 has not made step 6"
    watcher(*messages[-1])
    assert [process.wait(60) for process in processes] == [-9, -9]
    assert lost == ["host"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"methods": ("none", "tape")}, "unknown methods tape; legal are none, dcp_sync"),
        ({"methods": ("none", "none")}, "none, none: name each once"),
        ({"methods": ()}, "legal are none"),
        ({"hosts": 1}, "2 replicas need 2 machines"),
        ({"steps": 0}, "at least one"),
        ({"kills": -1}, "at least zero"),
        ({"work": TrainingWork(state_bytes=10**12)}, "bytes, and .* are available"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CheckpointBenchmark(**options)


def test_work_that_cannot_be_is_refused() -> None:
    for options in ({"job": "chess"}, {"state_bytes": 1}, {"compute_seconds": -1.0}):
        with pytest.raises(ValueError):
            TrainingWork(**options)


def test_parts_are_blocks_and_runs() -> None:
    benchmark = CheckpointBenchmark(methods=(NONE, THINWIRE), repeat=3, kills=2, link=Link(None))
    assert benchmark.recovering == [THINWIRE]
    assert benchmark.parts == 2 * 4 + 4
    assert replace(benchmark, kills=0).recovering == []


def test_the_command_refuses_before_it_starts_anything(tmp_path: Path) -> None:
    for arguments, reason in (
        (["--report", str(tmp_path / "missing" / "page.html")], "is not a directory"),
        (["--methods", "none,tape"], "unknown methods tape"),
        (["--link", "fast"], "unknown link"),
    ):
        ended = CliRunner().invoke(bench, ["checkpoint", *arguments])
        assert ended.exit_code == 2
        assert reason in re.sub(r"[│\s]+", " ", ended.output)


class TestKiller:
    """The campaign of kills sees a wrong state, and loses a host only when its copies are elsewhere."""

    def killer(self, kind: str, killed: list[str]) -> Killer:
        made = Killer(
            [["a0", "a1", "a2", "a3"], ["b0", "b1", "b2", "b3"]], kind, 0, 1, 0.0, lambda: killed.append("lost")
        )
        made.kill = lambda *ranks: killed.append(f"killed {sorted(ranks)}")  # type: ignore[method-assign]
        return made

    def test_a_state_of_another_step_is_wrong(self) -> None:
        killer = self.killer("", [])
        killer(0, RankMessage("restored", 2, "a2"))
        assert killer.wrong == []
        killer(1, RankMessage("restored", 2, "b1"))
        killer(0, RankMessage("state", 3, "a2"))
        assert [text[:5] for text in killer.wrong] == ["wrong", "wrong"]
        assert "rank 1 is in another state after step 2" in killer.wrong[0]

    def test_a_host_is_lost_when_a_newer_version_is_everywhere(self) -> None:
        done: list[str] = []
        killer = self.killer("host", done)
        for rank, name in enumerate("ab"):
            killer(rank, RankMessage("pid", 100 + rank))
            killer(rank, RankMessage("restored", 1, f"{name}1"))
        for rank, name in enumerate("ab"):
            killer(rank, RankMessage("state", 2, f"{name}2"))
            killer(rank, RankMessage("kept", 1))
        assert done == [], "only the version that was restored is everywhere"
        killer(0, RankMessage("kept", 2))
        assert done == ["killed [0, 1]", "lost", "killed [0, 1]"]

    def test_trainers_are_killed_while_they_restore(self) -> None:
        done: list[str] = []
        killer = self.killer("restore", done)
        killer(0, RankMessage("pid", 100))
        assert done == []
        killer(1, RankMessage("pid", 101))
        assert done == ["killed [0, 1]"]


def test_a_method_without_its_package_has_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert unavailable("lm_resiliency") == "pip install lm-resiliency"
    assert unavailable(THINWIRE) == ""
    row = {**dict.fromkeys(ROW), "method": "nvrx", "unavailable": unavailable("nvrx")}
    assert table_rows([row])[0][0] == "nvrx: pip install nvidia-resiliency-ext"
