"""One rank of `thinwire bench train`: it trains a job by one method, with a clock, and measures the held-out loss."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.gradients.tables import tables_of
from thinwire.lab.bench.jobs.job import Data, Job
from thinwire.lab.bench.jobs.own import JobError, OwnJob, same_random_numbers_after, share_parameters
from thinwire.lab.bench.train.account import Account, counter_of
from thinwire.lab.bench.train.curve import evaluation_steps, smoothed, window_of
from thinwire.lab.bench.train.methods import Method, method_of, method_of_plan
from thinwire.lab.bench.train.planned import Planning
from thinwire.lab.digests import digest_of
from thinwire.lab.harmless import harmless
from thinwire.lab.testbed.rank import RankContext

_ONE_BUCKET_MB = 1024.0


@dataclass(frozen=True)
class JobTraining:
    """One run of a job.

    Args:
        job: a job of ours or of the user.
        steps: planned number of steps; the final loss is that at their end.
        extra_steps: largest number of additional steps, while the smoothed held-out loss is above ``target_loss``.
        target_loss: loss at which extra steps end; None for none.
        interface: network interface whose sent bytes are counted; None if the host has none of its own.
        accumulate: batches whose gradients are added up in a step; their loss is the mean.
    """

    job: Job | OwnJob
    method: str
    seed: int
    steps: int
    extra_steps: int = 0
    target_loss: float | None = None
    interface: str | None = None
    accumulate: int = 1


@dataclass
class StepRecord:
    """Seconds of one step on one rank; the last four come from the method, None if it does not report them.

    Backward includes forward, and ends when the last gradient is there. Exposed are those in which the training thread
    waited: at the end of backward, or for the round of an outer loop.
    """

    backward_seconds: float
    exposed_seconds: float
    optimizer_seconds: float
    encode_seconds: float | None
    wire_seconds: float | None
    decode_seconds: float | None
    sent_bytes: float | None

    @property
    def step_seconds(self) -> float:
        return self.backward_seconds + self.exposed_seconds + self.optimizer_seconds


@dataclass
class RankRecord:
    """Measurements of a training on one rank. Losses are of all held-out samples, the same on all ranks."""

    parameters: int = 0
    gradient_bytes: int = 0
    optimizer: str = ""
    steps: list[StepRecord] = field(default_factory=list)
    held_out_losses: list[tuple[int, float]] = field(default_factory=list)
    link_bytes: int | None = None
    digest: str = ""
    losses_digest: str = ""
    account: Account = Account()  # noqa: RUF009  # frozen
    plan: str = ""


@harmless()
def train(context: RankContext, training: JobTraining, data: Data | None) -> RankRecord:
    """Train in the default process group. ``context.send`` gets each finished step and its loss.

    Raises:
        ValueError: the method does not exist, or cannot be attached to this job.
    """
    trainer = _Trainer(context, training, data)
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    record = RankRecord(
        parameters=sum(parameter.numel() for parameter in trained),
        gradient_bytes=sum(parameter.nbytes for parameter in trained),
        optimizer=trainer.settings,
        plan=trainer.planned,
    )
    dist.barrier()
    sent_on_link = counter_of(training.interface)
    for step, evaluates in _steps(training):
        record.steps.append(trainer.step(step + 1))
        if evaluates:
            record.held_out_losses.append((step + 1, trainer.held_out_loss()))
            if _is_done(training, record.held_out_losses):
                break
    dist.barrier()
    record.link_bytes = sent_on_link()
    record.account = trainer.method.account()
    record.losses_digest = trainer.losses.hexdigest()
    trainer.method.finish()
    record.digest = digest_of(trainer.network.parameters())
    trainer.method.close()
    return record


def _steps(training: JobTraining) -> Iterator[tuple[int, bool]]:
    """Every step that may be made, from 0, and whether the held-out loss is measured after it."""
    planned = evaluation_steps(training.steps)
    every = max(1, planned[-1] // len(planned))
    for step in range(training.steps + training.extra_steps):
        extra = step + 1 - training.steps
        yield step, step + 1 in planned or (extra > 0 and extra % every == 0)


def _is_done(training: JobTraining, losses: list[tuple[int, float]]) -> bool:
    """After the planned steps, whether there is no target, or it is reached."""
    if losses[-1][0] < training.steps:
        return False
    if training.target_loss is None:
        return True
    return min(smoothed([loss for _, loss in losses], window_of(training.steps))) <= training.target_loss


class _Trainer:
    """The model with its optimizer, its method and its part of the data."""

    def __init__(self, context: RankContext, training: JobTraining, data: Data | None) -> None:
        self.context, self.run = context, training
        rank, world_size = context.rank, context.world_size
        self.training = training.job.training(data, rank, world_size, training.seed)
        self.network = self.training.model
        self.optimizer = training.job.optimizer_of(self.training)
        first = self.optimizer.param_groups[0]
        self.settings = f"{type(self.optimizer).__name__} at learning rate {first['lr']:g}"
        self.job = training.job
        if isinstance(self.job, OwnJob):  # a method that has momentum itself takes over that of the optimizer
            self.job = replace(self.job, momentum=float(first.get("momentum", 0.0)))
            _check_device(self.network, self.job)
            share_parameters(self.network)
        self.held_out, self.weight = training.job.held_out(self.training, data, rank, world_size)
        method = method_of(training.method, self.job, training.steps, world_size)
        self.planned = ""
        if method.planning is not None:
            method = self._planned(method.planning, data)
        self.model = self._wrapped(method)
        self.last_gradient_at = 0.0
        self.losses = hashlib.blake2b(digest_size=16)
        """Hash of the bits of every loss of a batch so far."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)
        set_up_optimizer(self.optimizer, method, self.network, training.method)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: method.inner_lr * self.job.learning_rate_share(step, training.steps)
        )
        self.clips = method.clips_after_sum
        self.method = method.attach(self.model, self.optimizer)
        self.before = self.method.account()

    def _planned(self, planning: Planning, data: Data | None) -> Method:
        """The method of the plan, which is made before the run, by a training of its own."""
        with same_random_numbers_after():
            plan = planning.plan(
                lambda: self.job.training(data, self.context.rank, self.context.world_size, self.run.seed)
            )
        self.planned = plan.choice
        return method_of_plan(plan)

    def _wrapped(self, method: Method) -> nn.Module:
        """All ranks have the same parameters, so DDP need not broadcast them."""
        if method.is_plain:
            return self.network
        bucket_cap_mb = _ONE_BUCKET_MB if method.one_bucket else None
        return DistributedDataParallel(self.network, init_sync=False, bucket_cap_mb=bucket_cap_mb)

    def _on_gradient(self, parameter: Tensor) -> None:
        self.last_gradient_at = time.perf_counter()

    def step(self, number: int) -> StepRecord:
        """One training step.

        The rounds of an outer loop end in the optimizer's step, whose seconds are then those without the waiting.
        """
        batches = [self.training.batch() for _ in range(self.run.accumulate)]
        started = time.perf_counter()
        self.optimizer.zero_grad()
        with self._no_sync() if len(batches) > 1 else nullcontext():
            losses = [self._backward(batch) for batch in batches[:-1]]
        losses.append(self._backward(batches[-1]))
        synchronized = time.perf_counter()
        if self.clips and self.training.after_backward is not None:
            self.training.after_backward(self.model)
        self.optimizer.step()
        ended = time.perf_counter()
        self.schedule.step()
        self.losses.update(torch.stack(losses).numpy().tobytes())
        if self.context.rank == 0:
            self.context.send((number, torch.stack(losses).mean().item()))
        before, self.before = self.before, self.method.account()
        waited = 0.0
        if self.before.exposed_seconds is not None:
            waited = min(ended - synchronized, self.before.exposed_seconds - (before.exposed_seconds or 0.0))
        return StepRecord(
            backward_seconds=self.last_gradient_at - started,
            exposed_seconds=synchronized - self.last_gradient_at + waited,
            optimizer_seconds=ended - synchronized - waited,
            **_difference(self.before, before),
        )

    def _backward(self, batch: Any) -> Tensor:
        """Add the gradients of a batch, and return its loss."""
        loss = self.training.loss(self.model, batch)
        (loss / self.run.accumulate if self.run.accumulate > 1 else loss).backward()
        return loss.detach().double()

    def _no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else self.method.no_sync()

    def held_out_loss(self) -> float:
        """Mean over all held-out samples: each rank computes its share, and a small all-reduce combines them."""
        self.network.eval()
        with torch.no_grad(), same_random_numbers_after(), self.method.judged():
            loss = self.training.loss(self.network, self.held_out)
        self.network.train()
        total = torch.tensor([loss.item() * self.weight, self.weight], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total[0] / total[1])


