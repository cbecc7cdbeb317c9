"""Dense gradients of a real job: recorded on each rank while it trains a few steps on batches of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.lab.bench.jobs.job import Data, Job
from thinwire.lab.bench.jobs.named import parse_job
from thinwire.lab.bench.jobs.own import OwnJob, share_parameters
from thinwire.lab.harmless import harmless

PREFIX = "dense:"
FORM = "dense:JOB[:autocast][:accumulate=N][:after=STEPS], such as dense:gpt:autocast"
_AFTER = 10
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # as DDP has them


@dataclass(frozen=True)
class DenseWorkload:
    """The gradients of one step of a job on each rank, in buckets as DDP fills them.

    Args:
        text: ``dense:JOB``, a job of `bench train` with its settings; ``:autocast`` is bfloat16 in the forward pass,
            ``:accumulate=N`` adds up N batches a step, ``:after=STEPS`` trains so many steps before.
        scale: size of the job's model, see `Job.scaled`; None for the job's own.
        seed: seed of the initial parameters and of the order of the data.

    Raises:
        ValueError: another text; an unknown job or setting.

    Example:
        >>> DenseWorkload("dense:gpt:autocast:accumulate=4").accumulate
        4
    """

    text: str
    scale: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.text.startswith(PREFIX):
            raise ValueError(f"{self.text!r} is no dense workload: give {FORM}")
        if self.accumulate < 1 or self.after < 0:
            raise ValueError(f"{self.text}: accumulate is at least 1, and after at least 0")
        _ = self.job

    @cached_property
    def job(self) -> Job | OwnJob:
        words = [word for word in self._words if not word.startswith(("autocast", "accumulate=", "after="))]
        job = parse_job(":".join(words), self.scale)
        return replace(job, autocast="bfloat16") if "autocast" in self._words else job

    @property
    def accumulate(self) -> int:
        return self._number("accumulate", 1)

    @property
    def after(self) -> int:
        return self._number("after", _AFTER)

    @property
    def _words(self) -> list[str]:
        return self.text.removeprefix(PREFIX).split(":")

    def _number(self, name: str, default: int) -> int:
        values = [word.partition("=")[2] for word in self._words if word.startswith(f"{name}=")]
        if values and not values[-1].isdecimal():
            raise ValueError(f"{name}={values[-1]} in {self.text}: give a whole number")
        return int(values[-1]) if values else default

    @harmless()
    def record(self, rank: int, world_size: int, data: Data | None) -> list[Tensor]:
        """Train on this rank and return its local gradients of the next step, in buckets; a collective call.

        The same in every run. Gradients that are sparse are left out: they travel as rows.
        """
        job = self.job
        training = job.training(data, rank, world_size, self.seed)
        model = training.model.train()
        if isinstance(job, OwnJob):
            share_parameters(model)
        optimizer = job.optimizer_of(training)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: job.learning_rate_share(step, job.steps))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for step in range(self.after + 1):
            optimizer.zero_grad()
            for _ in range(self.accumulate):
                (training.loss(model, training.batch()) / self.accumulate).backward()
            if step == self.after:
                break
            for parameter in trained:
                _average(parameter, world_size)
            if training.after_backward is not None:
                training.after_backward(model)
            optimizer.step()
            schedule.step()
        gradients = [torch.zeros_like(entry) if entry.grad is None else entry.grad for entry in reversed(trained)]
        return buckets([gradient for gradient in gradients if not gradient.is_sparse])


def buckets(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients in flat buckets as DDP fills them: 1 MiB, then 25 MiB each, closed by what exceeds that."""
    filled: list[list[Tensor]] = []
    open_buckets: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        bucket = open_buckets.setdefault(gradient.dtype, [])
        bucket.append(gradient.detach().reshape(-1))
        limit = _BUCKET_BYTES if any(full[0].dtype == gradient.dtype for full in filled) else _FIRST_BUCKET_BYTES
        if sum(part.nbytes for part in bucket) >= limit:
            filled.append(open_buckets.pop(gradient.dtype))
    return [torch.cat(parts) for parts in (*filled, *open_buckets.values())]


def _average(parameter: Tensor, world_size: int) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    dist.all_reduce(parameter.grad)
    if parameter.grad.is_sparse:
        parameter.grad = parameter.grad.coalesce()
    parameter.grad.div_(world_size)
