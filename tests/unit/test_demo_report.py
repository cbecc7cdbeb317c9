"""What the demo reports: the fixed JSON fields, honest sentences, a page that needs nothing but itself."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from thinwire.cli.demo import demo
from thinwire.lab.demo import stock
from thinwire.lab.demo.compare import Comparison, ModeResult
from thinwire.lab.demo.report import build_report
from thinwire.lab.demo.summary import conclusion, format_bytes, format_seconds, summary_rows
from thinwire.lab.demo.train import TrainConfig
from thinwire.lab.report import Report

STEPS = 5
DDP_TABLE = [
    {"name": "words.weight", "kind": "sparse rows", "bytes": 900.0, "density": 0.1, "density_after": 0.3},
    {"name": "lstm.weight", "kind": "dense", "bytes": 100.0, "density": 1.0, "density_after": 1.0},
]


def mode_result(loss: float, sent: float, table: list[dict[str, Any]]) -> ModeResult:
    ones = np.ones(STEPS)
    return ModeResult(
        loss=loss * ones,
        step_seconds=0.2 * ones,
        forward_seconds=0.05 * ones,
        backward_seconds=0.1 * ones,
        optimizer_seconds=0.05 * ones,
        comm_seconds=0.08 * ones,
        bytes_sent=sent * ones,
        bytes_by_rank=sent * np.array([0.9, 1.1]),
        parameters_bitwise_equal=True,
        table=table,
    )


def comparison(thinwire_table: list[dict[str, Any]], link_mbit: float | None = None) -> Comparison:
    modes = {"ddp": mode_result(4.0, 1000.0, DDP_TABLE), "thinwire": mode_result(4.0002, 500.0, thinwire_table)}
    return Comparison(TrainConfig(steps=STEPS), 2, 7000, 300, link_mbit, modes)


THINWIRE_TABLES = {
    "as documented": [{"name": "words.weight", "density": 0.1, "density_after": 0.3, "bytes": 400.0}],
    "totals": [{"name": "words.weight", "total_bytes": 2000.0, "bytes": 1.0}, {"name": "rest", "bytes": 100.0}],
    "other columns": [{"name": "<b>&", "colour": "green", "few": None}, {"nameless": 1}],
    "empty": [],
}


def test_json_has_the_promised_fields() -> None:
    figures = json.loads(json.dumps(comparison(THINWIRE_TABLES["as documented"]).to_json()))
    assert figures["steps"] == STEPS
    assert figures["loss_max_relative_difference"] == pytest.approx(5e-5)
    assert figures["parameters_bitwise_equal"] is True
    assert figures["bytes_per_step"]["ddp"] == 1000.0
    assert figures["bytes_per_step"]["thinwire"] == 500.0
    assert figures["bytes_per_step"]["ddp_dense"] > 1000.0
    assert figures["step_seconds"] == {"ddp": 0.2, "thinwire": 0.2}
    assert figures["comm_seconds"] == {"ddp": 0.08, "thinwire": 0.08}


def test_one_unequal_mode_makes_parameters_unequal() -> None:
    result = comparison([])
    object.__setattr__(result.modes["thinwire"], "parameters_bitwise_equal", False)
    assert result.to_json()["parameters_bitwise_equal"] is False


def test_bytes_by_parameter_add_up() -> None:
    modes = comparison(THINWIRE_TABLES["totals"]).modes
    assert modes["ddp"].bytes_by_parameter(["words.weight"]) == {"words.weight": 900.0, "all others": 100.0}
    assert modes["thinwire"].bytes_by_parameter(["words.weight"]) == {"words.weight": 400.0, "all others": 100.0}


@pytest.mark.parametrize("table", THINWIRE_TABLES.values(), ids=THINWIRE_TABLES.keys())
def test_page_takes_any_table_and_refers_to_nothing_outside(table: list[dict[str, Any]], tmp_path: Path) -> None:
    page = build_report(comparison(table))
    page.write(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("<figure") == 5
    for reference in ("<script", "<link", "<img", "src=", "url(http", "@import"):
        assert reference not in text
    assert "<b>&" not in text


def test_page_without_matplotlib_has_tables_and_says_how_to_get_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = build_report(comparison([])).html()
    assert "<svg" not in text
    assert "thinwire[plot]" in text
    assert "<table" in text


def test_page_follows_the_light_or_dark_of_the_reader() -> None:
    report = Report("A & B")
    report.picture("line", lambda axes: axes.plot([1, 2], label="<one>"))
    text = report.html()
    assert "currentColor" in text
    assert "#010203" not in text
    assert "prefers-color-scheme: dark" in text
    assert "<title>A &amp; B</title>" in text


def test_conclusion_says_that_loopback_shows_no_speed() -> None:
    assert "little or no gain" in conclusion(comparison([]))
    assert "2.00x fewer bytes" in conclusion(comparison([]))
    assert "95 Mbit/s" in conclusion(comparison([], link_mbit=95.0))


def test_summary_shows_density_before_and_after() -> None:
    rows = {row[0]: row[1:] for row in summary_rows(comparison(THINWIRE_TABLES["as documented"]))}
    assert rows["density of words.weight, after sum"] == ["10.00% -> 30.00%"] * 2
    assert rows["imbalance of bytes, max / mean rank"] == ["-", "1.100"]


def test_formulas_of_gloo() -> None:
    assert stock.ring_bytes(1000, 4) == 1500
    assert stock.ring_bytes(1000, 1) == 0
    assert stock.gathered_bytes(rows=10, row_bytes=512, world_size=4) == 3 * (72 + 10 * 520)


def test_intervals_in_flight_together_count_once() -> None:
    assert stock.covered_seconds([(0, 2), (5, 6), (1, 3), (1.5, 1.6)]) == 4
    assert stock.covered_seconds([]) == 0


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (999, "999 B"), (4_831_080, "4.83 MB"), (2e9, "2 GB")])
def test_format_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


def test_format_seconds() -> None:
    assert (format_seconds(0.1234), format_seconds(2.5)) == ("123 ms", "2.5 s")


def application() -> typer.Typer:
    app = typer.Typer()
    app.command()(demo)
    return app


def test_help_has_an_example() -> None:
    assert "thinwire demo --link 100mbit" in CliRunner().invoke(application(), ["--help"]).output


@pytest.mark.parametrize(
    "arguments",
    [["--link", "100mph"], ["--hosts", "0"], ["--steps", "0"], ["--report", "/no/such/place/report.html"]],
)
def test_bad_options_are_refused_before_any_work(arguments: list[str]) -> None:
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_steps_must_be_positive() -> None:
    with pytest.raises(ValueError, match="steps must be at least 1"):
        TrainConfig(steps=0)
