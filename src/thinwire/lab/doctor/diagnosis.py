"""Diagnose from one `Measurement` whether a training should synchronize its gradients in another way. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from thinwire.fuse.policy import Policy, default_policies
from thinwire.lab.doctor.advice import Advice, advice_of, lines_of, where_to_paste
from thinwire.lab.doctor.lossless import LosslessOption, format_mbit, lossless_option
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.outer import OuterOption, outer_option
from thinwire.lab.planning.planner import (
    DEFAULTS,
    LOSSIER_WORTH,
    LOSSY_WORTH,
    MEASURED_LOSSY_WORTH,
    SHORT,
    Way,
    best_way,
    plan_of,
    step_seconds,
    stock_seconds,
    ways,
    with_sums,
)
from thinwire.lossless.decide import TAKEN
from thinwire.plan.explain import format_bytes, format_seconds
from thinwire.plan.plan import LOSSLESS, STOCK, WORTH, Plan

SPEEDS_MBIT = tuple(10 ** (1 + step / 4) for step in range(17))
"""Link speeds in the picture: 10 Mbit/s to 100 Gbit/s."""

_EXPOSED = 0.03
"""Share of a step above which waiting for the network counts."""
_BISECTIONS = 6
FINALISTS = 5
"""Largest number of ways that are trained before one is recommended; stock DDP is one of them."""
_HOPEFUL = 1.3
"""Ratio to the best predicted step above which a way is not trained: predictions were off by 40 % at worst."""
NOT_TRIED = "not tried: no time was left"

OnSpeed = Callable[[int, int], None]
"""A callback that receives the number of link speeds done, and of all."""


@dataclass(frozen=True)
class LinkCurve:
    """The curve of a method over link speed: seconds of a whole step at each of `SPEEDS_MBIT`."""

    name: str
    step_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Confirmed:
    """A way that was trained for a few steps.

    Args:
        name: name of the way.
        predicted_step_seconds: step seconds by the timeline.
        measured_step_seconds: median step of the slowest rank; None if the training failed, or was not tried.
        failure: why there is none, in a line.
    """

    name: str
    predicted_step_seconds: float
    measured_step_seconds: float | None
    failure: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a training, with the plan that it recommends.

    Args:
        title: name of the training.
        measurement: the measured figures.
        advice: what to change, which may be nothing.
        plan: the same as a plan; `Plan.does_nothing` says that there is nothing to do.
        found: all ways that could be advised, stock DDP first.
        better_plan: name and step seconds of a way that needs a plan and is better by enough, where none was asked for.
        best_exact: name and step seconds of the fastest way without compression.
        exposed_seconds: seconds of each step in which backward waits for the network under stock DDP.
        communication_seconds: seconds of each step in which its network is busy.
        curves: curves of stock DDP, the best exact way, and each compressor.
        stops_mbit: link speed above which nothing beats stock DDP by enough; None if something does at 100 Gbit/s, 0
            if nothing does at any speed.
        compression_stops_mbit: the same for ways that compress, against the best exact one.
        confirmed: the ways that were trained; where there are any but stock DDP, their measured seconds decide.
        tries_lossless: whether to train with lossless sums, however they are predicted to do.
    """

    title: str
    measurement: Measurement
    advice: Advice
    plan: Plan
    found: tuple[Way, ...]
    better_plan: tuple[str, float] | None
    best_exact: tuple[str, float]
    exposed_seconds: float
    communication_seconds: float
    curves: tuple[LinkCurve, ...]
    stops_mbit: float | None
    compression_stops_mbit: float | None
    confirmed: tuple[Confirmed, ...] = ()
    tries_lossless: bool = False

    @property
    def stock_step_seconds(self) -> float:
        return self.plan.other_seconds + self.plan.dense_seconds

    @property
    def is_measured(self) -> bool:
        """Whether measured steps decide, and not predicted ones."""
        return any(row.name != STOCK and row.measured_step_seconds is not None for row in self.confirmed)

    @property
    def backward_seconds(self) -> float:
        """Seconds of backward in a step of stock DDP, without waiting."""
        return self.plan.dense_seconds - self.exposed_seconds

    @property
    def failed(self) -> tuple[Confirmed, ...]:
        """The ways whose training failed."""
        return tuple(row for row in self.confirmed if _has_failed(row))

    @property
    def exposed_share(self) -> float:
        """Exposed share of a step of stock DDP."""
        return self.exposed_seconds / self.stock_step_seconds if self.stock_step_seconds else 0.0

    @property
    def is_exposed(self) -> bool:
        """Whether backward waits for the network for more than 3 % of a step."""
        return self.exposed_share > _EXPOSED

    @property
    def outer(self) -> OuterOption | None:
        """The outer loop, which is another algorithm; None where it would not help enough to be named."""
        computing = self.plan.other_seconds + self.backward_seconds
        return outer_option(self.measurement, self.plan.step_seconds, computing)

    @property
    def lossless(self) -> LosslessOption | None:
        """The price of lossless sums; None if it was not measured what the code achieves."""
        return lossless_option(self.measurement)

    def to_json(self) -> dict[str, Any]:
        lossless = self.lossless
        return {
            "title": self.title,
            "do_nothing": self.plan.does_nothing,
            "stock_step_seconds": self.stock_step_seconds,
            "plan_step_seconds": self.plan.step_seconds,
            "speedup": self.plan.speedup,
            "advice": {
                "name": self.advice.name,
                "lines": lines_of(self.advice, self.measurement.ddp),
                "where": where_to_paste(self.advice, self.measurement.ddp) if self.advice.attaches else "",
            },
            "outer": None if self.outer is None else self.outer.to_json(),
            "lossless": None if lossless is None else lossless.to_json(),
            "confirmed": [asdict(row) for row in self.confirmed],
            "tables": [asdict(job) for job in self.measurement.row_jobs],
            "best_exact": {"name": self.best_exact[0], "step_seconds": self.best_exact[1]},
            "communication_seconds": self.communication_seconds,
            "exposed_seconds": self.exposed_seconds,
            "exposed_share": self.exposed_share,
            "link_mbit": self.measurement.link.mbit,
            "stops_mbit": self.stops_mbit,
            "compression_stops_mbit": self.compression_stops_mbit,
            "speeds_mbit": list(SPEEDS_MBIT),
            "curves": [asdict(curve) for curve in self.curves],
            "plan": self.plan.to_json(),
            "measurement": self.measurement.to_json(),
        }


