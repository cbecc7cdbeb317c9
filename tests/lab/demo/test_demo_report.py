"""What the demo reports: the fixed JSON fields, honest sentences, a page that needs nothing but itself."""

import json
import platform
import re
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import thinwire
from thinwire.comm.process_group import sparse_all_reduce_bytes
from thinwire.lab.cli import demo as command
from thinwire.lab.cli.main import app
from thinwire.lab.demo import stock
from thinwire.lab.demo.compare import Comparison, VariantResult
from thinwire.lab.demo.corpus import Corpus
from thinwire.lab.demo.report import build_report, write_picture
from thinwire.lab.demo.summary import (
    NEXT,
    advice,
    conditions,
    format_bytes,
    format_factor,
    format_seconds,
    link_rows,
    losing_points,
    result,
)
from thinwire.lab.demo.train import LEAST_MEASURED, LEAST_STEPS, MOST_SECONDS, MOST_STEPS, VARIANTS, TrainConfig
from thinwire.lab.testbed import network
from thinwire.lab.testbed.network import Link, NetAdminError

STEPS = 5
SECONDS = {"ddp": 2.0, "thinwire": 0.5, "ddp_sparse": 0.2, "thinwire_sparse": 0.1}


def comparison(link_mbit: float | None = 955.0, loss: float = 4.0, **seconds: float) -> Comparison:
    """Measurements as if of two ranks; steps of warm-up take 9 s, and ``loss`` is that of thinwire."""
    results = {}
    for variant in VARIANTS:
        step = np.full(STEPS, (SECONDS | seconds)[variant.name])
        step[:2] = 9.0
        columns = {
            "loss": np.full(STEPS, loss if variant.name == "thinwire" else 4.0),
            "step_seconds": step,
            "comm_seconds": step / 2,
            "bytes_sent": np.full(STEPS, 500.0 if variant.attached else 1000.0),
        }
        table = [{"name": "words_in.weight", "scheme": "zen"}] if variant.attached else []
        results[variant.name] = VariantResult(variant, columns, True, table)
    return Comparison(TrainConfig(), 2, 7000, 300, link_mbit, results)


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


def test_one_unequal_variant_makes_parameters_unequal() -> None:
    one = comparison()
    object.__setattr__(one.results["thinwire_sparse"], "parameters_bitwise_equal", False)
    assert one.to_json()["parameters_bitwise_equal"] is False
    assert not one.is_exact
    assert "the losses differ: please report this" in result(one)


def test_a_run_of_warm_up_only_has_its_last_step() -> None:
    one = comparison()
    for variant in one.results.values():
        variant.columns.update({name: column[:2] for name, column in variant.columns.items()})
    assert one.results["ddp"].step_seconds == 9.0
    assert one.measured_steps == 1


@pytest.mark.parametrize(
    ("seconds", "link", "how", "where"),
    [
        (0.5, 955.0, "4.0x faster than", ""),
        (1.6, 955.0, "1.25x faster than", ""),
        (2.05, 955.0, "As fast as", ""),
        (3.0, None, "1.50x slower than", ", on loopback, where bytes cost next to nothing"),
    ],
)
def test_the_result_is_one_true_sentence(seconds: float, link: float | None, how: str, where: str) -> None:
    sentence = f"{how} this model under DDP, by one line: thinwire.attach(model), with the same losses{where}."
    assert result(comparison(link, thinwire=seconds)) == sentence


@pytest.mark.parametrize(
    ("sparse", "both", "before", "then"),
    [
        (0.2, 0.1, "If you can switch to sparse=True, do that first: stock DDP then", "2.0x faster than that"),
        (0.2, 0.2, "If you can switch to sparse=True, do that first: stock DDP then", "as fast"),
        (0.2, 0.3, "If you can switch to sparse=True, do that first: stock DDP then", "1.50x slower than that"),
        (0.8, 0.4, "With sparse=True, stock DDP", "2.0x faster than that"),
    ],
)
def test_the_advice_on_sparse_gradients_is_honest(sparse: float, both: float, before: str, then: str) -> None:
    sentence = f"{before} takes {format_seconds(sparse)} a step, and thinwire is {then}."
    assert advice(comparison(ddp_sparse=sparse, thinwire_sparse=both)) == sentence


