"""Should this training synchronize its gradients in another way at all? Answers from one `Measurement`. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.fuse.policy import Policy
from thinwire.plan.explain import format_bytes, format_seconds
from thinwire.plan.measurement import Measurement
from thinwire.plan.plan import STOCK, Plan
from thinwire.plan.planner import DEFAULTS, Way, best_way, default_policies, plan_of, ways

SPEEDS_MBIT = tuple(10 ** (1 + step / 4) for step in range(17))
"""Of the links in the picture: 10 Mbit/s to 100 Gbit/s."""

_EXPOSED = 0.03
"""Less than this share of a step is not worth a word."""
_BISECTIONS = 6

OnSpeed = Callable[[int, int], None]
"""Told how many links are done, and of how many."""


@dataclass(frozen=True)
class LinkCurve:
    """A method over link speed: seconds of a whole step at each of `SPEEDS_MBIT`."""

    name: str
    step_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What is the matter with a training, and what to do.

    Args:
        title: what was looked at.
        measurement: the figures.
        plan: the best for this link; `Plan.does_nothing` says that there is nothing to do.
        best_exact: name and seconds of a step of the fastest way without compression.
        exposed_seconds: for which stock DDP has backward wait for the network, in each step.
        communication_seconds: that its network is busy for in each step.
        curves: stock DDP, the best exact way, and each compressor.
        stops_mbit: on faster links than this nothing is better than stock DDP by enough; None if something is at 100
            Gbit/s, 0 if nothing is anywhere.
        compression_stops_mbit: the same of ways that compress, over the best exact one.
    """

    title: str
    measurement: Measurement
    plan: Plan
    best_exact: tuple[str, float]
    exposed_seconds: float
    communication_seconds: float
    curves: tuple[LinkCurve, ...]
    stops_mbit: float | None
    compression_stops_mbit: float | None

    @property
    def stock_step_seconds(self) -> float:
        return self.plan.other_seconds + self.plan.dense_seconds

    @property
    def exposed_share(self) -> float:
        """Of a step of stock DDP."""
        return self.exposed_seconds / self.stock_step_seconds if self.stock_step_seconds else 0.0

    @property
    def is_exposed(self) -> bool:
        """Whether backward waits for the network for more than 3 % of a step."""
        return self.exposed_share > _EXPOSED

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "do_nothing": self.plan.does_nothing,
            "stock_step_seconds": self.stock_step_seconds,
            "plan_step_seconds": self.plan.step_seconds,
            "speedup": self.plan.speedup,
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
) -> Diagnosis:
    """Price all ways on this link, and the best of each kind on others.

    Args:
        policies: of fusion, for the plan; the curves have the last but one of them, by default Cupcake's.

    Raises:
        ValueError: a compressor that was not measured, or that nobody can plan with.
    """
    policies = default_policies() if policies is None else policies
    found = ways(measurement, compressors, policies)
    best = best_way(measurement, found)
    exact = min((way for way in found if way.is_exact), key=lambda way: way.seconds)
    fusing = policies[-2:-1] or policies

    def at(mbit: float) -> list[Way]:
        # By the quicker search, whose plans are within 2 % of the other's: there are dozens of links, and "espresso"
        # takes some seconds at each for a model of 300 gradients.
        return ways(measurement.at(mbit), compressors, fusing, search="groups")

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
    backward, stock = sum(measurement.backward_seconds), found[0]
    costs = measurement.costs()
    return Diagnosis(
        title,
        measurement,
        plan_of(best, measurement, found),
        (exact.name, measurement.other_seconds + exact.seconds),
        max(0.0, stock.seconds - backward),
        sum(costs.seconds(group) - costs.opening_seconds for group in stock.groups),
        tuple(LinkCurve(name, tuple(seconds)) for name, seconds in curves.items()),
        _stops([way.name != STOCK for way in winners], lambda mbit: taken(mbit).name != STOCK),
        _stops([not way.is_exact for way in winners], lambda mbit: not taken(mbit).is_exact),
    )