def diagnose(
    title: str,
    measurement: Measurement,
    compressors: Sequence[str] = DEFAULTS,
    policies: Sequence[Policy] | None = None,
    on_speed: OnSpeed = lambda done, total: None,
    with_plan: bool = True,
    dense: str = "auto",
) -> Diagnosis:
    """Price all ways on this link, and the best of each kind on others.

    Args:
        policies: fusion policies for the plan; the curves use the last but one of them, by default Cupcake's.
        with_plan: whether the advice may need the file of a plan.
        dense: "native" leaves out lossless sums; "lossless" trains with them, see `finalists`.

    Raises:
        ValueError: a compressor that was not measured, or whose bytes cannot be predicted.
    """
    policies = default_policies() if policies is None else policies
    measurement = with_sums(measurement, dense)
    priced = _possible(measurement, ways(measurement, compressors, policies))
    found = [way for way in priced if with_plan or way.is_plain]
    best = best_way(measurement, found)
    with_plans = best_way(measurement, priced)
    fusing = policies[-2:-1] or policies

    def at(mbit: float) -> list[Way]:
        # By the quicker search, whose plans are within 2 % of the other's: there are dozens of links, and "espresso"
        # takes some seconds at each for a model of 300 gradients.
        moved = measurement.at(mbit)
        alike = _possible(moved, ways(moved, compressors, fusing, search="groups"))
        return [way for way in alike if with_plan or way.is_plain]

    def taken(mbit: float) -> Way:
        return best_way(measurement, at(mbit))

    curves: dict[str, list[float]] = {}
    winners = []
    for place, mbit in enumerate(SPEEDS_MBIT):
        alike = at(mbit)
        for name, seconds in _fastest_of_each(alike).items():
            curves.setdefault(name, []).append(measurement.other_seconds + seconds)
        winners.append(best_way(measurement, alike))
        on_speed(place + 1, len(SPEEDS_MBIT))
    stock = found[0]
    gains = step_seconds(measurement, best) > LOSSIER_WORTH * step_seconds(measurement, with_plans)
    return Diagnosis(
        title,
        measurement,
        advice_of(best, measurement, found),
        plan_of(best, measurement, found),
        tuple(found),
        (with_plans.name, step_seconds(measurement, with_plans)) if gains else None,
        _best_exact(measurement, found),
        max(0.0, stock.seconds - measurement.all_backward_seconds),
        stock_seconds(measurement),
        tuple(LinkCurve(name, tuple(seconds)) for name, seconds in curves.items()),
        _stops([way.name != STOCK for way in winners], lambda mbit: taken(mbit).name != STOCK),
        _stops([not way.is_exact for way in winners], lambda mbit: not taken(mbit).is_exact),
        tries_lossless=dense == LOSSLESS,
    )


