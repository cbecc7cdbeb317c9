"""Diagnose from one `Measurement` whether a training should synchronize its gradients in another way. Pure."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from thinwire.lab.doctor.advice import Advice, advice_of, lines_of, where_to_paste
from thinwire.lab.doctor.equal_loss import Judgement
from thinwire.lab.doctor.losses import describe_loss, loss_json
from thinwire.lab.doctor.lossless import LosslessOption, format_mbit, lossless_option
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.outer import OuterOption, outer_option
from thinwire.lab.planning.planner import (
    LOSSY_WORTH,
    PLAN_WORTH,
    SHORT,
    LossRow,
    Option,
    best_option,
    by_seconds,
    plan_of,
    price_options,
    step_seconds,
    stock_seconds,
    with_sums,
)
from thinwire.lab.planning.tables import RowJob
from thinwire.plan.plan import LOSSLESS, STOCK, WORTH, Plan
from thinwire.plan.policy import Policy, default_policies
from thinwire.plan.text import format_bytes, format_seconds
from thinwire.tune.lossless import TAKEN

SPEEDS_MBIT = tuple(10 ** (1 + step / 4) for step in range(17))
"""Link speeds in the picture: 10 Mbit/s to 100 Gbit/s."""

_EXPOSED = 0.03
"""Share of a step above which waiting for the network counts."""
_BISECTIONS = 6
FINALISTS = 6
"""Largest number of options that are trained before one is recommended; stock DDP is one of them."""
NOT_TRIED = "not tried"
"""Beginning of the reason why an option was not tried, which is no failure."""
_BELOW_WIRE = 0.8
"""Share of the seconds of its bytes on the link below which a measured step cannot be: links are measured to 5 %."""
_FAR_OFF, _LEAST_SECONDS = 3.0, 0.05
"""Ratio of a measured step to its prediction, either way, and the least difference, above which one of them is wrong:
predictions were off by 40 % at worst. Of steps of a few milliseconds a busy machine makes any multiple."""

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
        name: name of the option.
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
        found: all options that could be advised, stock DDP first.
        better_plan: name and step seconds of an option that needs a plan and is better by enough, where none was asked
        for. best_exact: name and step seconds of the fastest way without compression.
        exposed_seconds: seconds of each step in which backward waits for the network under stock DDP.
        communication_seconds: seconds of each step in which its network is busy.
        curves: curves of stock DDP, the best exact way, and each compressor.
        stops_mbit: link speed above which nothing beats stock DDP by enough; None if something does at 100 Gbit/s, 0
            if nothing does at any speed.
        compression_stops_mbit: the same for options that compress, against the best exact one.
        confirmed: the options that were trained; where there are any but stock DDP, their measured seconds decide.
        tries_lossless: whether to train with lossless sums, however they are predicted to do.
        error: why there is no verdict: a measured step that cannot be. Empty if there is one.
        judgement: what holds the loss of the training; None where that was not asked for.
        held_back: name of the lossy option that might be worth it where the advice is to do nothing, because it or the
            best exact way was not tried; empty if there is none.
    """

    title: str
    measurement: Measurement
    advice: Advice
    plan: Plan
    options: tuple[Option, ...]
    better_plan: tuple[str, float] | None
    best_exact: tuple[str, float]
    exposed_seconds: float
    communication_seconds: float
    curves: tuple[LinkCurve, ...]
    stops_mbit: float | None
    compression_stops_mbit: float | None
    confirmed: tuple[Confirmed, ...] = ()
    tries_lossless: bool = False
    error: str = ""
    judgement: Judgement | None = None
    held_back: str = ""

    @property
    def stock_step_seconds(self) -> float:
        return self.plan.other_seconds + self.plan.dense_seconds

    @property
    def is_measured(self) -> bool:
        """Whether measured steps decide, and not predicted ones."""
        return any(row.measured_step_seconds is not None for row in self.confirmed)

    @property
    def source(self) -> str:
        """What the seconds of stock DDP are: "measured", or "predicted" where nothing was tried."""
        return "measured" if self.is_measured else "predicted"

    @property
    def backward_seconds(self) -> float:
        """Seconds of backward in a step of stock DDP, without waiting."""
        return self.plan.dense_seconds - self.exposed_seconds

    @property
    def hidden_seconds(self) -> float:
        """Seconds of communication that backward hides: never more than backward lasts."""
        return min(self.backward_seconds, max(0.0, self.communication_seconds - self.exposed_seconds))

    @property
    def untried(self) -> frozenset[str]:
        """Names of the options for which no time was left."""
        return frozenset(row.name for row in self.confirmed if row.failure.startswith(NOT_TRIED))

    @property
    def is_best_exact_untried(self) -> bool:
        """Whether the best exact way is known by its prediction only, although options were trained."""
        return self.best_exact[0] in self.untried

    @property
    def failed(self) -> tuple[Confirmed, ...]:
        """The options whose training failed."""
        return tuple(row for row in self.confirmed if not row.measured_step_seconds and row.name not in self.untried)

    @property
    def unproven(self) -> str:
        """Names of what failed, if every exact way that was tried did, but for stock DDP; else empty."""
        exact = {option.name for option in self.options if option.is_exact and option.name != STOCK}
        ran = any(row.name in exact and row.measured_step_seconds is not None for row in self.confirmed)
        names = [row.name for row in self.failed]
        return "" if ran or not exact.intersection(names) else ", ".join(names)

    @property
    def is_lossy(self) -> bool:
        """Whether the recommended way compresses anything."""
        return any(group.compressor for group in self.plan.groups)

    @property
    def exposed_share(self) -> float:
        """Exposed share of a step of stock DDP."""
        return self.exposed_seconds / self.stock_step_seconds if self.stock_step_seconds else 0.0

    @property
    def outer(self) -> OuterOption | None:
        """The outer loop, which is another algorithm; None where it would not help enough to be named."""
        computing = self.plan.other_seconds + self.backward_seconds
        return outer_option(self.measurement, self.plan.step_seconds, computing)

    @property
    def lossless(self) -> LosslessOption | None:
        """The price of lossless sums; None if it was not measured what the code achieves."""
        return lossless_option(self.measurement)

    @property
    def judged(self) -> LossRow | None:
        """The loss of the advice in short trainings; None where there were none."""
        return next((option.judged for option in self.options if option.name == self.plan.choice), None)

    def seconds_of(self, row: LossRow) -> float | None:
        """Return the step seconds of the fastest option with a judged method; None if none is left."""
        measured = {each.name: each.measured_step_seconds for each in self.confirmed}
        options = [option for option in self.options if option.judged == row]
        return min((measured.get(one.name) or step_seconds(self.measurement, one) for one in options), default=None)

    def to_json(self) -> dict[str, Any]:
        lossless, optimizer = self.lossless, self.measurement.optimizer
        taken = [group.compressor for group in self.plan.groups]
        compressors = {option.name: option.compressors for option in self.options}
        verdict: dict[str, Any] = {
            "do_nothing": self.plan.does_nothing,
            "plan_step_seconds": self.plan.step_seconds,
            "speedup": self.plan.speedup,
            "advice": {
                "name": self.advice.name,
                "lines": lines_of(self.advice, self.measurement.ddp),
                "where": where_to_paste(self.advice, self.measurement.ddp) if self.advice.dense else "",
                "loss": loss_json(taken, optimizer),
                "rate": 1.0 if self.judged is None else self.judged.rate,
            },
            "outer": None if self.outer is None else self.outer.to_json(),
            "best_exact": {
                "name": self.best_exact[0],
                "step_seconds": self.best_exact[1],
                "predicted": not self.is_measured or self.is_best_exact_untried,
            },
            "plan": self.plan.to_json(),
        }
        return {
            "title": self.title,
            "error": self.error or None,
            **(dict.fromkeys(verdict) if self.error else verdict),
            "stock_step_seconds": self.stock_step_seconds,
            "lossless": None if lossless is None else lossless.to_json(),
            "confirmed": [
                {**asdict(row), "loss": loss_json(compressors.get(row.name, ()), optimizer)} for row in self.confirmed
            ],
            "optimizer": optimizer,
            "passes": self.measurement.passes,
            "synchronizations": self.measurement.synchronizations,
            "tables": [asdict(job) for job in _row_jobs(self.measurement)],
            "losses": None if self.judgement is None else self.judgement.to_json(self.seconds_of),
            "communication_seconds": self.communication_seconds,
            "exposed_seconds": self.exposed_seconds,
            "exposed_share": self.exposed_share,
            "link_mbit": self.measurement.link.mbit,
            "stops_mbit": self.stops_mbit,
            "compression_stops_mbit": self.compression_stops_mbit,
            "speeds_mbit": list(SPEEDS_MBIT),
            "curves": [asdict(curve) for curve in self.curves],
            "measurement": self.measurement.to_json(),
        }