def describe(diagnosis: Diagnosis, plan_path: str | None = None) -> str:
    """The answers, on one screen.

    Args:
        plan_path: where the plan is, if it was written.
    """
    measured, plan = diagnosis.measurement, diagnosis.plan
    hosts = f"{measured.hosts} hosts" if measured.hosts > 1 else "one host"
    rows = [
        ("Model", f"{len(measured.parameters)} parameters, {format_bytes(sum(measured.size_bytes))} of gradients"),
        ("Ranks", f"{measured.world_size} on {hosts}, {measured.device}"),
        ("Link", measured.link.network.describe()),
        (
            "A step of stock DDP",
            f"{format_seconds(diagnosis.stock_step_seconds)}: forward and the rest"
            f" {format_seconds(plan.other_seconds)}, backward {format_seconds(sum(measured.backward_seconds))}, waiting"
            f" for the network {format_seconds(diagnosis.exposed_seconds)}",
        ),
        ("Exposed?", _exposure(diagnosis)),
        ("Best exact way", _gain(diagnosis, *diagnosis.best_exact)),
        ("Best of all", _verdict(diagnosis)),
        ("Compression pays", _range(diagnosis.compression_stops_mbit)),
        ("Anything pays", _range(diagnosis.stops_mbit)),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"thinwire doctor: {diagnosis.title}", ""]
    lines += [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join([*lines, "", *_advice(diagnosis, plan_path)]) + "\n"


def format_mbit(mbit: float) -> str:
    """``250 Mbit/s``, ``2.5 Gbit/s``: two digits, which is as much as is known."""
    rounded = float(f"{mbit:.2g}")
    return f"{rounded:g} Mbit/s" if rounded < 1000 else f"{rounded / 1000:g} Gbit/s"


def _fastest_of_each(found: Sequence[Way]) -> dict[str, float]:
    """Seconds of stock DDP, of exact ways, and of each compressor by whatever exchange, where it has all groups."""
    fastest = {STOCK: found[0].seconds}
    for way in found[1:]:
        name = way.compressors[0] or "exact, fused"
        if len(set(way.compressors)) == 1:
            fastest[name] = min(way.seconds, fastest.get(name, math.inf))
    return fastest


def _stops(pays: Sequence[bool], pays_at: Callable[[float], bool]) -> float | None:
    """Between the fastest link of the picture on which something pays and the next one."""
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
    times = diagnosis.stock_step_seconds / step_seconds if step_seconds else 1.0
    return f"{name}: {format_seconds(step_seconds)} a step, {times:.2f} times as fast as stock DDP"


def _verdict(diagnosis: Diagnosis) -> str:
    plan = diagnosis.plan
    if plan.does_nothing:
        return "do nothing: no exact way is faster than stock DDP by more than 3 %, and no lossy one by 15 %"
    lossy = "; lossy" if any(group.compressor for group in plan.groups) else ""
    return _gain(diagnosis, plan.choice, plan.step_seconds) + lossy


def _range(stops: float | None) -> str:
    if stops is None:
        return f"on any link, up to {format_mbit(SPEEDS_MBIT[-1])} at least"
    return f"on links below about {format_mbit(stops)}" if stops else "on no link"


def _advice(diagnosis: Diagnosis, plan_path: str | None) -> list[str]:
    plan = diagnosis.plan
    if plan.does_nothing:
        return ["Do nothing. Stock DDP is as good as anything here, and simpler."]
    lines = ["Change two lines:" if plan_path else "Write the plan with --output plan.json, and change two lines:", ""]
    path = plan_path or "plan.json"
    lines += ["    import thinwire", f'    thinwire.attach(model, plan=thinwire.Plan.load("{path}"))']
    if any(group.compressor for group in plan.groups):
        lines += ["", "It is lossy: compare the loss too, or take the exact way with --compress none."]
    return lines
