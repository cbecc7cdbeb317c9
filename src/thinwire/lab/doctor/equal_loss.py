"""Whether lossy compression holds the loss of a training, and what it costs in steps, from short trainings. Pure.

Methods are compared at the same learning rates, each at its best, because the rate decides more than the code does.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.planner import WORTH, LossRow, Option, step_seconds
from thinwire.plan.text import format_bytes, format_seconds

RATES = (0.5, 1.0, 2.0)
"""Multiples of the learning rates of the script at which every method is trained."""
SEEDS, MOST_SEEDS = 3, 6
"""Trainings of a method at its best rate, which give the error bar, and most of them where it is undecided."""
LEAST_STEPS = 30
"""Fewest steps that can be judged."""
_TENTHS = 10
_SIGMAS = 2.0
"""Standard errors in an error bar."""
_HOPELESS = 3.0
"""Multiple of the limit above which a method is not trained with another seed."""
_LEARNED = 5.0
"""Multiple of the limit by which the dense loss must fall: of less progress a percent is too large a part."""


@dataclass(frozen=True)
class ShortRun:
    """A short training.

    Args:
        codec: text of `thinwire.lab.doctor.advice.method`, of large gradients; None for exact sums.
        rate: multiple of the script's learning rates.
        seed: number that shifts the seeds of the script.
    """

    codec: str | None = None
    rate: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class ShortCurve:
    """The outcome of a short training.

    Args:
        losses: training loss of each step, the mean over ranks.
        sent_bytes: bytes that a rank sends in a step.
        failure: why the training failed; empty if it did not.
    """

    run: ShortRun
    losses: tuple[float, ...]
    sent_bytes: float = 0.0
    failure: str = ""

    @property
    def tenths(self) -> list[float]:
        """Mean losses of the tenths of the training; infinite where they are not finite."""
        ends = [len(self.losses) * tenth // _TENTHS for tenth in range(_TENTHS + 1)]
        means = [statistics.fmean(self.losses[start:end]) for start, end in pairwise(ends)]
        return [mean if math.isfinite(mean) else math.inf for mean in means]

    @property
    def end(self) -> float:
        """Mean loss of the last tenth; infinite for a failed or shorter training."""
        return math.inf if self.failure or len(self.losses) < LEAST_STEPS else self.tenths[-1]


@dataclass(frozen=True)
class Judgement:
    """Which methods hold the loss.

    Args:
        limit: largest part of the dense loss by which a method may end above it.
        steps, world_size: steps of each training, and its simulated ranks.
        rows: dense first.
        doubt: why nothing lossy is advised; empty if the trainings say enough.
    """

    limit: float
    steps: int
    world_size: int
    rows: tuple[LossRow, ...] = ()
    doubt: str = ""

    def of(self, options: Sequence[Option]) -> list[Option]:
        """Return the options that hold the loss, each with its row: that of its worst codec if it has several."""
        known = {row.codec: row for row in self.rows if not (row.codec and (row.refused or self.doubt))}
        held = []
        for option in options:
            rows = [known.get(codec) for codec in ((None,) if option.is_exact else map(" by ".join, option.codecs))]
            if option.is_exact or all(rows):
                worst = max(filter(None, rows), key=lambda row: row.steps, default=None)
                held.append(replace(option, judged=worst))
        return held

    def to_json(self, step_seconds: Callable[[LossRow], float | None]) -> dict[str, Any]:
        """Return the figures.

        Args:
            step_seconds: returns the seconds of a step with a method on the link; None if they are not known.
        """
        rows = []
        for row in self.rows:
            seconds = step_seconds(row)
            in_all = seconds and self.steps * row.steps * seconds
            codec = row.codec and row.codec.split(" by ")
            figures = {**asdict(row), "codec": codec, "step_seconds": seconds, "seconds_to_loss": in_all}
            rows.append({"method": row.name, **figures})
        return {**asdict(self), "rows": rows}

    def describe(self, step_seconds: Callable[[LossRow], float | None]) -> list[str]:
        """Return a table for the screen."""
        trained = f"Loss after {self.steps} steps of {self.world_size} simulated ranks, each at its best rate:"
        lines, width = [trained] if self.rows else [], max((len(row.name) for row in self.rows), default=0)
        for row in self.rows:
            seconds = step_seconds(row)
            lasts = row.refused or (seconds and f"{format_seconds(self.steps * row.steps * seconds)} to the dense loss")
            figures = f"x{row.rate:<3g}  {row.loss:<8.4g}  {row.against:<17}  {format_bytes(row.sent_bytes):>8} a step"
            lines.append(f"{row.name:<{width}}  {figures}  {lasts or ''}")
        return [*lines, f"No lossy way is advised: {self.doubt}."] if self.doubt else lines


def contenders(measurement: Measurement, priced: Sequence[Option]) -> list[str]:
    """Return the codecs worth training with: each compressor by its fastest exchange, if its step is shorter than that
    of every exact option."""
    bound = min(step_seconds(measurement, option) for option in priced if option.is_exact) / WORTH
    fastest: dict[str, Option] = {}
    for option in sorted(priced, key=lambda option: option.seconds):
        if not option.is_exact and len(option.codecs) == 1 and step_seconds(measurement, option) < bound:
            fastest.setdefault(option.codecs[0][0], option)
    return [" by ".join(option.codecs[0]) for option in sorted(fastest.values(), key=lambda option: option.loss)]


def judge(
    codecs: Sequence[str], world_size: int, limit: float, train: Callable[[Sequence[ShortRun]], list[ShortCurve]]
) -> Judgement:
    """Train dense and with each codec at all rates, then those that may hold with other seeds at their best one.

    Args:
        train: trains, and returns the curves in the same order.
    """
    methods: list[str | None] = [None, *codecs]
    curves = train([ShortRun(codec, rate) for codec in methods for rate in RATES])
    best = {codec: min((c for c in curves if c.run.codec == codec), key=lambda each: each.end) for codec in methods}
    own = {curve.run.codec: curve.end for curve in curves if curve.run.rate == 1.0}
    dense = best[None]
    steps = len(dense.losses)
    if not 0.0 < dense.end < math.inf:
        few = f"{steps} steps of {world_size} ranks are too few: the script has to call optimizer.step() more often"
        positive = f"a loss of {dense.end:g} cannot be judged in percent"
        return Judgement(limit, steps, world_size, (), dense.failure or (few if steps < LEAST_STEPS else positive))
    left = [codec for codec in methods if best[codec].end <= (1.0 + _HOPELESS * limit) * dense.end]
    trained = {codec: [best[codec]] for codec in methods}
    rows: list[LossRow] = []
    for seed in range(1, MOST_SEEDS):
        for curve in train([ShortRun(codec, best[codec].run.rate, seed) for codec in left]):
            trained[curve.run.codec].append(curve)
        rows = _rows(trained, own, limit)
        undecided = [row.codec for row in rows[1:] if abs(row.excess - limit) < row.error]
        left = left if seed + 1 < SEEDS else [None, *undecided]
        if len(left) == 1:
            break
    start, *_, end = _means(trained[None])
    fallen = max(0.0, start / end - 1.0)
    doubt = f"the dense loss fell by {fallen:.1%} only, and {limit:.1%} is too large a part of that"
    return Judgement(limit, steps, world_size, tuple(rows), doubt if fallen < _LEARNED * limit else "")


def _rows(
    trained: Mapping[str | None, Sequence[ShortCurve]], own: Mapping[str | None, float], limit: float
) -> list[LossRow]:
    """Return the rows of all methods. Trainings of all methods scatter alike, so all give the error bar together."""
    dense = trained[None]
    excesses = {
        codec: [curve.end / other.end - 1.0 for curve, other in zip(curves, dense, strict=False)]
        for codec, curves in trained.items()
    }
    repeated = [values for codec, values in excesses.items() if codec and len(values) > 1 and max(values) < math.inf]
    scatter = math.sqrt(statistics.fmean(map(statistics.variance, repeated))) if repeated else 0.0
    rows = []
    for codec, (first, *others) in trained.items():
        loss = statistics.fmean(curve.end for curve in (first, *others))
        row = LossRow(codec, first.run.rate, loss, 1.0 - first.end / own[codec], first.sent_bytes)
        excess, error = statistics.fmean(excesses[codec]), _SIGMAS * scatter / math.sqrt(1 + len(others))
        if codec is not None:
            why = first.failure or f"more than {limit:.1%} above" * (excess > limit) or "not known well enough"
            refused = "" if excess + error <= limit else f"refused: {why}"
            steps = _steps(_means(dense), _means(dense)[-1] * (1.0 + excess + error))
            row = replace(row, excess=excess, error=error, steps=steps, refused=refused)
        rows.append(row)
    return rows


def _means(curves: Sequence[ShortCurve]) -> list[float]:
    """Return the mean of the tenths of several trainings."""
    return [statistics.fmean(values) for values in zip(*(curve.tenths for curve in curves), strict=True)]


def _steps(dense: Sequence[float], loss: float) -> float:
    """Return how many times as many steps the end takes as the first point at which the dense loss is this one.

    Example:
        >>> _steps([4.0, 3.0, 2.0], 2.5), _steps([4.0, 3.0, 2.0], 1.9), _steps([4.0, 3.0, 2.0], 9.0)
        (1.25, 1.0, inf)
    """
    if loss >= dense[0]:
        return math.inf
    for index, (before, after) in enumerate(pairwise(dense)):
        if after <= loss:
            return max(1.0, (len(dense) - 0.5) / (index + 0.5 + (before - loss) / (before - after)))
    return 1.0
