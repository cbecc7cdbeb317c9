"""Pages and plots of reports: their parts have names, say how they were made, and their labels do not overlap."""

from __future__ import annotations

import re
import sys

import pytest

from pages import measured, train_report
from tests.lab.origin import ORIGIN
from thinwire.lab.report import Origin, Report


def test_a_page_says_how_it_was_made() -> None:
    page = Report("Title", facts=[("Link", "955 Mbit/s, measured")], origin=ORIGIN).html()
    footer = page.partition("<footer")[2]
    for text in (ORIGIN.command, ORIGIN.versions, ORIGIN.date, ORIGIN.machine, "955 Mbit/s, measured"):
        assert text in footer


def test_the_origin_is_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/thinwire/__main__.py", "doctor", "my train.py"])
    origin = Origin.of_this_process()
    assert origin.command == "thinwire doctor 'my train.py'"
    assert "torch" in origin.versions
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", origin.date)
    assert " cores, " in origin.machine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "choice", "kind"),
    [
        ("power_sgd", None, "lossy"),
        ("exact", None, "exact"),
        ("plan", "exact, cupcake", "exact"),
        ("plan", "top_k:density=0.01 by all_gather", "lossy"),
    ],
)
def test_a_benchmark_says_whether_its_best_method_is_lossy(method: str, choice: str | None, kind: str) -> None:
    result = measured("train-lstm-8x100mbit")
    result["rows"] = [row for row in result["rows"] if row["method"] in ("ddp", "power_sgd")]
    result["rows"][1] |= {"method": method, "plan": choice}
    assert f'<section class="hero {kind}"' in train_report(result).html()


def test_every_part_has_a_name_and_is_escaped() -> None:
    report = Report("A & B", "<i>", origin=ORIGIN)
    report.hero("2.9x <faster>", "than stock & DDP", lossy=True)
    report.figures([("bytes", "<1 MB")])
    report.code('attach(model, plan=Plan.load("<p>"))', "Paste & go")
    report.table("Ways <b>", ["way", "seconds"], [["<b>exact", "1.2 s"]])
    report.items("Doubts", ["a < b"])
    report.items("No doubts", [])
    page = report.html()
    body = page.partition("<body>")[2]
    for unescaped in ("<i>", "<faster>", "<1 MB", '<p>"', "<b>", "a < b"):
        assert unescaped not in body
    assert 'caption class="unseen">Ways &lt;b&gt;</caption>' in page
    assert '<th scope="row">&lt;b&gt;exact</th>' in page
    assert "No doubts" not in page
    for name in re.findall(r'aria-labelledby="(\w+)"', page):
        assert page.count(f'id="{name}"') == 1
    assert not re.search(r"<script|<link|<img|src=|url\(http|@import", page)
