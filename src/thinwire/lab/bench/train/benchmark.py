"""`thinwire bench train`: one job under each method in turn, on emulated hosts; rows of measured figures."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from thinwire.lab.bench.in_job import is_in_job, job_group, on_all_ranks
from thinwire.lab.bench.jobs.job import Job
from thinwire.lab.bench.jobs.named import parse_job
from thinwire.lab.bench.jobs.own import OwnJob, clear_job_errors
from thinwire.lab.bench.train.curve import TOLERANCE, reached_at
from thinwire.lab.bench.train.methods import DDP, method_of
from thinwire.lab.bench.train.rank import JobTraining, RankRecord, train
from thinwire.lab.bench.train.rows import against_dense, against_rank_order, curve_of, row_of
from thinwire.lab.bench.turns import conditions
from thinwire.lab.testbed.launch import preload, values_of_ranks
from thinwire.lab.testbed.network import Link, emulated

OnStep = Callable[[str, int, int, float], None]
"""Function called with (method, seed, steps done, loss of rank 0's batch)."""


@dataclass(frozen=True)
class TrainBenchmark:
    """Trainings and methods to compare.

    Args:
        job: name of the job, or a user's own, see `OwnJob`.
        methods: texts for `methods.method_of`; "ddp" is always run first.
        steps: number of steps; None for the job's own number.
        seeds: number of seeds, from 0, for the initial parameters and for the order of the data.
        scale: size of the job's model against the published one, see `Job.scaled`; None for the job's own.
        autocast: whether the forward pass is under `torch.autocast` in bfloat16.
        accumulate: batches whose gradients are added up in a step.
        extra: share of the steps that a method may train on, at the last learning rate, to reach the loss of ddp.

    Raises:
        ValueError: an unknown job or method, or numbers below one; the message says what is legal.
    """

    job: str
    methods: tuple[str, ...] = (DDP, "bf16")
    hosts: int = 8
    link: Link = Link(None)  # noqa: RUF009  # frozen
    seeds: int = 3
    steps: int | None = None
    scale: float | None = None
    extra: float = 0.25
    autocast: bool = False
    accumulate: int = 1
    timeout_seconds: float = 7200.0

    def __post_init__(self) -> None:
        if min(self.hosts, self.seeds, self.num_steps, self.accumulate) < 1 or not self.methods:
            raise ValueError("hosts, seeds, steps, batches of a step and methods must be at least one")
        if self.extra < 0.0:
            raise ValueError(f"extra steps are a share of the steps, at least 0, not {self.extra}")
        if len(set(self.methods)) < len(self.methods):
            raise ValueError("a method is named twice")
        for method in self.methods:
            method_of(method, self.the_job, self.num_steps, self.hosts)

    @property
    def the_job(self) -> Job | OwnJob:
        job = parse_job(self.job, self.scale)
        return replace(job, autocast="bfloat16") if self.autocast else job

    @property
    def num_steps(self) -> int:
        return self.the_job.steps if self.steps is None else self.steps

    def steps_of(self, method: str) -> int:
        """Planned steps of a method: the benchmark's, or more of an outer loop that trains longer."""
        return round(self.num_steps * method_of(method, self.the_job, self.num_steps, self.hosts).longer)

    def max_steps_of(self, method: str) -> int:
        """Largest number of steps of one run, including the extra ones."""
        return self.steps_of(method) + round(self.extra * self.steps_of(method))


def run(benchmark: TrainBenchmark, on_step: OnStep) -> dict[str, Any]:
    """Run the trainings and return ``{"environment": {...}, "rows": [...]}``; fields: docs/evidence/bench-train.md.

    Every run has fresh processes; for each seed the methods follow one another. In a job that torchrun started all runs
    share its processes and its network; ``on_step`` is called on rank 0, and all ranks get the result.

    Raises:
        ImportError: the job's data need a package that is not installed.
        JobError: the user's own job cannot be trained.
        NetAdminError: a link is asked for, but the process may not make network namespaces.
        RanksFailed: a rank failed, with its traceback.
    """
    data = benchmark.the_job.load()
    if is_in_job():

        def train_here(training: JobTraining) -> list[RankRecord]:
            return on_all_ranks(
                train, training, data, on_message=lambda message: on_step(training.method, training.seed, *message)
            )

        with job_group():
            return _results(benchmark, train_here)
    preload("torch._dynamo")
    preload("thinwire.lab.bench.train.stock")
    with clear_job_errors(), emulated(benchmark.hosts, benchmark.link) as network:

        def train_on_ranks(training: JobTraining) -> list[RankRecord]:
            return values_of_ranks(
                train,
                training,
                data,
                world_size=benchmark.hosts,
                network=network,
                timeout_seconds=benchmark.timeout_seconds,
                on_message=lambda rank, message: on_step(training.method, training.seed, *message),
            )

        interface = network.interface if network else None
        return _results(benchmark, train_on_ranks, network.measure() if network else None, interface)


def _results(
    benchmark: TrainBenchmark,
    train_all: Callable[[JobTraining], list[RankRecord]],
    link_mbit: float | None = None,
    interface: str | None = None,
) -> dict[str, Any]:
    """Train by each method under each seed, stock DDP first: the others are measured by its final loss."""
    rows = []
    for seed in range(benchmark.seeds):
        dense_loss, of_seed = None, []
        for method in sorted(benchmark.methods, key=lambda method: method != DDP):  # it is their aim
            training = JobTraining(
                job=benchmark.the_job,
                method=method,
                seed=seed,
                steps=benchmark.steps_of(method),
                extra_steps=benchmark.max_steps_of(method) - benchmark.steps_of(method),
                target_loss=None if dense_loss is None else reached_at(dense_loss),
                interface=interface,
                accumulate=benchmark.accumulate,
            )
            records = train_all(training)
            row, curve = row_of(training, records, link_mbit), curve_of(training, records)
            if method == DDP:
                dense_loss = row["final_loss"]
            of_seed.append(against_dense(row, curve, dense_loss))
        rows += against_rank_order(of_seed)
    return {"environment": _environment(benchmark), "rows": rows}


def _environment(benchmark: TrainBenchmark) -> dict[str, Any]:
    job = benchmark.the_job
    return {
        **conditions(benchmark.hosts, benchmark.link),
        "steps": benchmark.num_steps,
        "seeds": benchmark.seeds,
        "judged_by": job.judged_by,
        "loss_tolerance": TOLERANCE,
        "batch_size": job.batch_size,
        "autocast": job.autocast or None,
        "accumulate": benchmark.accumulate,
        "learning_rate": job.learning_rate,
        "momentum": job.momentum,
        "clip_norm": job.clip_norm,
    }