def test_losing_points_are_named_in_words() -> None:
    slow, fast = comparison(95.0), comparison(9400.0, thinwire=2.4, thinwire_sparse=0.3)
    assert losing_points([slow, fast]) == [
        "At 9,400 Mbit/s, thinwire is 1.20x slower than stock DDP.",
        "At 9,400 Mbit/s, thinwire, sparse=True is 1.50x slower than stock DDP, sparse=True.",
    ]
    assert losing_points([slow]) == ["On none of these links is thinwire slower than stock DDP by more than 5%."]
    assert link_rows([slow, fast])[-2:] == [
        ["thinwire: speed-up", "4.0x", "0.83x"],
        ["thinwire, sparse=True: speed-up", "2.0x", "0.67x"],
    ]


def test_conditions_name_the_measured_link_and_the_steps_that_count() -> None:
    assert "links of 955 Mbit/s measured" in conditions(comparison())
    assert "loopback" in conditions(comparison(None))
    assert "5 steps of each in turn, medians of the last 3" in conditions(comparison())
    assert "two tables of 120,000 rows of 128" in conditions(comparison())


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


def test_formulas_of_gloo() -> None:
    assert stock.ring_bytes(1000, 4) == 1500
    assert stock.ring_bytes(1000, 1) == 0
    assert sparse_all_reduce_bytes([10] * 4, rank=0, row_bytes=512) == 3 * (72 + 10 * 520)


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (999, "999 B"), (4_831_080, "4.83 MB"), (2e9, "2 GB")])
def test_format_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


def test_format_seconds_and_factors() -> None:
    assert (format_seconds(0.1234), format_seconds(2.5)) == ("123 ms", "2.5 s")
    assert (format_factor(5.267), format_factor(1.234)) == ("5.3x", "1.23x")


def test_steps_follow_from_the_time_unless_they_are_given() -> None:
    timed = TrainConfig(seconds=40.0)
    assert timed.steps_in_all(1, 0.0) == 2 + LEAST_MEASURED, "of warm-up, and measured"
    assert timed.steps_in_all(3, 4.0) == 2 + 10, "the time begins with the third step"
    assert timed.steps_in_all(12, 25.0) == 2 + 16
    assert timed.steps_in_all(18, 40.5) == 18
    assert timed.steps_in_all(MOST_STEPS, 10.0) == MOST_STEPS


def test_a_busy_machine_gets_more_time_and_not_fewer_steps() -> None:
    """At a load of 60 on 2 cores it once printed 1.16x, from two steps."""
    timed = TrainConfig(seconds=40.0)
    assert timed.steps_in_all(4, 60.0) == 2 + LEAST_MEASURED
    assert timed.steps_in_all(2 + LEAST_MEASURED, 100.0) == 2 + LEAST_MEASURED
    assert timed.steps_in_all(4, MOST_SECONDS) == LEAST_STEPS
    assert timed.steps_in_all(5, MOST_SECONDS) == 5


def test_step_counts_that_are_given_are_kept() -> None:
    assert TrainConfig(steps=7).steps_in_all(3, 1e9) == 7
    with pytest.raises(ValueError, match="steps must be at least 1"):
        TrainConfig(steps=0)


@pytest.mark.parametrize(
    ("load", "spread", "says"),
    [(0.4, 1.0, ""), (60.0, 1.0, "busy (60 other processes on 2 cores, "), (0.4, 1.5, "busy (steps of stock")],
)
def test_the_result_says_that_the_machine_is_busy(load: float, spread: float, says: str) -> None:
    one = replace(comparison(), load=load, cores=2)
    one.results["ddp"].columns["step_seconds"][-1:] *= spread
    assert one.is_busy == one.to_json()["machine_is_busy"] == bool(says)
    assert ("these times mean little" in result(one)) == bool(says)
    assert says in result(one)
    assert result(one).split(", by one line: ")[0] == "4.0x faster than this model under DDP"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": "300"})


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[Link | None]:
    """Links that the command compares, instead of training."""
    seen: list[Link | None] = []

    def compare(
        _corpus: Corpus, _config: TrainConfig, _hosts: int, link: Link | None, on_step: Any, on_stage: Any
    ) -> Comparison:
        seen.append(link)
        on_step(1, 2, 4.25)
        return comparison(None if link is None or link.mbit is None else link.mbit)

    monkeypatch.setattr("thinwire.lab.demo.compare.compare", compare)
    monkeypatch.setattr("thinwire.lab.demo.corpus.load", lambda progress: Corpus(np.zeros(1, np.int32), ("a",)))
    return seen


