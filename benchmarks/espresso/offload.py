"""Espresso's Algorithm 2: the choice of tensors that the host's processors compress instead of the accelerator.

Tensors of one size with one option are a group. Lemma 1 of the paper: of a group, if q tensors are offloaded, the best
q are those farthest from the output layer, whose gradients are ready first: the longer their encoding can overlap with
the rest. So only the number of each group matters: the product of (members + 1) plans.

The lemma is an intuition, not a law of this timeline: where the link is the bottleneck and idle until the first tensor,
that one is better encoded where that is sooner done. On 400 random instances of up to 7 tensors it cost something in
14, 6 % at most. So a few tensors are decided by trying every subset, which is exact; more of them by every product of
counts, as published, which is best under the lemma; and where even those are too many, by improving one count at a time
from none at all until that gains nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from math import prod
from typing import NamedTuple

from espresso.engine import Chain, Engine

LEAST_GAIN = 1e-6
"""Least relative gain by which a plan replaces another."""

MAX_SUBSETS = 1024
MAX_COUNTS = 1024

Groups = Sequence[Sequence[int]]
"""Tensors of each group, in backward order."""


class Offload(NamedTuple):
    """Result of Algorithm 2.

    Attributes:
        tensors: the tensors to offload, in backward order.
        method: "subsets" (optimal), "counts" (optimal under lemma 1) or "descent" (neither is proven).
        trials: timelines evaluated.
    """

    tensors: tuple[int, ...]
    method: str
    trials: int


def offload(engine: Engine, groups: Groups, on_cpu: Mapping[int, Chain]) -> Offload:
    """Return the best tensors to offload from the engine's strategy, which stays as it is.

    Args:
        groups: groups of the tensors that may be offloaded.
        on_cpu: for each of them, its chain when offloaded.
    """
    search = _Search(engine, on_cpu)
    if 2 ** sum(map(len, groups)) <= MAX_SUBSETS:
        method = "subsets"
        search.best_of(_subsets([tensor for group in groups for tensor in group]))
    elif prod(len(group) + 1 for group in groups) <= MAX_COUNTS:
        method = "counts"
        search.best_of(_offloaded(groups, counts) for counts in product(*(range(len(group) + 1) for group in groups)))
    else:
        method = "descent"
        _descend(search, groups)
    return Offload(tuple(sorted(search.best)), method, search.trials)


class _Search:
    """The best plan so far."""

    def __init__(self, engine: Engine, on_cpu: Mapping[int, Chain]) -> None:
        self._engine, self._on_cpu = engine, on_cpu
        self.best: tuple[int, ...] = ()
        self.seconds = engine.seconds
        self.trials = 0

    def best_of(self, plans: Iterator[tuple[int, ...]]) -> None:
        """Try all plans; among equally fast ones the first counts."""
        for tensors in plans:
            self.trials += 1
            limit = self.seconds * (1 - LEAST_GAIN)
            seconds = self._engine.trial({tensor: self._on_cpu[tensor] for tensor in tensors}, limit)
            if seconds < limit:
                self.best, self.seconds = tensors, seconds


def _subsets(tensors: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for mask in range(2 ** len(tensors)):
        yield tuple(tensor for place, tensor in enumerate(tensors) if mask >> place & 1)


def _offloaded(groups: Groups, counts: Sequence[int]) -> tuple[int, ...]:
    """Lemma 1: of each group the first in backward order."""
    return tuple(chain.from_iterable(group[:count] for group, count in zip(groups, counts, strict=True)))


def _descend(search: _Search, groups: Groups) -> None:
    counts = [0] * len(groups)
    improves = True
    while improves:
        before = search.seconds
        for place, group in enumerate(groups):
            plans = [[*counts[:place], count, *counts[place + 1 :]] for count in range(len(group) + 1)]
            seconds = search.seconds
            search.best_of(_offloaded(groups, plan) for plan in plans)
            if search.seconds < seconds:
                counts = next(plan for plan in plans if _offloaded(groups, plan) == search.best)
        improves = search.seconds < before
