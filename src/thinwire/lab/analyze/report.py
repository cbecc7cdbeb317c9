"""Report of the analysis as a page: ``report.html``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from thinwire.lab import palette
from thinwire.lab.analyze.prediction import Prediction
from thinwire.lab.analyze.statistics import OwnerLoad, TableStatistics
from thinwire.lab.analyze.summary import EXTRAPOLATION, Analysis, explanations, warnings_of
from thinwire.lab.demo.summary import format_bytes, format_seconds
from thinwire.lab.plot import INK, is_narrow, key, label_ends, mark
from thinwire.lab.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_TABLES_PICTURED = 4
"""Largest number of tables with plots, five each; all tables are in the numbers."""

_LOOKS: dict[str, tuple[str, Any]] = {
    "dense": (palette.STOCK, "-"),
    "agsparse": (palette.TORCH, "-"),
    "sparcml": (palette.PUBLISHED, "-"),
    "omnireduce": (palette.PUBLISHED, palette.DASHES[1]),
    "zen": (palette.THINWIRE, "-"),
}
"""Schemes with a line, beside the chosen one; the tables have all of them."""
_CHOSEN = "chosen by auto"

Figure = Literal["bytes", "seconds"]
_WRITTEN: dict[str, Callable[[float], str]] = {"bytes": format_bytes, "seconds": format_seconds}


def build_report(analysis: Analysis) -> Report:
    """Build a page of the result, plots of the largest sparse tables, and all numbers; ``.write(path)`` saves it."""
    facts = [("Link", analysis.network.describe()), ("Ranks", f"{analysis.recording.world_size} on one machine")]
    report = Report("How sparse are the gradients?", analysis.conditions, facts)
    if not analysis.sparse:
        report.hero(
            "A dense all-reduce is right",
            "No parameter has a sparse gradient: thinwire doctor says whether compression pays.",
        )
    else:
        _figures(report, analysis.sparse[0])
        report.table("Sparse tables", *overview(analysis))
    for table in analysis.sparse[:MOST_TABLES_PICTURED]:
        _schemes_pictures(report, table, analysis)
        _statistics_pictures(report, table)
    for table in analysis.sparse:
        report.items(
            f"{table.name}: what thinwire would choose, by predicted seconds, and why",
            warnings_of(table) + explanations(table),
        )
        _bytes_table(report, table)
        _seconds_table(report, table, analysis)
    if analysis.others:
        report.table(
            "Other parameters",
            ["parameter", "rows x width", "gradient", "non-zero rows"],
            [
                [
                    table.name,
                    f"{table.num_rows:,} x {table.width:,}",
                    table.kind,
                    f"{float(analysis.recording.densities[table.name].mean()):.2%}",
                ]
                for table in analysis.others
            ],
            "Small, or at least half dense in some step: all-reduced.",
        )
    return report


def overview(analysis: Analysis) -> tuple[list[str], list[list[str]], str]:
    """Return columns, one row per sparse table, and a note; for the page and for the terminal."""
    ranks = analysis.recording.world_size
    columns = ["parameter", "rows x width", "density", "overlap", f"gamma^{ranks}", "skew 8/128", "imbalance"]
    note = (
        "Density: share of rows that one rank touches. Overlap: median |A ∩ B| / min(|A|, |B|) of two ranks."
        f" gamma^{ranks}: rows of all ranks together over the rows of one rank. Skew: density of the densest of 8"
        " or 128 equal ranges over the whole density. Imbalance: load of the fullest owner over the mean in the push,"
        " with contiguous/permuted ownership; 1 is ideal."
    )
    return columns, [_overview_row(table) for table in analysis.sparse], note


def _overview_row(table: TableStatistics) -> list[str]:
    return [
        table.name,
        f"{table.num_rows:,} x {table.width}",
        f"{table.density.mean:.2%}",
        f"{table.overlap_quantiles[0.5]:.2f}",
        f"{table.densification[-1]:.2f}",
        "/".join(f"{value:.1f}" for value in table.skewness.values()) or "-",
        f"{table.contiguous.imbalance_push:.2f}/{table.permutation.imbalance_push:.2f}",
    ]


def _figures(report: Report, table: TableStatistics) -> None:
    here = table.here
    dense = table.sent_bytes["dense"]
    sent = table.sent_bytes.get(here.pick, here.bytes[here.pick])
    ranks = f"on {table.world_size} ranks"
    if here.pick == "dense":
        report.hero(
            "A dense all-reduce is right", f"{table.name}, the largest sparse table, {ranks}: no scheme is faster."
        )
    elif sent:
        report.hero(
            f"{dense / sent:.1f}x fewer bytes than a dense all-reduce",
            f"{table.name}, the largest sparse table, by {here.pick} {ranks}: {format_bytes(sent)} instead of"
            f" {format_bytes(dense)} a step and rank.",
            lossy=False,
        )
    figures = [
        (f"of the rows of {table.name} are touched by a rank", f"{table.density.mean:.2%}"),
        (f"the rows of one rank, {ranks} together", f"{table.densification[-1]:.2f}x"),
    ]
    if {"dense", here.pick} <= here.seconds.keys():
        figures += [
            ("predicted for a dense all-reduce", format_seconds(here.seconds["dense"])),
            (f"predicted for {here.pick}", format_seconds(here.seconds[here.pick])),
        ]
    report.figures(figures)


def _schemes_pictures(report: Report, table: TableStatistics, analysis: Analysis) -> None:
    pictures: dict[Figure, tuple[str, str]] = {
        "bytes": (
            "bytes",
            "Expected bytes that a rank sends in a step; both axes are logarithmic. Contiguous partitions are drawn at"
            " their best case, even loads. Dots: exact bytes for the recorded ids. Right of the dotted line the union"
            " is extrapolated. The table below has all schemes.",
        ),
        "seconds": (
            "predicted seconds",
            f"Predicted, not measured: {analysis.network.describe()}. One synchronization, none of it hidden behind"
            " computing; both axes are logarithmic. Wide band: what thinwire would choose, the fastest of its"
            " candidates. Right of the dotted line the union is extrapolated.",
        ),
    }
    for what, (title, note) in pictures.items():
        draw = partial(_draw_schemes, table=table, what=what)
        text = _in_words(table, what)
        report.picture(f"{table.name}: {title} by number of ranks", draw, note, text, height_inches=3.8)


def _statistics_pictures(report: Report, table: TableStatistics) -> None:
    last = table.predictions[-1]
    report.picture(
        f"{table.name}: rows of all ranks together",
        lambda axes: _draw_densification(axes, table),
        "Rows that n ranks touch together, over the rows of one rank. " + EXTRAPOLATION,
        f"Recorded: {table.densification[-1]:.2f} times on {table.world_size} ranks. Extrapolated:"
        f" {last.densification:.2f} times on {last.world_size}.",
        height_inches=2.8,
    )
    report.picture(
        f"{table.name}: overlap of two ranks",
        lambda axes: _draw_overlaps(axes, table),
        f"|A ∩ B| / min(|A|, |B|) of every pair of ranks in every step: {len(table.overlaps)} values.",
        f"Median {table.overlap_quantiles[0.5]:.2f}, from {min(table.overlaps):.2f} to {max(table.overlaps):.2f}.",
        height_inches=2.4,
    )
    report.picture(
        f"{table.name}: load of each owner",
        lambda axes: _draw_loads(axes, table),
        "Rows that each owner, the rank that sums them, receives; mean over steps. Contiguous: equal ranges of ids."
        " Permutation: thinwire's own. Dotted: the mean.",
        f"Fullest owner over the mean: contiguous {table.contiguous.imbalance_push:.2f}, permutation"
        f" {table.permutation.imbalance_push:.2f}.",
        height_inches=2.6,
    )


def _draw_densification(axes: Axes, table: TableStatistics) -> None:
    ranks = [prediction.world_size for prediction in table.predictions]
    growth = [prediction.densification for prediction in table.predictions]
    axes.plot(ranks, growth, "--", color=INK, label=f"n^{table.densification_exponent:.2f}, at most all rows")
    recorded = range(1, table.world_size + 1)
    axes.plot(recorded, table.densification, "o-", color=INK, markersize=4, label="_recorded")
    axes.set(xlabel="ranks", ylabel="times the rows of one rank", xscale="log", xlim=(1, max(ranks)))
    axes.set_yscale("log" if growth[-1] > 10 else "linear")
    _rank_ticks(axes, [1, *ranks])
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda _value, _position: "")
    mark(axes, table.world_size, f"recorded: {table.world_size} ranks")
    label_ends(axes)


def _draw_overlaps(axes: Axes, table: TableStatistics) -> None:
    axes.hist(table.overlaps, bins=[share / 40 for share in range(41)], color=INK, alpha=0.4)
    axes.set(xlabel="overlap ratio", ylabel="pairs", xlim=(0, 1))
    median = table.overlap_quantiles[0.5]
    mark(axes, median, f"median {median:.2f}")


def _draw_loads(axes: Axes, table: TableStatistics) -> None:
    loads: tuple[tuple[str, OwnerLoad, str], ...] = (
        ("contiguous", table.contiguous, palette.PUBLISHED),
        ("permutation", table.permutation, palette.THINWIRE),
    )
    for offset, (label, load, color) in zip((-0.2, 0.2), loads, strict=True):
        owners = [owner + offset for owner in range(table.world_size)]
        axes.bar(
            owners, load.push_rows, 0.38, color=color, label=f"{label}: fullest {load.imbalance_push:.2f}x the mean"
        )
    axes.axhline(sum(table.permutation.push_rows) / table.world_size, color=INK, linewidth=1.0, linestyle=":")
    step = -(-table.world_size // (8 if is_narrow(axes) else 16))
    axes.set(xlabel="owner (rank)", ylabel="rows received", xticks=range(0, table.world_size, step))
    axes.grid(axis="x", visible=False)
    key(axes, 1 if is_narrow(axes) else 2)


def _draw_schemes(axes: Axes, table: TableStatistics, what: Figure) -> None:
    """Draw bytes or seconds of the schemes in `_LOOKS` and of the chosen one."""
    ranks = [prediction.world_size for prediction in table.predictions]
    chosen = [_values(prediction, what)[prediction.pick] for prediction in table.predictions]
    axes.plot(ranks, chosen, color=palette.THINWIRE, linewidth=7, alpha=0.35, solid_capstyle="round", label=_CHOSEN)
    for name, (color, line) in _LOOKS.items():
        values = [_values(prediction, what).get(name, math.nan) for prediction in table.predictions]
        if any(math.isfinite(value) for value in values):
            axes.plot(ranks, values, linestyle=line, color=color, label=name)
    axes.set(xlabel="ranks", xscale="log", yscale="log", xlim=(min(ranks), max(ranks)))
    _rank_ticks(axes, ranks)
    axes.yaxis.set_major_formatter(lambda value, _position: _WRITTEN[what](value))
    axes.yaxis.set_minor_formatter(lambda _value, _position: "")
    if what == "bytes":
        axes.set_ylabel("sent by a rank in a step")
        for name, (color, _) in _LOOKS.items():
            if name in table.sent_bytes:
                axes.plot([table.world_size], [table.sent_bytes[name]], "o", color=color, markersize=4, label="_exact")
    else:
        axes.set_ylabel("predicted time of a step")
    mark(axes, table.world_size, f"recorded: {table.world_size} ranks")
    label_ends(axes)


def _values(prediction: Prediction, what: Figure) -> Mapping[str, float]:
    return prediction.bytes if what == "bytes" else prediction.seconds


def _in_words(table: TableStatistics, what: Figure) -> str:
    here, last = table.here, table.predictions[-1]
    first, then = _values(here, what), _values(last, what)
    return " ".join(
        f"{name}: {_WRITTEN[what](first[name])} on {here.world_size} ranks, {_WRITTEN[what](then[name])} on"
        f" {last.world_size}."
        for name in _LOOKS
        if name in first and name in then
    )


def _rank_ticks(axes: Axes, ranks: list[int]) -> None:
    """Label powers of two; in a narrow plot every second one, from the largest on."""
    powers = [count for count in ranks if count & (count - 1) == 0]
    shown = powers[::-2][::-1] if is_narrow(axes) else powers
    axes.set_xticks(shown, [str(count) for count in shown])
    axes.set_xticks([], minor=True)


def _bytes_table(report: Report, table: TableStatistics) -> None:
    exact = f"{table.world_size}, exact"
    rows = [
        ["rows together", "", *(f"{one.union:,.0f}" for one in table.predictions)],
        [_CHOSEN, "", *(one.pick for one in table.predictions)],
    ]
    for name in _fewest_first(table, "bytes"):
        columns = (table.sent_bytes, *(one.bytes for one in table.predictions))
        rows.append([name, *(_cell(column, name, format_bytes) for column in columns)])
    report.table(
        f"{table.name}: bytes per rank and step, by number of ranks",
        ["scheme", exact, *map(_ranks, table.predictions)],
        rows,
        f"Exact: the recorded ids; no scheme can send less than {format_bytes(table.lower_bound_bytes)} of values."
        f" The others: expected, with even loads; * extrapolated. {EXTRAPOLATION}",
    )


def _seconds_table(report: Report, table: TableStatistics, analysis: Analysis) -> None:
    report.table(
        f"{table.name}: predicted seconds per step, by number of ranks",
        ["scheme", *map(_ranks, table.predictions)],
        [
            [_CHOSEN, *(one.pick for one in table.predictions)],
            *(
                [name, *(_cell(one.seconds, name, format_seconds) for one in table.predictions)]
                for name in _fewest_first(table, "seconds")
            ),
        ],
        f"Predicted, not measured: {analysis.network.describe()}. Of the busiest rank where rows are dealt by"
        " thinwire's permutation; contiguous ranges and blocks are at their best case, even loads. * extrapolated.",
    )


def _fewest_first(table: TableStatistics, what: Figure) -> list[str]:
    """Return all schemes, by their bytes or seconds on the recorded number of ranks."""
    here = _values(table.here, what)
    return sorted(table.schemes, key=lambda name: here.get(name, math.inf))


def _ranks(prediction: Prediction) -> str:
    return f"{prediction.world_size}{'*' if prediction.extrapolated else ''}"


def _cell(values: Mapping[str, float], name: str, written: Callable[[float], str]) -> str:
    return written(values[name]) if name in values else "-"
