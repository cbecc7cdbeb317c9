"""An addition to Espresso: a plan that starts from the prices of the linear programme, improved tensor by tensor.

Algorithm 1 decides one tensor after the other, from no compression, and each for the currently shortest timeline.
Where two tensors must change together to gain anything it stops, and it fills the resource that is free first, which
others need later. Algorithm 2 moves all encoding and decoding of a tensor to the processors, or none. Here

1. each tensor gets the option that is cheapest at the prices of the relaxation, among those that can be done by the
   time that Algorithms 1 and 2 reach: all resources are weighed against one another at once, and an option may use
   both devices;
2. in Algorithm 1's order each tensor is given every option that is cheapest at some prices, and keeps it where the
   timeline gets shorter, or stays as long and the option is cheaper: the freed resources let another tensor gain;
3. that again, until a pass gains less than 0.2 %, or the bound is as near;
4. tensors that are compressed without gain are left uncompressed, the smallest first: as few as possible are inexact.

`espresso` uses the result where it is shorter by that share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from espresso.engine import Engine
from espresso.job import EspressoJob
from espresso.offload import LEAST_GAIN
from espresso.options import DENSE, Option
from espresso.relaxation import Relaxation
from espresso.tasks import PricedOption, Pricer

ENOUGH = 2e-3
"""Relative distance to the bound at which the search ends, and least relative gain of a useful pass."""


class Refinement(NamedTuple):
    """Result of the refinement.

    Attributes:
        choices: option of each tensor; empty if the previous plan was near enough to the bound.
        seconds: its F(S), or that of the previous plan if there is no other.
        proven_seconds: no strategy of the same options is done before that.
        trials: timelines evaluated.
    """

    choices: tuple[Option, ...]
    seconds: float
    proven_seconds: float
    trials: int


def refine(job: EspressoJob, tree: Sequence[Option], seconds: float) -> Refinement:
    """Return a strategy made of these options that is faster than ``seconds``, if the search finds one.

    Example:
        >>> from published.models import MODELS
        >>> from espresso.testbeds import pcie_25g
        >>> from espresso.options import options
        >>> job = job_of(MODELS["lstm"](), pcie_25g())
        >>> found = refine(job, options(), seconds=1.0)
        >>> found.proven_seconds <= found.seconds < 1.01 * found.proven_seconds
        True
    """
    relaxation = Relaxation(job, tree)
    proven = relaxation.proven_seconds()
    if seconds <= proven * (1 + ENOUGH):
        return Refinement((), seconds, proven, trials=0)
    descent = _Descent(job, relaxation, seconds, enough=proven * (1 + ENOUGH))
    while descent.improve_all():
        pass
    descent.undo_all()
    choices = tuple(choice.option for choice in descent.choices)
    return Refinement(choices, descent.engine.seconds, proven, descent.trials)


class _Descent:
    """The strategy so far, and its timeline."""

    def __init__(self, job: EspressoJob, relaxation: Relaxation, deadline: float, enough: float) -> None:
        self._sizes, self._enough = job.size_bytes, enough
        self._prices = relaxation.prices(deadline).tolist()
        self._menus = {
            size: [(self._price(choice), choice) for choice in relaxation.menu(size, self._prices)]
            for size in set(self._sizes)
        }
        pricer = Pricer(self._sizes, job.cluster, job.compression)
        self._dense = {size: pricer.choice(DENSE, size) for size in self._menus}
        self._order = sorted(range(job.num_tensors), key=lambda tensor: (-self._sizes[tensor], -tensor))
        self.choices = relaxation.cheapest(self._prices, deadline)
        self.engine = Engine(job.backward_seconds, [choice.chain for choice in self.choices])
        self.trials = 0

    def improve_all(self) -> bool:
        """One pass; whether another is useful."""
        before = self.engine.seconds
        for tensor in self._order:
            if self.engine.seconds <= self._enough:
                return False
            self._improve(tensor)
        return self.engine.seconds < before * (1 - ENOUGH)

    def undo_all(self) -> None:
        """Leave tensors uncompressed if that does not lengthen the timeline."""
        for tensor in reversed(self._order):
            if self.choices[tensor].option.compressions:
                dense = self._dense[self._sizes[tensor]]
                self._try(tensor, dense, self.engine.seconds)

    def _improve(self, tensor: int) -> None:
        own = self._price(self.choices[tensor])
        for price, choice in self._menus[self._sizes[tensor]]:
            if choice.chain == self.choices[tensor].chain:
                continue
            if self._try(tensor, choice, self.engine.seconds * (1 if price < own else 1 - LEAST_GAIN)):
                own = price

    def _try(self, tensor: int, choice: PricedOption, limit: float) -> bool:
        self.trials += 1
        kept = self.engine.trial({tensor: choice.chain}, limit) <= limit
        if kept:
            self.engine.change({tensor: choice.chain})
            self.choices[tensor] = choice
        return kept

    def _price(self, choice: PricedOption) -> float:
        return sum(self._prices[resource] * seconds for resource, seconds in choice.chain)
