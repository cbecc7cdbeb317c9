"""Price every way to synchronize the gradients of a measured model, and choose the best, or to do nothing. Pure.

Espresso's decision tree has, on a lane, a leaf for each compressor by each exchange that was measured, and one for the
exact all-reduce. The lane compresses on the host, beside backward, on whichever device the gradients are: a machine has
one processor to choose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from thinwire.fuse.policy import Policy, byte_cap, counts_bytes, default_policies
from thinwire.fuse.profile import Groups, Linear, Profile
from thinwire.lab.planning.costs import Costs, chosen_costs
from thinwire.lab.planning.lane_search import espresso_jobs, fastest_jobs
from thinwire.lab.planning.measurement import BELIEVED, Measurement
from thinwire.lab.planning.speeds import COPIES
from thinwire.lab.planning.tables import gathered
from thinwire.lossless.decide import TAKEN
from thinwire.plan.plan import EXACT, LOSSLESS, NATIVE, ROWS, STOCK, WORTH, Candidate, Group, Plan

DEFAULTS = ("bf16", "top_k:density=0.01", "ef_sign_sgd", "power_sgd")
"""Compressors considered by default: one of each kind."""

LOSSY_WORTH = 1.15
"""Least ratio of step times at which a lossy way replaces an exact one: costs of compressors are predicted with errors
of 4 to 10 % mostly and 30 % at worst where compared, and a plan slower than stock DDP is worse than none."""

MEASURED_LOSSY_WORTH = 1.08
"""The same where both were measured in the training itself."""

LOSSIER_WORTH = 1.05
"""Least ratio of step times at which a way replaces another lossy one that loses less, or that needs no plan."""

LEAST_LOSSY = ("fp16", "bf16", "qsgd", "int8", "natural", "fp8", "power_sgd", "ef_sign_sgd", "terngrad", "top_k")
"""Compressors by what they lose, least first, as far as they were compared; all others come last. A character
transformer under AdamW, 300 steps on 4 ranks, ended above dense by 0.04 % (qsgd of 8 bits), 1.9 to 3.7 % (power_sgd of
rank 8), 5.6 % (ef_sign_sgd) and 15 to 21 % (top_k of 3 %)."""

BEST_CUT = "best cut"
"""Name of groups that are optimal for costs that no policy sees exactly; see `thinwire.lab.planning.lane_search`."""

WHERE_IT_PAYS = "where it pays"
"""Name of ways that compress only some gradients."""

MIXED = f"compressors mixed, each {WHERE_IT_PAYS}"
"""Name of the way that chooses per gradient among everything measured."""

SHORT = f"{EXACT}, {LOSSLESS}"
"""Prefix of the names of ways that sum losslessly: exact sums in fewer bytes."""

USUAL = "buckets of DDP"
"""Name of the groups in which gradients travel without a plan."""

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
        timeline_seconds: the same without the correction, which breaks ties.
        is_plain: whether ``attach(model)`` does it without a plan, with ``compress=`` if it is lossy, or ``dense=``.
        is_lossless: whether what is not compressed is summed losslessly.
    """

    name: str
    groups: Groups
    compressors: tuple[str | None, ...]
    exchanges: tuple[str, ...]
    seconds: float
    joins: tuple[bool, ...] = ()
    timeline_seconds: float = 0.0
    is_plain: bool = False
    is_lossless: bool = False

    @property
    def loss(self) -> int:
        """Rank of what is lost or spent: 0 for stock DDP, 1 for exact ways, 2 for lossless ones, which cost a processor
        its time, then compressors as in `LEAST_LOSSY`."""
        lossy = [text.partition(":")[0] for text in self.compressors if text]
        ranks = [LEAST_LOSSY.index(name) if name in LEAST_LOSSY else len(LEAST_LOSSY) for name in lossy]
        return 3 + max(ranks) if ranks else 2 if self.is_lossless else int(self.name != STOCK)

    @property
    def is_exact(self) -> bool:
        return not any(self.compressors)

    @property
    def codecs(self) -> tuple[tuple[str, str], ...]:
        """Compressors and their exchanges; those of exact gradients, or `LOSSLESS`, if nothing is compressed."""
        used = dict.fromkeys(zip(self.compressors, self.exchanges, strict=True))
        exact = (LOSSLESS if self.is_lossless else COPIES, "all_reduce")
        return tuple((text, exchange) for text, exchange in used if text) or (exact,)


