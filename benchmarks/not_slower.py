"""Steps of models trained by stock DDP and by thinwire in the same processes, in turn: is thinwire ever slower?

    python benchmarks/not_slower.py --link none --jobs lstm,recommender,dlrm,mlp --steps 40
    python benchmarks/not_slower.py --link 1gbit --jobs lstm_dense --steps 10 --json out.json

Each job is trained by stock DDP, and by DDP with `thinwire.attach(ddp)`, of the same seed. All step in turn, each going
first in every other round, after a barrier that is not timed; a step takes as long as its slowest rank. The ratio is
the median over rounds of thinwire's step to that of stock DDP right beside it. The ratio of processor time, a mean over
ranks, varies less where ranks share processors. Tables of the jobs named ``..._dense``
have dense gradients, and those of the others are ``sparse=True``. Links other than "none" need network namespaces.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab.demo.model import LanguageModel, LogUniform, ModelConfig
from thinwire.lab.testbed.launch import preload, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link
from thinwire.lab.testbed.rank import RankContext

WITH_TABLES, WITHOUT = 1.03, 1.01
"""Largest ratio of the step of thinwire to that of stock DDP that counts as not slower, with tables and without."""


@dataclass(frozen=True)
class Job:
    """A model to train.

    Args:
        model: makes the model; True for tables with sparse gradients.
        batch: draws the inputs of a step and its target, from a generator of the rank.
        loss: computes the loss from the output and the target.
        optimizer: makes the optimizer of parameters.
    """

    model: Callable[[bool], nn.Module]
    batch: Callable[[torch.Generator, int], tuple[tuple[Any, ...], Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    has_tables: bool = True


NUM_WORDS = 60_000
SAMPLER = LogUniform(NUM_WORDS, 4096)


def language_model(is_sparse: bool) -> nn.Module:
    """Return the language model of ``thinwire demo``."""
    model = LanguageModel(ModelConfig(NUM_WORDS))
    model.words_in.sparse = model.words_out.sparse = is_sparse
    return model


def words(data: torch.Generator, step: int) -> tuple[tuple[Any, ...], Tensor]:
    logs = torch.rand(32, 21, generator=data, dtype=torch.float64)
    text = (torch.exp(logs * torch.log(torch.tensor(NUM_WORDS + 1.0))).long() - 1).clamp_(max=NUM_WORDS - 1)
    return (text, SAMPLER.sample(0, step), SAMPLER), torch.zeros(())


class Recommender(nn.Module):
    """The model of examples/ddp_sparse.py."""

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(200_000, 32, sparse=is_sparse, mode="mean")
        self.score = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, bags: Tensor) -> Tensor:
        return self.score(self.items(bags)).flatten()


def bags(data: torch.Generator, step: int) -> tuple[tuple[Any, ...], Tensor]:
    items = (torch.rand(64, 8, generator=data) ** 4 * 200_000).long()
    return (items,), (items[:, 0] % 2).float()


class Dlrm(nn.Module):
    """A recommendation model as in DLRM: tables of categories, an MLP of numbers, dot products, an MLP on top."""

    SIZES = (100_000, 50_000, 20_000, 5_000, 1_000, 200, 50, 10)

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 16, mode="sum", sparse=is_sparse) for rows in self.SIZES)
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 16), nn.ReLU())
        pairs = len(self.SIZES) * (len(self.SIZES) + 1) // 2
        self.top = nn.Sequential(nn.Linear(16 + pairs, 256), nn.ReLU(), nn.Linear(256, 1))
        self.register_buffer("places", torch.tril_indices(len(self.SIZES) + 1, len(self.SIZES) + 1, offset=-1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        bottom = self.bottom(numbers)
        rows = [table(categories[:, place, None]) for place, table in enumerate(self.tables)]
        vectors = torch.stack([bottom, *rows], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.places[0], self.places[1]]
        return self.top(torch.cat([bottom, products], dim=1)).flatten()


def clicks(data: torch.Generator, step: int) -> tuple[tuple[Any, ...], Tensor]:
    shares = torch.rand(256, len(Dlrm.SIZES), generator=data) ** 3
    categories = (shares * torch.tensor(Dlrm.SIZES)).long()
    return (torch.randn(256, 13, generator=data), categories), (categories.sum(1) % 2).float()


def mlp(is_sparse: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def digits(data: torch.Generator, step: int) -> tuple[tuple[Any, ...], Tensor]:
    return (torch.randn(128, 784, generator=data),), torch.randint(0, 10, (128,), generator=data)


BINARY = nn.functional.binary_cross_entropy_with_logits
SGD = partial(torch.optim.SGD, lr=0.05)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.2, initial_accumulator_value=0.1)
JOBS = {
    "lstm": Job(language_model, words, lambda output, target: output, ADAGRAD),
    "recommender": Job(Recommender, bags, BINARY, SGD),
    "dlrm": Job(Dlrm, clicks, BINARY, SGD),
    "mlp": Job(mlp, digits, nn.functional.cross_entropy, SGD, has_tables=False),
}


class Training:
    """A model in training, by stock DDP or by thinwire."""

    def __init__(self, name: str, rank: int, is_attached: bool) -> None:
        self.job = JOBS[name.removesuffix("_dense")]
        torch.manual_seed(0)
        self.model = DistributedDataParallel(self.job.model(not name.endswith("_dense")), init_sync=False)
        self.optimizer = self.job.optimizer(self.model.parameters())
        self.data = torch.Generator().manual_seed(rank)
        self.sync = thinwire.attach(self.model) if is_attached else None
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.schemes: list[list[str]] = []

    def step(self, step: int) -> None:
        """Make a step, and record its seconds and the scheme of each table in it."""
        inputs, target = self.job.batch(self.data, step)
        dist.barrier()
        before, started = time.process_time(), time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.job.loss(self.model(*inputs), target)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)
        self.processor_seconds.append(time.process_time() - before)
        if self.sync is not None:
            self.schemes.append([str(row["scheme"]) for row in self.sync.table()])


def train(context: RankContext, name: str, steps: int, is_logged: bool) -> tuple[list[list[float]], list[list[str]]]:
    """Return seconds and processor seconds of the steps, of stock DDP and then of thinwire, and thinwire's schemes."""
    if is_logged and context.rank == 0:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.sparse.check_sparse_tensor_invariants.disable()
    both = [Training(name, context.rank, is_attached) for is_attached in (False, True)]
    for step in range(steps):
        for training in both if step % 2 else reversed(both):
            training.step(step)
    seconds = [times for training in both for times in (training.seconds, training.processor_seconds)]
    return seconds, both[1].schemes


