"""Plans for published models from published figures: nothing is measured, and there is no network. Pure."""

from __future__ import annotations

from collections.abc import Callable

from published.cluster import FLAT, Cluster
from published.costs import compression
from published.models import MODELS, PublishedModel
from thinwire.compress.base import Parameter, Summable
from thinwire.compress.methods.sparsify import Sparsifier
from thinwire.compress.named import parse
from thinwire.compress.wrappers import code_of
from thinwire.lab.planning.planner import DDP_BUCKETS
from thinwire.plan.plan import EXACT, STOCK, WORTH, Candidate, Group, Plan, fingerprint
from thinwire.plan.policy import default_policies
from thinwire.plan.profile import Groups, Linear, Profile
from thinwire.plan.timeline import iteration_seconds

_INTRA = {"pcie": 0.4e-9, "nvlink": 0.02e-9}  # seconds a byte, as of Espresso's public simulator
INSIDE = tuple(_INTRA)
_GOODPUT = 0.8
_INTRA_ALPHA, _INTER_ALPHA = 10e-6, 25e-6
_TEXTS = {
    "random_k": "random_k:density=0.01",
    "dgc": "dgc:density=0.01",
    "ef_sign_sgd": "ef_sign_sgd",
    "onebit": "ef_sign_sgd",
}


def published_cluster(hosts: int, ranks_per_host: int, mbit: float, inside: str = "pcie") -> Cluster:
    """Return hosts on links of a rate, of which TCP gets four fifths; accelerators on PCIe or NVLink.

    Raises:
        ValueError: other numbers or links.
    """
    if inside not in _INTRA:
        raise ValueError(f"accelerators are on {' or '.join(INSIDE)}, not {inside!r}")
    if not mbit > 0:
        raise ValueError(f"a link has a rate above 0 Mbit/s, not {mbit}")
    return Cluster(
        hosts,
        ranks_per_host,
        intra=Linear(_INTRA_ALPHA, _INTRA[inside]),
        inter=Linear(_INTER_ALPHA, 8e-6 / (mbit * _GOODPUT)),
        host_copy=Linear(20e-6, 8 / 100e9),
        name=f"{inside}, {mbit:g} Mbit/s",
    )


def plan_published(name: str, cluster: Cluster) -> Plan:
    """Return the best plan for a model of `published.models`, with the compressor of Espresso's figures.

    Raises:
        ValueError: an unknown model; the message says which there are.

    Example:
        >>> plan = plan_published("lstm", published_cluster(8, 8, 25_000))
        >>> plan.world_size, plan.speedup > 1
        (64, True)
    """
    if name not in MODELS:
        raise ValueError(f"no published model {name!r}; there are {', '.join(MODELS)}")
    model = MODELS[name]()
    dense = model.profile(None, _line(lambda size: float(cluster.seconds(FLAT, "all_reduce", size)), model))
    exchange, line = _coded_line(model, cluster)
    return _best(model, cluster, dense, model.profile(model.algorithm, line), exchange)


def _line(seconds: Callable[[float], float], model: PublishedModel) -> Linear:
    """The line through the costs of nothing and of the whole model."""
    total, alpha = sum(model.size_bytes), seconds(0.0)
    return Linear(alpha, (seconds(total) - alpha) / total)


def _coded_line(model: PublishedModel, cluster: Cluster) -> tuple[str, Linear]:
    """The faster exchange of payloads over all ranks, as a line in a payload's bytes (see `PublishedModel.profile`)."""

    def gathered(payload: float) -> float:
        return float(cluster.seconds(FLAT, "all_gather", payload))

    def in_two_shots(payload: float) -> float:
        return float(cluster.seconds(FLAT, "all_to_all", payload)) + gathered(payload / cluster.world_size)

    code = code_of(parse(_TEXTS[model.algorithm]))
    if isinstance(code, Summable):
        return "all_reduce", _line(lambda payload: float(cluster.seconds(FLAT, "all_reduce", payload)), model)
    lines = {"all_gather": _line(gathered, model)}
    if not isinstance(code, Sparsifier):  # two shots would choose again among the chosen values
        lines["two_shot"] = _line(in_two_shots, model)
    exchange = min(lines, key=lambda name: lines[name](compression(model.algorithm).ratio * sum(model.size_bytes)))
    return exchange, lines[exchange]


def _best(model: PublishedModel, cluster: Cluster, dense: Profile, coded: Profile, exchange: str) -> Plan:
    stock = DDP_BUCKETS.groups(dense)
    candidates: list[tuple[str, str | None, Groups, float]] = [(STOCK, None, stock, iteration_seconds(dense, stock))]
    text = _TEXTS[model.algorithm]
    for label, compressor, profile in ((EXACT, None, dense), (f"{text} by {exchange}", text, coded)):
        for policy in default_policies():
            groups = policy.groups(profile)
            candidates.append((f"{label}, {policy.name}", compressor, groups, iteration_seconds(profile, groups)))
    chosen = min(candidates, key=lambda candidate: candidate[3])
    if model.other_seconds + candidates[0][3] <= WORTH * (model.other_seconds + chosen[3]):
        chosen = candidates[0]
    choice, compressor, groups, seconds = chosen
    return Plan(
        world_size=cluster.world_size,
        fingerprint=fingerprint(Parameter(entry.name, entry.shape) for entry in model.parameters),
        groups=tuple(
            Group(
                tuple(model.names[index] for index in group),
                sum(model.size_bytes[index] for index in group),
                compressor,
                exchange if compressor else "all_reduce",
            )
            for group in groups
        ),
        predicted_seconds=seconds,
        dense_seconds=candidates[0][3],
        other_seconds=model.other_seconds,
        choice=choice,
        candidates=tuple(sorted((Candidate(each[0], each[3]) for each in candidates), key=lambda each: each.seconds)),
        note=f"From published figures ({model.source}); nothing was measured.",
    )