def diagnose(
    title: str,
    measurement: Measurement,
    compressors: Sequence[str] | None = None,
    policies: Sequence[Policy] | None = None,
    on_speed: OnSpeed = lambda done, total: None,
    with_plan: bool = True,
    dense: str = "auto",
    judgement: Judgement | None = None,
) -> Diagnosis:
    """Price all options on this link, and the best of each kind on others.

    Args:
        compressors: None for those that suit the optimizer.
        policies: fusion policies for the plan; the curves use the last but one of them, by default Cupcake's.
        with_plan: whether the advice may need the file of a plan.
        dense: "native" leaves out lossless sums; "lossless" trains with them, see `finalists`.
        judgement: what holds the loss; all other lossy options are left out.

    Raises:
        ValueError: a compressor that was not measured, or whose bytes cannot be predicted.
    """
    policies = default_policies() if policies is None else policies
    measurement = with_sums(measurement, dense)
    priced = _possible(measurement, price_options(measurement, compressors, policies), judgement)
    options = [option for option in priced if with_plan or option.is_plain]
    best = best_option(measurement, options)
    with_plans = best_option(measurement, priced)
    fusing = policies[-2:-1] or policies

    def at(mbit: float) -> list[Option]:
        # By the quicker search, whose plans are within 2 % of the other's: there are dozens of links, and "espresso"
        # takes some seconds at each for a model of 300 gradients.
        moved = measurement.at(mbit)
        alike = _possible(moved, price_options(moved, compressors, fusing, search="groups"), judgement)
        return [option for option in alike if with_plan or option.is_plain]

    def taken(mbit: float) -> Option:
        return best_option(measurement, at(mbit))

    curves: dict[str, list[float]] = {}
    winners = []
    for index, mbit in enumerate(SPEEDS_MBIT):
        alike = at(mbit)
        for name, seconds in _fastest_of_each(alike).items():
            curves.setdefault(name, []).append(measurement.other_seconds + seconds)
        winners.append(best_option(measurement, alike))
        on_speed(index + 1, len(SPEEDS_MBIT))
    stock = options[0]
    gains = step_seconds(measurement, best) > PLAN_WORTH * step_seconds(measurement, with_plans)
    return Diagnosis(
        title,
        measurement,
        advice_of(best, measurement, options),
        plan_of(best, measurement, options),
        tuple(options),
        (with_plans.name, step_seconds(measurement, with_plans)) if gains else None,
        _best_exact(measurement, options),
        max(0.0, stock.seconds - measurement.all_backward_seconds),
        stock_seconds(measurement),
        tuple(LinkCurve(name, tuple(seconds)) for name, seconds in curves.items()),
        _stops([option.name != STOCK for option in winners], lambda mbit: taken(mbit).name != STOCK),
        _stops([not option.is_exact for option in winners], lambda mbit: not taken(mbit).is_exact),
        tries_lossless=dense == LOSSLESS,
        judgement=judgement,
    )


