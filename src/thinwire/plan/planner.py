"""Price every way to synchronize the gradients of a measured model, and take the best. "Do nothing" is a way. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thinwire.fuse.byte_cap import ByteCap, byte_cap
from thinwire.fuse.policy import Policy
from thinwire.fuse.safusion import SaFusion
from thinwire.plan.costs import Costs
from thinwire.plan.lane_search import fastest_jobs
from thinwire.plan.measurement import Measurement
from thinwire.plan.plan import EXACT, STOCK, Candidate, Group, Plan
from thinwire.plan.profile import Groups, Linear, Profile
from thinwire.plan.speeds import COPIES
from thinwire.plan.timeline import iteration_seconds

DEFAULTS = ("bf16", "top_k:density=0.01", "ef_sign_sgd", "power_sgd")
"""Compressors that are considered unless others are named: one of each kind."""

WORTH = 1.03
"""How many times as long the step of a simpler way must take for another one to be worth it."""

LOSSY_WORTH = 1.15
"""The same for a way that is lossy, against exact ones: what a compressor takes is predicted less well, by 4 to 10 %
mostly and by 30 % at worst where it was compared, and a plan that is slower than nothing is worse than none."""

BEST_CUT = "best cut"
"""The name of groups that are optimal for costs that no policy sees exactly; see `thinwire.plan.lane_search`."""

DDP_BUCKETS = byte_cap(mb=25, first_mb=1)
"""What stock DDP does."""


@dataclass(frozen=True)
class Way:
    """A way to synchronize, priced.

    Args:
        name: for people.
        groups: which gradients travel together, by place in backward order.
        compressors: of each group; None for an exact one.
        exchange: of the groups that are compressed.
        seconds: from the start of backward until the last gradient is there, as in training where that was tried.
    """

    name: str
    groups: Groups
    compressors: tuple[str | None, ...]
    exchange: str
    seconds: float

    @property
    def is_exact(self) -> bool:
        return not any(self.compressors)

    @property
    def codec(self) -> tuple[str, str]:
        """Compressor and exchange, as `thinwire.plan.speeds.Codec` names them."""
        return next((text for text in self.compressors if text), COPIES), self.exchange


def best_plan(
    measurement: Measurement,
    compressors: Sequence[str] = DEFAULTS,
    policies: Sequence[Policy] | None = None,
) -> Plan:
    """The best of all ways; of two that are alike, the simpler one.

    Stock DDP is taken unless a step of it takes more than `WORTH` times as long as that of another exact way. A lossy
    way has to beat the best exact one by `LOSSY_WORTH`. The same measurement gives the same plan on all ranks.

    Args:
        compressors: texts of `thinwire.compress.named.parse` that were measured; () for exact ways only.
        policies: of fusion; None takes all of `thinwire.fuse`.

    Raises:
        ValueError: a compressor that was not measured, or that sends what nobody can tell beforehand.

    Example:
        >>> plan = best_plan(Measurement.load("measured.json"))   # doctest: +SKIP
        >>> plan.save("plan.json")                                # doctest: +SKIP
    """
    return plan_of(best_way(measurement, found := ways(measurement, compressors, policies)), measurement, found)


def best_way(measurement: Measurement, found: Sequence[Way]) -> Way:
    """Which of them `best_plan` takes. The first must be stock DDP."""
    stock, exact = found[0], [way for way in found if way.is_exact]
    chosen = stock
    for among, worth in ((exact, WORTH), (found, LOSSY_WORTH)):
        fastest = min(among, key=lambda way: way.seconds)
        if _is_worth(measurement, fastest, chosen, worth):
            chosen = fastest
    return chosen


def ways(
    measurement: Measurement, compressors: Sequence[str] = DEFAULTS, policies: Sequence[Policy] | None = None
) -> list[Way]:
    """All, priced; stock DDP first. For arguments and errors see `best_plan`."""
    chosen = default_policies() if policies is None else policies
    found = [stock_way(measurement)]
    exact = measurement.costs()
    found += _fused(measurement, exact, None, "all_reduce", chosen)
    for compressor in compressors:
        exchanges = measurement.exchanges(compressor) or (measurement.fastest_exchange(compressor),)
        for exchange in exchanges:
            costs = measurement.costs(compressor, exchange)
            if any(costs.coded):
                found += _fused(measurement, costs, compressor, exchange, chosen)
                found += _mixed(measurement, exact, costs, compressor, exchange)
    return found


def stock_way(measurement: Measurement) -> Way:
    """What DDP does by itself: buckets of 1 MiB, then of 25 MiB, each all-reduced as soon as it is full."""
    costs, groups = measurement.costs(), DDP_BUCKETS.groups(measurement.profile())
    seconds = [costs.seconds(group) - costs.opening_seconds for group in groups]  # DDP asks nobody
    return Way(
        STOCK,
        groups,
        (None,) * len(groups),
        "all_reduce",
        _in_training(measurement, groups, seconds, (STOCK, "all_reduce")),
    )


def _in_training(
    measurement: Measurement, groups: Groups, seconds: Sequence[float], codec: tuple[str | None, str]
) -> float:
    """`in_turn`, and what it leaves out; never less than backward alone."""
    timeline = in_turn(measurement, groups, seconds)
    return max(timeline + measurement.extra_seconds(*codec), math.fsum(measurement.backward_seconds))


def in_turn(measurement: Measurement, groups: Groups, seconds: Sequence[float]) -> float:
    """The timeline's verdict on groups of known seconds: one after the other, each when its last gradient is ready."""
    backward = measurement.backward_seconds
    ready = tuple(math.fsum(backward[place] for place in group) for group in groups)
    free = Linear(0.0, 0.0)
    profile = Profile(
        ready, tuple(seconds), free, free, Linear(0.0, 1.0)
    )  # a group is a tensor, and its size is its time
    return iteration_seconds(profile, tuple((place,) for place in range(len(groups))))


