"""Plots by matplotlib, imported on use: inline SVG for a page, or a file of its own. Lines are labelled at their ends.

    def draw(axes):
        axes.plot(steps, losses, color=palette.STOCK, label="stock DDP")
        axes.set(xlabel="step", ylabel="loss (nats)")
        label_ends(axes)

    save_picture(draw, "loss.png", title="Loss against steps")

Text, axes and background of an inline SVG have the page's colours, so it suits light and dark pages.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thinwire.lab import palette
from thinwire.lab.missing import naming

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Draw = Callable[["Axes"], None]

WIDE_INCHES, NARROW_INCHES = 7.0, 3.7
"""Widths for a window and for a telephone: text keeps its size, and the plot gets narrower."""
MOST_LINES = 6
"""Largest number of lines in a plot; others belong in a table below it."""

INK = "#010203"
"""Black, and in a page its text colour: no other element of a plot has this value."""
SMALL = 9
"""Size of labels in points."""
_LINE_POINTS = 1.25 * SMALL
_LEADER = {"arrowstyle": "-", "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 2}
_STYLE = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color"), INK),
    **dict.fromkeys(("grid.color", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), SMALL),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "font.family": "sans-serif",
    "font.size": 10,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",  # text stays text: selectable, in the page's font
}


def inline_svg(draw: Draw, height_inches: float = 3.2, width_inches: float = WIDE_INCHES, prefix: str = "plot") -> str:
    """Return the picture as an ``<svg>`` in the colours of a page.

    Args:
        prefix: start of the ids in it; two SVGs of a page must not share one.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": prefix}):
        file = io.StringIO()
        _figure(draw, width_inches, height_inches).savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    for color, variable in palette.VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    # Coordinates in hundredths of a point are fine enough, and half the bytes; texts stay as they are.
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), svg)
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)  # it would apply to the whole page
    # matplotlib names fonts that the reader may not have; without a name the page's font is used.
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    # The page sets the size; the view box keeps the proportions.
    head, _, rest = svg.partition(">")
    return re.sub(r'\s(?:width|height)="[^"]*"', "", head) + ">" + rest


def save_picture(draw: Draw, path: str | Path, height_inches: float = 3.2, title: str = "") -> None:
    """Write the picture to a file of its own, on white; the ending gives the format: .png, .svg, .pdf.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: matplotlib does not know the ending.
    """
    import matplotlib

    with matplotlib.rc_context({**_STYLE, "figure.facecolor": "white"}):
        figure = _figure(draw, WIDE_INCHES, height_inches)
        if figure.legends:  # which are at the top, where the title would be
            figure.axes[0].set_title(title, loc="left", fontsize=11)
        else:
            figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        with naming(path):
            figure.savefig(path, dpi=160, metadata={"Title": f"thinwire: {title}"})  # `output` knows it by that


def is_narrow(axes: Axes) -> bool:
    """Return whether the picture is for a narrow window."""
    return _whole(axes).get_figwidth() < 5


def label_ends(axes: Axes) -> None:
    """Write the label of each line at its end, in its colour, instead of a legend.

    Call it last, when scales and limits are set. Labels are moved apart where lines end close together; a thin line
    then leads to the end.
    """
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    if not lines:
        return
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [to_axes.transform(_end(line)) for line in lines]
    for line, (x, y) in zip(lines, ends, strict=True):
        if x < 0.99:  # a line that ends earlier is led to the edge
            axes.plot([x, 1], [y, y], ":", color=line.get_color(), linewidth=0.8, transform=axes.transAxes)
            axes.plot([x], [y], "o", color=line.get_color(), markersize=3.5, transform=axes.transAxes)
    texts = [wrapped(str(line.get_label()), 13 if is_narrow(axes) else 26) for line in lines]
    labels = [
        axes.annotate(
            text,
            xy=(1, y),
            xycoords="axes fraction",
            xytext=(1.05, y),
            textcoords="axes fraction",
            color=line.get_color(),
            fontsize=SMALL,
            va="center",
            linespacing=1.0,
            annotation_clip=False,
            arrowprops={**_LEADER, "color": line.get_color()},
        )
        for text, (_, y), line in zip(texts, ends, lines, strict=True)
    ]
    figure = _whole(axes)
    figure.draw_without_rendering()  # the layout makes room for the labels, and then the height is known
    axes_points = 72 * axes.get_window_extent().height / figure.dpi
    heights = [(text.count("\n") + 1) * _LINE_POINTS / axes_points for text in texts]
    for label, y in zip(labels, spread([float(y) for _, y in ends], heights), strict=True):
        label.xyann = (1.05, y)


def _end(line: Line2D) -> tuple[float, float]:
    """Return the last point of a line that has two numbers."""
    x, y = next(point for point in reversed(np.asarray(line.get_xydata(), float)) if np.isfinite(point).all())
    return float(x), float(y)


def wrapped(label: str, width: int) -> str:
    """Break a long label, also behind a colon or comma.

    >>> wrapped("top_k:density=0.01", 13)
    'top_k:\\ndensity=0.01'
    """
    if len(label) <= width:
        return label
    return "\n".join(textwrap.wrap(re.sub(r"([:,])(?=\S)", r"\1 ", label), width, break_on_hyphens=False))


def spread(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Return middles of labels near the ``wanted`` ones, in the same order: none overlaps another or is below 0.

    >>> spread([0.5, 0.5], [0.1, 0.1])
    [0.45, 0.55]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    clusters: list[tuple[float, float, list[int]]] = []  # middle, height, members from below
    for i in order:
        middle, height, members = wanted[i], heights[i], [i]
        while clusters and clusters[-1][0] + clusters[-1][1] / 2 > middle - height / 2 - 1e-9:
            below, its_height, before = clusters.pop()
            count = len(before) + len(members)
            middle = (below * len(before) + middle * len(members)) / count
            height, members = height + its_height, before + members
        clusters.append((middle, height, members))
    centers, bottom = [0.0] * len(wanted), 0.0
    for middle, height, members in clusters:
        bottom = max(bottom, middle - height / 2)
        for i in members:
            centers[i] = round(bottom + heights[i] / 2, 6)
            bottom += heights[i]
    return centers


def log_ticks(axes: Axes) -> None:
    """Label a vertical axis of powers also between them: 0.1, 0.2, 0.5, 1; call it when all lines are drawn."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    steps = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0) if decades < 0.7 else (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def mark(axes: Axes, x: float, text: str, row: int = 0) -> None:
    """Draw a dotted vertical line with a text above the plot; ``row`` counts upward where two texts could meet."""
    axes.axvline(x, color=INK, linewidth=1.0, linestyle=":")
    share = float((axes.transData + axes.transAxes.inverted()).transform((x, axes.get_ylim()[0]))[0])
    axes.annotate(
        text,
        (x, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3 + row * _LINE_POINTS),
        textcoords="offset points",
        ha="left" if share < 0.3 else "right" if share > 0.7 else "center",
        va="bottom",
        fontsize=SMALL,
    )


def key(axes: Axes, columns: int) -> None:
    """Put a legend above a plot of bars, whose parts are too small for labels of their own."""
    _whole(axes).legend(loc="outside upper left", ncols=min(columns, 2) if is_narrow(axes) else columns)


def _whole(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def _figure(draw: Draw, width_inches: float, height_inches: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    draw(figure.add_subplot())
    return figure
