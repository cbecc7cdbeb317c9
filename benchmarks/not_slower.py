"""Steps of models trained by stock DDP and by thinwire in the same processes, in turn: is thinwire ever slower?

    python benchmarks/not_slower.py --jobs mlp,transformer,table,tables_dense,recommender,torch_transformer --ranks 2
    python benchmarks/not_slower.py --link 10gbit --jobs lstm_dense --json out.json

Each job is trained by stock DDP, and by DDP with `thinwire.attach(ddp)`, of the same seed. All step in turn, each going
first in every other round, after a barrier that is not timed; a step takes as long as its slowest rank. The ratio is
the median over rounds of thinwire's step to that of stock DDP right beside it, over the rounds after the first 200; the
ratio of the first 200 is that of their sums, the first step included. The ratio of processor time, a mean over
ranks, varies less where ranks share processors. Calls are those of Python in a step, on the training thread, and memory
is what attach and the first 20 steps added, by ranks that do nothing else. Tables of the jobs named ``..._dense``
have dense gradients, and those of the others are ``sparse=True``; the model of ``torch_transformer`` is one of torch's
own tests. Links other than "none" need network namespaces.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import os
import platform
import statistics
import sys
import time
import unittest
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
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

SETTLED, FIRST = 1.02, 1.05
"""Largest ratio of thinwire to stock DDP that counts as not slower: of a step once decided, and of the first 200."""
FIRST_STEPS = 200


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
    """One table and a network on top: that of examples/ddp_sparse.py, or with another table and a wider network."""

    def __init__(self, is_sparse: bool, num_rows: int = 200_000, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(num_rows, width, sparse=is_sparse, mode="mean")
        self.score = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, bags: Tensor) -> Tensor:
        return self.score(self.items(bags)).flatten()


def bags(data: torch.Generator, step: int, num_rows: int = 200_000, batch: int = 64) -> tuple[tuple[Any, ...], Tensor]:
    items = (torch.rand(batch, 8, generator=data) ** 4 * num_rows).long()
    return (items,), (items[:, 0] % 2).float()


class Tables(nn.Module):
    """Many small tables of categories, and a network on top of them."""

    SIZES = tuple(1000 + 160 * number for number in range(26))

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 16, sparse=is_sparse) for rows in self.SIZES)
        self.top = nn.Sequential(nn.Linear(26 * 16, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, categories: Tensor) -> Tensor:
        rows = [table(categories[:, number]) for number, table in enumerate(self.tables)]
        return self.top(torch.cat(rows, dim=1)).flatten()


def categories(data: torch.Generator, step: int) -> tuple[tuple[Any, ...], Tensor]:
    ids = (torch.rand(128, 26, generator=data) ** 3 * torch.tensor(Tables.SIZES)).long()
    return (ids,), (ids.sum(1) % 2).float()


class Transformer(nn.Module):
    """Two layers of an encoder on features, without a table."""

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 10)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.body(features).mean(1))


def sequences(data: torch.Generator, step: int) -> tuple[tuple[Any, ...], Tensor]:
    return (torch.randn(8, 32, 128, generator=data),), torch.randint(0, 10, (8,), generator=data)


def torch_transformer(is_sparse: bool) -> nn.Module:
    """Return the language model of torch's tests of tensor parallelism, with two tables and a decoder."""
    absent = ModuleType("expecttest")  # for the tests beside it, which do not run here
    absent.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", absent)
    from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs
    from torch.testing._internal.distributed._tensor.common_dtensor import Transformer as Decoder

    arguments = ModelArgs(vocab_size=2000, max_seq_len=32, dim=64, n_heads=4, dropout_p=0.0, weight_tying=False)
    return Decoder(arguments)


def tokens(data: torch.Generator, step: int) -> tuple[tuple[Any, ...], Tensor]:
    text = (torch.rand(8, 33, generator=data) ** 3 * 2000).long()
    return (text[:, :-1],), text[:, 1:].flatten()


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
    "recommender": Job(partial(Recommender, hidden=4096), partial(bags, batch=512), BINARY, SGD),
    "example": Job(Recommender, bags, BINARY, SGD),
    "table": Job(partial(Recommender, num_rows=5000, width=16), partial(bags, num_rows=5000), BINARY, SGD),
    "tables": Job(Tables, categories, BINARY, SGD),
    "dlrm": Job(Dlrm, clicks, BINARY, SGD),
    "mlp": Job(mlp, digits, nn.functional.cross_entropy, SGD),
    "transformer": Job(Transformer, sequences, nn.functional.cross_entropy, SGD),
    "torch_transformer": Job(
        torch_transformer, tokens, lambda output, text: nn.functional.cross_entropy(output.flatten(0, 1), text), SGD
    ),
}


class Training:
    """A model in training, by stock DDP or by thinwire."""

    def __init__(self, name: str, rank: int, is_attached: bool) -> None:
        self.job = JOBS[name.removesuffix("_dense")]
        os.environ["THINWIRE_ROUTE"] = "auto"  # as in any training; ranks of emulated hosts have rows at once
        torch.manual_seed(0)
        # Two stock DDPs with sparse gradients on one Gloo group corrupt the heap: 3 of 4 runs of 2,500 steps on 4 ranks
        # ended by SIGSEGV or SIGABRT (torch 2.13, nothing of thinwire loaded), none with a group each.
        model = self.job.model(not name.endswith("_dense"))
        self.model = DistributedDataParallel(model, init_sync=False, process_group=dist.new_group())
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
        if self.sync is not None and step % 10 == 0:
            self.schemes.append([str(row["scheme"]) for row in self.sync.table()])


