"""`thinwire bench checkpoint`: the cost of checkpoints by several methods, and their benefit, on emulated hosts."""

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from thinwire.checkpoint.holder.store import available_bytes
from thinwire.checkpoint.placement import ring_sizes
from thinwire.lab.bench.checkpoint.hosts import HolderHosts
from thinwire.lab.bench.checkpoint.methods import IN_PEERS, METHODS, NONE, RIVALS, Destination
from thinwire.lab.bench.checkpoint.overhead import Overhead, OverheadRecord, measure
from thinwire.lab.bench.checkpoint.recovery import Campaign, Recovery
from thinwire.lab.bench.checkpoint.rivals import unavailable
from thinwire.lab.bench.checkpoint.rows import ROW, baselines, bounds_of, row_of
from thinwire.lab.bench.checkpoint.traffic import Sampler, timeline
from thinwire.lab.bench.checkpoint.work import SYNTHETIC, TrainingWork
from thinwire.lab.bench.jobs.job import Data
from thinwire.lab.report import environment
from thinwire.lab.testbed.launch import RanksFailed, preload, values_of_ranks
from thinwire.lab.testbed.network import Link

SLOTS = 2  # of each shard, on each host that holds it

OnProgress = Callable[[str], None]
"""Function called with the name of each finished part, once for each of `CheckpointBenchmark.parts`."""


@dataclass(frozen=True)
class CheckpointBenchmark:
    """Settings of the benchmark.

    Args:
        steps: iterations of a block; each method has a block in each of ``repeat`` turns.
        replicas: copies of each host's state, including its own.
        kills: number of times all trainers of a method are killed before a host is lost too; 0 skips recovery.
        compress: that of the Checkpointers, ``thinwire`` and ``blocking``.
        traced: whether to sample the traffic of the links too, for a picture.

    Raises:
        ValueError: an unknown method or job, fewer hosts than replicas, numbers below one, or more state than there is
            memory for.
    """

    work: TrainingWork = TrainingWork()  # noqa: RUF009  # frozen
    methods: tuple[str, ...] = METHODS
    hosts: int = 8
    link: Link = Link(None)  # noqa: RUF009  # frozen
    steps: int = 20
    repeat: int = 10
    replicas: int = 2
    kills: int = 2
    compress: str | None = None
    traced: bool = False
    timeout_seconds: float = 7200.0

    def __post_init__(self) -> None:
        legal = (*METHODS, *RIVALS)
        unknown = [method for method in self.methods if method not in legal]
        if unknown or not self.methods:
            raise ValueError(f"unknown methods {', '.join(unknown) or '(none)'}; legal are {', '.join(legal)}")
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods {', '.join(self.methods)}: name each once")
        if min(self.steps, self.repeat) < 1 or self.kills < 0:
            raise ValueError("steps and repeats must be at least one, kills at least zero")
        if self.compress not in (None, "lossless"):
            raise ValueError(f"compress {self.compress!r}: it is 'lossless' or none")
        ring_sizes(self.hosts, self.replicas)
        in_peers = sum(method in IN_PEERS for method in self.methods)
        needed = in_peers * self.hosts * self.replicas * SLOTS * self.work.state_bytes
        if self.work.job == SYNTHETIC and needed > available_bytes():
            raise ValueError(
                f"{self.hosts} hosts, {self.replicas} replicas and {in_peers} methods that keep {SLOTS} versions need"
                f" {needed:,} bytes, and {available_bytes():,} are available: make the state smaller"
            )

    @property
    def recovering(self) -> list[str]:
        """Methods whose trainings are killed."""
        return [method for method in self.methods if method != NONE] if self.kills else []

    @property
    def parts(self) -> int:
        """Number of progress reports."""
        return len(self.methods) * (self.repeat + 1) + len(self.recovering) * (self.kills + 2)


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
    rows_of_absent = [{**dict.fromkeys(ROW), "method": method, "unavailable": absent[method]} for method in absent]
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
        failed: dict[str, str] = {}
        recoveries = _recoveries(benchmark, hosts, directory, data, records, on_progress, failed)
    link_mbit = hosts.link_mbit
    result: dict[str, Any] = {
        "environment": _environment(benchmark, records, link_mbit),
        "rows": [row_of(method, records, recoveries.get(method), link_mbit) for method in benchmark.methods],
    }
    reasons = {method: {"unavailable": text} for method, text in failed.items() if text is not None}
    result["rows"] = [{**row, **reasons.get(row["method"], {})} for row in result["rows"]] + rows_of_absent
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
    plan = Overhead(
        work=benchmark.work,
        methods=benchmark.methods,
        steps=benchmark.steps,
        repeat=benchmark.repeat,
        destination=Destination(hosts.sockets, directory, benchmark.replicas, "overhead", benchmark.compress),
        traced=benchmark.traced and hosts.network is not None,
    )

    def on_message(rank: int, message: tuple[Any, ...]) -> None:
        if rank == 0 and message[0] == "progress":
            on_progress(f"{message[1]}, turn {message[2] + 1} of {benchmark.repeat}")
        elif rank == 0:
            (sampler.start if message[1] else sampler.stop)()

    records = values_of_ranks(
        measure,
        plan,
        data,
        world_size=benchmark.hosts,
        network=hosts.network,
        timeout_seconds=benchmark.timeout_seconds,
        on_message=on_message,
    )
    for method in benchmark.methods:
        hosts.forget(f"{plan.destination.run_id}-{method}")
    return records


def _recoveries(
    benchmark: CheckpointBenchmark,
    hosts: HolderHosts,
    directory: str,
    data: Data | None,
    records: list[OverheadRecord],
    on_progress: OnProgress,
    failed: dict[str, str],
) -> dict[str, Recovery]:
    """Recoveries by method; the reasons of rivals that fail are added to ``failed``."""
    if not benchmark.recovering:
        return {}
    campaign = Campaign(
        work=benchmark.work,
        data=data,
        hosts=hosts,
        destination=Destination(hosts.sockets, directory, benchmark.replicas, "recovery", benchmark.compress),
        kills=benchmark.kills,
        iteration_seconds=statistics.median(records[0].blocks[0].iterations),
        timeout_seconds=benchmark.timeout_seconds,
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
            failed[method] = f"no recovery: {str(error).strip().splitlines()[-1]}"
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
