"""`thinwire bench sync --workload dense:...`: real dense gradients summed by each method; rows of measured figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.lab.bench.dense.rank import METHODS, NATIVE, DenseMeasurement, DenseRank, measure
from thinwire.lab.bench.dense.workload import DenseWorkload
from thinwire.lab.bench.in_job import gloo_group, is_in_job, on_all_ranks
from thinwire.lab.bench.jobs.own import clear_job_errors
from thinwire.lab.bench.sync import quantile, seconds_of_runs
from thinwire.lab.bench.sync_rank import Turns
from thinwire.lab.bench.train.rows import bits_per_value
from thinwire.lab.report import environment
from thinwire.lab.testbed.launch import run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lossless.sum import SumReport


@dataclass(frozen=True)
class DenseBenchmark:
    """Settings of the benchmark.

    Raises:
        ValueError: an unknown workload or method, or numbers below one; the message lists what is legal.
    """

    workload: DenseWorkload
    hosts: int = 8
    ranks_per_host: int = 1
    link: Link = Link(None)  # noqa: RUF009  # frozen
    methods: tuple[str, ...] = METHODS
    repeat: int = 5
    warm_up: int = 0
    timeout_seconds: float = 1800.0

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise ValueError(f"unknown method {method!r} of a dense workload; legal are {', '.join(METHODS)}")
        if min(self.hosts, self.ranks_per_host, self.repeat) < 1 or not self.methods or self.warm_up < 0:
            raise ValueError("hosts, ranks per host, repeats and methods must be at least one")

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host


def run(benchmark: DenseBenchmark, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the benchmark and return ``{"environment": {...}, "rows": [...]}``; fields: docs/evidence/bench-sync.md.

    ``on_progress(method)`` is called whenever rank 0 finished a run of a method.

    Raises:
        JobError: the user's own job cannot be trained.
        NetAdminError: a link is asked for, but the process may not make network namespaces.
        RanksFailed: a rank failed, with its traceback.
    """
    limited = benchmark.link.mbit is not None
    data = benchmark.workload.job.load()
    with (
        clear_job_errors(),
        EmulatedNetwork(benchmark.hosts, benchmark.link) if limited else nullcontext() as network,
    ):
        link_mbit = network.measure() if network else None
        outcomes = run_ranks(
            measure,
            benchmark.workload,
            data,
            benchmark.methods,
            Turns(benchmark.repeat, benchmark.warm_up, None if limited else benchmark.ranks_per_host),
            network.interface if network else None,
            world_size=benchmark.world_size,
            ranks_per_host=benchmark.ranks_per_host if limited else None,
            network=network,
            timeout_seconds=benchmark.timeout_seconds,
            on_message=lambda rank, message: on_progress(message) if rank == 0 else None,
        )
    return _result(benchmark, link_mbit, [outcome.value for outcome in outcomes])


def run_in_job(benchmark: DenseBenchmark, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the benchmark as a rank of a job that torchrun started, over its own network, and return the same on all."""
    turns = Turns(benchmark.repeat, benchmark.warm_up, one_clock=benchmark.hosts == 1)
    with gloo_group():
        data = benchmark.workload.job.load()
        arguments = (benchmark.workload, data, benchmark.methods, turns, None)
        per_rank = on_all_ranks(measure, *arguments, on_message=on_progress)
    return _result(benchmark, None, per_rank)


def _result(benchmark: DenseBenchmark, link_mbit: float | None, ranks: Sequence[DenseRank]) -> dict[str, Any]:
    return {"environment": _environment(benchmark), "rows": _rows(benchmark, link_mbit, ranks)}


def _environment(benchmark: DenseBenchmark) -> dict[str, Any]:
    return {
        **environment(),
        "hosts": benchmark.hosts,
        "in_job": is_in_job(),
        "link_nominal_mbit": benchmark.link.mbit,
        "repeat": benchmark.repeat,
        "warm_up": benchmark.warm_up,
        "seed": benchmark.workload.seed,
        "threads_per_rank": torch.get_num_threads() if is_in_job() else 1,
    }


def _rows(benchmark: DenseBenchmark, link_mbit: float | None, ranks: Sequence[DenseRank]) -> list[dict[str, Any]]:
    measured = {method: [rank.methods[method] for rank in ranks] for method in benchmark.methods}
    seconds = {method: seconds_of_runs(each) for method, each in measured.items()}
    native = statistics.median(seconds[NATIVE]) if NATIVE in seconds else None
    values, world_size = sum(ranks[0].bucket_values), benchmark.world_size
    common = {
        "workload": benchmark.workload.text,
        "world_size": world_size,
        "ranks_per_host": benchmark.ranks_per_host,
        "link_mbit": link_mbit,
        "dtype": ranks[0].dtype,
        "values": values,
        "buckets": list(ranks[0].bucket_values),
        "zeros": statistics.fmean(rank.zeros for rank in ranks),
        "ideal_bits_push": statistics.fmean(rank.ideal_push for rank in ranks),
        "ideal_bits_pull": ranks[0].ideal_pull,
    }
    return [
        common
        | {
            "scheme": method,
            "bytes_sent_max": max(each.sent_bytes for each in measured[method]),
            "bytes_predicted_max": max(each.predicted_bytes for each in measured[method]),
            "bytes_between_hosts_max": _of_busiest_host(benchmark, measured[method]),
            "bytes_link_max": _link_bytes(measured[method]),
            "bits_per_value": bits_per_value([each.sent_bytes for each in measured[method]], values),
            **_coded([each.coded for each in measured[method] if each.coded is not None]),
            "seconds_median": statistics.median(seconds[method]),
            "seconds_p10": quantile(seconds[method], 0.1),
            "seconds_p90": quantile(seconds[method], 0.9),
            "speedup_vs_native": native / statistics.median(seconds[method]) if native is not None else None,
            "max_abs_error": measured[method][0].max_abs_error,
            "relative_error": measured[method][0].relative_error,
            "bitwise_rank_order": all(each.equal_to_rank_order for each in measured[method]),
            "bitwise_equal_across_ranks": len({each.digest for each in measured[method]}) == 1,
        }
        for method in benchmark.methods
    ]


def _coded(reports: Sequence[SumReport]) -> dict[str, float | None]:
    """Bits of a value pushed and pulled, and seconds of coding of the slowest rank; null without a code."""
    if not reports:
        return dict.fromkeys(("bits_push", "bits_pull", "encode_seconds", "decode_seconds"))
    return {
        "bits_push": statistics.fmean(report.push.bits for report in reports),
        "bits_pull": statistics.fmean(report.pull.bits for report in reports),
        "encode_seconds": max(report.push.encode_seconds + report.pull.encode_seconds for report in reports),
        "decode_seconds": max(report.push.decode_seconds + report.pull.decode_seconds for report in reports),
    }


def _link_bytes(measurements: Sequence[DenseMeasurement]) -> int | None:
    counted = [each.link_bytes for each in measurements if each.link_bytes is not None]
    return round(max(counted)) if counted else None


def _of_busiest_host(benchmark: DenseBenchmark, measurements: Sequence[DenseMeasurement]) -> int:
    sent = [each.sent_between_hosts_bytes for each in measurements]
    each = benchmark.ranks_per_host
    return max(sum(sent[start : start + each]) for start in range(0, len(sent), each))
