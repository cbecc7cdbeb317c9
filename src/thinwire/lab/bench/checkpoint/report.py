"""Report of the comparison as a page, and the picture of the links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from thinwire.lab import palette
from thinwire.lab.bench.checkpoint.methods import NONE, THINWIRE
from thinwire.lab.bench.checkpoint.summary import CAPTION, COLUMNS, conditions, sentences, table_rows
from thinwire.lab.plot import SMALL, is_narrow, key, save_picture
from thinwire.lab.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLE = "What the links carry"
_NOTE = (
    "One band for each host, as high as its link is fast. The bar at the bottom of a band: the training thread is in"
    " Checkpointer.step. Checkpoints should fill the time that gradients leave."
)
_COLORS = {NONE: palette.STOCK, "dcp_sync": palette.TORCH, "dcp_async": palette.TORCH}


def build_report(result: dict[str, Any]) -> Report:
    """Build the page of the result, a table and the plots; ``.write(path)`` writes the file."""
    rows = result["rows"]
    mbit = rows[0]["link_mbit"]
    link = "none: loopback" if mbit is None else f"{mbit:.1f} Mbit/s, measured, a host"
    report = Report("Checkpoints: what they cost and what they save", conditions(result), [("Link", link)])
    own = next((row for row in rows if row["method"] == THINWIRE and row["overhead_ratio"] is not None), None)
    if own is not None:
        bounds = result["environment"].get("bounds") or {}
        report.hero(
            f"{own['overhead_ratio'] - 1:+.1%} a step for {_how_often(bounds.get('reached_interval_iterations'))}",
            _result(own),
        )
    figures = [
        ("seconds until all trainers run again", own and own["recovery_seconds_processes"], ".2f"),
        ("seconds until ready after a host was lost", own and own["recovery_seconds_host"], ".2f"),
        ("steps lost, at most", own and own["iterations_lost"], ".2f"),
    ]
    report.figures([(what, format(value, form)) for what, value, form in figures if value is not None])
    timed = [row for row in rows if row["overhead_ratio"] is not None]
    if timed:
        report.picture(
            "Step time with and without checkpoints",
            lambda axes: _draw_steps(axes, timed),
            "Median step, and its ratio to the step without checkpoints, paired turn by turn.",
            " ".join(f"{row['method']}: {row['overhead_ratio']:.3f} times as long." for row in timed),
            height_inches=0.8 + 0.4 * len(timed),
        )
    if "timeline" in result:
        report.picture(
            _TITLE, lambda axes: draw_timeline(axes, result), _NOTE, _in_words(result), height_inches=_height(result)
        )
    report.table("All methods", COLUMNS, table_rows(rows), CAPTION)
    report.items("Bounds", sentences(result))
    return report


def _how_often(interval: float | None) -> str:
    """Return how many checkpoints were made, where the link allowed fewer than were asked for."""
    if interval is None or interval < 1.005:
        return "a checkpoint in every step"
    return f"a checkpoint in every {interval:.2f} steps"


def _result(row: dict[str, Any]) -> str:
    wasted, equal = row["wasted_seconds"], row["restore_bitwise_equal"]
    parts = [] if wasted is None else [f"A failure wastes {wasted:.2f} s on average."]
    if equal is not None:
        parts.append(
            "After a restore losses and parameters are bit for bit the same as in a run without a failure."
            if equal
            else "After a restore losses or parameters differ from a run without a failure."
        )
    return " ".join(parts)


def _draw_steps(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for index, row in enumerate(rows):
        seconds = row["iteration_seconds_median"]
        axes.barh(index, seconds, 0.6, color=_COLORS.get(row["method"], palette.THINWIRE))
        text = f"{seconds:.3f} s" + ("" if row["method"] == NONE else f", {row['overhead_ratio']:.3f}x")
        axes.annotate(text, (seconds, index), xytext=(4, 0), textcoords="offset points", va="center", fontsize=SMALL)
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.set(xlabel="time of a step (s)")
    axes.margins(x=0.6 if is_narrow(axes) else 0.25)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _in_words(result: dict[str, Any]) -> str:
    hosts = result["timeline"]["hosts"]

    def mean(name: str) -> float:
        return fmean(value for host in hosts for value in host[name])

    return (
        f"{len(hosts)} hosts over {result['timeline']['seconds']:.1f} s: on average {mean('gradient_mbit'):.1f} Mbit/s"
        f" of gradients and {mean('checkpoint_mbit'):.1f} Mbit/s of checkpoints a host."
    )


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
    for index, host in enumerate(timeline["hosts"]):
        seconds = host["seconds"]
        floor = [-index - 1.0] * len(seconds)
        gradients = [-index - 1 + 0.9 * rate / link_mbit for rate in host["gradient_mbit"]]
        both = [top + 0.9 * rate / link_mbit for top, rate in zip(gradients, host["checkpoint_mbit"], strict=True)]
        labels = ("gradients", "checkpoints", "training waits") if index == 0 else (None, None, None)
        axes.fill_between(seconds, floor, gradients, step="mid", color=palette.STOCK, linewidth=0, label=labels[0])
        axes.fill_between(seconds, gradients, both, step="mid", color=palette.THINWIRE, linewidth=0, label=labels[1])
        spans = [(begin, end - begin) for begin, end in host["steps"]]
        axes.broken_barh(spans, (-index - 1.07, 0.07), color=palette.NETWORK, linewidth=0, label=labels[2])
    count = len(timeline["hosts"])
    axes.set_yticks([-index - 0.55 for index in range(count)], [f"host {index}" for index in range(count)])
    axes.set(xlabel="time (s)", xlim=(0, timeline["seconds"]), ylim=(-count - 0.1, 0.05))
    axes.grid(axis="y", visible=False)
    key(axes, 3)
