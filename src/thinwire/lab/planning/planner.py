"""Price every option to synchronize the gradients of a measured model, and choose the best, or to do nothing. Pure.

Espresso's decision tree has, on a lane, a leaf for each compressor by each exchange that was measured, and one for the
exact all-reduce. The lane compresses on the host, beside backward, on whichever device the gradients are: a machine has
one processor to choose.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from thinwire.lab.planning.costs import Costs, chosen_costs
from thinwire.lab.planning.lane_search import espresso_jobs, fastest_jobs
from thinwire.lab.planning.measurement import BELIEVED, Measurement
from thinwire.lab.planning.speeds import COPIES
from thinwire.lab.planning.tables import gathered
from thinwire.plan.plan import EXACT, LOSSLESS, NATIVE, ROWS, SHORT, STOCK, WORTH, Candidate, Group, Plan
from thinwire.plan.policy import Policy, byte_cap, counts_bytes, default_policies
from thinwire.plan.profile import Groups, Linear, Profile
from thinwire.tune.lossless import TAKEN

DEFAULTS = ("bf16", "qsgd:bits=8", "power_sgd")
"""Compressors considered by default: one of each kind that keeps a loss within 4 % of dense in all our tables."""

WITH_SGD = ("ef_sign_sgd", "top_k:density=0.01", "power_sgd:rank=0.1:values=mxfp4")
"""Compressors considered too where SGD trains the model, or where each is judged by the loss of the user's own script:
with AdamW they end up to 29 % above dense."""

LOSSY_WORTH = 1.3
"""Least ratio of step times at which a lossy option replaces an exact one, or one that loses less. A loss is paid for
in further steps: compressors of our tables that end 1 to 5 % above dense are some tenths of a training behind.
Predictions of compressors are off by 4 to 10 % mostly, and 30 % at worst where compared."""

PLAN_WORTH = 1.05
"""Least ratio of step times at which a plan replaces one line without a plan."""

LEAST_LOSSY = (
    "fp16", "bf16", "qsgd", "int8", "natural", "fp8", "mxfp8", "power_sgd", "ef_sign_sgd", "mxfp4", "terngrad", "top_k",
)  # fmt: skip
"""Compressors by what they lose, least first, as far as they were compared; all others come last. For figures see
`thinwire.lab.doctor.losses`."""

BEST_CUT = "best cut"
"""Name of groups that are optimal for costs that no policy sees exactly; see `thinwire.lab.planning.lane_search`."""

WHERE_IT_PAYS = "where it pays"
"""Name of options that compress only some gradients."""

MIXED = f"compressors mixed, each {WHERE_IT_PAYS}"
"""Name of the option that chooses per gradient among everything measured."""

USUAL = "buckets of DDP"
"""Name of the groups in which gradients travel without a plan."""

SEARCHES = ("espresso", "groups")
"""Names of the searches for gradients worth compressing; see `best_plan`."""

DDP_BUCKETS = byte_cap(mb=25, first_mb=1)
"""The buckets of stock DDP."""


@dataclass(frozen=True)
class LossRow:
    """The loss of a method at its best rate, against the dense loss at its own.

    Args:
        codec: text of `thinwire.lab.doctor.advice.method`; None for exact sums.
        rate: the best multiple of the script's learning rates.
        loss: mean loss of the last tenth of the training, over seeds.
        gain: part of the loss by which it is lower than at the script's own rate.
        sent_bytes: bytes that a rank sends in a step.
        excess, error: part of the dense loss by which it ends above, and two standard errors of that.
        steps: how many times as many steps it needs for the dense loss as dense, error included.
        refused: why it is refused; empty if it holds.
    """

    codec: str | None
    rate: float
    loss: float
    gain: float
    sent_bytes: float
    excess: float = 0.0
    error: float = 0.0
    steps: float = 1.0
    refused: str = ""

    @property
    def name(self) -> str:
        return self.codec or "dense"

    @property
    def against(self) -> str:
        """The loss against dense in a few words."""
        return "" if self.codec is None else f"{self.excess:+.2%} ± {self.error:.2%}"


@dataclass(frozen=True)
class Option:
    """A priced option to synchronize.

    Args:
        name: name for people.
        groups: gradients that are sent alike, in backward order, and how: as a plan has them.
        seconds: seconds from the start of backward until the last gradient is synchronized, corrected by training.
        timeline_seconds: the same without the correction, which breaks ties.
        wire_seconds: seconds that its bytes alone need on the link.
        is_plain: whether ``attach(model)`` does it without a plan, with a compressor as ``dense`` if it is lossy.
        judged: its loss in short trainings of the script; None if there were none.
    """

    name: str
    groups: tuple[Group, ...]
    seconds: float
    timeline_seconds: float = 0.0
    wire_seconds: float = 0.0
    is_plain: bool = False
    judged: LossRow | None = None

    @property
    def compressors(self) -> tuple[str | None, ...]:
        """The compressor of each group; None for an exact one."""
        return tuple(group.compressor for group in self.groups)

    @property
    def is_lossless(self) -> bool:
        """Whether what is not compressed is summed losslessly."""
        return any(group.dense == LOSSLESS for group in self.groups)

    @property
    def loss(self) -> int:
        """Rank of what is lost or spent: 0 for stock DDP, 1 for exact options, 2 for lossless ones, which cost a
        processor its time, then compressors as in `LEAST_LOSSY`."""
        lossy = [text.partition(":")[0] for text in self.compressors if text]
        ranks = [LEAST_LOSSY.index(name) if name in LEAST_LOSSY else len(LEAST_LOSSY) for name in lossy]
        return 3 + max(ranks) if ranks else 2 if self.is_lossless else int(self.name != STOCK)

    @property
    def is_exact(self) -> bool:
        return not any(self.compressors)

    @property
    def codecs(self) -> tuple[tuple[str, str], ...]:
        """Compressors and their exchanges; the pair of exact gradients, or `LOSSLESS`, if nothing is compressed."""
        used = dict.fromkeys((group.compressor, group.exchange) for group in self.groups if group.compressor)
        return tuple(used) or ((LOSSLESS if self.is_lossless else COPIES, "all_reduce"),)


by_seconds = attrgetter("seconds", "timeline_seconds")
"""The key by which options are sorted, the fastest first."""

_ALL = ("*",)
"""Stands for the gradients of a group that are not chosen yet."""


class _Leaf(NamedTuple):
    """A priced option to send one gradient, a leaf of the decision tree: a group of any, and what each costs in it."""

    group: Group
    costs: Costs

    @property
    def label(self) -> str:
        group = self.group
        exact = SHORT if group.dense == LOSSLESS else EXACT
        return exact if group.compressor is None else f"{group.compressor} by {group.exchange}"


def best_plan(
    measurement: Measurement,
    compressors: Sequence[str] | None = None,
    policies: Sequence[Policy] | None = None,
    search: str = "espresso",
    dense: str = "auto",
) -> Plan:
    """Return the plan of the best option; of two that are about as fast, of the simpler one.

    Stock DDP is chosen unless its step lasts more than `WORTH` times as long as that of another exact option. A lossy
    option has to beat the best exact one by `LOSSY_WORTH`, and the best of those that lose less, too. The same
    measurement gives the same plan on all ranks.

    Args:
        compressors: texts of `thinwire.compress.named.parse` that were measured; () for exact options only, None for
        those
            that suit the optimizer.
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
    priced = price_options(measurement, () if dense == LOSSLESS else compressors, policies, search)
    legal = [option for option in priced if option.is_lossless or dense != LOSSLESS]
    return plan_of(best_option(measurement, legal), measurement, priced)


