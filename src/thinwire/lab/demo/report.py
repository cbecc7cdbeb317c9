"""Report of the comparison as a page, and its plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thinwire.lab import palette
from thinwire.lab.demo import summary
from thinwire.lab.demo.compare import Comparison
from thinwire.lab.demo.train import VARIANTS
from thinwire.lab.plot import INK, label_ends, log_ticks, save_picture
from thinwire.lab.report import Origin, Report
from thinwire.lab.report import environment as versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOOKS = {
    "ddp": (palette.STOCK, "-"),
    "thinwire": (palette.THINWIRE, "-"),
    "ddp_sparse": (palette.TORCH, "-"),
    "thinwire_sparse": (palette.THINWIRE, palette.DASHES[1]),
}
_STEP_TITLE = "Step time"
_CURVE_TITLE = "Step time against the link"


def build_report(comparisons: Sequence[Comparison]) -> Report:
    """Build the page of one comparison, or of one for each link."""
    first = summary.headline(comparisons)
    links = ", ".join(summary.format_link(one.link_mbit) for one in comparisons)
    facts = [("Link", links if first.link_mbit is None else f"{links}, measured")]
    report = Report("One language model, trained in four ways", summary.conditions(first), facts)
    how, what = summary.result(first).split(", by one line: ")
    report.hero(how, f"By one line: {what}")
    report.text(summary.advice(first))
    if len(comparisons) > 1:
        columns = ["", *(summary.format_link(one.link_mbit) for one in comparisons)]
        report.picture(
            _CURVE_TITLE, lambda axes: _draw_curve(axes, comparisons), " ".join(summary.losing_points(comparisons))
        )
        report.table("Step on each link", columns, summary.link_rows(comparisons))
    report.picture(
        _STEP_TITLE,
        lambda axes: _draw_steps(axes, first),
        "Medians; thin lines go from the 10th to the 90th percentile.",
    )
    report.picture("Loss", lambda axes: _draw_losses(axes, first), summary.exactness(first))
    note = "Stock DDP's bytes follow from the formulas of Gloo's collectives and the rows of every step."
    report.table("All figures", summary.COLUMNS, summary.rows(first), f"{note} thinwire's are counted.")
    what, command = summary.NEXT.split(": ")
    report.code(command, what)
    return report


def write_picture(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write the plot of the step times: bars of the variants, or curves if there are several links."""
    first = summary.headline(comparisons)
    if len(comparisons) > 1:
        save_picture(lambda axes: _draw_curve(axes, comparisons), path, title=_CURVE_TITLE)
    else:
        title = f"Step time, {first.hosts} hosts, {summary.format_link(first.link_mbit)}"
        save_picture(lambda axes: _draw_steps(axes, first), path, height_inches=2.4, title=title)


def environment() -> dict[str, str]:
    """Return versions, date, machine and command, as entries of the JSON."""
    origin = Origin.of_this_process()
    return {**versions(), "machine": origin.machine, "command": origin.command}


def _draw_steps(axes: "Axes", comparison: Comparison) -> None:
    results = list(comparison.results.values())
    seconds = np.array([one.step_seconds for one in results])
    low, high = np.array([one.step_seconds_range for one in results]).T
    spread = np.maximum(0.0, [seconds - low, high - seconds])
    labels = [one.variant.label.replace(", ", ",\n") for one in results]
    colors = [_LOOKS[one.variant.name][0] for one in results]
    axes.barh(labels, seconds, xerr=spread, color=colors, height=0.6, ecolor=INK, error_kw={"linewidth": 0.8})
    for row, (one, end) in enumerate(zip(results, high, strict=True)):
        text = summary.format_seconds(one.step_seconds)
        if one.variant.name == "thinwire":
            text += f" ({summary.format_factor(comparison.speedup('ddp', 'thinwire'))})"
        axes.annotate(text, (max(end, seconds[row]), row), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set(xlabel="seconds", xlim=(0, 1.25 * high.max()))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _draw_losses(axes: "Axes", comparison: Comparison) -> None:
    steps = np.arange(1, comparison.steps + 1)
    for width, (name, one) in zip((10, 7, 4, 1.2), comparison.results.items(), strict=True):
        color, style = _LOOKS[name]
        axes.plot(steps, one.loss, color=color, linewidth=width, linestyle=style, label=one.variant.label)
    axes.set(xlabel="step", ylabel="loss (nats per word)", xlim=(1, max(2, steps[-1])))
    label_ends(axes)


def _draw_curve(axes: "Axes", comparisons: Sequence[Comparison]) -> None:
    points = sorted(comparisons, key=lambda one: one.link_mbit or 0.0)
    links = [one.link_mbit or 0.0 for one in points]
    for variant in VARIANTS:
        seconds = [one.results[variant.name].step_seconds for one in points]
        color, style = _LOOKS[variant.name]
        axes.plot(links, seconds, marker="o", markersize=4, color=color, linestyle=style, label=variant.label)
    axes.set(xscale="log", xlabel="measured link of a host (Mbit/s)", ylabel="step (seconds)")
    axes.set_xticks(links, [f"{link:,.0f}" for link in links])
    axes.minorticks_off()
    log_ticks(axes)
    label_ends(axes)
