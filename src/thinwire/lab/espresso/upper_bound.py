"""Bounds that no plan can beat: Espresso's Upper Bound, where compression is free, and one with its costs.

The paper runs its timeline with compression at no cost. Here the bound is proven instead, so that it holds for every
strategy, with any result of a search: `thinwire.lab.espresso.relaxation` has the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thinwire.fuse.profile import Linear
from thinwire.lab.espresso import engine
from thinwire.lab.espresso.job import EspressoJob
from thinwire.lab.espresso.options import Option
from thinwire.lab.espresso.relaxation import Relaxation

_LINK_STEPS = 64
_NOTHING = Linear(0.0, 0.0)


def upper_bound(job: EspressoJob, options: Sequence[Option]) -> float:
    """Return seconds of an iteration that no strategy made of these options can beat, were compression free.

    The device of encoding makes no difference then: options of one device suffice.
    """
    free = replace(job, compression=job.compression.free(), cluster=replace(job.cluster, host_copy=_NOTHING))
    relaxation = Relaxation(free, options, engine.LINKS, _LINK_STEPS)
    return max(relaxation.seconds(), relaxation.alone_seconds)


def attainable_bound(job: EspressoJob, options: Sequence[Option]) -> float:
    """Return seconds of an iteration that no strategy made of these options can beat at their costs.

    No strategy lies between the upper bound and this; the whole tree costs half a second.
    """
    return Relaxation(job, options).proven_seconds()