def measured(name: str, link: Link, ranks: int, steps: int, skipped: int, is_logged: bool) -> dict[str, Any]:
    """Train a job and return its figures."""
    with EmulatedNetwork(ranks, link) if link.mbit else nullcontext() as network:
        mbit = network.measure() if network else None
        outcomes = run_ranks(train, name, steps, is_logged, world_size=ranks, network=network, timeout_seconds=600)
    per_rank = [outcome.value[0] for outcome in outcomes]
    stock, ours = ([max(moments) for moments in zip(*(of[place] for of in per_rank), strict=True)] for place in (0, 2))
    processor = [statistics.fmean(statistics.fmean(of[place][skipped:]) for of in per_rank) for place in (1, 3)]
    schemes = outcomes[0].value[1]
    most = WITH_TABLES if JOBS[name.removesuffix("_dense")].has_tables else WITHOUT
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours[skipped:], stock[skipped:], strict=True))
    return {
        "job": name,
        "ranks": ranks,
        "link_mbit": mbit,
        "stock_seconds": statistics.median(stock[skipped:]),
        "thinwire_seconds": statistics.median(ours[skipped:]),
        "ratio": ratio,
        "processor_ratio": processor[1] / processor[0],
        "is_not_slower": ratio <= most,
        "first_seconds": ours[:skipped],
        "settled_in_step": max((step for step, each in enumerate(schemes) if each != schemes[-1]), default=-1) + 2,
        "schemes": sorted(set(schemes[-1])),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="lstm,recommender,dlrm,mlp")
    parser.add_argument("--link", default="none", help="none, or a rate such as 1gbit")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=int, default=4, help="first steps that do not count")
    parser.add_argument("--log", action="store_true", help="print the choices of thinwire")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    preload("torch._dynamo")
    link, rows = Link.parse(options.link), []
    for name in options.jobs.split(","):
        row = measured(name, link, options.ranks, options.steps, options.skip, options.log)
        rows.append(row)
        print(
            f"{name:17} {options.link:>7}  stock {1e3 * row['stock_seconds']:7.1f} ms  thinwire"
            f" {1e3 * row['thinwire_seconds']:7.1f} ms"
            f"  ratio {row['ratio']:.3f}, of processors {row['processor_ratio']:.3f}"
            f"  {'not slower' if row['is_not_slower'] else 'SLOWER'}  {' '.join(row['schemes'])}",
            flush=True,
        )
    if options.json:
        about = {"thinwire": thinwire.__version__, "torch": torch.__version__, "processors": os.cpu_count()}
        options.json.write_text(json.dumps({"environment": {**about, "system": platform.platform()}, "rows": rows}))


if __name__ == "__main__":
    main()