def set_up_optimizer(
    optimizer: torch.optim.Optimizer, method: Method, network: nn.Module, name: str
) -> torch.optim.Optimizer:
    """Give the parameters that a method compresses its settings for them; the rest keep theirs, as under stock DDP.

    Raises:
        JobError: the method has momentum itself, and the optimizer has another that cannot be switched off.
    """
    tables = {id(table) for table in tables_of(network)}
    compressed = {
        id(parameter)
        for key, parameter in network.named_parameters()
        if parameter.requires_grad and id(parameter) not in tables and method.compresses(key, parameter)
    }
    groups = []
    for group in optimizer.param_groups:
        parts = [
            [entry for entry in group["params"] if (id(entry) in compressed) is chosen] for chosen in (True, False)
        ]
        changed = {"lr": group["lr"] * method.learning_rate_scale}
        if parts[0] and not method.optimizer_momentum:
            if "momentum" not in group:
                raise JobError(
                    f"{name} needs torch.optim.SGD, and the job has {type(optimizer).__name__}: leave it out"
                )
            changed |= {"momentum": 0.0, "nesterov": False}
        groups += [{**group, "params": parts[0], **changed}, {**group, "params": parts[1]}]
    optimizer.param_groups[:] = [group for group in groups if group["params"]]
    return optimizer


def _check_device(model: nn.Module, job: OwnJob) -> None:
    devices = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    if devices:
        raise JobError(
            f"{job.name} returns a model on {min(devices)}, and the benchmark trains on the CPU: leave it there"
        )


def _difference(after: Account, before: Account) -> dict[str, float | None]:
    names = ("encode_seconds", "wire_seconds", "decode_seconds", "sent_bytes")
    pairs = ((name, getattr(after, name), getattr(before, name)) for name in names)
    return {name: None if now is None or then is None else now - then for name, now, then in pairs}
