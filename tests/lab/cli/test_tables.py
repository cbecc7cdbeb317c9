"""The tables of bench and analyze: every figure is whole, in a narrow window and in a pipe."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from thinwire.lab.analyze.prediction import AssumedLink
from thinwire.lab.analyze.recording import Recording, Table
from thinwire.lab.analyze.summary import Analysis
from thinwire.lab.bench.checkpoint import summary as checkpoint_summary
from thinwire.lab.bench.trace import IndexTrace
from thinwire.lab.bench.train import summary as train_summary
from thinwire.lab.cli import analyze, bench_checkpoint, bench_sync, bench_train, output
from thinwire.lab.cli.bench import show_comparison

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def stored(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def printed(show: Callable[[Console], object], width: int) -> str:
    file = io.StringIO()
    show(Console(file=file, width=width, emoji=False))
    text = file.getvalue()
    assert "…" not in text
    if width >= 80:
        assert all(len(line) <= width for line in text.splitlines() if "─" in line), "a table wider than the window"
    return text


def cells_of(text: str) -> set[str]:
    """The words of a text; figures stand among them whole."""
    return set(text.split())


def test_one_step_and_one_seed_are_no_plural() -> None:
    name = next(path.name for path in sorted(RESULTS.glob("train-*.json")))
    result = stored(name)
    result["environment"] |= {"steps": 1, "seeds": 1}
    assert train_summary.conditions(result).endswith(" 1 step, 1 seed")
    result["environment"] |= {"steps": 20, "seeds": 3}
    assert train_summary.conditions(result).endswith(" 20 steps, 3 seeds")


@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("name", ["sync-lstm-8x100mbit.json", "contenders-bert-8x100mbit.json"])
def test_bench_sync(name: str, width: int) -> None:
    result = stored(name)
    words = cells_of(printed(lambda console: bench_sync._print(result, console), width))
    for row in result["rows"]:
        assert f"{row['seconds_median']:.3f}" in words
        assert f"{row['bytes_sent_max'] / 1e6:.2f}" in words
        assert f"{row['max_abs_error']:.0e}" in words


@pytest.mark.parametrize("width", [60, 80, 160])
def test_bench_sync_by_size(width: int) -> None:
    result = stored("sync-lstm-8x100mbit.json")
    rows = [
        row | {"size_bytes": size, "algbw": 123e6, "busbw": 216e6} for size in (10**6, 10**9) for row in result["rows"]
    ]
    words = cells_of(printed(lambda console: bench_sync._print_sizes(result | {"rows": rows}, console), width))
    assert {"1", "1e+03", "123.0", "216.0"} <= words
    assert {f"{row['seconds_median']:.4f}" for row in rows} <= words


@pytest.mark.parametrize("width", [60, 80, 160])
def test_bench_train(width: int) -> None:
    result = stored("train-lstm-8x100mbit.json")
    text = printed(lambda console: bench_train._print(result, console), width)
    for cells in train_summary.table_rows(result["rows"]):
        assert set(" ".join(cells[1:]).split()) <= cells_of(text)
        assert cells[0][:6] in text


@pytest.mark.parametrize("width", [60, 80, 160])
def test_bench_checkpoint(width: int) -> None:
    result = stored("checkpoint-8x100mbit.json")
    text = printed(lambda console: bench_checkpoint._print(result, console), width)
    for cells in checkpoint_summary.table_rows(result["rows"]):
        assert set(" ".join(cells[1:]).split()) <= cells_of(text)
        assert cells[0][:6] in text


def analysis(name: str, sparse: bool = True) -> Analysis:
    generator = torch.Generator().manual_seed(0)
    tables = (Table(name, 119_788, 128, "float32", "dense"), Table("layer.weight", 512, 128, "float32", "dense"))
    steps = tuple(tuple(torch.randint(0, 5000, (900,), generator=generator).unique() for _ in range(4)) for _ in "ab")
    traces = {name: IndexTrace(119_788, 128, steps)} if sparse else {}
    densities = {table.name: torch.ones(2, 4, dtype=torch.float64) for table in tables}
    recording = Recording(4, 1, tables, densities, traces)
    return Analysis.of(recording, "train.py", 2, AssumedLink(1000.0, 50e-6))


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 160])
def test_analyze(width: int) -> None:
    found = analysis("embeddings[0].weight")
    text = printed(lambda console: analyze._print(found, console), width)
    words = cells_of(text)
    (table,) = found.sparse
    for prediction in table.predictions:
        assert f"{prediction.union:,.0f}" in words
    assert {"119,788", f"{table.density.mean:.2%}", f"{table.densification[-1]:.2f}"} <= words
    assert "embeddings[0].weight" in text, "brackets are no markup"
    folded = "".join(words)
    assert table.prediction(1024).pick in text or table.prediction(1024).pick[:6] in folded


def test_analyze_names_stock_ddp_with_dense_and_with_sparse_tables() -> None:
    found = analysis("table.weight")
    stock, sparse, ours = found.totals
    assert [total.name for total in found.totals] == ["stock DDP", "stock DDP, sparse=True", "thinwire"]
    (table,) = found.sparse
    rest = 2 * 3 / 4 * 512 * 128 * 4
    assert stock.bytes == pytest.approx(2 * 3 / 4 * 119_788 * 128 * 4 + rest, rel=1e-5)
    held = table.density.mean * 119_788
    assert sparse.bytes == pytest.approx(3 * held * (8 + 512) + rest, rel=0.01), "ids of 8 bytes, rows to three others"
    assert ours.bytes == pytest.approx(table.prediction(4).bytes[table.prediction(4).pick] + rest)
    assert ours.seconds < stock.seconds
    text = printed(lambda console: analyze._print(found, console), 80)
    assert re.search(r"stock DDP, sparse=True +\d", text)
    assert len(found.to_json()["totals"]) == 3


def test_analyze_sends_a_dense_model_to_doctor() -> None:
    text = printed(lambda console: analyze._print(analysis("table.weight", sparse=False), console), 80)
    assert "thinwire doctor train.py" in text


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


def test_progress_is_reported_also_while_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step may last for minutes; without a terminal somebody waits for a line."""
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.01)
    lines = ""
    with output.progress("dense [1]", total=4) as tell:
        tell(done=2)
        while lines.count("dense [1]: 2 of 4") < 3:
            lines += capsys.readouterr().err
            time.sleep(0.01)
    with output.progress("nothing", quiet=True):
        time.sleep(0.05)
    assert "nothing" not in capsys.readouterr().err


def test_a_terminal_has_a_bar_of_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(output, "Console", lambda **how: Console(file=terminal, force_terminal=True, width=80))
    with output.progress("Recording", total=7) as tell:
        tell(done=7)
    assert "7/7" in terminal.getvalue()