def equivalent_profile(measurement: Measurement, costs: Costs) -> Profile:
    """For policies that weigh costs: sizes such that ``communicate`` gives exactly what `Costs.seconds` does.

    A tensor that is compressed takes no time in proportion to its bytes: its "bytes" are seconds here.
    """
    free = Linear(0.0, 0.0)
    return Profile(
        measurement.backward_seconds,
        costs.tensor_seconds,
        free,
        free,
        Linear(costs.group_seconds, 1.0),
        measurement.names,
        measurement.other_seconds,
    )


def default_policies() -> tuple[Policy, ...]:
    """Those of `thinwire.fuse`."""
    from thinwire import fuse

    return (
        fuse.layerwise(),
        fuse.one_bucket(),
        fuse.byte_cap(1),
        fuse.byte_cap(25),
        fuse.mg_wfbp(),
        fuse.omgs(),
        fuse.cupcake(),
        fuse.safusion(),
    )


def plan_of(way: Way, measurement: Measurement, found: Sequence[Way]) -> Plan:
    """A way as a plan, with all that were found as its candidates."""
    names, sizes = measurement.names, measurement.size_bytes
    groups = tuple(
        Group(
            tuple(names[place] for place in group),
            sum(sizes[place] for place in group),
            compressor,
            way.exchange if compressor else "all_reduce",
        )
        for group, compressor in zip(way.groups, way.compressors, strict=True)
    )
    ranked = sorted(found, key=lambda candidate: candidate.seconds)
    tables = len(measurement.tables)
    return Plan(
        world_size=measurement.world_size,
        fingerprint=measurement.fingerprint,
        groups=groups,
        predicted_seconds=way.seconds,
        dense_seconds=found[0].seconds,
        other_seconds=measurement.other_seconds,
        choice=way.name,
        candidates=tuple(Candidate(candidate.name, candidate.seconds) for candidate in ranked),
        note=f"{tables} tables of embeddings are not in it: thinwire.attach sends their rows." if tables else "",
    )


def _is_worth(measurement: Measurement, way: Way, instead_of: Way, worth: float) -> bool:
    other = measurement.other_seconds
    return other + instead_of.seconds > worth * (other + way.seconds)


def counts_bytes(policy: Policy) -> bool:
    """Whether a policy closes groups at a number of bytes of gradients, and not by what they cost."""
    return isinstance(policy, ByteCap) or (isinstance(policy, SaFusion) and not policy.adapt)


def _fused(
    measurement: Measurement, costs: Costs, compressor: str | None, exchange: str, policies: Sequence[Policy]
) -> Iterator[Way]:
    """One way for each grouping that is new; the first policy that has it gives the name."""
    label = EXACT if compressor is None else f"{compressor} by {exchange}"
    by_bytes, by_cost = measurement.profile(compressor, exchange), equivalent_profile(measurement, costs)
    named = [(policy.name, policy.groups(by_bytes if counts_bytes(policy) else by_cost)) for policy in policies]
    named.append((BEST_CUT, fastest_jobs(measurement.backward_seconds, (costs,))[0]))
    seen: set[Groups] = set()
    for name, groups in named:
        if groups not in seen:
            seen.add(groups)
            prices = [costs.seconds(group) for group in groups]
            seconds = _in_training(measurement, groups, prices, (compressor, exchange))
            yield Way(f"{label}, {name}", groups, (compressor,) * len(groups), exchange, seconds)


def _mixed(measurement: Measurement, exact: Costs, coded: Costs, compressor: str, exchange: str) -> Iterator[Way]:
    """Each group compressed only where that pays; nothing if that is all groups or none."""
    groups, chosen = fastest_jobs(measurement.backward_seconds, (exact, coded))
    if not all(chosen) and any(chosen):
        prices = [(exact, coded)[way].seconds(group) for group, way in zip(groups, chosen, strict=True)]
        compressors = tuple(compressor if way else None for way in chosen)
        seconds = _in_training(measurement, groups, prices, (compressor, exchange))
        yield Way(f"{compressor} by {exchange} where it pays", groups, compressors, exchange, seconds)
