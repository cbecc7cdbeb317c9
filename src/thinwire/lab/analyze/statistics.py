"""Statistics of one table's ids for its synchronization: ZEN's, and the bytes of every scheme.

Pure functions: equal traces give equal statistics, except for predicted seconds, for which kernels are measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import torch
from torch import Tensor

from thinwire.lab.analyze.prediction import DEFAULT_LINK, PREDICTED_RANKS, AssumedLink, Prediction, is_hashed, predict
from thinwire.lab.bench.trace import IndexTrace
from thinwire.lab.bench.turns import quantile
from thinwire.lab.ledger import sent_bytes, value_lower_bound_bytes
from thinwire.lab.sparsity import densification, imbalance_pull, imbalance_push, overlap_ratio, skewness
from thinwire.rows.partition import Contiguous, Partition, Permutation
from thinwire.sums.named import NAMED

SKEWNESS_PARTITIONS = (8, 128)
MAX_HASHED_ELEMENTS = 1 << 22
"""Largest table with exact bytes of ZEN's hash, which needs a list of all ids of an owner: 12 s for 15 million
elements. Beyond, the bytes of the permutation are expected, which deals evenly without a list."""
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class Spread:
    """Mean, minimum and maximum of a number over all steps and ranks."""

    mean: float
    min: float
    max: float


@dataclass(frozen=True)
class OwnerLoad:
    """Evenness of a partition's deal of rows to ``world_size`` owners. Means over steps; 1.0 is perfect balance.

    ``push_rows[j]`` is the number of rows that all ranks together hold of owner j's part, ``pull_rows[j]`` that of the
    union.
    """

    imbalance_push: float
    imbalance_pull: float
    push_rows: tuple[float, ...]
    pull_rows: tuple[float, ...]


@dataclass(frozen=True)
class TableStatistics:
    """Statistics of one table [num_rows, width] of ``dtype``, over ``num_steps`` steps on ``world_size`` ranks.

    ``densification[n - 1]`` is the growth of the density over the first n ranks; ``densification_exponent`` is a in
    the fit n^a. ``skewness`` is by number of partitions, without those that exceed ``num_rows``. ``sent_bytes`` are
    exact for the recorded ids: means over steps and ranks, without hashed schemes for a table of more than
    `MAX_HASHED_ELEMENTS`; ``lower_bound_bytes`` is the least that any scheme can send.
    """

    name: str
    num_rows: int
    width: int
    dtype: str
    num_steps: int
    world_size: int
    density: Spread
    overlaps: tuple[float, ...]
    densification: tuple[float, ...]
    densification_exponent: float
    skewness: dict[int, float]
    contiguous: OwnerLoad
    permutation: OwnerLoad
    sent_bytes: dict[str, float]
    lower_bound_bytes: float
    predictions: tuple[Prediction, ...]

    @property
    def schemes(self) -> list[str]:
        """Names of all schemes with a prediction."""
        return list(dict.fromkeys(name for prediction in self.predictions for name in prediction.bytes))

    @property
    def overlap_quantiles(self) -> dict[float, float]:
        """Quantiles of the overlap ratio, over pairs of ranks and steps."""
        return {share: quantile(self.overlaps, share) for share in QUANTILES}

    @property
    def here(self) -> Prediction:
        """The prediction for the recorded number of ranks."""
        return next(one for one in self.predictions if one.world_size == self.world_size)


def table_statistics(
    name: str,
    trace: IndexTrace,
    dtype: torch.dtype = torch.float32,
    network: AssumedLink = DEFAULT_LINK,
    ranks: Sequence[int] = PREDICTED_RANKS,
) -> TableStatistics:
    """Return all statistics of one table, including predictions on ``ranks`` ranks each on ``network``.

    Raises:
        ValueError: fewer than 2 ranks, between which there is nothing to compare. (A trace has at least one step.)

    Example:
        >>> ids = torch.tensor([0, 3])
        >>> table_statistics("table", Trace(num_rows=8, width=4, steps=((ids, ids),))).densification
        (1.0, 1.0)
    """
    if trace.world_size < 2:
        raise ValueError(f"statistics between ranks need at least 2 ranks; the trace has {trace.world_size}")
    curve = densification_curve(trace.steps)
    exponent = fit_exponent(curve)
    densities = [ids.numel() / trace.num_rows for step in trace.steps for ids in step]
    return TableStatistics(
        name=name,
        num_rows=trace.num_rows,
        width=trace.width,
        dtype=str(dtype).removeprefix("torch."),
        num_steps=len(trace.steps),
        world_size=trace.world_size,
        density=Spread(fmean(densities), min(densities), max(densities)),
        overlaps=tuple(overlap_ratio(a, b) for step in trace.steps for a, b in combinations(step, 2)),
        densification=curve,
        densification_exponent=exponent,
        skewness={
            parts: fmean(skewness(ids, trace.num_rows, parts) for step in trace.steps for ids in step)
            for parts in SKEWNESS_PARTITIONS
            if parts <= trace.num_rows
        },
        contiguous=owner_load(trace.steps, Contiguous(trace.num_rows, trace.world_size)),
        permutation=owner_load(trace.steps, Permutation(trace.num_rows, trace.world_size, seed=0)),
        sent_bytes=_exact_bytes(trace, dtype),
        lower_bound_bytes=fmean(value_lower_bound_bytes(step, trace.width * dtype.itemsize) for step in trace.steps),
        predictions=predict(trace, dtype, curve, exponent, network, ranks),
    )


def densification_curve(steps: Sequence[Sequence[Tensor]]) -> tuple[float, ...]:
    """Return the densification of the first n ranks for n = 1 .. W, mean over steps."""
    return tuple(fmean(densification(step[:count]) for step in steps) for count in range(1, len(steps[0]) + 1))


def fit_exponent(curve: Sequence[float]) -> float:
    """Return the a for which n^a is closest to ``curve[n - 1]`` in least squares of the logarithms, in [0, 1].

    ZEN (OSDI'25, section 2.1) publishes curves between n^0.3 and n^0.78. A power law overestimates the union of very
    many ranks, because the union saturates at the rows that occur at all.
    """
    logs = [(math.log(n), math.log(growth)) for n, growth in enumerate(curve, start=1) if n > 1]
    slope = sum(x * y for x, y in logs) / sum(x * x for x, _ in logs)
    return min(1.0, max(0.0, slope))


def owner_load(steps: Sequence[Sequence[Tensor]], partition: Partition) -> OwnerLoad:
    """Return the rows that each owner receives and returns under ``partition``, and their imbalance."""
    owners = partition.world_size
    push = [torch.stack([_per_owner(ids, partition) for ids in step]) for step in steps]
    pull = [_per_owner(torch.cat(list(step)).unique(), partition) for step in steps]
    return OwnerLoad(
        imbalance_push=fmean(map(imbalance_push, push)),
        imbalance_pull=fmean(map(imbalance_pull, pull)),
        push_rows=tuple(fmean(float(counts[:, owner].sum()) for counts in push) for owner in range(owners)),
        pull_rows=tuple(fmean(float(counts[owner]) for counts in pull) for owner in range(owners)),
    )


def _exact_bytes(trace: IndexTrace, dtype: torch.dtype) -> dict[str, float]:
    large = trace.num_rows * trace.width > MAX_HASHED_ELEMENTS
    return {
        name: fmean(fmean(sent_bytes(scheme, step, trace.num_rows, trace.width, dtype)) for step in trace.steps)
        for name, scheme in NAMED.items()
        if not (large and is_hashed(scheme))
    }


def _per_owner(ids: Tensor, partition: Partition) -> Tensor:
    return torch.bincount(partition.owners(ids), minlength=partition.world_size)
