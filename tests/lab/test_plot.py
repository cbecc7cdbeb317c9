"""Plots of a page."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pages import PAGES
from tests.lab.origin import ORIGIN
from thinwire.lab import palette
from thinwire.lab.plot import MOST_LINES, label_ends, spread
from thinwire.lab.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
