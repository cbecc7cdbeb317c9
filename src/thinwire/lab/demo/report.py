"""Report of the comparison as a page: ``report.html``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.lab.demo.compare import Comparison, ModeResult
from thinwire.lab.demo.summary import conclusion, conditions, format_bytes, format_seconds, summary_rows
from thinwire.lab.demo.train import MODES
from thinwire.lab.report import PALETTE, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABELS = {"ddp": "stock DDP", "thinwire": "thinwire"}
_COLORS = {"ddp": PALETTE[0], "thinwire": PALETTE[1], "ddp_dense": PALETTE[2]}


def build_report(comparison: Comparison) -> Report:
    """Build a page of figures, tables and five pictures; ``.write(path)`` writes the file."""
    report = Report("One language model, trained twice", conditions(comparison))
    figures = comparison.to_json()
    sent = figures["bytes_per_step"]
    report.figures(
        [
            ("fewer bytes than stock DDP", f"{sent['ddp'] / sent['thinwire']:.2f}x"),
            ("fewer bytes than DDP with dense gradients", f"{sent['ddp_dense'] / sent['thinwire']:.0f}x"),
            ("largest relative difference of the loss", f"{figures['loss_max_relative_difference']:.1e}"),
            ("parameters bitwise equal on all ranks", "yes" if figures["parameters_bitwise_equal"] else "NO"),
        ]
    )
    report.text(conclusion(comparison))
    _pictures(report, comparison)
    report.table("All figures", ["", "stock DDP", "thinwire"], summary_rows(comparison))
    for mode in MODES:
        _parameter_table(report, _LABELS[mode], comparison.modes[mode])
    return report


def write_report(comparison: Comparison, path: Path) -> None:
    """Write ``report.html``."""
    build_report(comparison).write(path)


def _pictures(report: Report, comparison: Comparison) -> None:
    report.picture(
        "Loss",
        lambda axes: _draw_losses(axes, comparison),
        "Sampled-softmax loss, mean over ranks. The same seed gives two curves that lie on each other.",
    )
    report.picture(
        "How far the losses are apart",
        lambda axes: _draw_difference(axes, comparison),
        "Both sums are exact up to the order of additions; what is left is float32 rounding.",
        height_inches=2.4,
    )
    report.picture(
        "Bytes by scheme",
        lambda axes: _draw_bytes(axes, comparison),
        "Sent per step and rank, logarithmic axis. The DDP figures follow from the formulas of torch's Gloo "
        "collectives, applied to the rows of every step; dense DDP was not run. thinwire's are counted.",
        height_inches=2.2,
    )
    report.picture(
        "Where the bytes went",
        lambda axes: _draw_parameters(axes, comparison),
        "Per step and rank: each table with sparse gradients, and the dense parameters together.",
    )
    report.picture(
        "Where the time went",
        lambda axes: _draw_times(axes, comparison),
        "Median step. Synchronization runs during backward and adds what it could not hide; the hatched bar "
        "is the time in which a collective was under way, waiting for slower ranks included.",
        height_inches=2.6,
    )


def _draw_losses(axes: "Axes", comparison: Comparison) -> None:
    steps = np.arange(1, comparison.config.steps + 1)
    axes.plot(steps, comparison.modes["ddp"].loss, color=_COLORS["ddp"], linewidth=5, alpha=0.55, label="stock DDP")
    axes.plot(steps, comparison.modes["thinwire"].loss, color=_COLORS["thinwire"], label="thinwire")
    axes.set(xlabel="step", ylabel="loss (nats per word)", xlim=(1, max(2, steps[-1])))
    axes.legend()


def _draw_difference(axes: "Axes", comparison: Comparison) -> None:
    difference = comparison.loss_difference
    steps = np.flatnonzero(difference) + 1
    axes.plot(steps, difference[steps - 1], ".", color=_COLORS["thinwire"], markersize=5)
    axes.axhline(1e-4, color=PALETTE[3], linewidth=1.2, linestyle="--")
    axes.text(1, 1.3e-4, "promised: below 1e-4", color=PALETTE[3], va="bottom")
    axes.set(xlabel="step", ylabel="relative difference", yscale="log", ylim=(1e-9, 1e-3))
    axes.set_xlim(1, max(2, comparison.config.steps))
    if not len(steps):
        axes.text(0.5, 0.4, "every loss is bit for bit the same", transform=axes.transAxes, ha="center")


def _draw_bytes(axes: "Axes", comparison: Comparison) -> None:
    bars = {
        "DDP, dense gradients": (comparison.dense_ddp_bytes_per_step, _COLORS["ddp_dense"]),
        "stock DDP, sparse": (comparison.modes["ddp"].bytes_per_step, _COLORS["ddp"]),
        "thinwire": (comparison.modes["thinwire"].bytes_per_step, _COLORS["thinwire"]),
    }
    values = [value for value, _ in bars.values()]
    drawn = axes.barh(list(bars), values, color=[color for _, color in bars.values()], height=0.62)
    axes.bar_label(drawn, [format_bytes(value) for value in values], padding=4)
    axes.set(xscale="log", xlabel="per step and rank", xlim=(min(values) / 10, max(values) * 4))
    axes.xaxis.set_major_formatter(lambda value, _position: format_bytes(value))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _draw_parameters(axes: "Axes", comparison: Comparison) -> None:
    separate = comparison.sparse_parameters
    sent = {mode: comparison.modes[mode].bytes_by_parameter(separate) for mode in MODES}
    names = sorted(sent["ddp"], key=lambda name: -sent["ddp"][name])
    largest = max(max(of.values()) for of in sent.values())
    for offset, mode in zip((-0.2, 0.2), MODES, strict=True):
        values = [sent[mode][name] / 1e6 for name in names]
        drawn = axes.barh(np.arange(len(names)) + offset, values, 0.38, color=_COLORS[mode], label=_LABELS[mode])
        axes.bar_label(drawn, [format_bytes(1e6 * value) for value in values], padding=4, fontsize=9)
    axes.set_yticks(np.arange(len(names)), names)
    axes.set(xlabel="MB per step and rank", xlim=(0, max(largest, 1.0) / 1e6 * 1.15))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right")


def _draw_times(axes: "Axes", comparison: Comparison) -> None:
    for row, name in enumerate(MODES):
        mode = comparison.modes[name]
        left = 0.0
        parts = (mode.forward_seconds, mode.backward_seconds, mode.optimizer_seconds)
        labels = ("forward", "backward with synchronization", "optimizer")
        for seconds, label, color in zip(parts, labels, (PALETTE[5], PALETTE[1], PALETTE[4]), strict=True):
            width = 1e3 * float(np.median(seconds))
            axes.barh(row, width, 0.4, left=left, color=color, label=label if row == 0 else None)
            left += width
        communication = 1e3 * float(np.median(mode.comm_seconds))
        label = "collective under way" if row == 0 else None
        axes.barh(row + 0.32, communication, 0.16, color="none", edgecolor=PALETTE[3], hatch="////", label=label)
        axes.annotate(format_seconds(left / 1e3), (left, row), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(MODES)), [_LABELS[mode] for mode in MODES])
    axes.set(xlabel="milliseconds")
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.figure.legend(loc="outside upper left", ncols=4, fontsize=9)


def _parameter_table(report: Report, label: str, mode: ModeResult) -> None:
    columns = list(dict.fromkeys(column for row in mode.table for column in row))
    if columns:
        rows = [[_cell(column, row.get(column)) for column in columns] for row in mode.table]
        report.table(f"Parameters, {label}", [column.replace("_", " ") for column in columns], rows)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if "bytes" in column:
        return format_bytes(value)
    return f"{value:.2%}" if column.startswith("density") else f"{value:.3g}"