@dataclass(frozen=True)
class _Option:
    """A priced way to send one gradient, a leaf of the decision tree; exact without a compressor, maybe losslessly."""

    compressor: str | None
    exchange: str
    costs: Costs
    is_lossless: bool = False

    @property
    def label(self) -> str:
        if self.is_lossless:
            return SHORT
        return EXACT if self.compressor is None else f"{self.compressor} by {self.exchange}"


def best_plan(
    measurement: Measurement,
    compressors: Sequence[str] = DEFAULTS,
    policies: Sequence[Policy] | None = None,
    search: str = "espresso",
    dense: str = "auto",
) -> Plan:
    """Return the plan of the best way; of two that are about as fast, of the simpler one.

    Stock DDP is chosen unless its step lasts more than `WORTH` times as long as that of another exact way. A lossy
    way has to beat the best exact one by `LOSSY_WORTH`. The same measurement gives the same plan on all ranks.

    Args:
        compressors: texts of `thinwire.compress.named.parse` that were measured; () for exact ways only.
        policies: fusion policies; None means all of `thinwire.fuse`.
        search: how to search for gradients worth compressing. "espresso" decides for each gradient, among all that was
            measured: see `thinwire.lab.planning.lane_search.espresso_jobs`. "groups" sends all gradients of a job
            alike, with one compressor in the plan; its plans are never faster.
        dense: whether dense gradients are summed losslessly: "auto" where that pays, "native" never, and "lossless" in
            any case; then nothing is compressed.

    Raises:
        ValueError: a compressor that was not measured, or whose bytes cannot be predicted; an unknown search; gradients
            without a lossless code, or of which none was measured.

    Example:
        >>> plan = best_plan(Measurement.load("measured.json"))   # doctest: +SKIP
        >>> plan.save("plan.json")                                # doctest: +SKIP
    """
    measurement = with_sums(measurement, dense)
    found = ways(measurement, () if dense == LOSSLESS else compressors, policies, search)
    lossless = [way for way in found if way.is_lossless]
    taken = lossless if dense == LOSSLESS else found
    return plan_of(best_way(measurement, taken), measurement, found)


def with_sums(measurement: Measurement, dense: str) -> Measurement:
    """Return the measurement for ``dense=``: without codes of dense gradients if that is "native".

    Raises:
        ValueError: another text than "auto", "native" or "lossless"; "lossless" where no code was measured.
    """
    if dense not in ("auto", NATIVE, LOSSLESS):
        raise ValueError(f"no dense={dense!r}; legal are auto, {NATIVE} and {LOSSLESS}")
    if dense == LOSSLESS and not (measurement.dense_codes and measurement.parameters):
        raise ValueError(
            "it was not measured what a lossless code achieves on these gradients: measure again, or leave out dense"
        )
    return replace(measurement, dense_codes=()) if dense == NATIVE else measurement


def best_way(measurement: Measurement, found: Sequence[Way], lossy_worth: float = LOSSY_WORTH) -> Way:
    """Return the way that `best_plan` chooses: the simplest one that no other beats by enough.

    Stock DDP is simpler than other exact ways, they are simpler than lossless ones, these than lossy ones, and among
    them the less lossy one is; of equals the one without a plan. "Enough" is `WORTH` among exact ways, `TAKEN` of a
    lossless one over another exact one, ``lossy_worth`` of a lossy one over an exact one, and `LOSSIER_WORTH` among
    lossy ones.

    Args:
        found: ways; the first must be stock DDP.
    """
    kinds: dict[tuple[int, bool], Way] = {}
    for way in sorted(found, key=lambda way: (way.seconds, way.timeline_seconds)):
        kinds.setdefault((way.loss, not way.is_plain), way)
    simplest_first = [kinds[kind] for kind in sorted(kinds)]

    def is_beaten(way: Way, by: Way) -> bool:
        exact_worth = TAKEN if by.is_lossless and not way.is_lossless else WORTH
        worth = exact_worth if by.is_exact else lossy_worth if way.is_exact else LOSSIER_WORTH
        return _is_worth(measurement, by, way, worth)

    return next(
        way
        for place, way in enumerate(simplest_first)
        if not any(is_beaten(way, other) for other in simplest_first[place + 1 :])
    )


