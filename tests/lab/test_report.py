"""Pages and plots of reports: their parts have names, say how they were made, and their labels do not overlap."""

from __future__ import annotations

import itertools
import re
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pages import PAGES, measured, train_report
from thinwire.lab import palette
from thinwire.lab.plot import MOST_LINES, label_ends, spread
from thinwire.lab.report import Origin, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORIGIN = Origin("thinwire demo --seed 1", "thinwire 1.2.3, torch 2.9.0", "2026-01-02 03:04 UTC", "a machine, 2 cores")


def luminance(color: str) -> float:
    """Relative luminance by WCAG 2."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("color", palette.VARIABLES, ids=palette.VARIABLES.values())
def test_labels_in_every_colour_are_legible_on_white_and_on_dark(color: str) -> None:
    assert 1.05 / (luminance(color) + 0.05) >= 4.5
    assert (luminance(palette.DARK[color]) + 0.05) / (luminance("#14171c") + 0.05) >= 4.5


def test_no_two_meanings_share_a_colour() -> None:
    names = [name for name in vars(palette) if name.isupper() and isinstance(getattr(palette, name), str)]
    assert len({getattr(palette, name) for name in names}) == len(names) == len(palette.VARIABLES)
    assert len(set(palette.DARK.values())) == len(set(palette.VARIABLES.values())) == len(names)


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
@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_whole_and_shows_numbers_where_it_promises_them(name: str) -> None:
    pytest.importorskip("matplotlib")
    page = PAGES[name]().html()
    assert not re.search(r"<script|<link|<img|src=|url\(http|@import", page)
    assert "How this was made" in page
    assert page.count('class="hero') == 1
    plots = re.findall(r'role="img" aria-label="([^"]*)"><svg.*?</svg>', page, re.DOTALL)
    assert plots
    assert all(len(label.partition(". ")[2]) > 20 for label in plots), "a plot without a description"
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        labels = [
            text for text in re.findall(r'<g id="[^"]*-text_\d+">.*?</g>', svg, re.DOTALL) if "fill: var(" in text
        ]
        assert len(labels) <= MOST_LINES
    tiles = re.findall(r"<dd>(.*?)</dd>", "".join(re.findall(r'<dl class="figures".*?</dl>', page)))
    assert all(re.search(r"\d", tile) for tile in tiles), "a tile without a number"
    result = re.search(r'class="result">([^<]*)', page)
    assert result is not None
    assert "never" not in result[1]


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


def test_a_plot_has_a_description_no_shared_ids_and_the_colours_of_the_page() -> None:
    pytest.importorskip("matplotlib")

    def draw(axes: Axes) -> None:
        axes.plot([1, 2], [1, 2], color=palette.STOCK, label="<one>")
        axes.set(xlim=(1, 2))
        label_ends(axes)

    report = Report("Title", origin=ORIGIN)
    for title in ("First", 'Second "plot"'):
        report.picture(title, draw, "A note.", "A line that rises.")
    page = report.html()
    assert page.count("<figure") == 2
    assert page.count("<svg") == 4, "for wide windows and for narrow ones"
    assert page.count('role="img" aria-label="First. A line that rises."') == 2
    assert page.count('aria-label="Second &quot;plot&quot;. A line that rises."') == 2
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert page.count("&lt;one&gt;") == 4
    assert "fill: var(--stock)" in page
    assert palette.STOCK not in page.partition("<body>")[2]
    assert "currentColor" in page
    assert "#010203" not in page


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 0.2)), min_size=1, max_size=6))
def test_labels_are_moved_apart_and_no_further(labels: list[tuple[float, float]]) -> None:
    wanted, heights = zip(*labels, strict=True)
    middles = spread(wanted, heights)
    assert all(middle >= height / 2 - 1e-5 for middle, height in zip(middles, heights, strict=True))
    order = sorted(range(len(labels)), key=lambda i: wanted[i])
    for below, above in itertools.pairwise(order):
        gap = (heights[below] + heights[above]) / 2
        assert middles[above] - middles[below] >= gap - 1e-5
    assert all(abs(middle - place) <= sum(heights) for middle, place in zip(middles, wanted, strict=True))
    if all(wanted[above] - wanted[below] > 0.21 for below, above in itertools.pairwise(order)):
        at_least = [max(place, height / 2) for place, height in labels]
        assert middles == pytest.approx(at_least, abs=1e-5)
