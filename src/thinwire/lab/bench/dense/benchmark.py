"""`thinwire bench sync --workload dense:...`: real dense gradients summed by each method; rows of measured figures."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.lab.bench.dense.rank import METHODS, NATIVE, DenseMeasurement, DenseRank, measure
from thinwire.lab.bench.dense.workload import DenseWorkload
from thinwire.lab.bench.jobs.own import clear_job_errors
from thinwire.lab.bench.train.rows import bits_per_value
from thinwire.lab.bench.turns import HostsBenchmark, quantile, seconds_of_runs
from thinwire.sums.lossless import SumReport


@dataclass(frozen=True)
class DenseBenchmark(HostsBenchmark):
    """Settings of the benchmark.

    Raises:
        ValueError: an unknown workload or method, or numbers below one; the message lists what is legal.
    """

    workload: DenseWorkload
    methods: tuple[str, ...] = field(default=METHODS, kw_only=True)

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise ValueError(f"unknown method {method!r} of a dense workload; legal are {', '.join(METHODS)}")
        self.check_numbers()


def run(benchmark: DenseBenchmark, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the benchmark and return ``{"environment": {...}, "rows": [...]}``; fields: docs/evidence/bench-sync.md.

    ``on_progress(method)`` is called whenever rank 0 finished a run of a method.

    Raises:
        JobError: the user's own job cannot be trained.
        NetAdminError: a link is asked for, but the process may not make network namespaces.
        RanksFailed: a rank failed, with its traceback.
    """
    workload = benchmark.workload
    with clear_job_errors():
        link_mbit, ranks = benchmark.measure(
            measure, workload, workload.job.load(), benchmark.methods, on_progress=on_progress
        )
    return {"environment": benchmark.environment(workload.seed), "rows": _rows(benchmark, link_mbit, ranks)}


def _rows(benchmark: DenseBenchmark, link_mbit: float | None, ranks: Sequence[DenseRank]) -> list[dict[str, Any]]:
    measured = {method: [rank.methods[method] for rank in ranks] for method in benchmark.methods}
    seconds = {method: seconds_of_runs(one.times for one in each) for method, each in measured.items()}
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
