"""Lower bounds of any strategy: the linear programme behind Espresso's bounds and behind its refinement.

The gradients j .. N are ready at G_j or later; after that, each resource has to serve their work. All are
done at the end, so that for weights w of the resources, which sum to 1,

    F >= G_j + sum over l >= j of min over options o of (sum over resources r of w_r seconds_r(o, l))
             + w_compute (G_N - G_j)

where the last term is the backward passes still to come (weak duality). The bound is the largest of this over j and a
grid of weights, which are prices: a second of a resource that is short costs more.

By a deadline T a tensor can only use options whose chain fits: G_l + sum over r of seconds_r(o, l) <= T. If the bound
over those alone is later than T, no strategy keeps T. That is stronger where a few tensors decide: of an option that is
short on each resource but late, nothing is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from espresso import engine
from espresso.job import EspressoJob
from espresso.options import Option
from espresso.tasks import PricedOption, Pricer, undominated

ALL = tuple(range(len(engine.TRACKS)))

_ROUNDING = 1e-9
_NARROW = 1e-5


class Relaxation:
    """The programme of one job. Options that need no less of any resource than another are left out.

    Args:
        options: options for any tensor.
        resources: resources of the engine that have a weight.
        steps: number of steps of a weight, which is a multiple of 1 / steps.

    Attributes:
        alone_seconds: time at which all tensors could be there, were each of them alone.

    Example:
        >>> from published.models import MODELS
        >>> from espresso.testbeds import pcie_25g
        >>> from espresso.options import options
        >>> ugatit = Relaxation(job_of(MODELS["ugatit"](), pcie_25g()), options(("gpu",)))
        >>> ugatit.seconds() < ugatit.proven_seconds()
        True
    """

    def __init__(
        self, job: EspressoJob, options: Sequence[Option], resources: Sequence[int] = ALL, steps: int = 12
    ) -> None:
        self._options, self._sizes = options, job.size_bytes
        self._pricer = Pricer(job.size_bytes, job.cluster, job.compression)
        self._weights = _weights(resources, steps)
        self._ready = np.cumsum(job.backward_seconds)
        self._backward = np.outer(self._ready[-1] - self._ready, self._weights[:, engine.COMPUTE])
        totals = self._pricer.totals(options)
        self._kinds = {
            size: _Kind(totals[:, place], self._weights, [t for t, own in enumerate(self._sizes) if own == size])
            for place, size in enumerate(self._pricer.sizes)
        }
        self.alone_seconds = max(float(self._ready[kind.tensors[-1]] + kind.chains[0]) for kind in self._kinds.values())

    def seconds(self, deadline: float = np.inf) -> float:
        """Return a time before which no strategy that keeps the deadline is done; infinite if none can keep it."""
        return float(max(self._bounds(deadline).max(), self._ready[-1]))

    def proven_seconds(self) -> float:
        """Return a time before which no strategy is done: the latest deadline known to be missed, to 1 in 100,000."""
        missed = kept = max(self.seconds(), self.alone_seconds)
        while self.seconds(kept) > kept:
            missed, kept = kept, 2 * kept
        while kept - missed > _NARROW * missed:
            middle = (missed + kept) / 2
            missed, kept = (middle, kept) if self.seconds(middle) > middle else (missed, middle)
        return missed

    def prices(self, deadline: float) -> np.ndarray:
        """Return the weights that give the bound, [resources]."""
        return self._weights[int(self._bounds(deadline).max(0).argmax())]

    def cheapest(self, prices: Sequence[float], deadline: float) -> list[PricedOption]:
        """Return each tensor's cheapest option at these prices that keeps the deadline, else its shortest."""
        choices: list[PricedOption] = []
        for tensor, size in enumerate(self._sizes):
            kind = self._kinds[size]
            fitting = max(1, int(kind.fitting(deadline - self._ready[tensor])))
            row = int((kind.totals[:fitting] * np.asarray(prices)).sum(1).argmin())
            choices.append(self._pricer.choice(self._options[kind.rows[row]], size))
        return choices

    def menu(self, size: float, prices: Sequence[float]) -> tuple[PricedOption, ...]:
        """Return the options that are the cheapest at some weights, the cheapest at these prices first."""
        kind = self._kinds[size]
        rows = np.unique(kind.weighted.argmin(0))
        ordered = rows[np.argsort((kind.totals[rows] * np.asarray(prices)).sum(1), kind="stable")]
        return tuple(self._pricer.choice(self._options[kind.rows[row]], size) for row in ordered)

    def _bounds(self, deadline: float) -> np.ndarray:
        """[tensors, weights]: the bound from each tensor on."""
        least = np.empty((len(self._ready), len(self._weights)))
        for kind in self._kinds.values():
            least[kind.tensors] = kind.least[kind.fitting(deadline - self._ready[kind.tensors])]
        return self._ready[:, None] + least[::-1].cumsum(0)[::-1] + self._backward


class _Kind:
    """The tensors of one size.

    Attributes:
        tensors: the tensors, in backward order.
        rows: indices of the options that count, the shortest chain first.
        totals: [rows, resources], seconds; chains: [rows], their sum.
        weighted: [rows, weights].
        least: [rows + 1, weights]: of the first n rows; infinite of none.
    """

    def __init__(self, totals: np.ndarray, weights: np.ndarray, tensors: list[int]) -> None:
        self.tensors = tensors
        self.rows = undominated(totals)
        self.totals = totals[self.rows]
        self.chains = self.totals.sum(1)
        self.weighted = _weighted(self.totals, weights)
        nothing = np.full((1, len(weights)), np.inf)
        self.least = np.minimum.accumulate(np.concatenate([nothing, self.weighted]), 0)

    def fitting(self, spare_seconds: np.ndarray) -> np.ndarray:
        """The number of rows that fit in that time."""
        return np.searchsorted(self.chains, spare_seconds * (1 + _ROUNDING), side="right")


def _weighted(seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[options, resources], [grid, resources] -> [options, grid]. No product of matrices: that starts BLAS threads."""
    total = np.zeros((len(seconds), len(weights)))
    for resource in ALL:
        total += np.multiply.outer(seconds[:, resource], weights[:, resource])
    return total


def _weights(resources: Sequence[int], steps: int) -> np.ndarray:
    """[grid, resources of the engine]: every way to share ``steps`` equal parts among some of them."""
    count = len(resources)
    bars = np.array(list(combinations(range(steps + count - 1), count - 1)))
    edges = np.pad(bars, ((0, 0), (1, 1)), constant_values=(-1, steps + count - 1))
    weights = np.zeros((len(bars), len(engine.TRACKS)))
    weights[:, list(resources)] = (np.diff(edges) - 1) / steps
    return weights
