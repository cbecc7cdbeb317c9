"""Report of the analysis as a page: ``report.html``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from thinwire.lab.analyze.prediction import Prediction
from thinwire.lab.analyze.statistics import OwnerLoad, TableStatistics
from thinwire.lab.analyze.summary import EXTRAPOLATION, Analysis, explanations, warnings_of
from thinwire.lab.demo.summary import format_bytes, format_seconds
from thinwire.lab.report import PALETTE, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_TABLES_PICTURED = 4
"""Largest number of tables with pictures, five each; all tables are in the numbers."""

_LINES = ("-", "--", ":")
_SECONDS_OF = ("dense", "agsparse", "zen", "column_split")
"""Schemes whose seconds are drawn, beside the pick."""


def build_report(analysis: Analysis) -> Report:
    """Build a page of figures, pictures of the largest sparse tables, and all numbers; ``.write(path)`` saves it."""
    report = Report("How sparse are the gradients?", analysis.conditions)
    if not analysis.sparse:
        report.text("No parameter has a sparse gradient: a dense all-reduce is right for all of them.")
    else:
        _figures(report, analysis.sparse[0])
        report.table("Sparse tables", *overview(analysis))
    for table in analysis.sparse[:MOST_TABLES_PICTURED]:
        _pictures(report, table)
        _seconds_picture(report, table, analysis)
    for table in analysis.sparse:
        _explanation(report, table)
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
        f" gamma^{ranks}: rows of all ranks together over those of one. Skew: density of the densest of 8 or 128 equal"
        " ranges over the whole density. Imbalance: load of the fullest owner over the mean in the push, with"
        " contiguous/permuted ownership; 1 is ideal."
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
    here = table.prediction(table.world_size)
    dense = table.sent_bytes["dense"]
    sent = table.sent_bytes.get(here.pick, here.bytes[here.pick])
    report.figures(
        [
            (f"density of {table.name}, the largest sparse table", f"{table.density.mean:.2%}"),
            (f"gamma: densification over {table.world_size} ranks", f"{table.densification[-1]:.2f}"),
            (f"pick on {table.world_size} ranks, by predicted seconds", here.pick),
            ("fewer bytes than a dense all-reduce", f"{dense / sent:.1f}x" if sent else "all"),
        ]
    )


def _pictures(report: Report, table: TableStatistics) -> None:
    report.picture(
        f"{table.name}: densification",
        lambda axes: _draw_densification(axes, table),
        "Rows of n ranks together over the rows of one. " + EXTRAPOLATION,
        height_inches=2.8,
    )
    report.picture(
        f"{table.name}: overlap of two ranks",
        lambda axes: _draw_overlaps(axes, table),
        f"|A ∩ B| / min(|A|, |B|) of every pair of ranks in every step: {len(table.overlaps)} values.",
        height_inches=2.4,
    )
    report.picture(
        f"{table.name}: load of each owner",
        lambda axes: _draw_loads(axes, table),
        "Rows that each owner receives in the push, mean over steps. Contiguous: equal ranges of ids. Permutation:"
        " thinwire's own.",
        height_inches=2.6,
    )
    report.picture(
        f"{table.name}: bytes by number of ranks",
        lambda axes: _draw_bytes(axes, table),
        "Expected bytes that a rank sends in a step; both axes are logarithmic. Contiguous partitions are drawn at"
        " their best case, even loads. Dots: exact bytes for the recorded ids. Right of the grey line the union is"
        " extrapolated.",
        height_inches=4.2,
    )


def _seconds_picture(report: Report, table: TableStatistics, analysis: Analysis) -> None:
    report.picture(
        f"{table.name}: predicted seconds by number of ranks",
        lambda axes: _draw_seconds(axes, table),
        f"Predicted, not measured: {analysis.network.describe()}. One synchronization, none of it hidden behind"
        " computing; both axes are logarithmic. Wide band: what thinwire would choose, the fastest of its candidates."
        " Right of the grey line the union is extrapolated.",
        height_inches=3.6,
    )


def _explanation(report: Report, table: TableStatistics) -> None:
    report.text(f"What thinwire would choose for {table.name}, by predicted seconds, and why:")
    for line in warnings_of(table) + explanations(table):
        report.text(line)


def _draw_densification(axes: Axes, table: TableStatistics) -> None:
    ranks = [prediction.world_size for prediction in table.predictions]
    growth = [prediction.densification for prediction in table.predictions]
    axes.plot(ranks, growth, "--", color=PALETTE[2], label=f"n^{table.densification_exponent:.2f}, at most all rows")
    recorded = range(1, table.world_size + 1)
    axes.plot(recorded, table.densification, "o-", color=PALETTE[1], markersize=5, label="recorded")
    axes.set(xlabel="ranks", ylabel="gamma", xscale="log", yscale="log" if growth[-1] > 10 else "linear")
    _rank_ticks(axes, [1, *ranks])
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
    axes.legend()


def _draw_overlaps(axes: Axes, table: TableStatistics) -> None:
    axes.hist(table.overlaps, bins=[share / 40 for share in range(41)], color=PALETTE[5])
    axes.axvline(table.overlap_quantiles[0.5], color=PALETTE[3], linestyle="--", linewidth=1.2, label="median")
    axes.set(xlabel="overlap ratio", ylabel="pairs", xlim=(0, 1))
    axes.legend()


def _draw_loads(axes: Axes, table: TableStatistics) -> None:
    loads: tuple[tuple[str, OwnerLoad, str], ...] = (
        ("contiguous", table.contiguous, PALETTE[0]),
        ("permutation", table.permutation, PALETTE[1]),
    )
    for offset, (label, load, color) in zip((-0.2, 0.2), loads, strict=True):
        owners = [owner + offset for owner in range(table.world_size)]
        axes.bar(owners, load.push_rows, 0.38, color=color, label=f"{label}, imbalance {load.imbalance_push:.2f}")
    axes.axhline(sum(table.permutation.push_rows) / table.world_size, color=PALETTE[2], linewidth=1.2, linestyle="--")
    axes.set(xlabel="owner", ylabel="rows received", xticks=range(table.world_size))
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.3)  # room for the legend
    axes.legend(ncols=2)


def _draw_bytes(axes: Axes, table: TableStatistics) -> None:
    ranks = [prediction.world_size for prediction in table.predictions]
    for place, name in enumerate(table.schemes):
        color, line = PALETTE[place % len(PALETTE)], _LINES[place // len(PALETTE) % len(_LINES)]
        expected = [prediction.bytes.get(name, math.nan) for prediction in table.predictions]
        axes.plot(ranks, expected, line, color=color, label=name)
        if name in table.sent_bytes:
            axes.plot([table.world_size], [table.sent_bytes[name]], "o", color=color, markersize=5)
    axes.axvline(table.world_size, color=PALETTE[2], linewidth=1, linestyle=":")
    axes.set(xlabel="ranks", xscale="log", yscale="log")
    _rank_ticks(axes, ranks)
    axes.yaxis.set_major_formatter(lambda value, _position: format_bytes(value))
    axes.yaxis.set_minor_formatter(lambda _value, _position: "")
    axes.figure.legend(loc="outside right upper", fontsize=8)


def _draw_seconds(axes: Axes, table: TableStatistics) -> None:
    ranks = [prediction.world_size for prediction in table.predictions]
    picked = [prediction.seconds[prediction.pick] for prediction in table.predictions]
    axes.plot(ranks, picked, color=PALETTE[1], linewidth=8, alpha=0.5, solid_capstyle="round", label="pick")
    for name, color in zip(_SECONDS_OF, (PALETTE[2], PALETTE[0], PALETTE[3], PALETTE[5]), strict=True):
        seconds = [prediction.seconds.get(name, math.nan) for prediction in table.predictions]
        axes.plot(ranks, seconds, "o-", color=color, markersize=3.5, label=name)
    axes.axvline(table.world_size, color=PALETTE[2], linewidth=1, linestyle=":")
    axes.set(xlabel="ranks", ylabel="predicted seconds", xscale="log", yscale="log")
    _rank_ticks(axes, ranks)
    axes.yaxis.set_major_formatter(lambda value, _position: format_seconds(value))
    axes.yaxis.set_minor_formatter(lambda _value, _position: "")
    axes.figure.legend(loc="outside right upper", fontsize=8)


def _rank_ticks(axes: Axes, ranks: list[int]) -> None:
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.set_xticks([], minor=True)


def _bytes_table(report: Report, table: TableStatistics) -> None:
    exact = [f"{table.world_size}, exact", "", "", *_cells(table, table.sent_bytes, format_bytes)]
    rows = [
        [
            _ranks(prediction),
            f"{prediction.union:,.0f}",
            prediction.pick,
            *_cells(table, prediction.bytes, format_bytes),
        ]
        for prediction in table.predictions
    ]
    report.table(
        f"{table.name}: bytes per rank and step",
        ["ranks", "rows together", "pick", *table.schemes],
        [exact, *rows],
        f"Exact: the recorded ids; no scheme can send less than {format_bytes(table.lower_bound_bytes)} of values."
        " The others: expected, with even loads. " + EXTRAPOLATION,
    )


def _seconds_table(report: Report, table: TableStatistics, analysis: Analysis) -> None:
    report.table(
        f"{table.name}: predicted seconds per step",
        ["ranks", "pick", *table.schemes],
        [[_ranks(one), one.pick, *_cells(table, one.seconds, format_seconds)] for one in table.predictions],
        f"Predicted, not measured: {analysis.network.describe()}. Of the busiest rank where rows are dealt by"
        " thinwire's permutation; contiguous ranges and blocks are at their best case, even loads.",
    )


def _ranks(prediction: Prediction) -> str:
    return f"{prediction.world_size}{' (extrapolated)' if prediction.extrapolated else ''}"


def _cells(table: TableStatistics, values: Mapping[str, float], written: Callable[[float], str]) -> list[str]:
    return [written(values[name]) if name in values else "-" for name in table.schemes]