def _possible(
    measurement: Measurement, options: Sequence[Option], judgement: Judgement | None = None
) -> Sequence[Option]:
    """Return the options that the model can take: DDP cannot form the buckets of every plan. With a judgement they hold
    the loss."""
    options = options if judgement is None else judgement.of(options)
    ddp = measurement.ddp
    last = math.fsum(measurement.backward_seconds)
    follows = ddp is None or (
        ddp.follows_plans and all(table.is_sparse or table.ready_seconds >= last for table in measurement.tables)
    )
    return [option for option in options if option.is_plain or follows]


def _best_exact(measurement: Measurement, options: Sequence[Option]) -> tuple[str, float]:
    exact = min((option for option in options if option.is_exact), key=by_seconds)
    return exact.name, step_seconds(measurement, exact)


def finalists(diagnosis: Diagnosis) -> list[Option]:
    """Return the options that are worth training, in the order in which to try them.

    These are stock DDP, exact options, the best first, and those that compress, the one that loses least first.

    Lossless sums are among them if they are predicted to be faster than other exact options, or asked for; a
    compressor if
    its predicted step is shorter than that of the best exact way: it has to be `LOSSY_WORTH` times as fast, and
    predictions are off by as much.
    """
    measurement = diagnosis.measurement
    stock, *others = sorted(diagnosis.options, key=lambda option: (option.name != STOCK, *by_seconds(option)))
    best: dict[int, Option] = {}
    for option in others:
        first = best.setdefault(option.loss, option)
        near = PLAN_WORTH * step_seconds(measurement, first)
        if option.is_plain and not first.is_plain and step_seconds(measurement, option) <= near:
            best[option.loss] = option
    uncoded = [stock, *(option for option in best.values() if option.is_exact and not option.is_lossless)]
    gaining = min(step_seconds(measurement, option) for option in uncoded) / WORTH
    exact = [
        option
        for option in best.values()
        if option.is_exact
        and (not option.is_lossless or diagnosis.tries_lossless or step_seconds(measurement, option) <= gaining)
    ]
    bound = min(option.seconds for option in [stock, *exact])
    lossy = sorted(
        (option for option in best.values() if not option.is_exact and option.seconds < bound),
        key=lambda option: option.loss,
    )
    return [stock, *exact, *lossy][:FINALISTS]


