"""Bounds that no plan can beat: Espresso's Upper Bound, where compression is free, and one with its costs.

The paper runs its timeline with compression at no cost. Here the bound is proven instead, so that it holds for every
strategy, with any result of a search: `espresso.relaxation` has the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from espresso import engine
from espresso.job import EspressoJob
from espresso.options import Option
from espresso.relaxation import Relaxation
from published.costs import CompressionCosts
from thinwire.plan.profile import Linear

_LINK_STEPS = 64
_NOTHING = Linear(0.0, 0.0)


def without_cost(compression: CompressionCosts) -> CompressionCosts:
    """Return the same compression at no cost to encode and decode."""
    return replace(compression, encode=_NOTHING, decode=_NOTHING, cpu_encode=_NOTHING, cpu_decode=_NOTHING)


def upper_bound(job: EspressoJob, options: Sequence[Option]) -> float:
    """Return seconds of an iteration that no strategy made of these options can beat, were compression free.

    The device of encoding makes no difference then: options of one device suffice.
    """
    free = replace(job, compression=without_cost(job.compression), cluster=replace(job.cluster, host_copy=_NOTHING))
    relaxation = Relaxation(free, options, engine.LINKS, _LINK_STEPS)
    return max(relaxation.seconds(), relaxation.alone_seconds)


def attainable_bound(job: EspressoJob, options: Sequence[Option]) -> float:
    """Return seconds of an iteration that no strategy made of these options can beat at their costs.

    No strategy lies between the upper bound and this; the whole tree costs half a second.
    """
    return Relaxation(job, options).proven_seconds()
