"""Every page of a report in a real browser: wide and narrow, light and dark, and printed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pages import PAGES
from tests.browser import chromium
from thinwire.lab.plot import MOST_LINES
from thinwire.lab.report import Report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(chromium.find() is None, reason="no chromium: apt-get install chromium"),
]
pytest.importorskip("matplotlib")

FIND = """(() => {
  const shown = element => element.getClientRects().length > 0
  const rect = element => element.getBoundingClientRect()
  const found = {overlaps: [], outside: [], unnamed: [], lines: [], cut: []}
  for (const svg of [...document.querySelectorAll("svg")].filter(shown)) {
    const holder = svg.closest("[role=img]")
    const name = holder && holder.getAttribute("aria-label") || ""
    if (name.length < 20) found.unnamed.push("svg: " + name)
    const texts = [...svg.querySelectorAll("text")].filter(text => text.textContent.trim())
    const page = rect(document.documentElement)
    texts.forEach((text, i) => {
      const a = rect(text)
      if (a.left < -0.5 || a.right > page.width + 0.5) found.outside.push(text.textContent)
      for (const other of texts.slice(i + 1)) {
        const b = rect(other)
        const width = Math.min(a.right, b.right) - Math.max(a.left, b.left)
        const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)
        // The box of a line of text has some empty room above and below the letters.
        if (width > 0.5 && height > 0.35 * Math.min(a.height, b.height))
          found.overlaps.push(text.textContent + " / " + other.textContent)
      }
    })
    const labels = [...svg.querySelectorAll("g[id*='-text_']")]
    found.lines.push(labels.filter(label => /fill: var/.test(label.innerHTML)).length)
  }
  for (const figure of document.querySelectorAll("figure, table, section, [role=region], footer, dl.figures"))
    if (!figure.getAttribute("aria-label") && !figure.getAttribute("aria-labelledby")
        && !figure.querySelector("caption, h2")) found.unnamed.push(figure.outerHTML.slice(0, 80))
  for (const image of document.querySelectorAll("img")) if (!image.alt) found.unnamed.push(image.src)
  for (const box of document.querySelectorAll("h1, h2, p, li, dt, dd"))
    if (shown(box) && box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).display !== "inline")
      found.cut.push(box.textContent.slice(0, 60))
  found.overflow = document.documentElement.scrollWidth - innerWidth
  return found
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Chromium]:
    path = chromium.find()
    assert path is not None
    with chromium.Chromium(path) as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest, folder: Path) -> Path:
    path = folder / f"{request.param.replace(', ', '-').replace(' ', '-')}.html"
    PAGES[request.param]().write(path)
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_page_fits_the_window_and_its_labels_are_apart(
    page: Path, browser: chromium.Chromium, width: int, dark: bool
) -> None:
    browser.open(page, width, dark=dark)
    browser.screenshot(page.with_name(f"{page.stem}-{width}-{'dark' if dark else 'light'}.png"))
    found = browser.evaluate(FIND)
    assert found["overflow"] <= 0, "the page scrolls sideways"
    assert found["overlaps"] == []
    assert found["outside"] == []
    assert found["unnamed"] == []
    assert found["cut"] == []
    assert found["lines"], "the page has no plot"
    assert max(found["lines"]) <= MOST_LINES
    assert browser.complaints == []
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") != dark


def test_a_page_prints_on_white_with_the_wide_plots(page: Path, browser: chromium.Chromium) -> None:
    browser.open(page, 720, dark=True, media="print")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate("document.querySelectorAll('.wide')[0].getClientRects().length") == 1
    assert browser.evaluate("document.querySelectorAll('.narrow')[0].getClientRects().length") == 0
    assert browser.pdf().startswith(b"%PDF")


def test_what_is_to_be_pasted_can_be_copied(browser: chromium.Chromium, folder: Path) -> None:
    path = folder / "code.html"
    report = Report("Title")
    report.code('import thinwire\nthinwire.attach(model, dense="<p>")', "Add:")
    report.write(path)
    browser.open(path, 1280)
    browser.evaluate("navigator.clipboard.writeText = text => { document.title = text; return Promise.resolve() }")
    browser.evaluate("document.querySelector('button').click()")
    assert browser.evaluate("document.title") == 'import thinwire thinwire.attach(model, dense="<p>")'
    assert browser.complaints == []