def defaults(optimizer: str) -> tuple[str, ...]:
    """Return the compressors that are considered for a model that this optimizer trains; see `Measurement`."""
    return (*DEFAULTS, *WITH_SGD) if optimizer == "SGD" else DEFAULTS


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


def best_option(measurement: Measurement, priced: Sequence[Option]) -> Option:
    """Return the option that `best_plan` chooses: the simplest one that no other beats by enough.

    Stock DDP is simpler than other exact options, they are simpler than lossless ones, these than lossy ones, and among
    them the less lossy one is; of equals the one without a plan. What is lossy has to beat the best exact one itself,
    and not only to be near another that does. "Enough" is `WORTH` among exact options, `TAKEN` of a lossless one over
    another exact one, `PLAN_WORTH` of a plan over a line that loses as much, and `LOSSY_WORTH` of any that loses
    more. Where short trainings have shown how many steps a lossy option needs for the dense loss, it has to reach
    that `PLAN_WORTH` sooner instead.

    Args:
        found: options; the first must be stock DDP.
    """
    kinds: dict[tuple[int, bool], Option] = {}
    for option in sorted(priced, key=by_seconds):
        kinds.setdefault((option.loss, not option.is_plain), option)
    simplest_first = [kinds[kind] for kind in sorted(kinds)]

    def is_beaten(option: Option, by: Option) -> bool:
        if by.is_exact:
            worth = TAKEN if by.is_lossless and not option.is_lossless else WORTH
        elif by.judged is not None:
            worth = PLAN_WORTH * by.judged.steps / (option.judged.steps if option.judged else 1.0)
        else:
            worth = PLAN_WORTH if option.loss == by.loss else LOSSY_WORTH
        return step_seconds(measurement, option) > worth * step_seconds(measurement, by)

    exact = min((option for option in simplest_first if option.is_exact), key=lambda option: option.seconds)
    worthy = [option for option in simplest_first if option.is_exact or is_beaten(exact, option)]
    return next(one for at, one in enumerate(worthy) if not any(is_beaten(one, by) for by in worthy[at + 1 :]))


