"""`thinwire bench checkpoint`: the cost of checkpoints by several methods, and their benefit, on emulated hosts."""

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from thinwire.lab.bench.checkpoint.hosts import HolderHosts
from thinwire.lab.bench.checkpoint.methods import RIVALS, Destination
from thinwire.lab.bench.checkpoint.overhead import OverheadRecord, measure
from thinwire.lab.bench.checkpoint.recovery import Campaign, Recovery
from thinwire.lab.bench.checkpoint.rivals import unavailable
from thinwire.lab.bench.checkpoint.rows import baselines, bounds_of, row_of
from thinwire.lab.bench.checkpoint.settings import CheckpointBenchmark
from thinwire.lab.bench.checkpoint.traffic import Sampler, timeline
from thinwire.lab.bench.jobs.job import Data
from thinwire.lab.report import environment
from thinwire.lab.testbed.launch import RanksFailed, preload, values_of_ranks

OnProgress = Callable[[str], None]
"""Function called with the name of each finished part, once for each of `CheckpointBenchmark.parts`."""


def run(benchmark: CheckpointBenchmark, on_progress: OnProgress) -> dict[str, Any]:
    """Run the benchmark and return ``{"environment": {...}, "rows": [...]}``; the fields are in
    docs/evidence/bench-checkpoint.md.

    With ``traced`` there is a "timeline" too.

    Raises:
        ImportError: the job's data need a package that is not installed.
        NetAdminError: a link is asked for, but the process may not make network namespaces.
        RanksFailed: a rank failed, with its traceback.
    """
    for module in ("overhead", "recovery", "dcp"):
        preload(f"thinwire.lab.bench.checkpoint.{module}")
    data = benchmark.work.load()
    absent = {method: reason for method in benchmark.methods if (reason := unavailable(method))}
    benchmark = replace(benchmark, methods=tuple(method for method in benchmark.methods if method not in absent))
    with (
        tempfile.TemporaryDirectory(prefix="thinwire-checkpoint-") as directory,
        HolderHosts(benchmark.hosts, benchmark.link, directory) as hosts,
    ):
        sampler = Sampler(hosts)
        try:
            records = _overhead(benchmark, hosts, directory, data, sampler, on_progress)
        finally:
            sampler.stop()
        failed: dict[str, dict[str, str]] = {}
        recoveries = _recoveries(benchmark, hosts, directory, data, records, on_progress, failed)
    link_mbit = hosts.link_mbit
    rows = [
        row_of(method, records, recoveries.get(method), link_mbit) | failed.get(method, {})
        for method in benchmark.methods
    ]
    rows += [{**dict.fromkeys(rows[0]), "method": method, "unavailable": reason} for method, reason in absent.items()]
    result: dict[str, Any] = {"environment": _environment(benchmark, records, link_mbit), "rows": rows}
    if records[0].traced:
        result["timeline"] = timeline(sampler.samples, [record.traced for record in records])
    return result


def _overhead(
    benchmark: CheckpointBenchmark,
    hosts: HolderHosts,
    directory: str,
    data: Data | None,
    sampler: Sampler,
    on_progress: OnProgress,
) -> list[OverheadRecord]:
    destination = Destination(hosts.sockets, directory, benchmark.replicas, "overhead", benchmark.compress)

    def on_message(rank: int, message: tuple[Any, ...]) -> None:
        if rank == 0 and message[0] == "progress":
            on_progress(f"{message[1]}, turn {message[2] + 1} of {benchmark.repeat}")
        elif rank == 0:
            (sampler.start if message[1] else sampler.stop)()

    records = values_of_ranks(
        measure,
        benchmark,
        destination,
        data,
        world_size=benchmark.hosts,
        network=hosts.network,
        timeout_seconds=benchmark.timeout_seconds,
        on_message=on_message,
    )
    for method in benchmark.methods:
        hosts.forget(f"{destination.run_id}-{method}")
    return records


def _recoveries(
    benchmark: CheckpointBenchmark,
    hosts: HolderHosts,
    directory: str,
    data: Data | None,
    records: list[OverheadRecord],
    on_progress: OnProgress,
    failed: dict[str, dict[str, str]],
) -> dict[str, Recovery]:
    """Recoveries by method; what the rows of rivals that fail say is added to ``failed``."""
    if not benchmark.recovering:
        return {}
    campaign = Campaign(
        benchmark,
        data,
        hosts,
        Destination(hosts.sockets, directory, benchmark.replicas, "recovery", benchmark.compress),
        iteration_seconds=statistics.median(records[0].blocks[0].iterations),
        on_kill=lambda method, kills: on_progress(f"{method}, run {kills} of {benchmark.kills + 2}"),
    )
    undisturbed = campaign.undisturbed()
    recoveries: dict[str, Recovery] = {}
    for method in benchmark.recovering:
        try:
            recoveries[method] = campaign.recover(method, undisturbed)
        except RanksFailed as error:
            if method not in RIVALS:
                raise
            failed[method] = {"unavailable": f"no recovery: {str(error).strip().splitlines()[-1]}"}
        hosts.forget(f"{campaign.destination.run_id}-{method}")
    return recoveries


def _environment(
    benchmark: CheckpointBenchmark, records: list[OverheadRecord], link_mbit: float | None
) -> dict[str, Any]:
    return {
        **environment(),
        "cores": os.cpu_count(),
        "hosts": benchmark.hosts,
        "link_nominal_mbit": benchmark.link.mbit,
        "job": benchmark.work.job,
        "dtype": benchmark.work.dtype,
        "compress": benchmark.compress,
        "compute_seconds": benchmark.work.compute_seconds,
        "replicas": benchmark.replicas,
        "steps": benchmark.steps,
        "repeat": benchmark.repeat,
        "iterations": benchmark.steps * benchmark.repeat,
        "kills": benchmark.kills,
        "threads_per_rank": 1,
        "stats": records[0].gaps,
        "bounds": bounds_of(records, benchmark.methods, benchmark.replicas, link_mbit),
        **baselines(records, benchmark.methods, link_mbit),
    }
