"""Report of the comparison as a page, and the picture of the links."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.lab.bench.checkpoint.summary import CAPTION, COLUMNS, conditions, sentences, table_rows
from thinwire.lab.plot import save_picture
from thinwire.lab.report import PALETTE, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLE = "What the links carry"
_NOTE = (
    "One band for each host, as high as its link is fast; bars at the bottom: the training thread is in"
    " Checkpointer.step. Checkpoints should fill the time in which gradients do not."
)


def build_report(result: dict[str, Any]) -> Report:
    """Build the page of figures, a table and the pictures; ``.write(path)`` writes the file."""
    report = Report("Checkpoints: what they cost and what they save", conditions(result))
    ratios = [(row["method"], row["overhead_ratio"]) for row in result["rows"] if row["overhead_ratio"] is not None]
    report.figures([(f"{method}: iteration time to that without", f"{ratio:.3f}x") for method, ratio in ratios[1:6]])
    for sentence in sentences(result):
        report.text(sentence)
    if "timeline" in result:
        report.picture(_TITLE, lambda axes: draw_timeline(axes, result), _NOTE, height_inches=_height(result))
    report.table("Methods", COLUMNS, table_rows(result["rows"]), CAPTION)
    return report


def write_report(result: dict[str, Any], path: Path) -> None:
    """Write the page."""
    build_report(result).write(path)


def write_picture(result: dict[str, Any], path: Path) -> None:
    """Write the picture of the links alone, in the format of the file name's ending (PNG, SVG, PDF).

    Raises:
        ValueError: the links were not looked at.
        ImportError: there is no matplotlib.
    """
    if "timeline" not in result:
        raise ValueError("there is no picture of the links: it needs the method thinwire, and a --link")
    save_picture(lambda axes: draw_timeline(axes, result), path, _height(result), _TITLE)


def _height(result: dict[str, Any]) -> float:
    return 1.0 + 0.45 * len(result["timeline"]["hosts"])


def draw_timeline(axes: Axes, result: dict[str, Any]) -> None:
    """Draw gradients and checkpoints of each host against time."""
    timeline, link_mbit = result["timeline"], result["rows"][0]["link_mbit"]
    for place, host in enumerate(timeline["hosts"]):
        seconds = host["seconds"]
        floor = [-place - 1.0] * len(seconds)
        gradients = [-place - 1 + 0.9 * rate / link_mbit for rate in host["gradient_mbit"]]
        both = [top + 0.9 * rate / link_mbit for top, rate in zip(gradients, host["checkpoint_mbit"], strict=True)]
        labels = ("gradients", "checkpoints") if place == 0 else (None, None)
        axes.fill_between(seconds, floor, gradients, step="mid", color=PALETTE[5], linewidth=0, label=labels[0])
        axes.fill_between(seconds, gradients, both, step="mid", color=PALETTE[0], linewidth=0, label=labels[1])
        spans = [(begin, end - begin) for begin, end in host["steps"]]
        axes.broken_barh(spans, (-place - 1.06, 0.06), color=PALETTE[3], label="in step()" if place == 0 else None)
    count = len(timeline["hosts"])
    axes.set_yticks([-place - 0.55 for place in range(count)], [f"host {place}" for place in range(count)])
    axes.set(xlabel="seconds", xlim=(0, timeline["seconds"]), ylim=(-count - 0.1, 0.05))
    axes.grid(axis="y", visible=False)
    axes.figure.legend(loc="outside upper right", ncols=3, fontsize=8)