def why_impossible(row: Confirmed, option: Option, measurement: Measurement, slack: float = 0.0) -> str:
    """Return why a measured step cannot be, with both figures; empty if it can.

    Args:
        slack: seconds by which steps compute faster than was measured apart, as where the machine was busy then.
    """
    seconds, predicted = row.measured_step_seconds, row.predicted_step_seconds
    if seconds is None:
        return ""
    measured = f"{row.name}: a step of {format_seconds(seconds)} was measured, and"
    if seconds < _BELOW_WIRE * option.wire_seconds:
        return (
            f"{measured} its bytes alone need {format_seconds(option.wire_seconds)} on this link of"
            f" {measurement.link.mbit:.0f} Mbit/s"
        )
    is_far = max(seconds, predicted - slack) > _FAR_OFF * min(seconds, predicted)
    if is_far and abs(seconds - predicted) > _LEAST_SECONDS:
        return f"{measured} {format_seconds(predicted)} was predicted"
    return ""


def confirm(diagnosis: Diagnosis, trained: Sequence[Confirmed]) -> Diagnosis:
    """Return the diagnosis with the measured seconds of options, which decide.

    An exact way that was not tried keeps its predicted seconds; while it is the best exact one, none that compresses
    is recommended, and none where every exact way but stock DDP failed. What failed is never advised. The seconds of
    computing were measured apart; they are cut to the shortest measured step, which computes no less. A measured step
    that the wire forbids, or far from its prediction, is an error.

    Args:
        trained: options of `finalists`, stock DDP among them.

    Raises:
        ValueError: stock DDP failed.
    """
    measurement = diagnosis.measurement
    steps = {row.name: row.measured_step_seconds for row in trained if row.measured_step_seconds is not None}
    if STOCK not in steps:
        reasons = "; ".join(row.failure for row in trained if row.failure)
        raise ValueError(f"the training failed under stock DDP: {reasons}")
    named = {option.name: option for option in diagnosis.options}
    computing = measurement.other_seconds + measurement.all_backward_seconds
    cut = min(1.0, min(steps.values()) / computing) if computing else 1.0
    slack = (1.0 - cut) * computing
    doubts = [why_impossible(row, named[row.name], measurement, slack) for row in trained if row.name in named]
    other = cut * measurement.other_seconds
    options_trained = [
        replace(option, seconds=steps[option.name] - other, timeline_seconds=option.seconds)
        for option in diagnosis.options
        if option.name in steps
    ]
    seen = replace(diagnosis, confirmed=tuple(trained), error="; ".join(filter(None, doubts)))
    failed = {row.name for row in seen.failed}
    rest = [
        replace(option, seconds=max(0.0, step_seconds(measurement, option) - other))
        for option in diagnosis.options
        if option.name not in {*steps, *failed}
    ]
    timed = replace(measurement, forward_seconds=other, rest_seconds=0.0)
    known = [*options_trained, *(option for option in rest if option.name in seen.untried)]
    best_exact = _best_exact(timed, known)
    sure = [] if seen.unproven or best_exact[0] in seen.untried else options_trained
    best, might = (
        best_option(timed, [option for option in known if option.is_exact or option in lossy])
        for lossy in (sure, known)
    )
    planned = None if seen.unproven else diagnosis.better_plan
    return replace(
        seen,
        advice=advice_of(best, timed, [*options_trained, *rest]),
        plan=plan_of(best, timed, [*options_trained, *rest]),
        best_exact=best_exact,
        held_back="" if seen.unproven or might.is_exact or best.name != STOCK else might.name,
        exposed_seconds=max(0.0, steps[STOCK] - cut * computing),
        better_plan=planned if planned and step_seconds(timed, best) > PLAN_WORTH * planned[1] else None,
    )


