"""Steps of models trained by stock DDP and by thinwire in the same processes, in turn: is thinwire ever slower?

    python benchmarks/not_slower.py --json benchmarks/results/not-slower.json
    python tools/results.py benchmarks/results/not-slower.json
    python benchmarks/not_slower.py --section benchmarks/results/not-slower.json >> docs/evidence/bench-train.md

Each job is trained three times at once, from the same seed and batches: by stock DDP, by DDP with
`thinwire.attach(ddp)`, and by stock DDP again. That third one is the control: what it seems to differ from the first
by is the noise of this harness. What could favor one of them:

- *Order.* All three step in each round, in an order drawn again for each round, the same on all ranks, after a barrier
  that is not timed. thinwire's model is created between the other two. Stock's steps right after one of thinwire's
  are compared with its others: work of thinwire that went on behind its own step would show there.
- *Warm-up.* A fourth model is trained for a few steps first, so that none of the three pays for what a process does
  once. Nothing of numba is loaded where ranks are forked from, so thinwire pays for that itself, as in a user's
  process, unless there is nothing to gain and it never loads it: the column "kernels" says so. Machine code is on disk.
- *Clocks.* A trial of thinwire times whole steps, and must not take those of the others for a part of its own: its
  clock stands still in them.
- *The garbage collector* is on, and meets whoever allocates; what there was before the first round is frozen.
- *Memory and caches.* Each model has its own tensors and process group, and each finds the caches as another one left
  them. Ranks have one thread of torch each.

A step takes as long as on its slowest rank. The ratio is the median over rounds of thinwire's step to each stock step
of its round; medians do not see rare steps, so the ratio of all seconds is stated, too. The ratio of the first 200
rounds is that of their sums, the first step included. Behind each in brackets is its interval of 95 %, by a bootstrap
over blocks of 10 neighboring rounds. "not slower" means that the interval ends below the limit, "slower" that it begins
above, and anything else is not resolved by so many rounds.

Calls are those of Python in a step on the training thread. On loopback, ranks that train one model only, by stock or
thinwire, say what attach and the first 200 steps add to memory, and take of the processors, whichever thread takes it.
Tables of the jobs named ``..._dense`` have dense gradients, and those of the others are ``sparse=True``; the model of
``torch_transformer`` is one of torch's own tests. Jobs named ``..._plain`` attach the plain module instead of DDP, and
in those named ``..._unused`` DDP looks for unused parameters. Links other than "none" need network namespaces.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import json
import logging
import os
import platform
import random
import resource
import statistics
import sys
import time
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab.demo.model import LanguageModel, LogUniform, ModelConfig
from thinwire.lab.testbed.launch import RanksFailed, leave_kernels_to_ranks, preload, values_of_ranks
from thinwire.lab.testbed.network import Link, emulated
from thinwire.lab.testbed.rank import RankContext
from thinwire.tune import playing

SETTLED, FIRST = 1.02, 1.05
"""Largest ratio of thinwire to stock DDP that counts as not slower: of a step once decided, and of the first 200."""
FIRST_STEPS, LEAST_ROUNDS, MOST_ROUNDS = 200, 100, 2000
STOCK, OURS, CONTROL = range(3)
"""Indices of the three trainings."""
BLOCK, RESAMPLES = 10, 1000
MOST_REPEATS = 2


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
        is_plain, finds_unused = is_attached and name.endswith("_plain"), name.endswith("_unused")
        name = name.removesuffix("_plain").removesuffix("_unused")
        self.job = JOBS[name.removesuffix("_dense")]
        os.environ["THINWIRE_ROUTE"] = "auto"  # as in any training; ranks of emulated hosts have rows at once
        torch.sparse.check_sparse_tensor_invariants.disable()
        torch.manual_seed(0)
        # Stock DDPs with sparse gradients damage the heap, see torch_sparse_crash.py, several on one Gloo group most
        # often: 3 of 4 runs of 2,500 steps on 4 ranks ended by SIGSEGV or SIGABRT (torch 2.13, nothing of thinwire).
        model = self.job.model(not name.endswith("_dense"))
        ddp = partial(DistributedDataParallel, init_sync=False, find_unused_parameters=finds_unused)
        self.model = model if is_plain else ddp(model, process_group=dist.new_group())
        self.optimizer = self.job.optimizer(self.model.parameters())
        self.data = torch.Generator().manual_seed(rank)
        self.sync = thinwire.attach(self.model) if is_attached else None
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.elapsed = self.started = 0.0

    def clock(self) -> float:
        """Return the time within steps of this training, which is all that a training alone would see."""
        return self.elapsed + time.perf_counter() - self.started

    def step(self, step: int) -> None:
        """Make a step, and record its seconds."""
        inputs, target = self.job.batch(self.data, step)
        dist.barrier()
        before, self.started = time.process_time(), time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.job.loss(self.model(*inputs), target)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - self.started)
        self.elapsed += self.seconds[-1]
        self.processor_seconds.append(time.process_time() - before)


def alone(context: RankContext, name: str, steps: int, is_attached: bool) -> tuple[float, float]:
    """Return what a training and its first steps add to the memory of a rank, in MB, and its processor seconds."""
    memory, seconds = resident_mb(), used_seconds()
    training = Training(name, context.rank, is_attached)
    for step in range(steps):
        training.step(step)
    return resident_mb() - memory, used_seconds() - seconds


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def used_seconds() -> float:
    """Return the processor seconds of this process and its children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def calls(training: Training, step: int) -> int:
    """Return the calls of Python functions in a step."""
    profile = cProfile.Profile()
    profile.enable()
    training.step(step)
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats() if not isinstance(entry.code, str))  # those of C