def _possible(measurement: Measurement, found: Sequence[Way]) -> list[Way]:
    """Return the ways that the model can go: DDP cannot form the buckets of every plan."""
    ddp = measurement.ddp
    last = math.fsum(measurement.backward_seconds)
    follows = ddp is None or (
        ddp.follows_plans and all(table.is_sparse or table.ready_seconds >= last for table in measurement.tables)
    )
    return [way for way in found if way.is_plain or follows]


def _best_exact(measurement: Measurement, found: Sequence[Way]) -> tuple[str, float]:
    exact = min((way for way in found if way.is_exact), key=lambda way: (way.seconds, way.timeline_seconds))
    return exact.name, step_seconds(measurement, exact)


def finalists(diagnosis: Diagnosis) -> list[Way]:
    """Return the ways that are worth training: stock DDP, the best exact one, and the best of some compressors.

    Of compressors the fastest is among them, and then those that lose least, if they are about as fast. Lossless sums
    are, if they are predicted to be faster than other exact ways, or asked for.
    """
    measurement = diagnosis.measurement
    stock, *others = sorted(diagnosis.found, key=lambda way: (way.name != STOCK, way.seconds, way.timeline_seconds))
    best: dict[int, Way] = {}
    for way in others:
        first = best.setdefault(way.loss, way)
        if way.is_plain and not first.is_plain and _is_close(measurement, way, first):
            best[way.loss] = way
    kinds = sorted(best.values(), key=lambda way: way.seconds)
    bound = _HOPEFUL * min(step_seconds(measurement, way) for way in [stock, *kinds])
    uncoded = [way for way in [stock, *kinds] if way.is_exact and not way.is_lossless]
    gaining = min(step_seconds(measurement, way) for way in uncoded) / WORTH
    hopeful = [
        way
        for way in kinds
        if step_seconds(measurement, way) <= (gaining if way.is_lossless else bound)
        or (way.is_exact and (diagnosis.tries_lossless or not way.is_lossless))
    ]
    exact, lossy = [way for way in hopeful if way.is_exact], [way for way in hopeful if not way.is_exact]
    return [stock, *exact, *lossy[:1], *sorted(lossy[1:], key=lambda way: way.loss)][:FINALISTS]


def _is_close(measurement: Measurement, way: Way, fastest: Way) -> bool:
    return step_seconds(measurement, way) <= LOSSIER_WORTH * step_seconds(measurement, fastest)