def step_seconds(measurement: Measurement, option: Option) -> float:
    """Return the predicted seconds of a whole step."""
    return measurement.other_seconds + option.seconds


def price_options(
    measurement: Measurement,
    compressors: Sequence[str] | None = None,
    policies: Sequence[Policy] | None = None,
    search: str = "espresso",
) -> list[Option]:
    """Return all options, priced; stock DDP first. For arguments and errors see `best_plan`."""
    if search not in SEARCHES:
        raise ValueError(f"no search {search!r}; legal are {', '.join(SEARCHES)}")
    policies = default_policies() if policies is None else policies
    if compressors is None:
        compressors = [text for text in defaults(measurement.optimizer) if measurement.exchanges(text)]
    exact = _Leaf(Group(_ALL), measurement.costs())
    priced = [stock_option(measurement)]
    if measurement.tables:  # which travel as rows, so that ``attach(model)`` is not the same as stock DDP
        choices = (0,) * len(measurement.names)
        priced.append(_option(measurement, ROWS, [exact], usual_groups(measurement), choices, is_plain=True))
    if not measurement.parameters:
        return priced
    priced += _fused(measurement, exact, policies)
    if measurement.dense_codes:
        priced += _fused(measurement, _Leaf(Group(_ALL, dense=LOSSLESS), measurement.lossless_costs()), policies)
    leaves = list(_leaves(measurement, compressors))
    for leaf in leaves:
        priced += _fused(measurement, leaf, policies)
        priced += _mixed(measurement, [exact, leaf], search)
    if search == "espresso" and len(leaves) > 1:
        priced += _mixed(measurement, [exact, *leaves], search)
    return priced


def _leaves(measurement: Measurement, compressors: Sequence[str]) -> Iterator[_Leaf]:
    """Yield each compressor by each exchange, if it compresses anything."""
    for compressor in compressors:
        exchanges = measurement.exchanges(compressor) or (measurement.fastest_exchange(compressor),)
        for exchange in exchanges:
            costs = measurement.costs(compressor, exchange)
            if any(costs.coded):
                yield _Leaf(Group(_ALL, 0, compressor, exchange), costs)


def stock_option(measurement: Measurement) -> Option:
    """Return the option of stock DDP: each bucket is all-reduced as soon as it is full, dense tables and all.

    Sparse gradients of tables are gathered. The groups of the option come from `usual_groups`.
    """
    jobs, wire_seconds = _stock_jobs(measurement)
    groups = tuple(Group(**_named(measurement, indices)) for indices in usual_groups(measurement))
    return _timed(measurement, Option(STOCK, groups, 0.0, is_plain=True), jobs, wire_seconds)


def stock_seconds(measurement: Measurement) -> float:
    """Return the seconds in which the network is busy in a step of stock DDP."""
    return measurement.synchronizations * math.fsum(seconds for _, seconds in _stock_jobs(measurement)[0])


