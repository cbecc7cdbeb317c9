"""Report of the comparison as a page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.lab.bench.train.methods import DDP
from thinwire.lab.bench.train.summary import COLUMNS, conditions, summarize, table_rows, verdict
from thinwire.lab.report import PALETTE, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PARTS = (
    ("backward_seconds", "forward and backward", PALETTE[5]),
    ("exposed_seconds", "exposed communication", PALETTE[3]),
    ("optimizer_seconds", "optimizer", PALETTE[4]),
)
_LANE_PARTS = (
    ("encode_seconds", "encode", PALETTE[0]),
    ("wire_seconds", "wire", PALETTE[2]),
    ("decode_seconds", "decode", PALETTE[1]),
)
_LINES = ("-", "--", ":", "-.")


def build_report(result: dict[str, Any]) -> Report:
    """Build the page of figures, a table and three pictures; ``.write(path)`` writes the file."""
    rows = result["rows"]
    report = Report(f"Training {rows[0]['job']}, one method at a time", conditions(result))
    others = [summary for summary in summarize(rows) if summary.method != DDP]
    report.figures([(f"{other.method}: time to stock DDP's loss", _speedup(other.speedup)) for other in others[:6]])
    report.text(verdict(rows))
    first_seed = [row for row in rows if row["seed"] == rows[0]["seed"]]
    note = f"Held-out loss, seed {rows[0]['seed']}: the same initial parameters and batches under every method."
    report.picture(
        "Loss against steps", lambda axes: _draw_losses(axes, first_seed, "curve_steps"), note, height_inches=4.2
    )
    report.picture(
        "Loss against seconds",
        lambda axes: _draw_losses(axes, first_seed, "seconds_curve"),
        "The same losses against the time of the training steps; measuring the held-out loss takes no time here.",
        height_inches=4.2,
    )
    report.picture(
        "Where a step's time goes",
        lambda axes: _draw_times(axes, rows),
        "Medians. Upper bar: the training thread. Lower, thin bar: encode, wire and decode, which run beside backward"
        " and are exposed only where they outlast it.",
        height_inches=1.2 + 0.5 * len(summarize(rows)),
    )
    report.table("Medians over seeds", COLUMNS, table_rows(rows))
    return report


def write_report(result: dict[str, Any], path: Path) -> None:
    """Write the page."""
    build_report(result).write(path)


def _speedup(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}x"


def _draw_losses(axes: Axes, rows: Sequence[dict[str, Any]], against: str) -> None:
    for i, row in enumerate(rows):
        points = [(x, y) for x, y in zip(row[against], row["loss_curve"], strict=True) if y is not None]
        color, line = PALETTE[i % len(PALETTE)], _LINES[i // len(PALETTE) % len(_LINES)]
        width = 3.0 if row["method"] == DDP else 1.6
        seen, losses = [x for x, _ in points], [y for _, y in points]
        axes.plot(seen, losses, line, color=color, linewidth=width, label=row["method"])
    axes.set(xlabel="step" if against == "curve_steps" else "seconds", ylabel="held-out loss (nats)")
    axes.legend(fontsize=8, ncols=2)


def _draw_times(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for place, method in enumerate(methods):
        own = [row for row in rows if row["method"] == method]
        for offset, height, parts in ((-0.12, 0.4, _PARTS), (0.24, 0.2, _LANE_PARTS)):
            left = 0.0
            for name, label, color in parts:
                width = statistics.median(row[name] or 0.0 for row in own)
                shown = label if place == 0 else None
                axes.barh(place + offset, width, height, left=left, color=color, label=shown)
                left += width
    axes.set_yticks(range(len(methods)), methods)
    axes.set(xlabel="seconds a step")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.figure.legend(loc="outside upper left", ncols=3, fontsize=8)