def confirm(diagnosis: Diagnosis, trained: Sequence[Confirmed]) -> Diagnosis:
    """Return the diagnosis with the measured seconds of ways, which decide.

    Where none but stock DDP could be trained, the prediction stands. The seconds of computing were measured apart;
    they are cut to the shortest measured step, which computes no less.

    Args:
        trained: ways of `finalists`, stock DDP among them.

    Raises:
        ValueError: stock DDP failed.
    """
    measurement = diagnosis.measurement
    steps = {row.name: row.measured_step_seconds for row in trained if row.measured_step_seconds is not None}
    if STOCK not in steps:
        raise ValueError("the training failed under stock DDP: " + "; ".join(row.failure for row in trained))
    if len(steps) == 1 and len(trained) > 1:
        return replace(diagnosis, confirmed=tuple(trained))
    computing = measurement.other_seconds + measurement.all_backward_seconds
    cut = min(1.0, min(steps.values()) / computing) if computing else 1.0
    other = cut * measurement.other_seconds
    ways_trained = [
        replace(way, seconds=steps[way.name] - other, timeline_seconds=way.seconds)
        for way in diagnosis.found
        if way.name in steps
    ]
    failed = {row.name for row in trained if _has_failed(row)}
    rest = [
        replace(way, seconds=max(0.0, step_seconds(measurement, way) - other))
        for way in diagnosis.found
        if way.name not in {*steps, *failed}
    ]
    timed = replace(measurement, forward_seconds=other, rest_seconds=0.0)
    best = best_way(timed, ways_trained, MEASURED_LOSSY_WORTH)
    return replace(
        diagnosis,
        advice=advice_of(best, timed, [*ways_trained, *rest]),
        plan=plan_of(best, timed, [*ways_trained, *rest]),
        best_exact=_best_exact(timed, ways_trained),
        exposed_seconds=max(0.0, steps[STOCK] - cut * computing),
        better_plan=diagnosis.better_plan if _would_gain(diagnosis, step_seconds(timed, best)) else None,
        confirmed=tuple(trained),
    )


def _has_failed(row: Confirmed) -> bool:
    return row.measured_step_seconds is None and row.failure != NOT_TRIED


def _would_gain(diagnosis: Diagnosis, measured_seconds: float) -> bool:
    """Return whether the prediction of a plan is better by enough than a step that was measured."""
    return diagnosis.better_plan is not None and measured_seconds > LOSSIER_WORTH * diagnosis.better_plan[1]