def usual_groups(measurement: Measurement) -> Groups:
    """Return the groups in which gradients travel without a plan: the buckets of DDP, without tables."""
    if not measurement.parameters:
        return ()
    if measurement.ddp is None or not measurement.ddp.buckets:
        return DDP_BUCKETS.groups(measurement.profile())
    bucket_of = {name: index for index, names in enumerate(measurement.ddp.buckets) for name in names}
    groups: dict[int, list[int]] = {}
    for index, name in enumerate(measurement.names):
        groups.setdefault(bucket_of.get(name, len(bucket_of)), []).append(index)
    return tuple(tuple(groups[index]) for index in sorted(groups))


Job = tuple[float, float]
"""Seconds from the start of backward until a job can start, and seconds that it lasts."""


def _stock_jobs(measurement: Measurement) -> tuple[list[Job], float]:
    """Return the collectives of stock DDP, and the seconds of their bytes alone."""
    everything = measurement.whole()
    costs, groups = everything.costs(), usual_groups(everything)
    jobs = jobs_of(everything, groups, [costs.seconds(group) - costs.opening_seconds for group in groups])  # no headers
    wire_seconds = costs.wire_seconds
    for table in measurement.tables:
        if table.is_sparse:
            seconds, wire = gathered(table, measurement.link)
            jobs.append((table.ready_seconds, seconds))
            wire_seconds += wire
    return sorted(jobs), wire_seconds


def _timed(measurement: Measurement, option: Option, jobs: Sequence[Job], wire_seconds: float) -> Option:
    """Return the option with the seconds of its jobs, corrected by the largest extra of its codecs.

    All synchronizations of a step are alike. The seconds are never less than backward takes, or of the bytes on the
    wire. Of a correction that makes it faster not more than `BELIEVED` of the timeline is believed.
    """
    timeline = measurement.synchronizations * in_turn(measurement, jobs)
    wire_seconds *= measurement.synchronizations
    codecs = ((STOCK, "all_reduce"),) if option.name == STOCK else option.codecs
    extra = max(measurement.extra_seconds(*codec) for codec in codecs)
    seconds = max(timeline + max(extra, -BELIEVED * timeline), measurement.all_backward_seconds, wire_seconds)
    return replace(option, seconds=seconds, timeline_seconds=timeline, wire_seconds=wire_seconds)


def in_turn(measurement: Measurement, jobs: Iterable[Job]) -> float:
    """Return the timeline of one synchronization's jobs, one after the other; never less than its backward."""
    free = 0.0
    for ready, seconds in jobs:
        free = max(free, ready) + seconds
    return max(free, measurement.pass_seconds)


def jobs_of(measurement: Measurement, groups: Groups, seconds: Sequence[float]) -> list[Job]:
    """Return groups of known seconds as jobs."""
    ready = measurement.ready_seconds
    return [(max(ready[index] for index in group), lasts) for group, lasts in zip(groups, seconds, strict=True)]


def equivalent_profile(measurement: Measurement, costs: Costs) -> Profile:
    """Return a profile whose ``communicate`` gives exactly `Costs.seconds`, for policies that weigh costs.

    The cost of a compressed tensor is not proportional to its bytes, so its "bytes" are seconds here.
    """
    communicate = Linear(costs.group_seconds, 1.0)
    seconds = tuple(encode + wire + decode for encode, wire, decode, _ in costs.tensors)
    return replace(measurement.profile_of(costs), size_bytes=seconds, communicate=communicate)


def plan_of(option: Option, measurement: Measurement, priced: Sequence[Option]) -> Plan:
    """Return an option as a plan, with all the options of ``found`` as its candidates."""
    ranked = sorted(priced, key=lambda candidate: candidate.seconds)
    tables = len(measurement.tables)
    return Plan(
        world_size=measurement.world_size,
        fingerprint=measurement.fingerprint,
        groups=option.groups,
        predicted_seconds=option.seconds,
        dense_seconds=priced[0].seconds,
        other_seconds=measurement.other_seconds,
        choice=option.name,
        candidates=tuple(Candidate(candidate.name, candidate.seconds) for candidate in ranked),
        note=_note(tables),
    )


