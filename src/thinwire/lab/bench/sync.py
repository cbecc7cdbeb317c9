"""`thinwire bench sync`: every scheme on one workload, in turn, on emulated hosts; rows of measured figures."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.hosts import Hosts
from thinwire.comm.process_group import sparse_all_reduce_bytes
from thinwire.lab import sparsity
from thinwire.lab.bench.in_job import gloo_group, is_in_job, on_all_ranks
from thinwire.lab.bench.methods import AGSPARSE_TORCH, scheme_of
from thinwire.lab.bench.recipes import get_recipe
from thinwire.lab.bench.sync_rank import RankMeasurement, Timed, Turns, measure
from thinwire.lab.bench.workload import Workload
from thinwire.lab.ledger import host_of_ranks, pair_bytes, unit_ids, value_lower_bound_bytes
from thinwire.lab.report import environment
from thinwire.lab.testbed.launch import run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.sync.choose import Demand, expected_seconds
from thinwire.sync.scheme import Ownership, Scheme, unit_shape
from thinwire.sync.two_level import TwoLevel
from thinwire.sync.union_shares import UnionPlan

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


@dataclass(frozen=True)
class SyncBenchmark:
    """Settings of the benchmark.

    Raises:
        ValueError: an unknown method, dtype, recipe or trace, or numbers below one; the message lists what is legal.
    """

    workload: str
    is_trace: bool = False
    hosts: int = 8
    ranks_per_host: int = 1
    link: Link = Link(None)  # noqa: RUF009  # frozen
    methods: tuple[str, ...] = ("auto", "zen", "agsparse", "agsparse_torch", "sparse_ps", "dense")
    repeat: int = 5
    warm_up: int = 0
    seed: int = 0
    dtype: str = "float32"
    scale: float | None = None
    timeout_seconds: float = 1800.0

    def __post_init__(self) -> None:
        for method in self.methods:
            if method != AGSPARSE_TORCH:
                scheme_of(method)
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; legal are {', '.join(DTYPES)}")
        if min(self.hosts, self.ranks_per_host, self.repeat) < 1 or not self.methods:
            raise ValueError("hosts, ranks per host, repeats and schemes must be at least one")
        if self.dtype == "float16" and AGSPARSE_TORCH in self.methods:
            raise ValueError(f"{AGSPARSE_TORCH} cannot sum float16 (torch has no kernel for it): leave it out")
        if self.warm_up < 0:
            raise ValueError(f"turns before those that count are at least 0, not {self.warm_up}")
        self.gradients().ids(0)

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def ranks_of_hosts(self) -> Hosts:
        """Ranks of each host: consecutive ranks share one."""
        starts = range(0, self.world_size, self.ranks_per_host)
        return tuple(tuple(range(start, start + self.ranks_per_host)) for start in starts)

    def of_size(self, size_bytes: int) -> SyncBenchmark:
        """Return this benchmark with a table whose dense gradient has about ``size_bytes``.

        Raises:
            ValueError: a recorded trace, which cannot be scaled.
        """
        if self.is_trace:
            raise ValueError("the table of a recorded trace has one size: leave out --sizes")
        recipe = get_recipe(self.workload)
        full = recipe.num_rows * recipe.width * DTYPES[self.dtype].itemsize
        return replace(self, scale=size_bytes / full)

    def gradients(self) -> Workload:
        return Workload(self.workload, self.is_trace, self.scale, self.seed, self.world_size, DTYPES[self.dtype])


def run(benchmark: SyncBenchmark, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the benchmark and return ``{"environment": {...}, "rows": [...]}``; fields: docs/evidence/bench-sync.md.

    ``on_progress(method)`` is called whenever rank 0 finished a run of a method.

    Raises:
        NetAdminError: a link is asked for, but the process may not make network namespaces.
        RanksFailed: a rank failed, with its traceback.
    """
    limited = benchmark.link.mbit is not None
    with EmulatedNetwork(benchmark.hosts, benchmark.link) if limited else nullcontext() as network:
        link_mbit = network.measure() if network else None
        outcomes = run_ranks(
            measure,
            benchmark.gradients(),
            benchmark.methods,
            Turns(benchmark.repeat, benchmark.warm_up, None if limited else benchmark.ranks_per_host),
            world_size=benchmark.world_size,
            ranks_per_host=benchmark.ranks_per_host if limited else None,
            network=network,
            timeout_seconds=benchmark.timeout_seconds,
            on_message=lambda rank, message: on_progress(message) if rank == 0 else None,
        )
    return _result(benchmark, link_mbit, [outcome.value for outcome in outcomes])