def allow_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "require_net_admin", lambda: None)


def refuse_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NetAdminError("no") from PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(network, "require_net_admin", refuse)


@pytest.mark.slow
def test_default_is_a_link_of_one_gigabit(
    links: list[Link | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("pyroute2")
    allow_hosts(monkeypatch)
    ran = run("--report", str(tmp_path / "r.html"), "--workers", "2")
    assert ran.exit_code == 0, ran.output
    assert links == [Link(1000.0)]
    assert "4.0x faster than this model under DDP" in ran.output
    assert ran.output.rstrip().endswith(NEXT)


@pytest.mark.slow
def test_loopback_with_the_reason_where_hosts_cannot_be_emulated(
    links: list[Link | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuse_hosts(monkeypatch)
    ran = run("--report", str(tmp_path / "r.html"))
    assert ran.exit_code == 0, ran.output
    assert links == [None]
    assert ran.output.count("bytes cost next to nothing; run this as root, or in a container with CAP_NET_ADMIN") == 1
    assert "Operation not permitted" in ran.output


def test_a_named_link_that_cannot_be_emulated_is_an_error(
    links: list[Link | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuse_hosts(monkeypatch)
    ran = run("--link", "1gbit", "--report", str(tmp_path / "r.html"))
    assert ran.exit_code == 1
    assert ran.output == "error: no\n"
    assert links == []


def test_without_pyroute2_the_default_is_loopback_and_a_named_link_an_error(
    links: list[Link | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    ran = run("--report", str(tmp_path / "r.html"))
    assert links == [None]
    assert "pip install '.[testbed]'" in ran.output
    ran = run("--link", "1gbit", "--report", str(tmp_path / "r.html"))
    assert ran.exit_code == 1
    assert links == [None]
    assert "pip install '.[testbed]'" in ran.output


def test_links_are_a_list_in_the_json(
    links: list[Link | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allow_hosts(monkeypatch)
    file = tmp_path / "out.json"
    ran = run("--links", "100mbit,1gbit", "--report", str(tmp_path / "r.html"), "--json", str(file))
    assert ran.exit_code == 0, ran.output
    assert links == [Link(100.0), Link(1000.0)]
    figures = json.loads(file.read_text())
    assert [one["link_mbit"] for one in figures["links"]] == [100.0, 1000.0]
    assert {"steps", "variants", "step_seconds"} <= figures["links"][1].keys()
    assert figures["link_mbit"] == 1000.0, "the link nearest to 1 Gbit/s, as without --links"
    assert "On none of these links is thinwire slower" in ran.output


@pytest.mark.slow
def test_the_json_names_versions_date_machine_and_command(
    links: list[Link | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allow_hosts(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["/bin/thinwire", "demo", "--link", "1gbit"])
    file = tmp_path / "out.json"
    ran = run("--link", "1gbit", "--report", str(tmp_path / "r.html"), "--json", str(file))
    assert ran.exit_code == 0, ran.output
    environment = json.loads(file.read_text())["environment"]
    assert {"torch", "system", "machine"} <= environment.keys()
    assert environment["thinwire"] == thinwire.__version__
    assert environment["python"] == platform.python_version()
    assert datetime.fromisoformat(environment["date"]).tzinfo is not None
    assert environment["links_nominal_mbit"] == [1000.0]
    assert environment["command"] == "thinwire demo --link 1gbit"


def test_help_has_an_example() -> None:
    assert "thinwire demo --links 100mbit,1gbit,10gbit" in run("--help").output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--link", "100mph"],
        ["--links", "100mbit,none"],
        ["--links", "100mbit", "--link", "1gbit"],
        ["--hosts", "0"],
        ["--steps", "0"],
        ["--report", "/no/such/folder/report.html"],
        ["--picture", "/no/such/folder/demo.svg"],
    ],
)
def test_bad_options_are_refused_before_any_work(arguments: list[str], links: list[Link | None]) -> None:
    ran = run(*arguments)
    assert ran.exit_code == 2
    assert arguments[0] in re.sub(r"\x1b\[[0-9;]*m", "", ran.output)
    assert links == []
