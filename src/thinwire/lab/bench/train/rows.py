"""Rows of `thinwire bench train`, computed from the ranks' records. Pure functions."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from statistics import fmean, median
from typing import Any

from thinwire.lab.bench.train.curve import LossCurve, reached_at
from thinwire.lab.bench.train.methods import RANK_ORDER, TORCH_METHODS, parse
from thinwire.lab.bench.train.rank import JobTraining, RankRecord, StepRecord
from thinwire.lab.bench.turns import mean_of_known, quantile
from thinwire.plan.plan import STOCK

_PARTS = (
    "backward_seconds", "exposed_seconds", "optimizer_seconds", "encode_seconds", "wire_seconds", "decode_seconds",
)  # fmt: skip


def curve_of(training: JobTraining, records: Sequence[RankRecord]) -> LossCurve:
    """Return the held-out loss of a run; seconds are means over ranks of the steps' times, without the evaluations.

    The first step counts as a median one: it opens connections, loads or compiles kernels and measures the link, once,
    which is negligible in hours of training and would be much in these two minutes.
    """
    step_seconds = _step_seconds(records)
    elapsed = list(accumulate([median(step_seconds), *step_seconds[1:]]))
    losses = records[0].held_out_losses
    return LossCurve(
        steps=tuple(step for step, _ in losses),
        seconds=tuple(elapsed[step - 1] for step, _ in losses),
        losses=tuple(loss for _, loss in losses),
        planned_steps=training.steps,
    )


def row_of(training: JobTraining, records: Sequence[RankRecord], link_mbit: float | None) -> dict[str, Any]:
    """Return one row, as in docs/evidence/bench-train.md, without the comparison to stock DDP (see `against_dense`)."""
    curve = curve_of(training, records)
    by_step = _by_step(records)
    step_seconds = _step_seconds(records)
    account, accounts = records[0].account, [record.account for record in records]
    typical = (lambda steps: median(map(fmean, steps))) if account.rounds is None else _mean_of_late
    return {
        "job": training.job.name,
        "method": training.method,
        "hosts": len(records),
        "link_mbit": link_mbit,
        "seed": training.seed,
        "parameters": records[0].parameters,
        "gradient_bytes": records[0].gradient_bytes,
        "optimizer": records[0].optimizer,
        "steps": training.steps,
        "steps_run": len(by_step),
        "step_seconds": typical([[seconds] for seconds in step_seconds]),
        "step_seconds_median": median(step_seconds),
        "step_seconds_p10": quantile(step_seconds, 0.1),
        "step_seconds_p90": quantile(step_seconds, 0.9),
        "first_step_seconds": step_seconds[0],
        **{name: _seconds(by_step, name, typical) for name in _PARTS},
        "groups": account.groups,
        "tensor_missing_rate": mean_of_known([one.tensor_missing_rate for one in accounts]),
        "rounds": account.rounds,
        "accumulate": training.accumulate,
        "lossless_bits_per_value": mean_of_known([one.lossless_bits_per_value for one in accounts]),
        "plan": records[0].plan or None,
        **_bytes(training, records),
        "final_loss": _finite(curve.final_loss),
        "curve_steps": list(curve.steps),
        "seconds_curve": list(curve.seconds),
        "loss_curve": [_finite(loss) for loss in curve.losses],
        "bitwise_equal_across_ranks": len({record.digest for record in records}) == 1,
        "parameters_digest": records[0].digest,
        "losses_digest": "".join(record.losses_digest for record in records),
    }


def against_dense(row: dict[str, Any], curve: LossCurve, dense_loss: float | None) -> dict[str, Any]:
    """Return the row with the time until the loss is within 0.1 % of the final loss of stock DDP of the same seed.

    Null if stock DDP was not run, or its loss not reached.
    """
    if dense_loss is None or row["final_loss"] is None:
        return row | {"seconds_to_dense_loss": None, "loss_vs_dense": None}
    return row | {
        "seconds_to_dense_loss": curve.seconds_to(reached_at(dense_loss)),
        "loss_vs_dense": row["final_loss"] / dense_loss - 1.0,
    }


def against_rank_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a seed with whether all losses and parameters equal the uncoded sum's in rank order.

    Null if that was not run.
    """
    digests = itemgetter("losses_digest", "parameters_digest")
    reference = [digests(row) for row in rows if row["method"] == RANK_ORDER]
    return [row | {"bitwise_rank_order": digests(row) == reference[0] if reference else None} for row in rows]


def bits_per_value(sent_bytes: Sequence[float], values: int) -> float | None:
    """Return the bits that travel for a value on its way to its owner and back, push plus pull, from bytes counted.

    A rank owns 1/n of the values and sends these neither to nor for itself, so it sends (n-1)/n of what a value takes
    twice. That factor is divided out: an all-reduce of float32 has 64, whatever n is; of bfloat16 32. None for one
    rank.

    Args:
        sent_bytes: bytes that each rank sent.
        values: number of values that each rank holds.

    Example:
        >>> bits_per_value([6000, 6000, 6000, 6000], 1000)  # a ring of 4 ranks sends 2 x 3/4 of 4000 bytes
        64.0
    """
    world_size = len(sent_bytes)
    if world_size == 1 or not values:
        return None
    return 8 * fmean(sent_bytes) / values * world_size / (world_size - 1)


def _bytes(training: JobTraining, records: Sequence[RankRecord]) -> dict[str, Any]:
    """Bytes a step of the rank that sent most: counted by thinwire, else by the host's interface, else by formula."""
    link = None
    if all(record.link_bytes is not None for record in records):
        link = max((record.link_bytes or 0) / len(record.steps) for record in records)
    sent_by_ranks = [fmean(step.sent_bytes or 0.0 for step in record.steps) for record in records]
    own = max(sent_by_ranks)
    by_torch = parse(training.method)[0] in TORCH_METHODS or records[0].plan == STOCK
    if not by_torch:
        sent, source = own, "counted"
    elif link is not None:
        sent, source = link, "interface"
    else:
        sent, source = own, "formula"
    dense_bytes = records[0].gradient_bytes * 2 * (len(records) - 1) / len(records)
    return {
        "bytes_sent_max": round(sent),
        "bytes_source": source,
        "bytes_own_max": round(own),
        "bytes_link_max": None if link is None else round(link),
        "density": sent / dense_bytes if dense_bytes else None,
        "bits_per_value": bits_per_value(sent_by_ranks, records[0].parameters),
    }


def _step_seconds(records: Sequence[RankRecord]) -> list[float]:
    return [fmean(step.step_seconds for step in steps) for steps in _by_step(records)]


def _by_step(records: Sequence[RankRecord]) -> list[list[StepRecord]]:
    return [list(steps) for steps in zip(*(record.steps for record in records), strict=True)]


def _mean_of_late(steps: Sequence[Sequence[float]]) -> float:
    """Mean of all steps but the first: most steps of an outer loop have no round, and the median would be one of them.

    The first opens connections.
    """
    return fmean(map(fmean, steps[1:] or steps))


def _seconds(
    by_step: list[list[StepRecord]], name: str, typical: Callable[[Sequence[Sequence[float]]], float]
) -> float | None:
    """Seconds of a part of a step; None if the method does not report it."""
    values = [[getattr(step, name) for step in steps] for steps in by_step]
    if any(value is None for steps in values for value in steps):
        return None
    return typical(values)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