def run_in_job(benchmark: SyncBenchmark, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the benchmark as a rank of a job that torchrun started, over its own network, and return the same on all."""
    turns = Turns(benchmark.repeat, benchmark.warm_up, one_clock=benchmark.hosts == 1)
    with gloo_group():
        per_rank = on_all_ranks(measure, benchmark.gradients(), benchmark.methods, turns, on_message=on_progress)
    return _result(benchmark, None, per_rank)


def run_sizes(
    benchmark: SyncBenchmark,
    sizes: Sequence[int],
    run_one: Callable[[SyncBenchmark], dict[str, Any]],
) -> dict[str, Any]:
    """Run the benchmark for dense gradients of about these sizes in bytes, and return the rows of all."""
    results = [run_one(benchmark.of_size(size)) for size in sizes]
    return {**results[-1], "rows": [row for result in results for row in result["rows"]]}


def parse_size(text: str) -> int:
    """Parse a size such as ``64kb``, ``16mb`` or ``1gb``, of 1000 bytes a step as links have them.

    Raises:
        ValueError: another text, or less than a byte.

    Example:
        >>> parse_size("1.5mb")
        1500000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(b|kb|mb|gb)", text.strip().lower())
    size = round(float(match[1]) * {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9}[match[2]]) if match else 0
    if size < 1:
        raise ValueError(f"unknown size {text!r}; legal forms: '64kb', '16mb', '1gb'")
    return size


def _result(
    benchmark: SyncBenchmark, link_mbit: float | None, per_rank: Sequence[dict[str, RankMeasurement]]
) -> dict[str, Any]:
    measured = {method: [values[method] for values in per_rank] for method in benchmark.methods}
    return {"environment": _environment(benchmark), "rows": _rows(benchmark, link_mbit, measured)}


def _environment(benchmark: SyncBenchmark) -> dict[str, Any]:
    return {
        **environment(),
        "hosts": benchmark.hosts,
        "in_job": is_in_job(),
        "link_nominal_mbit": benchmark.link.mbit,
        "repeat": benchmark.repeat,
        "warm_up": benchmark.warm_up,
        "seed": benchmark.seed,
        "threads_per_rank": torch.get_num_threads() if is_in_job() else 1,
    }


def _rows(
    benchmark: SyncBenchmark, link_mbit: float | None, measured: dict[str, list[RankMeasurement]]
) -> list[dict[str, Any]]:
    workload = benchmark.gradients()
    num_rows, width = workload.shape()
    ids = [workload.ids(rank) for rank in range(benchmark.world_size)]
    seconds = {method: seconds_of_runs(measurements) for method, measurements in measured.items()}
    dense = statistics.median(seconds["dense"]) if "dense" in seconds else None
    common = _common(benchmark, link_mbit, ids, num_rows, width)
    rows = []
    for method, measurements in measured.items():
        chosen = measurements[0].chosen
        pairs = predicted_pairs(method, chosen, benchmark.ranks_of_hosts, ids, num_rows, width, DTYPES[benchmark.dtype])
        predicted = [sum(row) for row in pairs]
        between = _between_hosts_max(benchmark.ranks_of_hosts, pairs, measurements)
        counted = [measurement.sent_bytes for measurement in measurements]
        known = [sent for sent in counted if sent is not None]
        sent = max(known) if known else max(predicted)
        median = statistics.median(seconds[method])
        rows.append(
            common
            | _imbalance(chosen, benchmark.ranks_of_hosts, ids, num_rows, width, DTYPES[benchmark.dtype])
            | {
                "scheme": method,
                "chosen": chosen,
                "bytes_sent_max": sent,
                "bytes_predicted_max": max(predicted),
                "bytes_between_hosts_max": between,
                "bytes_source": "counted" if known else "formula",
                "seconds_median": median,
                "seconds_p10": quantile(seconds[method], 0.1),
                "seconds_p90": quantile(seconds[method], 0.9),
                "seconds_predicted": _predicted_seconds(benchmark, measurements, ids, max(predicted)),
                **_bandwidths(num_rows * width * DTYPES[benchmark.dtype].itemsize, benchmark.world_size, median),
                "seconds_own_wire": between * 8e-6 / link_mbit if link_mbit else None,
                "speedup_vs_dense": dense / median if dense is not None else None,
                "max_abs_error": measurements[0].max_abs_error,
                "bitwise_equal_across_ranks": len({measurement.digest for measurement in measurements}) == 1,
            }
        )
    return rows


def _bandwidths(size_bytes: int, world_size: int, seconds: float) -> dict[str, float]:
    """The bandwidths of nccl-tests for an all-reduce: of the dense gradient, whatever a scheme sends in its place."""
    algbw = size_bytes / seconds
    return {"size_bytes": size_bytes, "algbw": algbw, "busbw": algbw * 2 * (world_size - 1) / world_size}


def _common(
    benchmark: SyncBenchmark, link_mbit: float | None, ids: list[Tensor], num_rows: int, width: int
) -> dict[str, Any]:
    row_bytes = width * DTYPES[benchmark.dtype].itemsize
    unions = [torch.cat([ids[rank] for rank in ranks]).unique() for ranks in benchmark.ranks_of_hosts]
    host_bound = value_lower_bound_bytes(unions, row_bytes)
    return {
        "workload": benchmark.workload,
        "world_size": benchmark.world_size,
        "ranks_per_host": benchmark.ranks_per_host,
        "link_mbit": link_mbit,
        "dtype": benchmark.dtype,
        "num_rows": num_rows,
        "width": width,
        "density": sum(sparsity.density(part, num_rows) for part in ids) / len(ids),
        "densification": sparsity.densification(ids),
        "skewness": sparsity.skewness(ids[0], num_rows, min(len(ids), num_rows)),
        "bytes_lower_bound": value_lower_bound_bytes(ids, row_bytes),
        "seconds_wire_bound": host_bound * 8e-6 / link_mbit if link_mbit else None,
    }


def predicted_pairs(
    method: str, chosen: str, hosts: Hosts, ids: Sequence[Tensor], num_rows: int, width: int, dtype: torch.dtype
) -> list[list[int]]:
    """Return the bytes that each rank sends to each, predicted; torch's own method by the algorithm that it runs.

    ``chosen`` is the name of the scheme that ran, which for "auto" depends on the machine and may be torch's own.
    """
    world_size = len(ids)
    if AGSPARSE_TORCH in (method, chosen):
        held, row_bytes = [part.numel() for part in ids], width * dtype.itemsize
        sent = [sparse_all_reduce_bytes(held, rank, row_bytes) for rank in range(world_size)]
        return [
            [sent[rank] * (peer == (rank + 1) % world_size) for peer in range(world_size)] for rank in range(world_size)
        ]
    scheme = _scheme(chosen, hosts)
    return pair_bytes(scheme, ids, num_rows, width, dtype)


def _predicted_seconds(
    benchmark: SyncBenchmark, measurements: list[RankMeasurement], ids: list[Tensor], sent_bytes: int
) -> float | None:
    """Seconds predicted from the machine as measured before the first method, and the bytes predicted.

    Null for two levels and torch's, and where the machine could not be measured.
    """
    chosen = measurements[0].chosen
    scheme = None if chosen == AGSPARSE_TORCH else scheme_of(chosen)
    machine = measurements[0].machine
    if not isinstance(scheme, Scheme) or machine is None:
        return None
    num_rows, width = benchmark.gradients().shape()
    counts, union = [part.numel() for part in ids], torch.cat(ids).unique().numel()
    demand = Demand.of(counts, num_rows, width, DTYPES[benchmark.dtype].itemsize, union)
    return expected_seconds(scheme, demand, machine, sent_bytes)


def _between_hosts_max(hosts: Hosts, pairs: list[list[int]], measurements: list[RankMeasurement]) -> int:
    """Bytes that the ranks of one host sent to other hosts, for the busiest host; by formula if not counted."""
    host = host_of_ranks(hosts)
    sent = [measurement.sent_between_hosts_bytes for measurement in measurements]
    for rank, row in enumerate(pairs):
        if sent[rank] is None:
            sent[rank] = sum(num_bytes for peer, num_bytes in enumerate(row) if host[peer] != host[rank])
    return max(sum(sent[rank] or 0 for rank in ranks) for ranks in hosts)


def _imbalance(
    chosen: str, hosts: Hosts, ids: list[Tensor], num_rows: int, width: int, dtype: torch.dtype
) -> dict[str, float | None]:
    """Imbalance of push and pull (ZEN, Definition 8); null for schemes without owners, and for two levels."""
    scheme = None if chosen == AGSPARSE_TORCH else _scheme(chosen, hosts)
    if not isinstance(scheme, Scheme) or scheme.balance is None:
        return {"imbalance_push": None, "imbalance_pull": None}
    num_units, unit_width = unit_shape(num_rows, width, scheme.unit)
    units = [unit_ids(part, width, scheme.unit) for part in ids]
    if scheme.knows_ids:
        counts, union = _shares_of_union(scheme, units, num_units, unit_width, dtype)
    else:
        partition = scheme.rows_partition(num_units, len(ids))
        owners = [partition.owners(part) for part in (*units, torch.cat(units).unique())]
        *pushed, union = [torch.bincount(of_rows, minlength=len(ids)) for of_rows in owners]
        counts = torch.stack(pushed)
    return {"imbalance_push": sparsity.imbalance_push(counts), "imbalance_pull": sparsity.imbalance_pull(union)}


def _shares_of_union(
    scheme: Scheme, ids: list[Tensor], num_rows: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Values that each rank pushes to each of the others, and values that each owner adds up.

    Rows that an owner holds itself do not count: it is dealt rows that it holds.
    """
    held, by_columns = tuple(part.numel() for part in ids), scheme.ownership is Ownership.COLUMNS
    plan = UnionPlan(held, num_rows, width, dtype.itemsize, scheme.push_format, by_columns)
    union, ranks = plan.union(ids), range(len(ids))

    def pushed(rank: int, owner: int) -> int:
        return sum(union.pushed(share, rank)[0].numel() * share.width for share in plan.shares(owner))

    counts = [[pushed(rank, owner) for owner in ranks if owner != rank] for rank in ranks]
    sums = [sum(union.num_rows(share) * share.width for share in plan.shares(owner)) for owner in ranks]
    return torch.tensor(counts), torch.tensor(sums)


def _scheme(name: str, hosts: Hosts) -> Scheme | TwoLevel:
    scheme = scheme_of(name)
    assert scheme is not None, "what ran is a scheme"
    return scheme.placed(host_of_ranks(hosts)) if isinstance(scheme, TwoLevel) else scheme


def seconds_of_runs(measurements: Sequence[Timed]) -> list[float]:
    """Return the seconds of each repetition, from the first rank that started to the last that ended."""
    starts = zip(*(measurement.started for measurement in measurements), strict=True)
    ends = zip(*(measurement.ended for measurement in measurements), strict=True)
    return [max(end) - min(start) for start, end in zip(starts, ends, strict=True)]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of values at a share of them."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))
