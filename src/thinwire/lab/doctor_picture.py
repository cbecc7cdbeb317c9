"""The doctor's page, and its picture: step time against the speed of the link, one line for each method."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from thinwire.lab import palette
from thinwire.lab.plot import MOST_LINES, is_narrow, label_ends, mark
from thinwire.lab.report import Report
from thinwire.plan.doctor import SPEEDS_MBIT, Diagnosis, LinkCurve, describe, format_mbit
from thinwire.plan.explain import format_seconds
from thinwire.plan.plan import EXACT, STOCK

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
    lossy = 0
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
    stops = diagnosis.compression_stops_mbit
    mark(axes, _mbit(diagnosis), f"your link: {_link(diagnosis)}")
    if stops:
        mark(axes, stops, f"compression pays below {format_mbit(stops)}", row=1)
    label_ends(axes)


def build_report(diagnosis: Diagnosis) -> Report:
    """Build a page with the verdict, the picture, the ways, and what to paste; ``.write(path)`` writes the file."""
    plan, measured = diagnosis.plan, diagnosis.measurement
    report = Report(
        "Does it pay to synchronize in another way?", diagnosis.title, [("Link", f"{_link(diagnosis)} a rank")]
    )
    stock, best = format_seconds(diagnosis.stock_step_seconds), format_seconds(plan.step_seconds)
    if plan.does_nothing:
        report.hero("Do nothing", f"Stock DDP is as good as anything here, and simpler: {stock} a step.")
    else:
        lossy = any(group.compressor for group in plan.groups)
        text = f"{plan.choice}: {best} a step, and {stock} under stock DDP."
        report.hero(f"{plan.speedup:.2f}x faster", text + (" Compare the loss, too." if lossy else ""), lossy)
    figures = [
        ("a step of stock DDP", stock),
        ("of it waits for the network", f"{diagnosis.exposed_share:.0%}"),
        ("a step of the best exact way", format_seconds(diagnosis.best_exact[1])),
        ("link of a rank", _link(diagnosis)),
    ]
    report.figures(figures)
    before, code, after = _advice(diagnosis)
    if code:
        report.code(code, before)
        for sentence in after:
            report.text(sentence)
    report.picture(TITLE, lambda axes: draw(axes, diagnosis), _NOTE, _in_words(diagnosis), height_inches=4.0)
    report.table("Step time by link", *_by_link(diagnosis), note=_NOTE if len(diagnosis.curves) > MOST_LINES else "")
    report.pairs("What was measured", _answers(diagnosis))
    report.table(
        "All ways" if len(plan.candidates) <= _SHOWN else f"The fastest {_SHOWN} ways of {len(plan.candidates)}",
        ["way", "step", "against stock DDP", ""],
        [
            [
                candidate.name,
                format_seconds(plan.other_seconds + candidate.seconds),
                f"{diagnosis.stock_step_seconds / (plan.other_seconds + candidate.seconds):.2f}x",
                "taken" if candidate.name == plan.choice else "lossy" if _is_lossy(candidate.name) else "",
            ]
            for candidate in plan.candidates[:_SHOWN]
        ],
    )
    report.items(
        "Doubts",
        [
            f"{doubt} was measured badly: was the machine busy? Measure again with --fresh."
            for doubt in measured.doubts()
        ],
    )
    return report


def _is_lossy(name: str) -> bool:
    return name != STOCK and not name.startswith(EXACT)


def _mbit(diagnosis: Diagnosis) -> float:
    return diagnosis.measurement.link.mbit


def _link(diagnosis: Diagnosis) -> str:
    """Return the measured rate with the digits that the screen has."""
    return f"{_mbit(diagnosis):.0f} Mbit/s"


def _drawn(diagnosis: Diagnosis) -> list[LinkCurve]:
    """Return stock DDP, exact ways, and the compressors that are fastest at the measured link."""
    at = min(range(len(SPEEDS_MBIT)), key=lambda i: abs(SPEEDS_MBIT[i] / _mbit(diagnosis) - 1))
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


def _answers(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return the (name, sentence) pairs of the screen."""
    block = describe(diagnosis).split("\n\n")[1]
    return [(name, text) for name, text in re.findall(r"^(.*?) {2,}(.*)$", block, re.MULTILINE)]


def _advice(diagnosis: Diagnosis) -> tuple[str, str, list[str]]:
    """Return the sentence before what is to be pasted, that itself, and the sentences after it."""
    lines = describe(diagnosis).split("\n\n", 2)[2].splitlines()
    pasted = [i for i, line in enumerate(lines) if line.startswith("    ")]
    if not pasted:
        return " ".join(lines), "", []
    code = "\n".join(line.removeprefix("    ") for line in lines[pasted[0] : pasted[-1] + 1])
    return " ".join(lines[: pasted[0]]).strip(), code, [line for line in lines[pasted[-1] + 1 :] if line]
