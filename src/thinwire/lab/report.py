"""Self-contained HTML reports: text, figures of merit, tables and inline SVG pictures in one file.

    report = Report("A title", "The conditions in one line")
    report.figures([("bytes per step", "1.2 MB")])
    report.table("Parameters", ["name", "bytes"], [["table.weight", "1.2 MB"]])
    report.picture("Loss", lambda axes: axes.plot(losses), "One line per run.")
    report.write("report.html")

Pictures need matplotlib, imported on use; without it the report has the tables and says how to get pictures.
They carry no colour for text, axes and background, so they read well on light and on dark pages.
"""

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[["Axes"], None]

PALETTE = ("#d9772b", "#2a9d8f", "#7d86a8", "#c4578c", "#b8a02e", "#5b8fd6")
"""Series colours with enough contrast on white and on near black."""

_INK = "#010203"  # stands for the page's text colour until the SVG is embedded
_STYLE = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "grid.color": _INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",  # text stays text: selectable, in the page's font
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}

_NO_MATPLOTLIB = "Pictures need matplotlib: <code>pip install 'thinwire[plot]'</code>, then run the command again."


class Report:
    """A page whose parts are kept in the order in which they were added. All text is escaped."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._subtitle = subtitle
        self._parts: list[str] = []
        self._pictures = 0

    def text(self, paragraph: str) -> None:
        """Add a paragraph of plain text."""
        self._parts.append(f"<p>{escape(paragraph)}</p>")

    def figures(self, values: Sequence[tuple[str, str]]) -> None:
        """Add figures of merit in large print: (what, value)."""
        cards = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for what, value in values)
        self._parts.append(f'<section class="figures">{cards}</section>')

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
        """Add a table; the first column is a heading, the others are aligned right."""
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        self._parts.append(
            f"<h2>{escape(title)}</h2>{_note(note)}"
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def picture(self, title: str, draw: Draw, note: str = "", height_inches: float = 3.2) -> None:
        """Add a picture that ``draw`` paints on empty axes, 7 inches wide on a page that scales it."""
        try:
            svg = inline_svg(draw, height_inches, salt=f"picture-{self._pictures}")
        except ImportError:
            svg = f"<p>{_NO_MATPLOTLIB}</p>"
        self._pictures += 1
        self._parts.append(f"<figure><h2>{escape(title)}</h2>{_note(note)}{svg}</figure>")

    def html(self) -> str:
        """Return the whole page."""
        return _PAGE.format(
            title=escape(self._title),
            subtitle=escape(self._subtitle),
            style=_CSS,
            body="\n".join(self._parts),
        )

    def write(self, path: str | Path) -> None:
        """Write the page as UTF-8."""
        Path(path).write_text(self.html(), encoding="utf-8")


def _note(note: str) -> str:
    return f'<p class="note">{escape(note)}</p>' if note else ""


def inline_svg(draw: Draw, height_inches: float = 3.2, salt: str = "picture") -> str:
    """Return the picture as an ``<svg>`` in the page's own text colour. Raises ImportError without matplotlib."""
    import matplotlib

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}):
        file = io.StringIO()
        _figure(draw, height_inches).savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # matplotlib names fonts that the reader may not have; without a name the page's font is used.
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    # The page sets the size; the view box keeps the proportions.
    return re.sub(r'<svg ([^>]*?)\bheight="[^"]*"|\bwidth="[\d.]+pt"', _without_size, svg, count=2)


def save_picture(draw: Draw, path: str | Path, height_inches: float = 3.2, title: str = "") -> None:
    """Write the picture to a file of its own, on white; the ending gives the format: .png, .svg, .pdf.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: matplotlib does not know the ending.
    """
    import matplotlib

    colors = {name: "black" if value == _INK else value for name, value in _STYLE.items()}
    with matplotlib.rc_context({**colors, "figure.facecolor": "white"}):
        figure = _figure(draw, height_inches)
        figure.axes[0].set_title(title, loc="left", fontsize=11)
        figure.savefig(path, dpi=160)


def _without_size(match: re.Match[str]) -> str:
    return f"<svg {match[1]}" if match[1] is not None else ""


def _figure(draw: Draw, height_inches: float) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, height_inches), layout="constrained")
    draw(figure.add_subplot())
    return figure


_CSS = """
:root { color-scheme: light dark;
  --ink: #1d2330; --faint: #667085; --page: #fff; --card: #f4f6f9; --line: #dde2ea }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --faint: #98a2b3; --page: #14171c; --card: #1e232b; --line: #303744 }
}
body { background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  margin: 2.5rem auto; max-width: 62rem; padding: 0 1.25rem }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 }
h2 { font-size: 1.05rem; margin: 2.25rem 0 .25rem }
p { max-width: 46rem }
.subtitle, .note { color: var(--faint); margin: .25rem 0 .75rem }
.note { font-size: .875rem }
.figures { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr));
  margin: 1.5rem 0 }
.figures div { background: var(--card); border-radius: .5rem; padding: .8rem 1rem }
.figures b { display: block; font-size: 1.45rem; font-variant-numeric: tabular-nums }
.figures span { color: var(--faint); font-size: .85rem }
figure { margin: 0 }
svg { display: block; height: auto; max-width: 48rem; width: 100% }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; width: 100% }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .75rem;
  text-align: right; white-space: nowrap }
th:first-child, td:first-child { padding-left: 0; text-align: left }
th { color: var(--faint); font-weight: 500 }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p class="subtitle">{subtitle}</p>
{body}
</body>
</html>
"""