def step_seconds(measurement: Measurement, way: Way) -> float:
    """Return the predicted seconds of a whole step."""
    return measurement.other_seconds + way.seconds


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
    found = [stock_way(measurement), *_rows_alone(measurement, exact)]
    if not measurement.parameters:
        return found
    found += _fused(measurement, exact, policies)
    if measurement.dense_codes:
        found += _fused(measurement, _Option(None, "all_reduce", measurement.lossless_costs(), True), policies)
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
    """Return the way of stock DDP: each bucket is all-reduced as soon as it is full, dense tables and all.

    Sparse gradients of tables are gathered. The groups of the way are those of `usual_groups`.
    """
    groups = usual_groups(measurement)
    jobs, wire_seconds = _stock_jobs(measurement)
    way = Way(STOCK, groups, (None,) * len(groups), ("all_reduce",) * len(groups), 0.0, is_plain=True)
    return _timed(measurement, way, jobs, wire_seconds, [(STOCK, "all_reduce")])


def stock_seconds(measurement: Measurement) -> float:
    """Return the seconds in which the network is busy in a step of stock DDP."""
    return math.fsum(seconds for _, seconds in _stock_jobs(measurement)[0])


def usual_groups(measurement: Measurement) -> Groups:
    """Return the groups in which gradients travel without a plan: the buckets of DDP, without tables."""
    if not measurement.parameters:
        return ()
    if measurement.ddp is None or not measurement.ddp.buckets:
        return DDP_BUCKETS.groups(measurement.profile())
    bucket_of = {name: place for place, names in enumerate(measurement.ddp.buckets) for name in names}
    groups: dict[int, list[int]] = {}
    for place, name in enumerate(measurement.names):
        groups.setdefault(bucket_of.get(name, len(bucket_of)), []).append(place)
    return tuple(tuple(groups[place]) for place in sorted(groups))


Job = tuple[float, float]
"""Seconds from the start of backward until a job can start, and seconds that it lasts."""


def _stock_jobs(measurement: Measurement) -> tuple[list[Job], float]:
    """Return the collectives of stock DDP, and the seconds of their bytes alone."""
    everything = measurement.whole()
    costs = everything.costs()
    jobs = [
        (max(everything.ready_seconds[place] for place in group), costs.seconds(group) - costs.opening_seconds)
        for group in usual_groups(everything)
    ]  # DDP sends no headers
    wire_seconds = math.fsum(costs.wire_seconds)
    for table in measurement.tables:
        if table.is_sparse:
            seconds, wire = gathered(table, measurement.link)
            jobs.append((table.ready_seconds, seconds))
            wire_seconds += wire
    return sorted(jobs), wire_seconds


def _timed(
    measurement: Measurement,
    way: Way,
    jobs: Sequence[Job],
    wire_seconds: float,
    codecs: Iterable[tuple[str | None, str]],
) -> Way:
    """Return the way with the seconds of its jobs, corrected by the largest extra of its codecs.

    They are never less than those of backward, or of the bytes on the wire. Of a correction that makes it faster not
    more than `BELIEVED` of the timeline is believed.
    """
    timeline = in_turn(measurement, jobs)
    extra = max(measurement.extra_seconds(*codec) for codec in codecs)
    seconds = max(timeline + max(extra, -BELIEVED * timeline), measurement.all_backward_seconds, wire_seconds)
    return replace(way, seconds=seconds, timeline_seconds=timeline)


def in_turn(measurement: Measurement, jobs: Iterable[Job]) -> float:
    """Return the timeline of jobs, one after the other, each when it is ready; and never less than backward."""
    free = 0.0
    for ready, seconds in jobs:
        free = max(free, ready) + seconds
    return max(free, measurement.all_backward_seconds)


