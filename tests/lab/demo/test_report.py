"""The page and the JSON of the demo."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.lab.demo.results import SECONDS, STEPS, comparison
from thinwire.lab.demo.report import build_report, write_picture


def test_json_has_the_promised_fields() -> None:
    figures = json.loads(json.dumps(comparison(loss=4.0002).to_json()))
    assert figures["steps"] == STEPS
    assert figures["link_mbit"] == 955.0
    assert figures["loss_max_relative_difference"] == pytest.approx(5e-5)
    assert figures["parameters_bitwise_equal"] is True
    assert figures["bytes_per_step"] == {"ddp": 1000.0, "thinwire": 500.0}
    assert figures["step_seconds"] == {"ddp": 2.0, "thinwire": 0.5}
    assert figures["comm_seconds"] == {"ddp": 1.0, "thinwire": 0.25}
    assert [entry["name"] for entry in figures["variants"]] == ["ddp", "thinwire", "ddp_sparse", "thinwire_sparse"]
    for entry in figures["variants"]:
        assert entry["step_seconds"] == SECONDS[entry["name"]]
        assert {"bytes_per_step", "loss_last", "step_seconds_p10", "step_seconds_p90"} <= entry.keys()


def test_a_run_of_warm_up_only_has_its_last_step() -> None:
    one = comparison()
    for variant in one.results.values():
        variant.columns.update({name: column[:2] for name, column in variant.columns.items()})
    assert one.results["ddp"].step_seconds == 9.0
    assert one.measured_steps == 1


@pytest.mark.slow
@pytest.mark.parametrize("links", [(955.0,), (None,), (95.0, 955.0, 9400.0)], ids=["link", "loopback", "links"])
def test_page_refers_to_nothing_outside(links: tuple[float | None, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    build_report([comparison(link) for link in links]).write(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("<figure") == (3 if len(links) > 1 else 2)
    for reference in ("<script", "<link", "<img", "src=", "url(http", "@import"):
        assert reference not in text
    assert "4.0x faster than this model under DDP" in text
    assert "thinwire doctor train.py" in text


def test_page_without_matplotlib_has_tables_and_says_how_to_get_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = build_report([comparison()]).html()
    assert "<svg" not in text
    assert ".[plot]" in text
    assert "<table" in text


@pytest.mark.parametrize("links", [(955.0,), (95.0, 955.0)])
def test_picture_is_a_file_of_its_own(links: tuple[float, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_picture([comparison(link) for link in links], tmp_path / "demo.svg")
    assert "stock DDP" in (tmp_path / "demo.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fastest", "slowest", "expected"),
    [
        (0.14, 6.55, ["0.2", "0.5", "1", "2", "5"]),
        (0.15, 0.4, ["0.15", "0.2", "0.3", "0.4"]),
        (0.02, 90.0, ["0.1", "1", "10"]),
    ],
)
def test_the_axis_of_step_times_has_readable_labels(
    fastest: float, slowest: float, expected: list[str], tmp_path: Path
) -> None:
    """The only label was 1, where times ran from 0.14 to 6.55 s."""
    pytest.importorskip("matplotlib")
    points = [comparison(95.0, ddp=slowest), comparison(955.0, thinwire=fastest, ddp_sparse=fastest)]
    for one in points:
        for name in ("thinwire", "ddp_sparse", "thinwire_sparse"):
            one.results[name].columns["step_seconds"][:] = fastest
    points[1].results["ddp"].columns["step_seconds"][:] = slowest
    write_picture(points, tmp_path / "demo.svg")
    labels = set(re.findall(r"<text[^>]*>([\d.]+)</text>", (tmp_path / "demo.svg").read_text()))
    assert set(expected) <= labels
    assert not {label for label in labels if 0 < float(label) < 0.9 * fastest or 1.1 * slowest < float(label) < 95}
