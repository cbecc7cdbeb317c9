"""Steps that no plan can beat: Espresso's Upper Bound, where compression is free, and one with what it costs.

The paper runs its timeline with compression at no cost. Here the bound is proven instead, so that it holds for every
strategy, whatever a search finds. The gradients j .. N are ready at G_j or later; after that, each resource has to
serve what they need of it. All are done at the end, so that for weights w of the resources, which sum to 1,

    F >= G_j + sum over l >= j of min over options o of (sum over resources r of w_r seconds_r(o, l))
             + w_compute (G_N - G_j)

where the last term is the backward passes still to come. The bound is the largest of this over j and a grid of weights,
and of every gradient's shortest chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from thinwire.plan import engine
from thinwire.plan.job import Job
from thinwire.plan.options import Option
from thinwire.plan.profile import Linear
from thinwire.plan.tasks import Pricer

_LINK_STEPS, _ALL_STEPS = 64, 12
_NOTHING = Linear(0.0, 0.0)


def upper_bound(job: Job, options: Sequence[Option]) -> float:
    """Seconds of an iteration that no strategy made of these options can beat, were compression free.

    Where to encode makes no difference then: options of one device say it for all.
    """
    free = replace(job, compression=job.compression.free(), cluster=replace(job.cluster, host_copy=_NOTHING))
    return _bound(free, options, _weights(engine.LINKS, _LINK_STEPS))


def attainable_bound(job: Job, options: Sequence[Option]) -> float:
    """Seconds of an iteration that no strategy made of these options, as they are, can beat at what they cost.

    Between this and the upper bound nothing is to be found; half a second for the whole tree.
    """
    return _bound(job, options, _weights(range(len(engine.TRACKS)), _ALL_STEPS))


def _bound(job: Job, options: Sequence[Option], weights: np.ndarray) -> float:
    pricer = Pricer(job.size_bytes, job.cluster, job.compression)
    totals = pricer.totals(options)
    places = [pricer.sizes.index(size) for size in job.size_bytes]
    least = np.stack([_weighted(of_size, weights).min(0) for of_size in totals.swapaxes(0, 1)])[places]
    ready = np.cumsum(job.backward_seconds)
    backward = np.outer(ready[-1] - ready, weights[:, engine.COMPUTE])
    busy = ready[:, None] + least[::-1].cumsum(0)[::-1] + backward
    chains = ready + totals.sum(2).min(0)[places]
    return float(max(busy.max(), chains.max(), ready[-1]))


def _weighted(seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[options, resources], [grid, resources] -> [options, grid]. No product of matrices: that starts BLAS threads."""
    total = np.zeros((len(seconds), len(weights)))
    for resource in range(len(engine.TRACKS)):
        if weights[:, resource].any():
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
