"""The same job on several numbers of ranks: bits of each step, bytes and seconds, beside stock DDP."""

import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import reproducible
from thinwire.lab.bench.jobs.job import Job, Samples
from thinwire.lab.bench.jobs.named import get_job
from thinwire.lab.testbed.launch import preload, values_of_ranks
from thinwire.lab.testbed.network import Link, emulated
from thinwire.lab.testbed.rank import RankContext
from thinwire.reproducible.digests import of_tensors


@dataclass(frozen=True)
class ReproducibleBenchmark:
    """What to train, and on how many ranks.

    Args:
        job: a job of `bench train` by name, with settings.
        ranks: numbers of ranks, one run each; the first is what others are compared with.
        micro_batches: of a step, on all ranks together.
        link: of the host of each rank; without a limit they share the loopback.
        stock: whether stock DDP trains too, whose bits depend on the number of ranks.
    """

    job: str = "gpt"
    ranks: tuple[int, ...] = (1, 2, 4)
    micro_batches: int = 24
    steps: int = 10
    seed: int = 0
    link: Link = Link(None)  # noqa: RUF009  # frozen
    stock: bool = True

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1 or min(self.micro_batches, self.steps) < 1:
            raise ValueError("ranks, micro-batches and steps are numbers from 1")
        get_job(self.job)


def run(benchmark: ReproducibleBenchmark) -> dict[str, Any]:
    """Train on each number of ranks, and say where two runs part first.

    Raises:
        RanksFailed: a model that cannot be trained so, with the reason.
    """
    preload("torch.nn.parallel")
    rows = []
    for world_size in benchmark.ranks:
        with emulated(world_size, benchmark.link if world_size > 1 else Link(None)) as network:
            for method in ("reproducible", "ddp") if benchmark.stock else ("reproducible",):
                made = values_of_ranks(
                    _train, benchmark, method, world_size=world_size, network=network, timeout_seconds=3600.0
                )
                rows.append(_row(method, world_size, made))
    first = {row["method"]: row["steps"] for row in reversed(rows)}
    for row in rows:
        row["parts_at"] = parting(first[row["method"]], row.pop("steps"))
    same = len({row["digest"] for row in rows if row["method"] == "reproducible"}) == 1
    return {"job": benchmark.job, "micro_batches": benchmark.micro_batches, "same_bits": same, "rows": rows}


def parting(one: list[dict[str, str]], other: list[dict[str, str]]) -> dict[str, Any] | None:
    """Return the first step and parameter whose bits differ after it, or None."""
    for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for name, text in mine.items():
            if theirs[name] != text:
                return {"step": step, "parameter": name}
    return None


def _row(method: str, world_size: int, made: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [max(of_step) for of_step in zip(*(one["seconds"] for one in made), strict=True)][1:] or [0.0]
    return {
        "method": method,
        "ranks": world_size,
        "digest": made[0]["digest"],
        "ranks_alike": len({one["digest"] for one in made}) == 1,
        "seconds_median": statistics.median(seconds),
        "bytes_sent_max": max(one["bytes_sent"] for one in made),
        "bits_per_value": max(one["bits"] for one in made),
        "inexact": max(one["inexact"] for one in made),
        "steps": made[0]["steps"],
    }


def _train(context: RankContext, benchmark: ReproducibleBenchmark, method: str) -> dict[str, Any]:
    job = get_job(benchmark.job)
    data, model = job.load(), job.model(benchmark.seed)
    optimizer = job.make_optimizer(model.parameters())
    seconds, digests = [], []

    def batch(step: int, index: int) -> Samples:
        draw = torch.Generator().manual_seed((benchmark.seed * 1_000_003 + step) * benchmark.micro_batches + index)
        return data.train.take(torch.randint(len(data.train), (job.batch_size,), generator=draw))

    def steps() -> Iterator[int]:
        if method == "ddp":
            yield from _stock(context, benchmark, job, model, batch)
            return
        for step in made:
            for index in step:
                job.loss(model, batch(step.number, index)).backward()
            yield step.number

    group = dist.group.WORLD if context.world_size > 1 else None
    made = reproducible.Steps(
        model, benchmark.micro_batches, benchmark.steps, benchmark.seed, optimizer, group
    )  # for both, so that both begin alike
    began = time.perf_counter()
    for _ in steps():
        job.clip(model)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        digests.append({name: of_tensors([(name, entry)]) for name, entry in model.named_parameters()})
        began = time.perf_counter()
    stats, dense = made.stats(), sum(entry.numel() * 4 for entry in model.parameters())
    ring = 2 * (context.world_size - 1) / context.world_size * dense * benchmark.steps
    is_stock = method == "ddp"
    return {
        "seconds": seconds,
        "steps": digests,
        "digest": reproducible.digest(model),
        "bytes_sent": ring if is_stock else stats["comm/bytes_sent"],
        "bits": 64.0 * (context.world_size > 1) if is_stock else stats["reproducible/bits_per_value"],
        "inexact": 0.0 if is_stock else stats["reproducible/inexact"],
    }


def _stock(
    context: RankContext, benchmark: ReproducibleBenchmark, job: Job, model: nn.Module, batch: Any
) -> Iterator[int]:
    """Accumulate this rank's micro-batches in float32, and all-reduce with the last one."""
    if context.world_size > benchmark.micro_batches:
        raise ValueError("stock DDP needs a micro-batch for each rank: give more, or leave it out")
    wrapped = DistributedDataParallel(model) if context.world_size > 1 else None
    parallel = wrapped or model
    share = list(range(benchmark.micro_batches))[context.rank :: context.world_size]
    for step in range(benchmark.steps):
        for index in share:
            with nullcontext() if wrapped is None or index == share[-1] else wrapped.no_sync():
                loss = job.loss(parallel, batch(step, index))
                (loss * context.world_size / benchmark.micro_batches).backward()
        yield step