def _note(tables: int) -> str:
    """Say what happens to embedding tables, which no plan has."""
    if not tables:
        return ""
    what = "1 embedding table is" if tables == 1 else f"{tables} embedding tables are"
    return f"{what} not in the plan: thinwire.attach sends the rows that a step touches. The seconds include that."


def _fused(measurement: Measurement, leaf: _Leaf, policies: Sequence[Policy]) -> Iterator[Option]:
    """Yield one option for each new grouping, named after the first policy that chooses it."""
    by_bytes = measurement.profile_of(leaf.costs)
    by_cost = equivalent_profile(measurement, leaf.costs)
    named = [(policy.name, policy.groups(by_bytes if counts_bytes(policy) else by_cost)) for policy in policies]
    named.append((BEST_CUT, fastest_jobs(measurement.backward_seconds, (leaf.costs,))[0]))
    choices = (0,) * len(measurement.names)
    seen: set[Groups] = set()
    if leaf.label != EXACT:
        seen.add(usual := usual_groups(measurement))
        yield _option(measurement, f"{leaf.label}, {USUAL}", [leaf], usual, choices, is_plain=True)
    for name, groups in named:
        if groups not in seen:
            seen.add(groups)
            yield _option(measurement, f"{leaf.label}, {name}", [leaf], groups, choices)


def _mixed(measurement: Measurement, leaves: Sequence[_Leaf], search: str) -> list[Option]:
    """Compress gradients only where that pays, or return nothing if that is none or all; the first option is exact."""
    costs = [leaf.costs for leaf in leaves]
    if search == "espresso":
        groups, choices = espresso_jobs(measurement.backward_seconds, measurement.size_bytes, costs)
    else:
        groups, taken = fastest_jobs(measurement.backward_seconds, costs)
        choices = tuple(option for group, option in zip(groups, taken, strict=True) for _ in group)
    coded = tuple(choice if costs[choice].coded[index] else 0 for index, choice in enumerate(choices))
    name = MIXED if len(leaves) > 2 else f"{leaves[1].label} {WHERE_IT_PAYS}"
    option = _option(measurement, name, leaves, groups, coded)
    is_mixed = len(option.codecs) > 1 if len(leaves) > 2 else len(set(option.compressors)) > 1
    return [option] if is_mixed else []


def _option(
    measurement: Measurement,
    name: str,
    leaves: Sequence[_Leaf],
    jobs: Groups,
    choices: Sequence[int],
    is_plain: bool = False,
) -> Option:
    """Return an option by the option of each gradient: a group for each option in a job. Tables travel as rows."""
    costs = chosen_costs([leaf.costs for leaf in leaves], choices)
    groups = tuple(
        replace(leaves[leaf].group, **_named(measurement, part), joins=number > 0)
        for job in jobs
        for number, (leaf, part) in enumerate(_parts(leaves, job, choices))
    )
    rows = measurement.row_jobs
    wire_seconds = costs.wire_seconds + math.fsum(job.wire_seconds for job in rows)
    dense = jobs_of(measurement, jobs, [costs.seconds(job) for job in jobs])
    timed = sorted([*dense, *((job.ready_seconds, job.seconds) for job in rows)])
    return _timed(measurement, Option(name, groups, 0.0, is_plain=is_plain), timed, wire_seconds)


def _named(measurement: Measurement, indices: Sequence[int]) -> dict[str, Any]:
    """Return the names of gradients, and their bytes together, for a group of a plan."""
    chosen = [measurement.parameters[index] for index in indices]
    size_bytes = sum(one.numel * one.dtype.itemsize for one in chosen)
    return {"parameters": tuple(one.name for one in chosen), "size_bytes": size_bytes}


def _parts(leaves: Sequence[_Leaf], job: Sequence[int], choices: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the options in a job with their gradients; small ones, exact anyway, go with the first compressed."""
    coded = [index for index in job if leaves[choices[index]].costs.coded[index]]
    parts: dict[int, list[int]] = {choices[index]: [] for index in coded[:1]}
    for index in job:
        is_small = coded and not leaves[choices[coded[0]]].costs.coded[index]
        parts.setdefault(choices[coded[0] if is_small else index], []).append(index)
    return [(leaf, tuple(indices)) for leaf, indices in parts.items()]