def train(context: RankContext, name: str, first: int, seconds: float, is_logged: bool) -> dict[str, Any]:
    """Train by stock DDP, thinwire and stock DDP in turn, and return what this rank saw.

    Args:
        first: rounds at the start that count by themselves.
        seconds: how long to go on after them.
    """
    if is_logged and context.rank == 0:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    warm = Training(name, context.rank, is_attached=False)
    for step in range(5):
        warm.step(step)
    stock_calls = statistics.median(calls(warm, 5 + number) for number in range(5))  # before anything is attached
    del warm
    trainings = [Training(name, context.rank, is_attached) for is_attached in (False, True, False)]
    playing.time = SimpleNamespace(perf_counter=trainings[OURS].clock)  # type: ignore[assignment]
    gc.collect()
    gc.freeze()
    draw, orders, rounds, started = random.Random(0), [], first, time.perf_counter()
    while len(orders) < rounds:
        orders.append(draw.sample(range(len(trainings)), len(trainings)))
        for index in orders[-1]:
            trainings[index].step(len(orders) - 1)
        if len(orders) == first:
            each = torch.tensor((time.perf_counter() - started) / first)
            dist.all_reduce(each, dist.ReduceOp.MAX)
            rounds += min(MOST_ROUNDS, max(LEAST_ROUNDS, round(seconds / each.item())))
    table = trainings[OURS].sync.table()
    return {
        "seconds": [training.seconds[:] for training in trainings],
        "processor": [training.processor_seconds[:] for training in trainings],
        "orders": orders,
        "schemes": sorted({str(row["scheme"]) for row in table}),
        "reasons": "; ".join(dict.fromkeys(str(row["reason"]) for row in table if row["reason"])),
        "has_kernels": "numba" in sys.modules,
        "calls": [stock_calls, statistics.median(calls(trainings[OURS], rounds + number) for number in range(5))],
    }


