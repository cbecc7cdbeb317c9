"""The doctor's page, and its picture: step time against the speed of the link, one line for each method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lab import palette
from thinwire.lab.doctor.diagnosis import (
    SPEEDS_MBIT,
    Diagnosis,
    LinkCurve,
    answers,
    hint,
    loss_in_words,
    to_paste,
    why_nothing,
)
from thinwire.lab.doctor.lossless import format_mbit
from thinwire.lab.plot import MOST_LINES, is_narrow, label_ends, mark
from thinwire.lab.report import Report
from thinwire.plan.plan import EXACT, STOCK
from thinwire.plan.text import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Step time against the speed of the link"
_NOTE = (
    "Predicted from what was measured, for the same machines on other links. Each line is the best fusion of a method."
)
_TICKS = [digit * 10.0**power for power in range(-6, 5) for digit in (1, 2, 5)]
_SHOWN = 12
"""Largest number of ways in the table."""


def draw(axes: Axes, diagnosis: Diagnosis) -> None:
    """Draw the curves on empty axes of matplotlib."""
    mbit, lossy = diagnosis.measurement.link.mbit, 0
    for curve in _drawn(diagnosis):
        color, line = (palette.STOCK, "-") if curve.name == STOCK else (palette.THINWIRE, "-")
        if _is_lossy(curve.name):
            color, line = palette.LOSSY, palette.DASHES[lossy % len(palette.DASHES)]
            lossy += 1
        width = 2.6 if curve.name == STOCK else 1.8
        axes.plot(SPEEDS_MBIT, curve.step_seconds, linestyle=line, color=color, linewidth=width, label=curve.name)
    axes.set(xscale="log", yscale="log", xlim=(SPEEDS_MBIT[0], SPEEDS_MBIT[-1]))
    axes.set(xlabel="link speed of a rank", ylabel="time of a step")
    decades = [speed for speed in SPEEDS_MBIT[::4] if not is_narrow(axes) or speed in SPEEDS_MBIT[::8]]
    axes.set_xticks(decades, [format_mbit(speed) for speed in decades])
    axes.set_xticks([], minor=True)
    lowest, highest = axes.get_ylim()
    ticks = [tick for tick in _TICKS if lowest <= tick <= highest]
    axes.set_yticks(ticks, [f"{tick:g} s" if tick >= 1 else f"{1e3 * tick:g} ms" for tick in ticks])
    axes.set_yticks([], minor=True)
    for row in diagnosis.confirmed:
        if row.measured_step_seconds is not None:
            color = palette.STOCK if row.name == STOCK else palette.LOSSY if _is_lossy(row.name) else palette.THINWIRE
            axes.plot([mbit], [row.measured_step_seconds], "D", color=color, markersize=5, label="_measured")
    stops = diagnosis.compression_stops_mbit
    mark(axes, mbit, f"your link: {_link(diagnosis)}")
    if stops:
        mark(axes, stops, f"compression pays below {format_mbit(stops)}", row=1)
    label_ends(axes)


def build_report(diagnosis: Diagnosis, plan_path: str | None = None) -> Report:
    """Build a page with the verdict, what to paste, the picture and the ways; ``.write(path)`` writes the file.

    Args:
        plan_path: path of the plan, if it was written.
    """
    link = f"{_link(diagnosis)} a rank, measured"
    report = Report("Does it pay to synchronize in another way?", diagnosis.title, [("Link", link)])
    _verdict(report, diagnosis)
    _paste(report, diagnosis, plan_path)
    if diagnosis.judgement is not None:
        report.code("\n".join(diagnosis.judgement.describe(diagnosis.seconds_of)), "Judged by short trainings")
    _trained(report, diagnosis)
    note = f"{_NOTE} Diamonds: measured." if diagnosis.confirmed else _NOTE
    report.picture(TITLE, lambda axes: draw(axes, diagnosis), note, _in_words(diagnosis), height_inches=4.0)
    report.table("Predicted step time by link speed", *_by_link(diagnosis))
    _tables(report, diagnosis)
    report.pairs("What was measured", [pair for pair in answers(diagnosis) if pair[0] not in ("Tables", "")])
    _options(report, diagnosis)
    report.items(
        "Doubts",
        [
            f"The times of {doubt} scatter by more than 30 %. Is the machine busy? Rerun with --fresh."
            for doubt in diagnosis.measurement.doubts()
        ],
    )
    return report


def _verdict(report: Report, diagnosis: Diagnosis) -> None:
    plan = diagnosis.plan
    stock, best = format_seconds(diagnosis.stock_step_seconds), format_seconds(plan.step_seconds)
    if diagnosis.error:
        report.hero("No verdict", f"{diagnosis.error}. One of the two figures is wrong: rerun with --fresh.", True)
    elif plan.does_nothing:
        report.hero("Do nothing", f"{why_nothing(diagnosis)}; {stock} a step, {diagnosis.source}.")
    else:
        source = "predicted" if plan.choice in diagnosis.untried else diagnosis.source
        text = f"{plan.choice}: {best} a step, and {stock} under stock DDP, {source}."
        loss = " Compare the loss, too." if diagnosis.is_lossy else ""
        report.hero(f"{plan.speedup:.2f}x faster", text + loss, diagnosis.is_lossy)
    report.figures(
        [
            (f"a step of stock DDP, {diagnosis.source}", stock),
            ("of it waits for the network", f"{diagnosis.exposed_share:.0%}"),
            ("a step of the best exact way", format_seconds(diagnosis.best_exact[1])),
            ("link of a rank", _link(diagnosis)),
        ]
    )


def _paste(report: Report, diagnosis: Diagnosis, plan_path: str | None) -> None:
    if diagnosis.error:
        return
    where, lines = to_paste(diagnosis, plan_path)
    if lines:
        report.code("\n".join(lines), where)
    if diagnosis.is_lossy:
        report.text("It is lossy: compare the loss, too, or take the exact way with --compress none.")
    if diagnosis.better_plan is not None:
        report.text(hint(diagnosis))
    if diagnosis.outer is not None:
        _, what, where, *_ = diagnosis.outer.describe()
        report.code("\n".join(diagnosis.outer.lines), f"Another algorithm: {diagnosis.outer.recipe}")
        report.text(f"{what} {where.removesuffix(':')}.")


def _trained(report: Report, diagnosis: Diagnosis) -> None:
    if diagnosis.confirmed:
        rows = [
            [
                row.name,
                format_seconds(row.predicted_step_seconds),
                row.failure if row.measured_step_seconds is None else format_seconds(row.measured_step_seconds),
                loss_in_words(diagnosis, row.name).removeprefix("loss "),
            ]
            for row in diagnosis.confirmed
        ]
        note = "The median step of the slowest rank. The measured times decide."
        report.table("Trained for a few steps", ["way", "predicted step", "measured step", "loss"], rows, note)


def _tables(report: Report, diagnosis: Diagnosis) -> None:
    measured = diagnosis.measurement
    known = {table.name: table for table in measured.tables}
    rows = [
        [
            name,
            f"{known[name].num_rows:,} x {known[name].width:,}",
            format_bytes(known[name].size_bytes),
            f"{known[name].density:.2%}",
            job.scheme,
            format_bytes(job.sent_bytes) if name == job.tables[0] else "with it",
            format_seconds(job.seconds) if name == job.tables[0] else "with it",
        ]
        for job in measured.row_jobs
        for name in job.tables
    ]
    if rows:
        columns = ["table", "rows x width", "size", "rows touched", "scheme", "sent a step", "time"]
        note = "Embedding tables travel as the rows that a step touches. Tables of one job are sent together."
        report.table("Embedding tables", columns, rows, note)


def _options(report: Report, diagnosis: Diagnosis) -> None:
    plan = diagnosis.plan
    rows = []
    for candidate in plan.candidates[:_SHOWN]:
        seconds = plan.other_seconds + candidate.seconds
        kind = "taken" if candidate.name == plan.choice else "lossy" if _is_lossy(candidate.name) else ""
        against = f"{diagnosis.stock_step_seconds / seconds:.2f}x" if seconds else "-"
        rows.append([candidate.name, format_seconds(seconds), against, kind])
    is_cut = len(plan.candidates) > _SHOWN
    note = "Predicted; of a way that was trained, as measured." if diagnosis.is_measured else ""
    title = f"The fastest {_SHOWN} ways of {len(plan.candidates)}" if is_cut else "All ways"
    report.table(title, ["way", "step", "against stock DDP", ""], rows, note)


def _is_lossy(name: str) -> bool:
    return name != STOCK and not name.startswith(EXACT)


def _link(diagnosis: Diagnosis) -> str:
    """Return the measured rate with the digits that the screen has."""
    return f"{diagnosis.measurement.link.mbit:.0f} Mbit/s"


def _drawn(diagnosis: Diagnosis) -> list[LinkCurve]:
    """Return stock DDP, exact ways, and the compressors that are fastest at the measured link."""
    mbit = diagnosis.measurement.link.mbit
    at = min(range(len(SPEEDS_MBIT)), key=lambda i: abs(SPEEDS_MBIT[i] / mbit - 1))
    ranked = sorted(diagnosis.curves, key=lambda curve: (_is_lossy(curve.name), curve.step_seconds[at]))
    kept = {curve.name for curve in ranked[:MOST_LINES]}
    return [curve for curve in diagnosis.curves if curve.name in kept]


def _by_link(diagnosis: Diagnosis) -> tuple[list[str], list[list[str]]]:
    columns = ["method", *(format_mbit(speed) for speed in SPEEDS_MBIT[::4])]
    return columns, [[curve.name, *map(format_seconds, curve.step_seconds[::4])] for curve in diagnosis.curves]


def _in_words(diagnosis: Diagnosis) -> str:
    slow, fast = format_mbit(SPEEDS_MBIT[0]), format_mbit(SPEEDS_MBIT[-1])
    return " ".join(
        f"{curve.name}: {format_seconds(curve.step_seconds[0])} at {slow}, {format_seconds(curve.step_seconds[-1])} at"
        f" {fast}."
        for curve in _drawn(diagnosis)
    )