def describe(diagnosis: Diagnosis, plan_path: str | None = None) -> str:
    """Return the answers as text of one screen.

    Args:
        plan_path: path of the plan, if it was written.
    """
    rows = answers(diagnosis)
    width = max(len(name) for name, _ in rows)
    lines = [f"thinwire doctor: {diagnosis.title}", ""]
    lines += [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join([*lines, *_confirmed(diagnosis), "", *_advice(diagnosis, plan_path)]) + "\n"


def answers(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return the answers as (name, text) pairs."""
    measured = diagnosis.measurement
    hosts = f"{measured.hosts} hosts" if measured.hosts > 1 else "one host"
    size_bytes = sum(measured.size_bytes) + sum(table.size_bytes for table in measured.tables)
    count = len(measured.parameters) + len(measured.tables)
    return [
        ("Model", f"{count} parameters, {format_bytes(size_bytes)} of gradients"),
        *[("Tables" if not place else "", text) for place, text in enumerate(_tables(measured))],
        ("Ranks", f"{measured.world_size} on {hosts}, {measured.device}"),
        *_left_out(measured),
        ("Link", measured.link.network.describe()),
        ("A step of stock DDP", _parts(diagnosis)),
        ("Exposed?", _exposure(diagnosis)),
        ("Best exact way", _gain(diagnosis, *diagnosis.best_exact)),
        *([] if diagnosis.lossless is None else [("Lossless sums", diagnosis.lossless.describe())]),
        ("Recommended", _verdict(diagnosis)),
        *_ranges(diagnosis),
    ]


def _parts(diagnosis: Diagnosis) -> str:
    """Return the step of stock DDP and its parts."""
    measured = ", measured" if diagnosis.is_measured else ""
    return (
        f"{format_seconds(diagnosis.stock_step_seconds)}{measured}: forward and the rest"
        f" {format_seconds(diagnosis.plan.other_seconds)}, backward {format_seconds(diagnosis.backward_seconds)},"
        f" waiting for the network {format_seconds(diagnosis.exposed_seconds)}"
    )


def _left_out(measured: Measurement) -> list[tuple[str, str]]:
    """Return what the script does that was not diagnosed."""
    ddp = measured.ddp
    if ddp is None:
        return []
    rows = [("Take out", f"{line}, which the doctor left out when it ran the script") for line in ddp.left_out]
    if ddp.others:
        models = "another DistributedDataParallel" if ddp.others == 1 else f"{ddp.others} more DistributedDataParallel"
        rows.append(("Left out", f"{models} of the script: only the first, in line {ddp.line}, is diagnosed"))
    return rows


def _tables(measured: Measurement) -> list[str]:
    """Return a line for each job of tables: names, sizes, rows, and what they cost."""
    known, lines = {table.name: table for table in measured.tables}, []
    for job in measured.row_jobs:
        tables = [known[name] for name in job.tables]
        names = ", ".join(table.name for table in tables[:3]) + (", ..." if len(tables) > 3 else "")
        density = statistics.fmean(table.density for table in tables)
        lines.append(
            f"{names}: {format_bytes(sum(table.size_bytes for table in tables))}, of whose rows a rank touches"
            f" {100 * density:.2g} %; by {job.scheme} {format_bytes(job.sent_bytes)} in {format_seconds(job.seconds)}"
        )
    return lines


def _confirmed(diagnosis: Diagnosis) -> list[str]:
    """Return the table of the ways that were trained."""
    if not diagnosis.confirmed:
        return []
    width = max(len(row.name) for row in diagnosis.confirmed)
    lines = ["", f"{'Trained for a few steps':<{width}}  {'predicted':>9}  {'measured':>9}"]
    for row in diagnosis.confirmed:
        measured = row.failure if row.measured_step_seconds is None else format_seconds(row.measured_step_seconds)
        lines.append(f"{row.name:<{width}}  {format_seconds(row.predicted_step_seconds):>9}  {measured:>9}")
    return lines


def _fastest_of_each(found: Sequence[Way]) -> dict[str, float]:
    """Return seconds of stock DDP, of exact ways, and of each compressor that all groups share."""
    fastest = {STOCK: found[0].seconds}
    for way in found[1:]:
        used = set(way.compressors) or {None}
        name = next(iter(used)) or (SHORT if way.is_lossless else "exact, fused")
        if len(used) == 1:
            fastest[name] = min(way.seconds, fastest.get(name, math.inf))
    return fastest


def _stops(pays: Sequence[bool], pays_at: Callable[[float], bool]) -> float | None:
    """Return the speed at which something stops paying, between two link speeds of the picture."""
    if pays[-1]:
        return None
    if not any(pays):
        return 0.0
    last = max(place for place, answer in enumerate(pays) if answer)
    low, high = math.log(SPEEDS_MBIT[last]), math.log(SPEEDS_MBIT[last + 1])
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if pays_at(math.exp(middle)) else (low, middle)
    return math.exp(low)


def _exposure(diagnosis: Diagnosis) -> str:
    if diagnosis.is_exposed:
        return f"yes: {diagnosis.exposed_share:.0%} of a step waits for the network"
    hidden = format_seconds(max(0.0, diagnosis.communication_seconds - diagnosis.exposed_seconds))
    return f"no: {diagnosis.exposed_share:.1%} of a step waits, and {hidden} of communication hide behind backward"


def _gain(diagnosis: Diagnosis, name: str, step_seconds: float) -> str:
    if name == STOCK:
        return f"{name}: {format_seconds(step_seconds)} a step"
    times = diagnosis.stock_step_seconds / step_seconds if step_seconds else 1.0
    return f"{name}: {format_seconds(step_seconds)} a step, {times:.2f} times as fast"


def _verdict(diagnosis: Diagnosis) -> str:
    plan = diagnosis.plan
    if plan.does_nothing:
        lossy = MEASURED_LOSSY_WORTH if diagnosis.is_measured else LOSSY_WORTH
        return (
            f"do nothing: no exact way is faster than stock DDP by more than {100 * (WORTH - 1):.0f} %,"
            + (f" no lossless sum by {100 * (TAKEN - 1):.0f} %," if diagnosis.measurement.dense_codes else "")
            + f" and no lossy one by {100 * (lossy - 1):.0f} %"
        )
    lossy_too = "; lossy" if any(group.compressor for group in plan.groups) else ""
    untried = "; predicted, because no way could be tried" if diagnosis.failed and not diagnosis.is_measured else ""
    return _gain(diagnosis, plan.choice, plan.step_seconds) + lossy_too + untried


def _ranges(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return the links on which something pays, by prediction; nothing where training has shown another choice.

    An exact way pays on slower links, too, if it does on this one, by the margin of the recommendation.
    """
    lossy, anything = diagnosis.compression_stops_mbit, diagnosis.stops_mbit
    here = diagnosis.measurement.link.mbit
    if diagnosis.is_measured:
        is_lossy = any(group.compressor for group in diagnosis.plan.groups)
        if is_lossy != _pays(lossy, here) or diagnosis.plan.does_nothing == _pays(anything, here):
            return []
    pays_here = not _pays(anything, here) or diagnosis.stock_step_seconds > WORTH * diagnosis.best_exact[1]
    exact_beyond = pays_here and (anything is None or (lossy is not None and anything > lossy))
    rows = [("Compression pays", _range(lossy))]
    return [*rows, ("An exact way pays", _range(anything))] if exact_beyond else rows


def _pays(stops: float | None, mbit: float) -> bool:
    return stops is None or mbit < stops


def _range(stops: float | None) -> str:
    if stops is None:
        return f"on any link up to {format_mbit(SPEEDS_MBIT[-1])}"
    return f"on links below about {format_mbit(stops)}" if stops else "on no link"


def _advice(diagnosis: Diagnosis, plan_path: str | None) -> list[str]:
    advice, ddp = diagnosis.advice, diagnosis.measurement.ddp
    if not advice.attaches:
        nothing = "Do nothing. Stock DDP is as good as anything here, and simpler."
        return [nothing, *_doubt(diagnosis), *_hint(diagnosis), *_another_algorithm(diagnosis)]
    is_written = advice.plan is None or plan_path is not None
    start = "Add" if is_written else "Write the plan with --output plan.json, and add"
    pasted = lines_of(advice, ddp, plan_path or "plan.json")
    lines = [f"{start}, {where_to_paste(advice, ddp)}:", "", *(f"    {line}" for line in pasted)]
    if any(group.compressor for group in diagnosis.plan.groups):
        lines += ["", "It is lossy: compare the loss too, or take the exact way with --compress none."]
    return [*lines, *_doubt(diagnosis), *_hint(diagnosis), *_another_algorithm(diagnosis)]


def _another_algorithm(diagnosis: Diagnosis) -> list[str]:
    return [] if diagnosis.outer is None else diagnosis.outer.describe()


def _doubt(diagnosis: Diagnosis) -> list[str]:
    """Return a sentence about ways that could not be tried."""
    if not diagnosis.failed:
        return []
    if diagnosis.is_measured:
        names = ", ".join(row.name for row in diagnosis.failed)
        return ["", f"In doubt: {names} could not be tried, and might be faster; the table says why."]
    return [
        "",
        "In doubt: no way but stock DDP could be tried, so this is a prediction; the table says why they failed.",
    ]


def _hint(diagnosis: Diagnosis) -> list[str]:
    """Return a sentence about a plan that would be faster."""
    if diagnosis.better_plan is None:
        return []
    name, seconds = diagnosis.better_plan
    return ["", f"A plan may be faster: {name}, {format_seconds(seconds)} a step is predicted. Try --output plan.json."]
