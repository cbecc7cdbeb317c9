"""Summary of the comparison in words and table rows, for terminal and report. Pure functions over the rows."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.lab.bench.train import methods
from thinwire.lab.bench.train.curve import TOLERANCE
from thinwire.lab.bench.train.methods import DDP, LOSSLESS, RANK_ORDER, parse
from thinwire.lab.text import counted, figure
from thinwire.sums.named import NAMED

COLUMNS = ("method", "MB", "fewer", "step s", "faster", "loss", "vs ddp", "to loss", "faster")
_BITS = "bits"
PAYS_FROM = 1.05
"""Least speedup that counts: less is within the noise of a machine that plays all hosts."""


@dataclass(frozen=True)
class MethodSummary:
    """Summary of one method, medians over seeds. None if a figure does not exist, or not for most of the seeds.

    Args:
        seconds_to_dense_loss: a run that never got there counts as infinitely long.
        speedup: seconds that stock DDP needed for its own final loss, over these.
    """

    method: str
    bytes_sent_max: float
    fewer_bytes: float | None
    step_seconds: float
    final_loss: float | None
    loss_vs_dense: float | None
    seconds_to_dense_loss: float | None
    speedup: float | None
    step_speedup: float | None
    bits_per_value: float | None = None


def summarize(rows: Sequence[dict[str, Any]]) -> list[MethodSummary]:
    """Return one summary a method, in the order of the rows."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    dense = by_method.get(DDP)
    return [_summary(method, own, dense) for method, own in by_method.items()]


def _summary(method: str, rows: list[dict[str, Any]], dense: list[dict[str, Any]] | None) -> MethodSummary:
    seconds = _median_or_none(rows, "seconds_to_dense_loss")
    dense_seconds = None if dense is None else _median_or_none(dense, "seconds_to_dense_loss")
    return MethodSummary(
        method=method,
        bytes_sent_max=_sent(rows),
        fewer_bytes=None if dense is None else _sent(dense) / max(1.0, _sent(rows)),
        step_seconds=_step_seconds(rows),
        final_loss=_median_or_none(rows, "final_loss"),
        loss_vs_dense=_median_or_none(rows, "loss_vs_dense"),
        seconds_to_dense_loss=seconds,
        speedup=dense_seconds / seconds if seconds and dense_seconds else None,
        step_speedup=None if dense is None else _step_seconds(dense) / _step_seconds(rows),
        bits_per_value=_bits_per_value(rows),
    )


def _bits_per_value(rows: list[dict[str, Any]]) -> float | None:
    """Return what the method itself tells of the gradients that it codes; else the bits of any, from bytes counted."""
    for name in ("lossless_bits_per_value", "bits_per_value"):
        if rows[0].get(name) is not None:
            return _median_or_none(rows, name)
    return None


def _step_seconds(rows: list[dict[str, Any]]) -> float:
    """Return the seconds of a step; rows of earlier versions have only their median."""
    return statistics.median(row.get("step_seconds", row["step_seconds_median"]) for row in rows)


def _sent(rows: list[dict[str, Any]]) -> float:
    """Return what interfaces counted, the same measure for all; without a link what methods report."""
    by_link = [row["bytes_link_max"] for row in rows if row.get("bytes_link_max") is not None]
    return statistics.median(by_link or [row["bytes_sent_max"] for row in rows])


def _median_or_none(rows: list[dict[str, Any]], name: str) -> float | None:
    """Nulls count as infinite; null if the median is one of them."""
    median = statistics.median(float("inf") if row[name] is None else row[name] for row in rows)
    return None if median == float("inf") else median


def conditions(result: dict[str, Any]) -> str:
    """Return job, hosts, link and steps in one line."""
    first, environment = result["rows"][0], result["environment"]
    where = f"{first['hosts']} hosts, {link_text(first)}"
    if environment.get("in_job"):
        where = f"{first['hosts']} ranks of a job, over its own network"
    size = first.get("gradient_bytes", 4 * first["parameters"]) / 1e6
    trained_by = f"{first['optimizer']}; " if "optimizer" in first else ""
    return (
        f"{first['job']}: {first['parameters']:,} parameters, {size:.1f} MB of gradients; {trained_by}{where};"
        f" {counted(environment['steps'], 'step')}, {counted(environment['seeds'], 'seed')}"
    )


def caption(result: dict[str, Any]) -> str:
    """Return what the columns mean."""
    judged_by = result["environment"].get("judged_by", "held-out loss")
    bits = "bits: of a value, push plus pull, without the factor (n-1)/n; " if _shows_bits(result["rows"]) else ""
    return (
        "Medians over seeds. MB: sent a step by the busiest rank, on a link as its interface counts; fewer, faster:"
        f" than ddp; {bits}loss: {judged_by}, mean of the last 10 % of the steps; to loss: until that, smoothed, is"
        f" within {TOLERANCE:.1%} of ddp's final one."
    )