def jobs_of(measurement: Measurement, groups: Groups, seconds: Sequence[float]) -> list[Job]:
    """Return groups of known seconds as jobs."""
    ready = measurement.ready_seconds
    return [(max(ready[place] for place in group), lasts) for group, lasts in zip(groups, seconds, strict=True)]


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
            LOSSLESS if way.is_lossless else NATIVE,
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
        note=_note(tables),
    )


def _note(tables: int) -> str:
    """Say what happens to embedding tables, which no plan has."""
    if not tables:
        return ""
    what = "1 embedding table is" if tables == 1 else f"{tables} embedding tables are"
    return f"{what} not in the plan: thinwire.attach sends the rows that a step touches. The seconds include that."


def _is_worth(measurement: Measurement, way: Way, instead_of: Way, worth: float) -> bool:
    other = measurement.other_seconds
    return other + instead_of.seconds > worth * (other + way.seconds)


def _rows_alone(measurement: Measurement, exact: _Option) -> Iterator[Way]:
    """Yield what ``attach(model)`` does, where that is not the same as stock DDP: tables travel as rows."""
    if measurement.tables:
        groups = usual_groups(measurement)
        yield _way(measurement, ROWS, [exact], groups, (0,) * len(measurement.names), is_plain=True)


def _fused(measurement: Measurement, option: _Option, policies: Sequence[Policy]) -> Iterator[Way]:
    """Yield one way for each new grouping, named after the first policy that chooses it."""
    by_bytes = measurement.profile_of(option.costs)
    by_cost = equivalent_profile(measurement, option.costs)
    named = [(policy.name, policy.groups(by_bytes if counts_bytes(policy) else by_cost)) for policy in policies]
    named.append((BEST_CUT, fastest_jobs(measurement.backward_seconds, (option.costs,))[0]))
    choices = (0,) * len(measurement.names)
    seen: set[Groups] = set()
    if option.compressor is not None or option.is_lossless:
        seen.add(usual := usual_groups(measurement))
        yield _way(measurement, f"{option.label}, {USUAL}", [option], usual, choices, is_plain=True)
    for name, groups in named:
        if groups not in seen:
            seen.add(groups)
            yield _way(measurement, f"{option.label}, {name}", [option], groups, choices)


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


def _way(
    measurement: Measurement,
    name: str,
    options: Sequence[_Option],
    jobs: Groups,
    choices: Sequence[int],
    is_plain: bool = False,
) -> Way:
    """Return a way by the option of each gradient: a group for each option in a job. Tables travel as rows."""
    costs = chosen_costs([option.costs for option in options], choices)
    parts = [(part, place > 0) for job in jobs for place, part in enumerate(_parts(options, job, choices))]
    way = Way(
        name,
        tuple(group for (_, group), _ in parts),
        tuple(options[option].compressor for (option, _), _ in parts),
        tuple(options[option].exchange for (option, _), _ in parts),
        0.0,
        tuple(joins for _, joins in parts),
        is_plain=is_plain,
        is_lossless=options[0].is_lossless,
    )
    rows = measurement.row_jobs
    wire_seconds = math.fsum(costs.wire_seconds) + math.fsum(job.wire_seconds for job in rows)
    dense = jobs_of(measurement, jobs, [costs.seconds(job) for job in jobs])
    return _timed(
        measurement,
        way,
        sorted([*dense, *((job.ready_seconds, job.seconds) for job in rows)]),
        wire_seconds,
        way.codecs,
    )


def _parts(options: Sequence[_Option], job: Sequence[int], choices: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the options in a job with their gradients; small ones, exact anyway, go with the first compressed."""
    coded = [place for place in job if options[choices[place]].costs.coded[place]]
    parts: dict[int, list[int]] = {choices[place]: [] for place in coded[:1]}
    for place in job:
        is_small = coded and not options[choices[coded[0]]].costs.coded[place]
        parts.setdefault(choices[coded[0] if is_small else place], []).append(place)
    return [(option, tuple(places)) for option, places in parts.items()]