def interval(figure: Callable[[np.ndarray], float], rounds: int) -> list[float]:
    """Return a figure of rounds, which it is given the indices of, and the ends of its interval of 95 %."""
    starts = np.random.default_rng(0).integers(0, rounds, (RESAMPLES, -(-rounds // BLOCK)))
    samples = ((starts[..., None] + np.arange(BLOCK)) % rounds).reshape(RESAMPLES, -1)[:, :rounds]
    return [figure(np.arange(rounds)), *np.quantile([figure(sample) for sample in samples], (0.025, 0.975)).tolist()]


def figures(seconds: np.ndarray, first: int) -> dict[str, list[float]]:
    """Return ratios of thinwire, and of the control, to stock DDP.

    Args:
        seconds: of each step on its slowest rank, by training and round.
        first: rounds at the start that count by themselves.
    """
    stock, ours, control = seconds[:, first:]
    begun, early = seconds[:, 0], seconds[:, 1:first]

    def sums(mine: float, *theirs: float) -> float:
        return float(mine / statistics.fmean(theirs))

    return {
        "ratio": interval(
            lambda at: float(np.median(np.concatenate([ours[at] / stock[at], ours[at] / control[at]]))), len(ours)
        ),
        "control_ratio": interval(lambda at: float(np.median(control[at] / stock[at])), len(ours)),
        "sum_ratio": interval(lambda at: sums(ours[at].sum(), stock[at].sum(), control[at].sum()), len(ours)),
        "first_ratio": interval(
            lambda at: sums(*(begun + early[:, at].sum(1))[[OURS, STOCK, CONTROL]].tolist()), early.shape[1]
        ),
        "first_control_ratio": interval(
            lambda at: sums(*(begun + early[:, at].sum(1))[[CONTROL, STOCK]].tolist()), early.shape[1]
        ),
    }


def behind_ours(seconds: np.ndarray, orders: Sequence[Sequence[int]], first: int) -> float:
    """Return the ratio of stock steps right after one of thinwire's to other stock steps, after the first rounds."""
    by_predecessor: tuple[list[float], list[float]] = [], []
    before = OURS
    for number, order in enumerate(orders):
        for index in order:
            if index != OURS and number >= first:
                by_predecessor[before == OURS].append(seconds[index, number])
            before = index
    return statistics.median(by_predecessor[True]) / statistics.median(by_predecessor[False])


def verdict(limits: Sequence[tuple[list[float], float]]) -> str:
    """Return what intervals say of the limits of their figures."""
    if any(low > limit for (_, low, _), limit in limits):
        return "SLOWER"
    return "not slower" if all(high <= limit for (_, _, high), limit in limits) else "not resolved"


def measured(name: str, link: Link, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train a job and return its figures."""
    with emulated(ranks, link) as network:
        mbit = network.measure() if network else None
        seen = values_of_ranks(
            train,
            name,
            options.first,
            options.seconds,
            options.log,
            world_size=ranks,
            network=network,
            timeout_seconds=600,
        )
    seconds = np.array([one["seconds"] for one in seen]).max(0)
    stock, ours, control = np.array([one["processor"] for one in seen]).mean(0)[:, options.first :].sum(1)
    row = {
        "job": name,
        "ranks": ranks,
        "link_mbit": mbit,
        "rounds": seconds.shape[1] - options.first,
        "stock_seconds": float(np.median(seconds[STOCK, options.first :])),
        **figures(seconds, options.first),
        "behind_ours_ratio": behind_ours(seconds, seen[0]["orders"], options.first),
        "processor_ratio": float(ours / statistics.fmean((stock, control))),
        "first_step_seconds": seconds[:CONTROL, 0].tolist(),
        **{key: seen[0][key] for key in ("calls", "has_kernels", "schemes", "reasons")},
    }
    if not link.mbit:
        both = [
            values_of_ranks(alone, name, options.first, is_attached, world_size=ranks, timeout_seconds=300)
            for is_attached in (False, True)
        ]
        row["memory_mb"] = [max(memory for memory, _ in of) for of in both]
        row["first_processor_seconds"] = [statistics.fmean(used for _, used in of) for of in both]
    return row | {"verdict": verdict([(row["ratio"], SETTLED), (row["first_ratio"], FIRST)])}


def repeated(name: str, link: Link, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a job as `measured` does, again if a rank was lost, as in torch's crash of sparse sums."""
    for repeats in range(MOST_REPEATS):
        try:
            return measured(name, link, ranks, options) | {"repeats": repeats}
        except RanksFailed as failure:
            print(f"{name} {link.mbit} Mbit/s {ranks} ranks, to be repeated: {failure}", flush=True)
    return measured(name, link, ranks, options) | {"repeats": MOST_REPEATS}


RATIOS = "ratio", "control_ratio", "sum_ratio", "first_ratio", "first_control_ratio"


def spread(figure: Sequence[float]) -> str:
    return "{:.3f} [{:.3f} .. {:.3f}]".format(*figure)


HEADINGS = (
    "job", "link", "ranks", "stock, ms", "thinwire / stock", "stock / stock", "all seconds",
    "first 200", "first 200, stock / stock", "calls", "kernels", "plays", "verdict",
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row in the section of a page."""
    return [
        f"`{row['job']}`",
        f"{row['link_mbit'] / 1e3:.1f} Gbit/s" if row["link_mbit"] else "loopback",
        str(row["ranks"]),
        f"{1e3 * row['stock_seconds']:.1f}",
        *(spread(row[key]) for key in RATIOS),
        " to ".join(f"{one:.0f}" for one in row["calls"]),
        "loaded" if row["has_kernels"] else "no",
        " ".join(row["schemes"]),
        row["verdict"],
    ]


def section(result: dict[str, Any]) -> str:
    """Return the section of a page about a result."""
    about, rows = result["environment"], result["rows"]
    counts = {said: sum(row["verdict"] == said for row in rows) for said in ("not slower", "not resolved", "SLOWER")}
    lone = [row for row in rows if "memory_mb" in row]
    lines = [
        "## Is it ever slower?\n",
        "`python benchmarks/not_slower.py` trains each job by stock DDP, with `thinwire.attach(ddp)`, and by stock",
        "DDP again as a control, in the same processes, step by step, in an order drawn for each round. A step takes",
        f"as long as on its slowest rank. Limits: {SETTLED} of stock after {FIRST_STEPS} steps (a median over rounds),",
        f"and {FIRST} for the sum of those. In brackets are intervals of 95 %, by a bootstrap over blocks of rounds;",
        'columns "stock / stock" show what the harness makes of no difference at all. "not slower": the interval ends',
        'below the limit; "SLOWER": it begins above; "not resolved": neither.',
        f"{', '.join(f'{count} {said}' for said, count in counts.items())}. torch {about['torch']},"
        f" {about['processors']} processors, {about['date']}; raw rows in `benchmarks/results/not-slower.json`.\n",
        f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS),
        *(f"| {' | '.join(cells(row))} |" for row in rows),
        f"\nAttach and {FIRST_STEPS} steps of a rank that trains nothing else, by stock and thinwire:\n",
        "| job | ranks | processor seconds | MB |",
        "|---|---|---|---|",
        *(
            f"| `{row['job']}` | {row['ranks']} |"
            f" {' to '.join(f'{one:.2f}' for one in row['first_processor_seconds'])} |"
            f" {' to '.join(f'{one:.0f}' for one in row['memory_mb'])} |"
            for row in lone
        ),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default="mlp,transformer,table,tables_dense,recommender,torch_transformer")
    parser.add_argument("--links", default="none,10gbit", help="none, or rates such as 1gbit")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--first", type=int, default=FIRST_STEPS, help="rounds at the start that count by themselves")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the rounds after them, of each row")
    parser.add_argument("--log", action="store_true", help="print the choices of thinwire")
    parser.add_argument("--json", type=Path, help="write rows there, after each of them")
    parser.add_argument("--section", type=Path, metavar="JSON", help="measure nothing; print the section of a page")
    options = parser.parse_args(arguments)
    if options.section:
        print(section(json.loads(options.section.read_text())))
        return
    for module in ("torch._dynamo", "thinwire.lab.demo.model"):
        preload(module)
    leave_kernels_to_ranks()
    about = {"thinwire": thinwire.__version__, "torch": torch.__version__, "processors": os.cpu_count()}
    about |= {"system": platform.platform(), "date": time.strftime("%Y-%m-%d")}
    rows: list[dict[str, Any]] = []
    combinations = itertools.product(options.ranks.split(","), options.links.split(","), options.jobs.split(","))
    for ranks, link, name in combinations:
        rows.append(row := repeated(name, Link.parse(link), int(ranks), options))
        print(
            f"{name:17} {link:>7} {ranks} ranks  stock {1e3 * row['stock_seconds']:6.1f} ms, {row['rounds']} rounds "
            + "; ".join(f"{key.removesuffix('_ratio')} {spread(row[key])}" for key in RATIOS)
            + f"; {row['verdict']}; behind ours {row['behind_ours_ratio']:.3f}, of processors"
            f" {row['processor_ratio']:.3f}; calls {' to '.join(map(str, row['calls']))}; kernels {row['has_kernels']};"
            f" {row.get('memory_mb', '')} {row.get('first_processor_seconds', '')} {' '.join(row['schemes'])}"
            f"  {row['reasons']}",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps({"environment": about, "rows": rows}))


if __name__ == "__main__":
    main()
