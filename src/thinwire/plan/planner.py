"""Price every way to synchronize the gradients of a measured model, and choose the best, or to do nothing. Pure.

Espresso's decision tree has, on a lane, a leaf for each compressor by each exchange that was measured, and one for the
exact all-reduce. The lane compresses on the host, beside backward, on whichever device the gradients are: a machine has
one processor to choose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from thinwire.fuse.buckets import ByteCap, byte_cap
from thinwire.fuse.policy import Policy
from thinwire.fuse.profile import Groups, Linear, Profile
from thinwire.fuse.safusion import SaFusion
from thinwire.fuse.timeline import iteration_seconds
from thinwire.plan.costs import Costs, chosen_costs
from thinwire.plan.lane_search import espresso_jobs, fastest_jobs
from thinwire.plan.measurement import Measurement
from thinwire.plan.plan import EXACT, STOCK, Candidate, Group, Plan
from thinwire.plan.speeds import COPIES

DEFAULTS = ("bf16", "top_k:density=0.01", "ef_sign_sgd", "power_sgd")
"""Compressors considered by default: one of each kind."""

WORTH = 1.03
"""Least ratio of step times at which an exact way replaces a simpler one."""

LOSSY_WORTH = 1.15
"""Least ratio of step times at which a lossy way replaces an exact one: costs of compressors are predicted with errors
of 4 to 10 % mostly and 30 % at worst where compared, and a plan slower than stock DDP is worse than none."""

BEST_CUT = "best cut"
"""Name of groups that are optimal for costs that no policy sees exactly; see `thinwire.plan.lane_search`."""

WHERE_IT_PAYS = "where it pays"
"""Name of ways that compress only some gradients."""

MIXED = f"compressors mixed, each {WHERE_IT_PAYS}"
"""Name of the way that chooses per gradient among everything measured."""

SEARCHES = ("espresso", "groups")
"""Names of the searches for gradients worth compressing; see `best_plan`."""

DDP_BUCKETS = byte_cap(mb=25, first_mb=1)
"""The buckets of stock DDP."""


@dataclass(frozen=True)
class Way:
    """A priced way to synchronize.

    Args:
        name: name for people.
        groups: indices, in backward order, of gradients that are sent alike.
        compressors: compressor of each group; None for an exact one.
        exchanges: exchange of each group.
        seconds: seconds from the start of backward until the last gradient is synchronized, corrected by training.
        joins: whether each group travels by the job of the group before; empty if none does.
    """

    name: str
    groups: Groups
    compressors: tuple[str | None, ...]
    exchanges: tuple[str, ...]
    seconds: float
    joins: tuple[bool, ...] = ()

    @property
    def is_exact(self) -> bool:
        return not any(self.compressors)

    @property
    def codecs(self) -> tuple[tuple[str, str], ...]:
        """Compressors and their exchanges; those of exact gradients if nothing is compressed."""
        used = dict.fromkeys(zip(self.compressors, self.exchanges, strict=True))
        return tuple((text, exchange) for text, exchange in used if text) or ((COPIES, "all_reduce"),)


@dataclass(frozen=True)
class _Option:
    """A priced way to send one gradient, a leaf of the decision tree; exact without a compressor."""

    compressor: str | None
    exchange: str
    costs: Costs

    @property
    def label(self) -> str:
        return EXACT if self.compressor is None else f"{self.compressor} by {self.exchange}"


def best_plan(
    measurement: Measurement,
    compressors: Sequence[str] = DEFAULTS,
    policies: Sequence[Policy] | None = None,
    search: str = "espresso",
) -> Plan:
    """Return the plan of the best way; of two that are about as fast, of the simpler one.

    Stock DDP is chosen unless its step lasts more than `WORTH` times as long as that of another exact way. A lossy
    way has to beat the best exact one by `LOSSY_WORTH`. The same measurement gives the same plan on all ranks.

    Args:
        compressors: texts of `thinwire.compress.named.parse` that were measured; () for exact ways only.
        policies: fusion policies; None means all of `thinwire.fuse`.
        search: how to search for gradients worth compressing. "espresso" decides for each gradient, among all that was
            measured: see `thinwire.plan.lane_search.espresso_jobs`. "groups" sends all gradients of a job alike, with
            one compressor in the plan; its plans are never faster.

    Raises:
        ValueError: a compressor that was not measured, or whose bytes cannot be predicted; an unknown search.

    Example:
        >>> plan = best_plan(Measurement.load("measured.json"))   # doctest: +SKIP
        >>> plan.save("plan.json")                                # doctest: +SKIP
    """
    return plan_of(best_way(measurement, found := ways(measurement, compressors, policies, search)), measurement, found)


def best_way(measurement: Measurement, found: Sequence[Way]) -> Way:
    """Return the way that `best_plan` chooses. The first must be stock DDP."""
    stock, exact = found[0], [way for way in found if way.is_exact]
    chosen = stock
    for among, worth in ((exact, WORTH), (found, LOSSY_WORTH)):
        fastest = min(among, key=lambda way: way.seconds)
        if _is_worth(measurement, fastest, chosen, worth):
            chosen = fastest
    return chosen


def ways(
    measurement: Measurement,
    compressors: Sequence[str] = DEFAULTS,
    policies: Sequence[Policy] | None = None,
    search: str = "espresso",
) -> list[Way]:
    """Return all ways, priced; stock DDP first. For arguments and errors see `best_plan`."""
    if search not in SEARCHES:
        raise ValueError(f"no search {search!r}; legal are {', '.join(SEARCHES)}")
    policies = default_policies() if policies is None else policies
    exact = _Option(None, "all_reduce", measurement.costs())
    found = [stock_way(measurement), *_fused(measurement, exact, policies)]
    options = list(_options(measurement, compressors))
    for option in options:
        found += _fused(measurement, option, policies)
        found += _mixed(measurement, [exact, option], search)
    if search == "espresso" and len(options) > 1:
        found += _mixed(measurement, [exact, *options], search)
    return found


def _options(measurement: Measurement, compressors: Sequence[str]) -> Iterator[_Option]:
    """Yield each compressor by each exchange, if it compresses anything."""
    for compressor in compressors:
        exchanges = measurement.exchanges(compressor) or (measurement.fastest_exchange(compressor),)
        for exchange in exchanges:
            costs = measurement.costs(compressor, exchange)
            if any(costs.coded):
                yield _Option(compressor, exchange, costs)


def stock_way(measurement: Measurement) -> Way:
    """Return the way of stock DDP: buckets of 1 MiB, then of 25 MiB, each all-reduced as soon as it is full."""
    costs, groups = measurement.costs(), DDP_BUCKETS.groups(measurement.profile())
    seconds = [costs.seconds(group) - costs.opening_seconds for group in groups]  # DDP sends no headers
    return Way(
        STOCK,
        groups,
        (None,) * len(groups),
        ("all_reduce",) * len(groups),
        _in_training(measurement, groups, seconds, [(STOCK, "all_reduce")]),
    )


def _in_training(
    measurement: Measurement, jobs: Groups, seconds: Sequence[float], codecs: Iterable[tuple[str | None, str]]
) -> float:
    """Return `in_turn` plus the largest extra seconds of the codecs, and never less than backward alone."""
    extra = max(measurement.extra_seconds(*codec) for codec in codecs)
    return max(in_turn(measurement, jobs, seconds) + extra, math.fsum(measurement.backward_seconds))


def in_turn(measurement: Measurement, groups: Groups, seconds: Sequence[float]) -> float:
    """Return the timeline of groups of known seconds: one after the other, each when its last gradient is ready."""
    backward = measurement.backward_seconds
    ready = tuple(math.fsum(backward[place] for place in group) for group in groups)
    free = Linear(0.0, 0.0)
    profile = Profile(
        ready, tuple(seconds), free, free, Linear(0.0, 1.0)
    )  # a group is a tensor, and its size is its time
    return iteration_seconds(profile, tuple((place,) for place in range(len(groups))))


def equivalent_profile(measurement: Measurement, costs: Costs) -> Profile:
    """Return a profile whose ``communicate`` gives exactly `Costs.seconds`, for policies that weigh costs.

    The cost of a compressed tensor is not proportional to its bytes, so its "bytes" are seconds here.
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
    """Return the policies of `thinwire.fuse`."""
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
    """Return a way as a plan, with all the ways of ``found`` as its candidates."""
    names, sizes = measurement.names, measurement.size_bytes
    groups = tuple(
        Group(
            tuple(names[place] for place in group),
            sum(sizes[place] for place in group),
            compressor,
            exchange,
            joins,
        )
        for group, compressor, exchange, joins in zip(
            way.groups, way.compressors, way.exchanges, way.joins or (False,) * len(way.groups), strict=True
        )
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
    """Return whether a policy closes groups at a number of bytes of gradients, and not by their cost."""
    return isinstance(policy, ByteCap) or (isinstance(policy, SaFusion) and not policy.adapt)


def _fused(measurement: Measurement, option: _Option, policies: Sequence[Policy]) -> Iterator[Way]:
    """Yield one way for each new grouping, named after the first policy that chooses it."""
    by_bytes = measurement.profile(option.compressor, option.exchange)
    by_cost = equivalent_profile(measurement, option.costs)
    named = [(policy.name, policy.groups(by_bytes if counts_bytes(policy) else by_cost)) for policy in policies]
    named.append((BEST_CUT, fastest_jobs(measurement.backward_seconds, (option.costs,))[0]))
    seen: set[Groups] = set()
    for name, groups in named:
        if groups not in seen:
            seen.add(groups)
            yield _way(measurement, f"{option.label}, {name}", [option], groups, (0,) * len(measurement.names))


def _mixed(measurement: Measurement, options: Sequence[_Option], search: str) -> list[Way]:
    """Compress gradients only where that pays, or return nothing if that is none or all; the first option is exact."""
    costs = [option.costs for option in options]
    groups, choices = _search(measurement, costs, search)
    coded = tuple(choice if costs[choice].coded[place] else 0 for place, choice in enumerate(choices))
    name = MIXED if len(options) > 2 else f"{options[1].label} {WHERE_IT_PAYS}"
    way = _way(measurement, name, options, groups, coded)
    is_mixed = len(way.codecs) > 1 if len(options) > 2 else len(set(way.compressors)) > 1
    return [way] if is_mixed else []


def _search(measurement: Measurement, options: Sequence[Costs], search: str) -> tuple[Groups, tuple[int, ...]]:
    """Return groups, and the option of each gradient."""
    if search == "espresso":
        return espresso_jobs(measurement.backward_seconds, measurement.size_bytes, options)
    groups, taken = fastest_jobs(measurement.backward_seconds, options)
    return groups, tuple(way for group, way in zip(groups, taken, strict=True) for _ in group)


def _way(measurement: Measurement, name: str, options: Sequence[_Option], jobs: Groups, choices: Sequence[int]) -> Way:
    """Return a way by the option of each gradient: a group for each option in a job."""
    costs = chosen_costs([option.costs for option in options], choices)
    parts = [(part, place > 0) for job in jobs for place, part in enumerate(_parts(options, job, choices))]
    way = Way(
        name,
        tuple(group for (_, group), _ in parts),
        tuple(options[option].compressor for (option, _), _ in parts),
        tuple(options[option].exchange for (option, _), _ in parts),
        0.0,
        tuple(joins for _, joins in parts),
    )
    seconds = _in_training(measurement, jobs, [costs.seconds(job) for job in jobs], way.codecs)
    return replace(way, seconds=seconds)


def _parts(options: Sequence[_Option], job: Sequence[int], choices: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the options in a job with their gradients; small ones, exact anyway, go with the first compressed."""
    coded = [place for place in job if options[choices[place]].costs.coded[place]]
    parts: dict[int, list[int]] = {choices[place]: [] for place in coded[:1]}
    for place in job:
        is_small = coded and not options[choices[coded[0]]].costs.coded[place]
        parts.setdefault(choices[coded[0] if is_small else place], []).append(place)
    return [(option, tuple(places)) for option, places in parts.items()]
