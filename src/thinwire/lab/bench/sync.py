"""`thinwire bench sync`: every scheme on one workload, in turn, on emulated hosts; rows of measured figures."""

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from thinwire.comm.hosts import Hosts
from thinwire.comm.process_group import sparse_all_reduce_bytes
from thinwire.kernels import dispatch
from thinwire.lab import sparsity
from thinwire.lab.bench.methods import AGSPARSE_TORCH, scheme_of
from thinwire.lab.bench.recipes import get_recipe
from thinwire.lab.bench.sync_rank import RankMeasurement, measure
from thinwire.lab.bench.turns import HostsBenchmark, quantile, seconds_of_runs
from thinwire.lab.bench.workload import Workload
from thinwire.lab.ledger import host_of_ranks, pair_bytes, unit_ids, value_lower_bound_bytes
from thinwire.sums.cost import Demand
from thinwire.sums.scheme import Scheme, unit_shape
from thinwire.sums.two_level import TwoLevel
from thinwire.sums.union_shares import UnionPlan
from thinwire.tune.prices import expected_seconds

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


KERNELS = tuple(
    kernel.name
    for kernel in dispatch.compiled_kernels()
    if kernel.cpu and not kernel.cpu.endswith((".floats", ".select", ".quantize"))
)
"""Kernels of exact sums of rows; kernels of compressors and lossless sums are most of the time of compiling."""


@dataclass(frozen=True)
class SyncBenchmark(HostsBenchmark):
    """Settings of the benchmark.

    Raises:
        ValueError: an unknown method, dtype, recipe or trace, or numbers below one; the message lists what is legal.
    """

    workload: str
    is_trace: bool = False
    methods: tuple[str, ...] = field(
        default=("auto", "zen", "agsparse", "agsparse_torch", "sparse_ps", "dense"), kw_only=True
    )
    seed: int = 0
    dtype: str = "float32"
    scale: float | None = None

    def __post_init__(self) -> None:
        for method in self.methods:
            if method != AGSPARSE_TORCH:
                scheme_of(method)
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; legal are {', '.join(DTYPES)}")
        self.check_numbers()
        if self.dtype == "float16" and AGSPARSE_TORCH in self.methods:
            raise ValueError(f"{AGSPARSE_TORCH} cannot sum float16 (torch has no kernel for it): leave it out")
        self.gradients().ids(0)

    @property
    def ranks_of_hosts(self) -> Hosts:
        """Ranks of each host: consecutive ranks share one."""
        starts = range(0, self.world_size, self.ranks_per_host)
        return tuple(tuple(range(start, start + self.ranks_per_host)) for start in starts)

    def of_size(self, size_bytes: int) -> Self:
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
    link_mbit, per_rank = benchmark.measure(
        measure, benchmark.gradients(), benchmark.methods, on_progress=on_progress, kernels=KERNELS
    )
    measured = {method: [values[method] for values in per_rank] for method in benchmark.methods}
    return {"environment": benchmark.environment(benchmark.seed), "rows": _rows(benchmark, link_mbit, measured)}


def run_sizes(
    benchmark: SyncBenchmark, sizes: Sequence[int], run_one: Callable[[SyncBenchmark], dict[str, Any]]
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


def _rows(
    benchmark: SyncBenchmark, link_mbit: float | None, measured: dict[str, list[RankMeasurement]]
) -> list[dict[str, Any]]:
    workload = benchmark.gradients()
    (num_rows, width), dtype, hosts = workload.shape(), workload.dtype, benchmark.ranks_of_hosts
    ids = [workload.ids(rank) for rank in range(benchmark.world_size)]
    seconds = {method: seconds_of_runs(one.times for one in each) for method, each in measured.items()}
    dense = statistics.median(seconds["dense"]) if "dense" in seconds else None
    common = _common(benchmark, link_mbit, ids, num_rows, width)
    rows = []
    for method, measurements in measured.items():
        chosen = measurements[0].chosen
        pairs = predicted_pairs(method, chosen, hosts, ids, num_rows, width, dtype)
        predicted = max(map(sum, pairs))
        between = _between_hosts_max(hosts, pairs, measurements)
        counted = [one.sent_bytes for one in measurements if one.sent_bytes is not None]
        median = statistics.median(seconds[method])
        rows.append(
            common
            | _imbalance(chosen, hosts, ids, num_rows, width, dtype)
            | {
                "scheme": method,
                "chosen": chosen,
                "bytes_sent_max": max(counted, default=predicted),
                "bytes_predicted_max": predicted,
                "bytes_between_hosts_max": between,
                "bytes_source": "counted" if counted else "formula",
                "seconds_median": median,
                "seconds_p10": quantile(seconds[method], 0.1),
                "seconds_p90": quantile(seconds[method], 0.9),
                "seconds_predicted": _predicted_seconds(benchmark, measurements, ids, predicted),
                **_bandwidths(num_rows * width * dtype.itemsize, benchmark.world_size, median),
                "seconds_own_wire": between * 8e-6 / link_mbit if link_mbit else None,
                "speedup_vs_dense": dense / median if dense is not None else None,
                "max_abs_error": measurements[0].max_abs_error,
                "bitwise_equal_across_ranks": len({measurement.digest for measurement in measurements}) == 1,
            }
        )
    return rows


def _bandwidths(size_bytes: int, world_size: int, seconds: float) -> dict[str, float]:
    """The bandwidths of nccl-tests for an all-reduce: of the dense gradient, whatever a scheme sends instead."""
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
    if AGSPARSE_TORCH in (method, chosen):
        held, row_bytes, ranks = [part.numel() for part in ids], width * dtype.itemsize, range(len(ids))
        sent = [sparse_all_reduce_bytes(held, rank, row_bytes) for rank in ranks]
        return [[sent[rank] * (peer == (rank + 1) % len(ids)) for peer in ranks] for rank in ranks]
    return pair_bytes(_scheme(chosen, hosts), ids, num_rows, width, dtype)


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
    plan = UnionPlan(tuple(part.numel() for part in ids), num_rows, width, dtype.itemsize, scheme)
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
