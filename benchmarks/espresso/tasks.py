"""Costs of an option of Espresso's tree for a tensor: the chain of tasks that the timeline runs.

A rank holds a region of the tensor, uncompressed or as payloads: one after encoding, one of each rank after an
indivisible communication, until decoding sums them to one again. Collectives split the region, join it or bring more
payloads of it; `TaskHolding` follows that, and `published.cluster` prices the transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from espresso import engine
from espresso.options import CPU, ActionTask, Option
from published.cluster import FLAT, INTRA, Cluster
from published.costs import CompressionCosts, Cost, KernelCosts
from thinwire.lab.collectives import Numbers


def seconds_of(cost: Cost, size_bytes: Numbers) -> Numbers:
    """Return the cost of one size, or of an array of sizes."""
    if isinstance(cost, KernelCosts):
        return np.maximum(cost.launch, cost.beta * size_bytes)
    return cost.alpha + cost.beta * size_bytes


@dataclass(frozen=True)
class TaskHolding:
    """State of one rank between two tasks.

    Attributes:
        region: bytes of the gradient of which it holds a part; an array prices many tensors at once.
        payloads: number of payloads of that region, from different ranks, not summed yet; 1 if summed.
        compressed: whether the payloads are codes.
        shares: different regions, or different gradients, on one host. Of one host's ranks that hold the same, one
            works on the processors and on the host's link for all.
    """

    region: Numbers
    payloads: int
    compressed: bool
    shares: int

    def wire_bytes(self, ratio: float) -> Numbers:
        return self.region * (self.payloads * ratio if self.compressed else 1)


class TaskWork(NamedTuple):
    """One task priced: a resource of `engine`, seconds, and a word for traces."""

    resource: int
    seconds: float
    label: str


class PricedOption(NamedTuple):
    """An option for one tensor, priced.

    Attributes:
        seconds: cost of all its tasks together.
    """

    option: Option
    chain: engine.Chain
    seconds: float


class _Priced(NamedTuple):
    """A `TaskWork` of many sizes at once."""

    resource: int
    seconds: np.ndarray
    label: str


class Pricer:
    """Pricer of options of tensors of these sizes, all sizes at once; each beginning of a path is priced once."""

    def __init__(self, sizes: Sequence[float], cluster: Cluster, compression: CompressionCosts) -> None:
        self.sizes = tuple(sorted(set(sizes)))
        self._cluster, self._compression = cluster, compression
        start = TaskHolding(np.array(self.sizes), 1, compressed=False, shares=cluster.ranks_per_host)
        self._known: dict[tuple[ActionTask, ...], tuple[tuple[_Priced, ...], TaskHolding]] = {(): ((), start)}

    def works(self, option: Option, size: float) -> tuple[TaskWork, ...]:
        """Return the tasks in order. Tasks of no cost are left out; neighbours on one resource are merged."""
        place = self.sizes.index(size)
        all_works = (
            TaskWork(resource, float(seconds[place]), label) for resource, seconds, label in self._walk(option.tasks)
        )
        needed = (work for work in all_works if work.seconds > 0)
        return tuple(_merge(list(neighbours)) for _, neighbours in groupby(needed, key=lambda work: work.resource))

    def choice(self, option: Option, size: float) -> PricedOption:
        chain = tuple((work.resource, work.seconds) for work in self.works(option, size))
        return PricedOption(option, chain, sum(seconds for _, seconds in chain))

    def menus(self, options: Sequence[Option], exhaustive: bool) -> Callable[[float], tuple[PricedOption, ...]]:
        """Return a function from a size to the options to try, least work first, computed on its first call.

        Args:
            exhaustive: whether to keep all; otherwise those that no other one equals or beats on every resource.
        """
        totals = self.totals(options)

        @cache
        def menu(size: float) -> tuple[PricedOption, ...]:
            of_size = totals[:, self.sizes.index(size)]
            rows = least_work_first(of_size) if exhaustive else undominated(of_size)
            return tuple(self.choice(options[row], size) for row in rows)

        return menu

    def totals(self, options: Sequence[Option]) -> np.ndarray:
        """Return seconds, [options, sizes, resources]."""
        totals = np.zeros((len(options), len(self.sizes), len(engine.TRACKS)))
        for row, option in enumerate(options):
            for resource, seconds, _ in self._walk(option.tasks):
                totals[row, :, resource] += seconds
        return totals

    def _walk(self, tasks: tuple[ActionTask, ...]) -> tuple[_Priced, ...]:
        return self.after(tasks)[0]

    def after(self, tasks: tuple[ActionTask, ...]) -> tuple[tuple[_Priced, ...], TaskHolding]:
        """Return the price of the beginning of a path, and the state of a rank after it."""
        if tasks not in self._known:
            works, held = self.after(tasks[:-1])
            price = _communicate if tasks[-1].level else _code
            work, held = price(tasks[-1], held, self._cluster, self._compression)
            self._known[tasks] = (*works, work), held
        return self._known[tasks]


def least_work_first(totals: np.ndarray) -> list[int]:
    """Return the rows of [options, resources] sorted by their sum."""
    return np.argsort(totals.sum(1), kind="stable").tolist()


def undominated(totals: np.ndarray) -> list[int]:
    """Return the rows of [options, resources], least work first, that no earlier one equals or beats everywhere."""
    kept: list[int] = []
    left = np.array(least_work_first(totals))
    while len(left):
        kept.append(int(left[0]))
        left = left[(totals[left] < totals[left[0]]).any(1)]
    return kept


def _merge(neighbours: Sequence[TaskWork]) -> TaskWork:
    seconds = sum(work.seconds for work in neighbours)
    return TaskWork(neighbours[0].resource, seconds, " + ".join(work.label for work in neighbours))


def _code(
    task: ActionTask, held: TaskHolding, cluster: Cluster, compression: CompressionCosts
) -> tuple[_Priced, TaskHolding]:
    """Encode the region, or decode its payloads and sum them."""
    encode = task.kind == "comp"
    passes = 1.0 if encode else 1 + (held.payloads - 1) * compression.further_payload
    after = replace(held, payloads=1, compressed=encode)
    label = "encode" if encode else "decode"
    if task.routine == CPU:
        cost = compression.cpu_encode if encode else compression.cpu_decode
        seconds = seconds_of(cost, held.region * held.shares * passes) + seconds_of(cluster.host_copy, held.region)
        return _Priced(engine.CPU, np.asarray(seconds), label), after
    cost = compression.encode if encode else compression.decode
    return _Priced(engine.COMPUTE, np.asarray(seconds_of(cost, held.region * passes)), label), after


def _communicate(
    task: ActionTask, held: TaskHolding, cluster: Cluster, compression: CompressionCosts
) -> tuple[_Priced, TaskHolding]:
    seconds = cluster.seconds(task.level, task.routine, held.wire_bytes(compression.ratio), held.shares)
    resource = engine.INTRA if cluster.link(task.level) == INTRA else engine.INTER
    after = _moved(task, held, cluster.participants(task.level), cluster.ranks_per_host)
    return _Priced(resource, np.asarray(seconds), f"{task.level} {task.routine}"), after


def _moved(task: ActionTask, held: TaskHolding, participants: int, ranks_per_host: int) -> TaskHolding:
    """State after a collective of a rank that goes on: the root of a reduce or gather, any rank of the others."""
    region, payloads, shares = held.region, held.payloads, held.shares
    on_host = task.level in (INTRA, FLAT)
    if task.kind in ("comm1", "comm1_comp"):
        splits = task.routine in ("reduce_scatter", "all_to_all")
        region = region / participants if splits else region
        shares = (ranks_per_host if splits else 1) if on_host else shares
    elif on_host:
        shares = 1
    if task.kind in ("comm2", "comm2_comp"):
        region = region * participants if task.routine == "all_gather" else region
    elif held.compressed:
        payloads *= participants
    return TaskHolding(region, payloads, held.compressed, shares)
