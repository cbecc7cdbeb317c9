"""Report of the comparison as a page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from thinwire.lab import palette
from thinwire.lab.bench.train import summary
from thinwire.lab.bench.train.methods import DDP, EXACT, PLAN, THINWIRE, parse
from thinwire.lab.plot import MOST_LINES, SMALL, is_narrow, key, label_ends, wrapped
from thinwire.lab.report import Report
from thinwire.lab.text import counted
from thinwire.plan.plan import EXACT as EXACT_METHODS
from thinwire.plan.plan import STOCK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PARTS = (
    ("backward_seconds", "forward and backward", palette.COMPUTE, 0.45),
    ("exposed_seconds", "waiting for the network", palette.NETWORK, 1.0),
    ("optimizer_seconds", "optimizer", palette.COMPUTE, 1.0),
)
_LANE_PARTS = (
    ("encode_seconds", "encode, decode", palette.COMPUTE, 0.7),
    ("wire_seconds", "network busy", palette.NETWORK, 0.4),
    ("decode_seconds", "", palette.COMPUTE, 0.7),
)
_EARLY = 6
"""The first sixth of a run, where all losses fall alike, is above the plot: the differences are at the end."""
_BYTES = "megabytes"
_LABELS = {"curve_steps": "step", "seconds_curve": "time (s)", _BYTES: "sent by a rank (MB)"}
_MOST_LOSSY = len(palette.DASHES)


def build_report(result: dict[str, Any]) -> Report:
    """Build the page of the verdict, a table and four plots; ``.write(path)`` writes the file."""
    rows = result["rows"]
    summaries = summary.summarize(rows)
    job, environment = rows[0]["job"], result["environment"]
    report = Report(
        f"Training {job}, one method at a time",
        summary.conditions(result),
        [
            ("Link", summary.link_text(rows[0])),
            ("Run", f"{counted(environment['steps'], 'step')}, {counted(environment['seeds'], 'seed')}"),
        ],
    )
    arrived = [one for one in summaries if one.method != DDP and one.speedup]
    ranked = sorted(arrived, key=lambda one: -(one.speedup or 0))
    report.hero(*_headline(rows, ranked))
    report.figures([(f"speed of {one.method} to stock DDP's loss", f"{one.speedup:.2f}x") for one in ranked[:4]])
    _loss_pictures(report, rows, environment.get("judged_by", "held-out loss"))
    most_breaks = max(_name(one.method, narrow=True).count("\n") for one in summaries)
    report.picture(
        "Where the time of a step goes",
        lambda axes: _draw_times(axes, rows),
        "Medians. Thick bar: the training thread. Thin bar below it: encoding, the network and decoding, which run"
        " beside backward; training waits only where they outlast it.",
        " ".join(f"{method}: {seconds} s." for method, seconds in _step_seconds(rows).items()),
        height_inches=1.0 + len(summaries) * max(0.55, 0.16 * (1 + most_breaks)),
    )
    report.table("All methods", summary.columns(rows), summary.table_rows(rows), summary.caption(result))
    return report


def _headline(rows: Sequence[dict[str, Any]], ranked: Sequence[summary.MethodSummary]) -> tuple[str, str, bool | None]:
    """Return the result, a sentence on it, and whether it is of a lossy method."""
    text, best = summary.verdict(rows), ranked[0] if ranked else None
    if best is not None and (best.speedup or 0) >= summary.PAYS_FROM:
        return f"{best.speedup:.2f}x faster to the loss of stock DDP", text, best.method in _lossy_of(rows)
    if best is not None:
        return "Nothing is faster than stock DDP here", text, None
    if any(row["method"] == DDP for row in rows):
        return "Nothing else reached the loss of stock DDP", text, None
    return "Stock DDP was not run", text, None


def _loss_pictures(report: Report, rows: Sequence[dict[str, Any]], loss: str) -> None:
    looks = _looks(rows)
    first_seed = [row for row in rows if row["seed"] == rows[0]["seed"] and row["method"] in looks]
    note = (
        f"Seed {rows[0]['seed']}: the same initial parameters and batches under every method. The first sixth, where"
        " all losses fall alike, is above the plot."
    )
    left_out = len({row["method"] for row in rows}) - len(looks)
    if left_out:
        note += f" The {left_out} slowest methods are in the table only."
    pictures = (
        ("seconds", "seconds_curve", " Time of the training steps, without that of measuring the loss.", "s"),
        ("steps", "curve_steps", "", "steps"),
        ("bytes", _BYTES, " Bytes that the busiest rank has sent so far, on a scale of powers of ten.", "MB"),
    )
    for what, against, more, unit in pictures:
        draw = partial(_draw_losses, rows=first_seed, against=against, loss=loss, looks=looks)
        text = _in_words(first_seed, against, unit)
        report.picture(f"Loss against {what}", draw, note + more, text, height_inches=4.0)


def _lossy_of(rows: Sequence[dict[str, Any]]) -> set[str]:
    """Return the methods that change the gradients; of a plan it is its choice that says so."""
    return {row["method"] for row in rows if _is_lossy(parse(row["method"])[0], row.get("plan") or "")}


def _is_lossy(name: str, choice: str) -> bool:
    if name == PLAN:
        return choice != STOCK and not choice.startswith(EXACT_METHODS)
    return name not in (DDP, THINWIRE, EXACT)


def _looks(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[str, Any]]:
    """Return the colour and line style of each method with a line; lines of one colour have different styles.

    They are of stock DDP, of exact methods, and of the others that are fastest to stock DDP's loss.
    """
    lossy = _lossy_of(rows)
    ranked = sorted(summary.summarize(rows), key=lambda one: (one.method != DDP, -(one.speedup or 0)))
    methods = [one.method for one in ranked]
    exact = [method for method in methods if method not in lossy][: MOST_LINES - 1]
    others = [method for method in methods if method in lossy][: min(_MOST_LOSSY, MOST_LINES - len(exact))]
    looks: dict[str, tuple[str, Any]] = {}
    for method in (method for method in methods if method in (*exact, *others)):
        color = palette.STOCK if method == DDP else palette.LOSSY if method in lossy else palette.THINWIRE
        alike = sum(used == color for used, _ in looks.values())
        looks[method] = color, palette.DASHES[alike % len(palette.DASHES)]
    return looks


def _points(row: dict[str, Any], against: str) -> list[tuple[float, float]]:
    sent = 1e-6 * (row.get("bytes_link_max") or row["bytes_sent_max"])
    at = [sent * step for step in row["curve_steps"]] if against == _BYTES else row[against]
    return [(x, y) for x, y in zip(at, row["loss_curve"], strict=True) if y is not None]


def _draw_losses(
    axes: Axes, rows: Sequence[dict[str, Any]], against: str, loss: str, looks: Mapping[str, tuple[str, Any]]
) -> None:
    last = 0.0
    for row in rows:
        points = _points(row, against)
        if points:
            color, line = looks[row["method"]]
            width = 2.6 if row["method"] == DDP else 1.6
            x, y = zip(*points, strict=True)
            axes.plot(x, y, linestyle=line, color=color, linewidth=width, label=row["method"])
            last = max(last, x[-1])
    axes.set(xlabel=_LABELS[against], ylabel=loss)
    if against == _BYTES:
        axes.set_xscale("log")
    else:
        axes.set_xlim(0, last or 1)
    late = [y for row in rows for _, y in _points(row, against)[len(row["loss_curve"]) // _EARLY :]]
    if late:
        axes.set_ylim(min(late) - 0.05 * (max(late) - min(late)), max(late))
    label_ends(axes)


def _in_words(rows: Sequence[dict[str, Any]], against: str, unit: str) -> str:
    ends = [(row["method"], _points(row, against)) for row in rows]
    return " ".join(
        f"{method} ends at a loss of {points[-1][1]:.3f} after {points[-1][0]:.4g} {unit}."
        for method, points in ends
        if points
    )


def _step_seconds(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return what the table says of a step of each method."""
    column = summary.columns(rows).index("step s")
    return {cells[0]: cells[column] for cells in summary.table_rows(rows)}


def _name(method: str, narrow: bool) -> str:
    return wrapped(method, 14 if narrow else 24)


def _draw_times(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    step_seconds = _step_seconds(rows)
    for index, method in enumerate(methods):
        own = [row for row in rows if row["method"] == method]
        for offset, height, parts in ((-0.12, 0.4, _PARTS), (0.22, 0.18, _LANE_PARTS)):
            left = 0.0
            for name, label, color, alpha in parts:
                width = statistics.median(row[name] or 0.0 for row in own)
                shown = label if index == 0 and label else None
                axes.barh(index + offset, width, height, left=left, color=color, alpha=alpha, label=shown, linewidth=0)
                left += width
            if parts is _PARTS:
                text, at = f"{step_seconds[method]} s", (left, index + offset)
                axes.annotate(text, at, xytext=(4, 0), textcoords="offset points", va="center", fontsize=SMALL)
    axes.set_yticks(range(len(methods)), [_name(method, is_narrow(axes)) for method in methods])
    axes.set(xlabel="time of a step (s)")
    axes.margins(x=0.14)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    key(axes, 5)