def describe(diagnosis: Diagnosis, plan_path: str | None = None) -> str:
    """Return the answers as text of one screen.

    Args:
        plan_path: path of the plan, if it was written.
    """
    rows = answers(diagnosis)
    width = max(len(name) for name, _ in rows)
    lines = [f"thinwire doctor: {diagnosis.title}", ""]
    lines += [f"{name:<{width}}  {text}" for name, text in rows]
    judged = [] if diagnosis.judgement is None else ["", *diagnosis.judgement.describe(diagnosis.seconds_of)]
    return "\n".join([*lines, *judged, *_confirmed(diagnosis), "", *_advice(diagnosis, plan_path)]) + "\n"


def answers(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return the answers as (name, text) pairs."""
    measured = diagnosis.measurement
    hosts = f"{measured.hosts} hosts" if measured.hosts > 1 else "one host"
    size_bytes = sum(measured.size_bytes) + sum(table.size_bytes for table in measured.tables)
    count = len(measured.parameters) + len(measured.tables)
    return [
        ("Model", f"{count} parameters, {format_bytes(size_bytes)} of gradients"),
        *[("Tables" if not index else "", text) for index, text in enumerate(_tables(measured))],
        ("Ranks", f"{measured.world_size} on {hosts}, {measured.device}"),
        *_left_out(measured),
        *_steps(measured),
        ("Link", measured.link.describe()),
        ("A step of stock DDP", _parts(diagnosis)),
        ("Exposed?", _exposure(diagnosis)),
        ("Best exact way", _gain(diagnosis, *diagnosis.best_exact) + _source(diagnosis, diagnosis.best_exact[0])),
        *_lossless(diagnosis),
        ("Recommended", _verdict(diagnosis)),
        *_ranges(diagnosis),
    ]


def _lossless(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return the price of lossless sums; nothing where measured steps contradict it."""
    price, steps = diagnosis.lossless, {row.name: row.measured_step_seconds or math.inf for row in diagnosis.confirmed}
    exact = [(option.is_lossless, steps.get(option.name, math.inf)) for option in diagnosis.options if option.is_exact]
    plain, coded = (min((time for kind, time in exact if kind is wanted), default=math.inf) for wanted in (False, True))
    if price is None or (coded < math.inf and (coded >= plain if price.pays else plain > TAKEN * coded)):
        return []
    return [("Lossless sums", price.describe())]


def _steps(measured: Measurement) -> list[tuple[str, str]]:
    """Return what a step is, where it is more than one backward."""
    if measured.passes == 1:
        return []
    times = "once" if measured.synchronizations == 1 else f"{measured.synchronizations} times"
    return [("A step", f"{measured.passes} backwards, synchronized {times}, and the optimizer's step")]


def _row_jobs(measured: Measurement) -> list[RowJob]:
    """Return the jobs of tables with the bytes and seconds of all synchronizations of a step."""
    count = measured.synchronizations
    return [
        replace(job, **{name: count * getattr(job, name) for name in ("sent_bytes", "wire_seconds", "seconds")})
        for job in measured.row_jobs
    ]


def _source(diagnosis: Diagnosis, name: str) -> str:
    """Return what stands behind the seconds of an option that were not measured."""
    if not diagnosis.is_measured:
        return "; predicted"
    return "; predicted, because it was not tried" if name in diagnosis.untried else ""


def _parts(diagnosis: Diagnosis) -> str:
    """Return the step of stock DDP and its parts."""
    return (
        f"{format_seconds(diagnosis.stock_step_seconds)}, {diagnosis.source}: forward and the rest"
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
    for job in _row_jobs(measured):
        tables = [known[name] for name in job.tables]
        names = ", ".join(table.name for table in tables[:3]) + (", ..." if len(tables) > 3 else "")
        density = statistics.fmean(table.density for table in tables)
        lines.append(
            f"{names}: {format_bytes(sum(table.size_bytes for table in tables))}; each rank touches"
            f" {100 * density:.2g} % of the rows; thinwire sends {format_bytes(job.sent_bytes)} in"
            f" {format_seconds(job.seconds)} (scheme {job.scheme})"
        )
    return lines


def _confirmed(diagnosis: Diagnosis) -> list[str]:
    """Return the table of the options that were trained."""
    if not diagnosis.confirmed:
        return []
    width = max(len(row.name) for row in diagnosis.confirmed)
    lines = ["", f"{'Trained for a few steps':<{width}}  {'predicted':>9}  {'measured':>9}"]
    for row in diagnosis.confirmed:
        measured = row.failure if row.measured_step_seconds is None else format_seconds(row.measured_step_seconds)
        line = f"{row.name:<{width}}  {format_seconds(row.predicted_step_seconds):>9}  {measured:>9}"
        loss = loss_in_words(diagnosis, row.name)
        lines.append(f"{line}  {loss}" if loss else line)
    return lines


def loss_in_words(diagnosis: Diagnosis, name: str) -> str:
    """Return what short trainings, or else our tables, say of the loss of an option; empty if it is exact."""
    option = next((option for option in diagnosis.options if option.name == name), None)
    if option is None or option.is_exact:
        return ""
    if option.judged is not None:
        return f"loss {option.judged.against} at rate x{option.judged.rate:g}, by short trainings"
    return describe_loss(option.compressors, diagnosis.measurement.optimizer)


def _fastest_of_each(options: Sequence[Option]) -> dict[str, float]:
    """Return seconds of stock DDP, of exact options, and of each compressor that all groups share."""
    fastest = {STOCK: options[0].seconds}
    for option in options[1:]:
        used = set(option.compressors) or {None}
        name = next(iter(used)) or (SHORT if option.is_lossless else "exact, fused")
        if len(used) == 1:
            fastest[name] = min(option.seconds, fastest.get(name, math.inf))
    return fastest


def _stops(pays: Sequence[bool], pays_at: Callable[[float], bool]) -> float | None:
    """Return the speed at which something stops paying, between two link speeds of the picture."""
    if pays[-1]:
        return None
    if not any(pays):
        return 0.0
    last = max(index for index, answer in enumerate(pays) if answer)
    low, high = math.log(SPEEDS_MBIT[last]), math.log(SPEEDS_MBIT[last + 1])
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if pays_at(math.exp(middle)) else (low, middle)
    return math.exp(low)


def _exposure(diagnosis: Diagnosis) -> str:
    if diagnosis.exposed_share > _EXPOSED:
        return f"yes: {diagnosis.exposed_share:.0%} of a step waits for the network"
    hidden = format_seconds(diagnosis.hidden_seconds)
    return f"no: {diagnosis.exposed_share:.1%} of a step waits, and {hidden} of communication hide behind backward"


def _gain(diagnosis: Diagnosis, name: str, step_seconds: float) -> str:
    if name == STOCK:
        return f"{name}: {format_seconds(step_seconds)} a step"
    times = diagnosis.stock_step_seconds / step_seconds if step_seconds else 1.0
    return f"{name}: {format_seconds(step_seconds)} a step, {times:.2f} times as fast"


def _verdict(diagnosis: Diagnosis) -> str:
    plan = diagnosis.plan
    if diagnosis.error:
        return "nothing, because of a figure that cannot be"
    if diagnosis.unproven and plan.does_nothing:
        return f"do nothing: {why_nothing(diagnosis)}"
    if plan.does_nothing:
        lossy = f"no lossy one by {100 * (LOSSY_WORTH - 1):.0f} %"
        lossy = "no lossy one that holds the loss reaches it 5 % sooner" if diagnosis.judgement else lossy
        held_back = f"{diagnosis.held_back}, which is lossy, or the best exact way was not tried"
        return (
            f"do nothing{'' if diagnosis.is_measured else ', by prediction'}: no exact way is faster than stock DDP by"
            f" more than {100 * (WORTH - 1):.0f} %,"
            + (f" no lossless sum by {100 * (TAKEN - 1):.0f} %," if diagnosis.measurement.dense_codes else "")
            + f" and {held_back if diagnosis.held_back else lossy}"
        )
    loss = loss_in_words(diagnosis, plan.choice)
    words = [_gain(diagnosis, plan.choice, plan.step_seconds), *(["lossy", loss] if loss else [])]
    return "; ".join(words) + _source(diagnosis, plan.choice)


def _ranges(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return the links on which something pays, by prediction; nothing where training has shown another choice.

    An exact way pays on slower links, too, if it does on this one, by the margin of the recommendation.
    """
    if diagnosis.error or diagnosis.is_best_exact_untried:
        return []
    lossy, anything = diagnosis.compression_stops_mbit, diagnosis.stops_mbit
    here = diagnosis.measurement.link.mbit
    differs = diagnosis.is_lossy != _pays(lossy, here) or diagnosis.plan.does_nothing == _pays(anything, here)
    if diagnosis.is_measured and differs:
        return []
    pays_here = not _pays(anything, here) or diagnosis.stock_step_seconds > WORTH * diagnosis.best_exact[1]
    exact_beyond = pays_here and (anything is None or (lossy is not None and anything > lossy))
    return [("Compression pays", _range(lossy)), *([("An exact way pays", _range(anything))] if exact_beyond else [])]


def _pays(stops: float | None, mbit: float) -> bool:
    return stops is None or mbit < stops


def _range(stops: float | None) -> str:
    if stops is None:
        return f"on any link up to {format_mbit(SPEEDS_MBIT[-1])}"
    return f"on links below about {format_mbit(stops)}" if stops else "on no link"


def _advice(diagnosis: Diagnosis, plan_path: str | None) -> list[str]:
    if diagnosis.error:
        return [
            f"No verdict: {diagnosis.error}. One of the two figures is wrong: is the machine busy, or are the steps of"
            " the script not alike? Rerun with --fresh."
        ]
    where, pasted = to_paste(diagnosis, plan_path)
    lines = [f"{where}:", "", *(f"    {line}" for line in pasted)]
    lines = lines if pasted else [f"Do nothing. {why_nothing(diagnosis)}."]
    if diagnosis.is_lossy:
        lines += ["", "It is lossy: compare the loss too, or take the exact way with --compress none."]
    lines += [line for note in (_rate(diagnosis), _doubt(diagnosis), hint(diagnosis)) if note for line in ("", note)]
    return lines + (diagnosis.outer.describe() if diagnosis.outer else [])


def to_paste(diagnosis: Diagnosis, plan_path: str | None) -> tuple[str, list[str]]:
    """Return where to add the advised lines, and these, none for stock DDP."""
    advice, ddp = diagnosis.advice, diagnosis.measurement.ddp
    start = "Add" if advice.plan is None or plan_path else "Write the plan with --output plan.json, and add"
    return f"{start}, {where_to_paste(advice, ddp)}", lines_of(advice, ddp, plan_path or "plan.json")


def why_nothing(diagnosis: Diagnosis) -> str:
    """Return why to do nothing, or what might be better."""
    if diagnosis.unproven:
        return f"{diagnosis.unproven} failed when tried, and nothing else is proven"
    untried = f"But {diagnosis.held_back} may be faster: rerun with --compress and its name alone, for time to try it"
    return untried if diagnosis.held_back else "Stock DDP is as good as anything here, and simpler"


def _rate(diagnosis: Diagnosis) -> str:
    """Return a sentence about the learning rate, which decides more than most codes do."""
    row = diagnosis.judged
    sentence = "Multiply the learning rates by {row.rate:g}: short trainings ended {row.gain:.1%} lower so."
    return "" if row is None or row.rate == 1.0 else sentence.format(row=row)


def _doubt(diagnosis: Diagnosis) -> str:
    """Return a sentence about options that could not be tried."""
    names = ", ".join(row.name for row in diagnosis.failed)
    return f"In doubt: {names} could not be tried, and might be faster; the table says why." if names else ""


def hint(diagnosis: Diagnosis) -> str:
    """Return a sentence about a plan that would be faster."""
    if diagnosis.better_plan is None:
        return ""
    name, seconds = diagnosis.better_plan
    return f"Predicted with a plan, {name}: {format_seconds(seconds)} a step. To write one: --output plan.json."
