"""The doctor's picture: step time against the speed of the link, one line for each method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lab.report import PALETTE, Report
from thinwire.plan.doctor import SPEEDS_MBIT, Diagnosis, describe, format_mbit
from thinwire.plan.explain import format_seconds
from thinwire.plan.plan import STOCK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TICKS = [digit * 10.0**power for power in range(-6, 5) for digit in (1, 2, 5)]
TITLE = "A step against the speed of the link"


def draw(axes: Axes, diagnosis: Diagnosis) -> None:
    """Draw the curves on empty axes of matplotlib."""
    for place, curve in enumerate(diagnosis.curves):
        is_stock = curve.name == STOCK
        axes.plot(
            SPEEDS_MBIT,
            curve.step_seconds,
            label=curve.name,
            color=PALETTE[place % len(PALETTE)],
            linestyle="--" if is_stock else "-",
            linewidth=2.6 if is_stock else 1.8,
        )
    measured = diagnosis.measurement.link.mbit
    axes.axvline(measured, color=PALETTE[2], linewidth=1.0, linestyle=":")
    axes.annotate(
        f"measured: {format_mbit(measured)}",
        (measured, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        fontsize=9,
    )
    if diagnosis.compression_stops_mbit:
        axes.axvline(diagnosis.compression_stops_mbit, color=PALETTE[3], linewidth=1.0, linestyle=":")
        axes.annotate(
            "compression stops paying",
            (diagnosis.compression_stops_mbit, 0.5),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=9,
        )
    axes.set(xscale="log", yscale="log", xlabel="link of a rank", ylabel="step", xlim=(SPEEDS_MBIT[0], SPEEDS_MBIT[-1]))
    axes.xaxis.set_major_formatter(lambda value, _position: format_mbit(value))
    lowest, highest = axes.get_ylim()
    ticks = [tick for tick in _TICKS if lowest <= tick <= highest]
    axes.set_yticks(ticks, [format_seconds(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.legend(fontsize=9)


def build_report(diagnosis: Diagnosis) -> Report:
    """Build a page with the answers, the picture and the candidates; ``.write(path)`` writes the file."""
    plan = diagnosis.plan
    report = Report("Does it pay to synchronize in another way?", diagnosis.title)
    report.figures(
        [
            ("of a step waits for the network", f"{diagnosis.exposed_share:.0%}"),
            ("a step of stock DDP", format_seconds(diagnosis.stock_step_seconds)),
            ("a step of the best plan", format_seconds(plan.step_seconds)),
            ("faster", "do nothing" if plan.does_nothing else f"{plan.speedup:.2f}x"),
        ]
    )
    for paragraph in describe(diagnosis).split("\n\n")[1:]:
        for line in paragraph.splitlines():
            report.text(line.strip())
    report.picture(
        TITLE,
        lambda axes: draw(axes, diagnosis),
        "Predicted from what was measured, for the same machines on other links; each line is the best fusion of a"
        " method.",
        height_inches=4.0,
    )
    report.table(
        "All candidates",
        ["candidate", "from the start of backward until the last gradient is there"],
        [[candidate.name, format_seconds(candidate.seconds)] for candidate in plan.candidates],
    )
    return report