def link_text(row: dict[str, Any]) -> str:
    return f"links of {row['link_mbit']:.1f} Mbit/s measured" if row["link_mbit"] else "no link (loopback)"


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Return in one or two honest sentences whether compression pays on this link, by the time to stock DDP's final
    loss, within 0.1 %.

    Lossy methods of thinwire count as compression; a bfloat16 all-reduce and torch's own hook are their baselines. The
    uncoded sum in rank order is there for its bits, and not judged.
    """
    summaries = {summary.method: summary for summary in summarize(rows)}
    if DDP not in summaries:
        return "Stock DDP was not run, so nothing can be said about what pays: add ddp to --methods."
    others = [summary for summary in summaries.values() if summary.method not in (DDP, RANK_ORDER)]
    ranked = sorted((summary for summary in others if summary.speedup), key=lambda summary: -(summary.speedup or 0))
    if not others:
        return "Only stock DDP was run."
    if not ranked:
        sentence = "Compression does not pay on this link: no other method reached the loss of stock DDP."
        return sentence + _too_slow(others)
    best = ranked[0]
    own = [summary for summary in ranked if parse(summary.method)[0] not in methods.TORCH_METHODS]
    text = f"reached the loss of stock DDP within {TOLERANCE:.1%} {best.speedup:.2f}x as fast as stock DDP did"
    if (best.speedup or 0) < PAYS_FROM:
        sentence = f"Compression does not pay on this link: the best, {best.method}, {text}."
    elif own and best is own[0]:
        what = _kind(parse(best.method)[0])
        sentence = f"{what} pays on this link: {best.method} {text}{_against_bf16(best, summaries)}."
    else:
        ahead = f", the best of thinwire, {own[0].method}, {own[0].speedup:.2f}x" if own else ""
        sentence = f"Of what was run, nothing beats {best.method} on this link: it {text}{ahead}."
    return sentence + _too_slow(others)


def _kind(name: str) -> str:
    """Return what a method of thinwire is, as the subject of a sentence."""
    if name in methods.OUTER_METHODS:
        return "Another algorithm, an outer loop,"
    return "Exact synchronization" if name in (methods.THINWIRE, methods.EXACT, LOSSLESS, *NAMED) else "Compression"


def _against_bf16(best: MethodSummary, summaries: dict[str, MethodSummary]) -> str:
    bf16 = summaries.get(methods.BF16)
    if bf16 is None:
        return " (a bfloat16 all-reduce, the honest rival, was not run: add bf16 to --methods)"
    if bf16.seconds_to_dense_loss is None or best.seconds_to_dense_loss is None:
        return ", a bfloat16 all-reduce did not reach it"
    return f" and {bf16.seconds_to_dense_loss / best.seconds_to_dense_loss:.2f}x as fast as a bfloat16 all-reduce"


def exactness(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence on parameters that differ between ranks, and on which methods have the bits of rank order."""
    unequal = sorted({row["method"] for row in rows if not row["bitwise_equal_across_ranks"]})
    compared = [row for row in rows if row.get("bitwise_rank_order") is not None and row["method"] != RANK_ORDER]
    other = {row["method"] for row in compared if not row["bitwise_rank_order"]}
    same = sorted({row["method"] for row in compared} - other)
    differing = sorted(method for method in other if parse(method)[0] == LOSSLESS)
    sentences = {
        "Parameters are not the same bits on all ranks": unequal,
        "Losses and parameters are bit for bit the same as of rank_order": same,
        "Losses or parameters differ from rank_order": differing,
    }
    return [f"{text}: {', '.join(named)}." for text, named in sentences.items() if named]


def _too_slow(others: Sequence[MethodSummary]) -> str:
    missed = [summary.method for summary in others if summary.seconds_to_dense_loss is None]
    return f" Not at that loss within its steps: {', '.join(missed)}." if missed else ""


def columns(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the heads of the table: `COLUMNS`, and the bits of a value where a lossless sum was run."""
    return (*COLUMNS[:2], _BITS, *COLUMNS[2:]) if _shows_bits(rows) else COLUMNS


def _shows_bits(rows: Sequence[dict[str, Any]]) -> bool:
    return any(parse(row["method"])[0] == LOSSLESS for row in rows)


def table_rows(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the cells for `columns`, fastest to the dense loss first."""
    summaries = sorted(summarize(rows), key=lambda summary: summary.seconds_to_dense_loss or float("inf"))
    if not _shows_bits(rows):
        return [_cells(summary) for summary in summaries]
    return [[*(cells := _cells(one))[:2], figure(one.bits_per_value, ".1f"), *cells[2:]] for one in summaries]


def _cells(summary: MethodSummary) -> list[str]:
    seconds = summary.seconds_to_dense_loss
    return [
        summary.method,
        _digits(summary.bytes_sent_max / 1e6),
        _times(summary.fewer_bytes),
        _digits(summary.step_seconds),
        _times(summary.step_speedup),
        "diverged" if summary.final_loss is None else f"{summary.final_loss:.4f}",
        figure(summary.loss_vs_dense, "+.2%"),
        "never" if seconds is None else f"{_digits(seconds)} s",
        _times(summary.speedup),
    ]


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def _digits(value: float) -> str:
    """Three digits, or as many as are in front of the point."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if 0 < value < 100 else f"{value:.0f}"
