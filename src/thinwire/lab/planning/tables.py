"""Costs of embedding tables: as rows, which `thinwire.attach` sends, and as stock DDP sends them. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from thinwire.comm.hosts import Hosts
from thinwire.comm.process_group import sparse_all_reduce_bytes
from thinwire.lab.planning.speeds import MeasuredLink
from thinwire.sums.cost import Demand
from thinwire.sums.named import DENSE, name_of
from thinwire.tune.prices import is_dense, offers_of, price, ranked

_SMALL_BYTES = 256 * 1024  # tables whose sums are smaller travel together, see `GradientSync.groups`


@dataclass(frozen=True)
class EmbeddingTable:
    """An embedding table of a measured model.

    Args:
        name: name of the parameter.
        num_rows, width, dtype: its shape and type.
        is_sparse: whether its gradients are sparse (``sparse=True``); DDP all-reduces all rows of dense ones.
        held: rows in the gradient of each rank, as the mean over the recorded steps.
        union: rows in the gradients of all ranks together, as the same mean.
        ready_seconds: seconds from the start of backward until its gradient is ready.

    Raises:
        ValueError: numbers of rows or seconds that are impossible.
    """

    name: str
    num_rows: int
    width: int
    dtype: torch.dtype
    is_sparse: bool
    held: tuple[float, ...]
    union: float
    ready_seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "held", tuple(self.held))
        numbers = (*self.held, self.union, self.ready_seconds)
        if not (self.held and all(math.isfinite(number) and number >= 0.0 for number in numbers)):
            raise ValueError(f"the table {self.name!r} has rows or seconds that cannot be: {numbers}")

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def density(self) -> float:
        """Share of rows in the gradient of a rank."""
        return statistics.fmean(self.held) / max(1, self.num_rows)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "dtype": str(self.dtype).removeprefix("torch."), "held": list(self.held)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Parse the result of `to_json`; raise KeyError, TypeError, AttributeError or ValueError for anything else."""
        fields: dict[str, Any] = {**data, "dtype": getattr(torch, data["dtype"]), "held": map(float, data["held"])}
        return cls(**fields)


@dataclass(frozen=True)
class RowJob:
    """The synchronization of tables as rows.

    Args:
        tables: names of the tables.
        scheme: the scheme that "auto" takes.
        sent_bytes: bytes that the busiest rank sends.
        wire_seconds: seconds of these bytes alone.
        seconds: seconds of the job.
        ready_seconds: seconds from the start of backward until the last gradient is ready.
    """

    tables: tuple[str, ...]
    scheme: str
    sent_bytes: float
    wire_seconds: float
    seconds: float
    ready_seconds: float


def row_jobs(tables: Sequence[EmbeddingTable], link: MeasuredLink, hosts: Hosts) -> tuple[RowJob, ...]:
    """Return the jobs in which `thinwire.attach` sends tables, in the order in which they are ready."""
    jobs = [_row_job(group, link, hosts) for group in _stacked(tables)]
    return tuple(sorted(jobs, key=lambda job: job.ready_seconds))


def gathered(table: EmbeddingTable, link: MeasuredLink) -> tuple[float, float]:
    """Return the seconds of torch's all-reduce of a sparse gradient, and the seconds of its bytes alone.

    It gathers sizes, ids and values, each by a collective of its own.
    """
    held = [math.ceil(rows) for rows in table.held]
    sent_bytes = max(sparse_all_reduce_bytes(held, rank, table.row_bytes) for rank in range(len(held)))
    fit = link.all_gather
    return 2 * max(fit.floor, fit.line.alpha) + fit(sent_bytes), fit.line.beta * sent_bytes


def _stacked(tables: Sequence[EmbeddingTable]) -> list[list[EmbeddingTable]]:
    """Put small tables of one width and type together."""
    groups: dict[object, list[EmbeddingTable]] = {}
    for table in tables:
        is_small = table.union * table.row_bytes <= _SMALL_BYTES
        groups.setdefault((table.width, table.dtype) if is_small else table.name, []).append(table)
    return list(groups.values())


def _row_job(group: Sequence[EmbeddingTable], link: MeasuredLink, hosts: Hosts) -> RowJob:
    first = group[0]
    held = [sum(rows) for rows in zip(*(table.held for table in group), strict=True)]
    num_rows, union = sum(table.num_rows for table in group), sum(table.union for table in group)
    demand = Demand.of(held, num_rows, first.width, first.dtype.itemsize, max(union, statistics.fmean(held)))
    machine = link.machine
    offer = price(DENSE, demand, machine) if is_dense(demand) else ranked(offers_of(demand, machine, hosts))[0]
    collective = link.all_reduce if offer.scheme == DENSE else link.all_to_all
    wire_seconds = offer.sent_bytes * collective.line.beta
    seconds = 2 * link.round.alpha + wire_seconds if offer.seconds is None else offer.seconds
    ready_seconds = max(table.ready_seconds for table in group)
    names = tuple(table.name for table in group)
    return RowJob(names, name_of(offer.scheme), offer.sent_bytes, wire_seconds, seconds, ready_seconds)