def memory(context: RankContext, name: str, is_attached: bool) -> float:
    """Return what a training and its first steps add to the memory of a rank, in MB."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    before = resident_mb()
    training = Training(name, context.rank, is_attached)
    for step in range(20):
        training.step(step)
    return resident_mb() - before


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def calls(training: Training, step: int) -> int:
    """Return the calls of Python functions in a step."""
    profile = cProfile.Profile()
    profile.enable()
    training.step(step)
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


def train(
    context: RankContext, name: str, steps: int, is_logged: bool
) -> tuple[list[list[float]], list[list[str]], list[int], str]:
    """Return seconds and processor seconds of the steps, of stock DDP and then of thinwire, thinwire's schemes, the
    calls of both, and why thinwire decided as it did."""
    if is_logged and context.rank == 0:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.sparse.check_sparse_tensor_invariants.disable()
    both = [Training(name, context.rank, is_attached) for is_attached in (False, True)]
    for step in range(steps):
        for training in both if step % 2 else reversed(both):
            training.step(step)
    seconds = [list(times) for training in both for times in (training.seconds, training.processor_seconds)]
    made = [statistics.median(calls(training, steps + number) for number in range(5)) for training in both]
    assert both[1].sync is not None
    reasons = dict.fromkeys(str(row["reason"]) for row in both[1].sync.table() if row["reason"])
    return seconds, both[1].schemes, made, "; ".join(reasons)


def measured(name: str, link: Link, ranks: int, steps: int, is_logged: bool) -> dict[str, Any]:
    """Train a job and return its figures."""
    first = min(FIRST_STEPS, steps // 2)
    with EmulatedNetwork(ranks, link) if link.mbit else nullcontext() as network:
        mbit = network.measure() if network else None
        outcomes = run_ranks(train, name, steps, is_logged, world_size=ranks, network=network, timeout_seconds=600)
    added = [
        max(outcome.value for outcome in run_ranks(memory, name, is_attached, world_size=ranks, timeout_seconds=300))
        for is_attached in (False, True)
    ]
    per_rank = [outcome.value[0] for outcome in outcomes]
    stock, ours = ([max(moments) for moments in zip(*(of[place] for of in per_rank), strict=True)] for place in (0, 2))
    _, schemes, made, reasons = outcomes[0].value

    def processor(place: int, begin: int, end: int | None) -> float:
        return statistics.fmean(sum(of[place][begin:end]) for of in per_rank)

    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours[first:], stock[first:], strict=True))
    return {
        "job": name,
        "ranks": ranks,
        "link_mbit": mbit,
        "stock_seconds": statistics.median(stock[first:]),
        "thinwire_seconds": statistics.median(ours[first:]),
        "ratio": ratio,
        "processor_ratio": processor(3, first, None) / processor(1, first, None),
        "first_ratio": sum(ours[:first]) / sum(stock[:first]),
        "first_processor_ratio": processor(3, 0, first) / processor(1, 0, first),
        "first_step_seconds": [stock[0], ours[0]],
        "calls": made,
        "memory_mb": added,
        "is_not_slower": ratio <= SETTLED and sum(ours[:first]) <= FIRST * sum(stock[:first]),
        "schemes": sorted(set(schemes[-1])),
        "reasons": reasons,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="mlp,transformer,table,tables_dense,recommender,torch_transformer")
    parser.add_argument("--link", default="none", help="none, or a rate such as 1gbit")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--log", action="store_true", help="print the choices of thinwire")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    preload("torch._dynamo")
    link, rows = Link.parse(options.link), []
    for name in options.jobs.split(","):
        row = measured(name, link, options.ranks, options.steps, options.log)
        rows.append(row)
        print(
            f"{name:17} {options.link:>7} {options.ranks} ranks  stock {1e3 * row['stock_seconds']:6.1f} ms  ratio"
            f" {row['ratio']:.3f}, of processors {row['processor_ratio']:.3f}; first {FIRST_STEPS}"
            f" {row['first_ratio']:.3f}, {row['first_processor_ratio']:.3f}; first step"
            f" {' to '.join(f'{1e3 * one:.0f}' for one in row['first_step_seconds'])} ms; calls"
            f" {' to '.join(map(str, row['calls']))}; memory {' to '.join(f'{one:.0f}' for one in row['memory_mb'])} MB"
            f"  {'not slower' if row['is_not_slower'] else 'SLOWER'}  {' '.join(row['schemes'])}  {row['reasons']}",
            flush=True,
        )
    if options.json:
        about = {"thinwire": thinwire.__version__, "torch": torch.__version__, "processors": os.cpu_count()}
        options.json.write_text(json.dumps({"environment": {**about, "system": platform.platform()}, "rows": rows}))


if __name__ == "__main__":
    main()
