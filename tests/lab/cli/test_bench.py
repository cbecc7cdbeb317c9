"""What all benchmarks share: names in their help, and the comparison with an earlier run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.lab.cli.screens import printed, stored
from thinwire.lab.cli import bench
from thinwire.lab.cli.bench import show_comparison


def test_a_comparison_with_an_earlier_run() -> None:
    rows = stored("sync-lstm-8x100mbit.json")["rows"]
    slower = [row | {"seconds_median": 2 * row["seconds_median"]} for row in rows if row["scheme"] != "zen"]
    same = ("workload", "world_size", "ranks_per_host", "dtype", "num_rows")

    def show(console: Console) -> None:
        show_comparison(console, rows, slower, same, "scheme", "seconds_median", Path("old[1].json"))

    text = printed(show, 60)
    assert "Compared with old[1].json" in text
    assert re.search(r"zen +- +[\d.]+ +-", text), "what only one of the runs has is shown too"
    assert re.search(r"dense +[\d.]+ +[\d.]+ +0.5", text)
    others, console = [row | {"workload": "bert"} for row in rows], Console()
    with pytest.raises(ValueError, match="no row that is the same in workload"):
        show_comparison(console, rows, others, same, "scheme", "seconds_median", Path("x"))


def test_names_in_the_help_of_benchmarks_are_those_there_are() -> None:
    from thinwire.lab.bench.checkpoint import methods as checkpoint
    from thinwire.lab.bench.jobs import named
    from thinwire.lab.bench.methods import METHODS
    from thinwire.lab.bench.recipes import RECIPES
    from thinwire.lab.bench.sync import DTYPES
    from thinwire.lab.bench.train import methods as train

    assert bench.WORKLOADS.split(", ") == sorted(RECIPES)
    assert bench.SCHEMES.split(", ") == [*METHODS]
    assert bench.DTYPES.split(", ") == [*DTYPES]
    assert bench.JOBS.split(", ") == [*named.JOBS]
    assert bench.METHODS.split(", ") == [*train.NAMES, *train.SETTINGS]
    assert bench.CHECKPOINT_METHODS.split(",") == [*checkpoint.METHODS]
