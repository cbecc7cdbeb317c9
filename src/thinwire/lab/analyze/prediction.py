"""Expected bytes and seconds of every scheme on other numbers of ranks, and the predicted choice.

Up to the recorded world size the rows are the measured ones; beyond, the union of n ranks is *extrapolated*,
with the densification n^a that fits the recorded curve best. Seconds are always *predicted*, for an assumed network.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

import torch

from thinwire.comm.machine import Machine, kernel_seconds
from thinwire.comm.process_group import ring_all_reduce_bytes, sparse_all_reduce_bytes
from thinwire.lab.bench.trace import IndexTrace
from thinwire.sums.cost import Demand, expected_bytes
from thinwire.sums.named import NAMED, name_of
from thinwire.sums.scheme import Ownership, Scheme
from thinwire.tune.prices import DENSE_SHARE, busiest_rank_bytes, choose, expected_seconds, explained, offers_of, ranked

_ASSUMED_OWNERS = 8  # number of parts with which kernels of an assumed machine are measured, whatever its world size
PREDICTED_RANKS = tuple(2**power for power in range(1, 11))


@dataclass(frozen=True)
class AssumedLink:
    """The link assumed for each unmeasured rank: its rate ``mbit``, and the latency between any two ranks."""

    mbit: float = 10_000.0
    latency_seconds: float = 50e-6

    def machine(self, world_size: int) -> Machine:
        """Return a machine of ``world_size`` ranks as fast as this process, on this network without contention.

        A message costs the latency; a round costs it ceil(log2 of ``world_size``) times, at least once: all messages
        leave at once, but more ranks wait longer for their last. A byte costs what the link needs, in the dense
        all-reduce too. Kernels are measured here, once in a process, so machines of several sizes differ in rounds
        only.

        Example:
            >>> round(AssumedLink(1000, 50e-6).machine(world_size=8).round_seconds, 9)
            0.00015
        """
        waits = max(1, math.ceil(math.log2(world_size)))
        latency = self.latency_seconds
        return Machine(waits * latency, latency, *[8e-6 / self.mbit] * 2, *_own_kernel_seconds())

    def describe(self) -> str:
        return (
            f"{self.mbit:g} Mbit/s a rank and {1e6 * self.latency_seconds:g} us between two, assumed; work on rows as"
            " measured on this machine"
        )

    def to_json(self, world_size: int) -> dict[str, Any]:
        """Return the assumed machine on ``world_size`` ranks, for JSON."""
        machine = asdict(self.machine(world_size))
        return {"assumed": self.describe(), "world_size": world_size, **asdict(self), **machine}


DEFAULT_LINK = AssumedLink()


_own_kernel_seconds = cache(lambda: kernel_seconds(_ASSUMED_OWNERS))


@dataclass(frozen=True)
class Prediction:
    """Expected bytes that a rank sends in a step and their seconds, by scheme, on ``world_size`` ranks.

    ``union`` is the number of rows that all ranks hold together; ``extrapolated``: more ranks than were recorded. Bytes
    are for even loads, seconds for the busiest rank. ``torch_bytes`` and ``torch_seconds`` belong to stock DDP with
    ``nn.Embedding(sparse=True)``, where Gloo gathers each rank's distinct rows with ids of 8 bytes. ``pick`` is the
    scheme that thinwire would choose there, and ``explanation`` the reason. ``warning`` is set if the
    numbers are impossible, so that nothing follows from them: then the pick is dense, the only scheme with bytes and
    seconds.
    """

    world_size: int
    extrapolated: bool
    densification: float
    union: float
    bytes: dict[str, float]
    seconds: dict[str, float]
    torch_bytes: float
    torch_seconds: float
    pick: str
    explanation: str
    warning: str | None


def predict(
    trace: IndexTrace,
    dtype: torch.dtype,
    curve: Sequence[float],
    exponent: float,
    network: AssumedLink = DEFAULT_LINK,
    ranks: Sequence[int] = PREDICTED_RANKS,
) -> tuple[Prediction, ...]:
    """Predict every named scheme on these numbers of ranks and on the recorded number.

    Args:
        curve: ``curve[n - 1]`` is the recorded growth of the density over n ranks.
        exponent: a of n^a, for more ranks.
    """
    held = fmean(ids.numel() for step in trace.steps for ids in step)
    predictions = []
    for world_size in sorted({*ranks, trace.world_size}):
        measured = world_size <= len(curve)
        growth = curve[world_size - 1] if measured else world_size**exponent
        union = min(float(trace.num_rows), held * growth)
        demand = Demand(world_size, trace.num_rows, trace.width, dtype.itemsize, held, union)
        predictions.append(predict_one(demand, network.machine(world_size), extrapolated=not measured))
    return tuple(predictions)


def predict_one(demand: Demand, machine: Machine, extrapolated: bool) -> Prediction:
    """Predict every named scheme for one demand."""
    pick, warning = _pick(demand, machine)
    schemes = {name: _without_list(scheme) for name, scheme in NAMED.items() if warning is None or scheme.is_dense}
    growth = demand.union / demand.held if demand.held else 1.0
    gathered = sparse_all_reduce_bytes([round(demand.held)] * demand.world_size, 0, demand.row_bytes)
    return Prediction(
        world_size=demand.world_size,
        extrapolated=extrapolated,
        densification=growth,
        union=demand.union,
        bytes={name: float(expected_bytes(scheme, demand)) for name, scheme in schemes.items()},
        seconds={
            name: expected_seconds(scheme, demand, machine, busiest_rank_bytes(scheme, demand))
            for name, scheme in schemes.items()
        },
        torch_bytes=float(gathered),
        torch_seconds=expected_seconds(NAMED["agsparse"], demand, machine, gathered),
        pick=pick,
        explanation=_explanation(demand, machine, warning),
        warning=warning,
    )


def predict_dense(size_bytes: int, world_size: int, machine: Machine) -> tuple[float, float]:
    """Return the bytes that a rank sends in one dense all-reduce, and its seconds."""
    sent = float(ring_all_reduce_bytes(size_bytes, world_size))
    return sent, expected_seconds(NAMED["dense"], Demand(world_size, 1, 1, 4, 1, 1), machine, sent)


def _pick(demand: Demand, machine: Machine) -> tuple[str, str | None]:
    """The name of the chosen scheme; of a demand that cannot be, dense, which is right whatever rows are, and why."""
    fault = fault_of(demand)
    return ("dense", f"{fault}; using dense") if fault is not None else (name_of(choose(demand, machine)), None)


def fault_of(demand: Demand) -> str | None:
    """Return why the numbers of a recording are impossible, or None if they are possible."""
    cannot_be, held, union = "sparsity statistics that cannot be: ", demand.held, demand.union
    if not demand.world_size:
        return "no step was observed, so nothing is known about sparsity"
    if not all(math.isfinite(value) for value in (held, union)):
        return f"{cannot_be}{held} rows a rank and {union} in all are not finite numbers"
    if not 0 <= held <= demand.num_rows:
        return f"{cannot_be}a rank holds {held:g} rows of a tensor that has {demand.num_rows}"
    if union > demand.num_rows or union < math.floor(held):
        return f"{cannot_be}{union:g} rows in all, where a rank holds {held:g} of {demand.num_rows}"
    return None


def _explanation(demand: Demand, machine: Machine, warning: str | None) -> str:
    """`explain` compares prices, which are not the reason for dense if nearly all rows are held or numbers fail."""
    if warning is not None:
        return f"dense: {warning}"
    if demand.held >= DENSE_SHARE * demand.num_rows:
        return f"dense: a rank holds {demand.held / demand.num_rows:.0%} of all rows"
    return explained(ranked(offers_of(demand, machine)), demand)


def _without_list(scheme: Scheme) -> Scheme:
    """An even deal, which `expected_bytes` assumes anyway."""
    return replace(scheme, ownership=Ownership.PERMUTATION) if is_hashed(scheme) else scheme


def is_hashed(scheme: Scheme) -> bool:
    """Return whether the scheme needs a list of all ids of an owner."""
    return scheme.ownership is Ownership.HIERARCHICAL_HASH
