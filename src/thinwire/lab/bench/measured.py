"""Measurement of a training on emulated hosts, or as a rank of a job: a named job, or a user's own factory."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from thinwire.lab.analyze.failure import raised_by_script
from thinwire.lab.analyze.trials import attach_as_advised, counts, try_each
from thinwire.lab.bench.in_job import job_group
from thinwire.lab.bench.jobs.job import Data, Job
from thinwire.lab.bench.jobs.own import JobError, OwnJob, clear_job_errors
from thinwire.lab.doctor.advice import Advice
from thinwire.lab.doctor.diagnosis import Confirmed
from thinwire.lab.harmless import harmless
from thinwire.lab.planning.measurement import Measurement
from thinwire.lab.planning.planner import Option
from thinwire.lab.planning.training import How, OnStage, Training, check, measure_training
from thinwire.lab.testbed.launch import preload, values_of_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link, emulated
from thinwire.lab.testbed.rank import RankContext

_MEASURING_SECONDS, _TRIAL_SECONDS = 1800.0, 600.0
"""Limits of the ranks of a measurement, and of a trial."""


def measure_on_hosts(
    job: Job | OwnJob, how: How, hosts: int, ranks_per_host: int, link: Link, on_stage: OnStage
) -> Measurement:
    """Measure on emulated hosts with a link each, or without a link as processes of this machine.

    Raises:
        ValueError: fewer than two ranks; see `thinwire.lab.planning.training.measure_training`.
        JobError: there is no such function, or it returns something else.
        NetAdminError: a link is asked for, but the process may not make network namespaces.
        RanksFailed: a rank failed, with its traceback.
    """
    world_size = hosts * ranks_per_host
    if world_size < 2:
        raise ValueError(f"{hosts} hosts of {ranks_per_host} ranks: two ranks are needed, because one has no link")
    check(how.compressors or ())
    for module in ("torch._dynamo", "thinwire.lab.planning.training"):
        preload(module)
    data = job.load()
    limited = link.mbit is not None
    how = replace(how, link=how.link or (f"emulated, {link.mbit:g} Mbit/s, {hosts} hosts" if limited else "loopback"))
    with clear_job_errors(), emulated(hosts, link) as network:
        where = world_size, ranks_per_host, network
        first, *_ = _run(where, _MEASURING_SECONDS, on_stage, measure_rank, job, data, how)
    measured = Measurement.from_json(first)
    environment = {**measured.environment, "link_nominal_mbit": link.mbit, "target": job.name}
    return replace(measured, hosts=hosts if limited else 1, environment=environment)


@harmless()
def measure_rank(context: RankContext, job: Job | OwnJob, data: Data | None, how: How, path: tuple[str, ...]) -> Any:
    """Measure on one rank, in the default process group."""
    sys.path[:] = path  # a factory is imported from the command's directory
    tell = context.send if context.rank == 0 else lambda stage: None
    with raised_by_script(job.name, JobError):
        training = job.training(data, context.rank, context.world_size, seed=0)
        return measure_training(training, how, on_stage=tell).to_json()


def try_on_hosts(
    job: Job | OwnJob,
    advised: Sequence[tuple[Option, Advice]],
    measurement: Measurement,
    ranks_per_host: int,
    link: Link,
    on_stage: OnStage,
    deadline: float,
) -> list[Confirmed]:
    """Train each option for a few steps on hosts like those that were measured, and return what a step takes; see
    `thinwire.lab.analyze.trials.try_each`.
    """
    data = job.load()
    with emulated(measurement.world_size // ranks_per_host, link) as network:

        def train(advice: Advice, predicted: float) -> list[list[float]]:
            where = measurement.world_size, ranks_per_host, network
            return _run(where, _TRIAL_SECONDS, on_stage, _try_rank, job, data, advice, predicted)

        return try_each(train, advised, measurement, on_stage, deadline)


def _run(
    where: tuple[int, int, EmulatedNetwork | None],
    timeout_seconds: float,
    on_stage: OnStage,
    function: Callable[..., Any],
    *args: Any,
) -> list[Any]:
    """Run a function on ranks, with the directories from which a job is imported, and return their values."""
    world_size, per_host, network = where
    return values_of_ranks(
        function,
        *args,
        tuple(sys.path),
        world_size=world_size,
        ranks_per_host=None if network is None else per_host,
        network=network,
        timeout_seconds=timeout_seconds,
        on_message=lambda rank, stage: on_stage(stage),
    )


@harmless()
def _try_rank(
    context: RankContext, job: Job | OwnJob, data: Data | None, advice: Advice, predicted: float, path: tuple[str, ...]
) -> list[float]:
    """Train on one rank; return the seconds of its steps."""
    sys.path[:] = path
    training = job.training(data, context.rank, context.world_size, seed=0)
    model: torch.nn.Module = training.model
    synchronizer = attach_as_advised(model, advice) if advice.dense else None
    if synchronizer is None:
        model = torch.nn.parallel.DistributedDataParallel(model)
    seconds = training.step_seconds(model, *counts(predicted))
    if synchronizer is not None:
        synchronizer.detach()
    return seconds


@harmless()
def measure_in_job(job: Job | OwnJob, how: How, on_stage: OnStage) -> Measurement:
    """Measure as a rank of a job that torchrun started, over its own network, in the default process group.

    Raises:
        ValueError: see `measure_on_hosts`.
    """
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with job_group("nccl" if has_gpu else "gloo"):
        training = job.training(None, dist.get_rank(), dist.get_world_size(), seed=0)
        training = _on_gpu(training) if has_gpu and isinstance(job, Job) else training
        return measure_training(training, how, on_stage=on_stage)


def _on_gpu(training: Training) -> Training:
    """A job of ours with its model and batches on this rank's GPU."""
    device = torch.device("cuda", torch.cuda.current_device())

    def batch() -> Any:
        samples = training.batch()
        return replace(samples, inputs=samples.inputs.to(device), targets=samples.targets.to(device))

    return replace(training, model=training.model.to(device), batch=batch)
