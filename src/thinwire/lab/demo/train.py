"""One rank of the demo: train four variants of the language model in turn, and record losses, times and bytes."""

import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab.demo import stock
from thinwire.lab.demo.model import LanguageModel, LogUniform, ModelConfig
from thinwire.lab.digests import digest_of
from thinwire.lab.testbed.rank import RankContext

INITIAL_ACCUMULATOR = 0.1
"""Initial accumulator of Adagrad: from 0 a gradient of rounding noise would cause a full step."""
WARM_UP_STEPS = 2
"""First steps, which no median includes: DDP forms its buckets, thinwire measures the link and loads its kernels."""
LEAST_MEASURED = 5
"""Fewest steps in a median if their number follows from a time, unless they take longer than `MOST_SECONDS`."""
LEAST_STEPS = 4
"""Fewest steps however long they take: at 100 Mbit/s, dense tables take stock DDP 18 s a step."""
MOST_SECONDS = 120.0
"""Most seconds of measured steps that are waited for, for the sake of `LEAST_MEASURED`."""
MOST_STEPS = 30
"""Most steps if their number follows from a time: rounding grows with steps, to 2.7e-7 of the loss in 27 of them."""
KERNELS = (
    "sum_rows", "union_positions", "deal", "checksum", "elias_fano_encode", "elias_fano_decode", "sum_rows_at",
    "dealt_ids", "scatter_rows", "pack_bits", "unpack_bits",
)  # fmt: skip
"""Kernels that the schemes call which "auto" chooses here: 6 s of a processor to compile where all take 33 s."""


@dataclass(frozen=True)
class Variant:
    """One way to train the model.

    Args:
        sparse: whether the tables are ``nn.Embedding(sparse=True)``; the default of `nn.Embedding` is False.
        attached: whether thinwire is attached to the DDP model.
    """

    name: str
    label: str
    sparse: bool
    attached: bool


VARIANTS = (
    Variant("ddp", "stock DDP", sparse=False, attached=False),
    Variant("thinwire", "thinwire", sparse=False, attached=True),
    Variant("ddp_sparse", "stock DDP, sparse=True", sparse=True, attached=False),
    Variant("thinwire_sparse", "thinwire, sparse=True", sparse=True, attached=True),
)


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run.

    Args:
        steps: steps of each variant; None for as many measured ones as fit into ``seconds``, at least `LEAST_MEASURED`.
        batch_size: sequences per rank and step, of ``sequence_length`` words.
        num_rows: rows of each table. It does not depend on the text: without the tests of the standard library, as in
            Debian's packages, that has 49 thousand words instead of 120 thousand. Rows beyond the words are only
            sampled as candidates; words beyond the rows, the rarest, share the last row.
    """

    steps: int | None = None
    seconds: float = 30.0
    seed: int = 0
    batch_size: int = 32
    sequence_length: int = 20
    num_rows: int = 120_000
    learning_rate: float = 0.2
    embedding_dim: int = 128
    hidden_size: int = 128
    candidates: int = 4096

    def model(self, sparse: bool = True) -> ModelConfig:
        """Return the sizes of the model."""
        return ModelConfig(self.num_rows, self.embedding_dim, self.hidden_size, self.candidates, sparse)

    def optimizer(self, parameters: Iterable[Tensor], fused: bool = False) -> torch.optim.Optimizer:
        """Return Adagrad for these parameters; fused, which is faster, it takes no sparse gradients."""
        rates = {"lr": self.learning_rate, "initial_accumulator_value": INITIAL_ACCUMULATOR}
        return torch.optim.Adagrad(parameters, **rates, fused=fused)

    def steps_in_all(self, done: int, seconds: float) -> int:
        """Return the expected number of steps of a run that did ``done``, the measured ones of them in ``seconds``."""
        if self.steps is not None:
            return self.steps
        measured = max(0, done - WARM_UP_STEPS)
        least = LEAST_STEPS if seconds >= MOST_SECONDS else WARM_UP_STEPS + LEAST_MEASURED
        fitting = math.floor(measured * self.seconds / seconds) if measured else 0
        more = done if seconds >= self.seconds else max(done + 1, WARM_UP_STEPS + fitting)
        return min(max(least, more), MOST_STEPS)


@dataclass(frozen=True)
class StepReport:
    """Message of a rank after a step of all variants: the loss under stock DDP, and the expected number of steps."""

    step: int
    loss: float
    steps_in_all: int


@dataclass(frozen=True)
class RankResult:
    """Results of a rank for one variant.

    Args:
        columns: a number per step, of this rank alone: loss, bytes_sent, comm_seconds, and the seconds of `timed_step`.
        parameters_digest: hash of all parameters at the end.
        table: what `Synchronizer.table` returns at the end; empty for stock DDP.
    """

    columns: dict[str, list[float]]
    parameters_digest: str
    table: list[dict[str, Any]]


def train_rank(context: RankContext, config: TrainConfig, tokens_file: Path) -> dict[str, RankResult]:
    """Train all variants from the same seed in the default process group, and return the results by variant.

    The variants take turns step by step, and in going first, so that a temporary load on the machine does not fall on
    one of them alone. The label of a variant is sent before its first step, which takes several times as long as later
    ones, and a `StepReport` after each step of all.

    Args:
        tokens_file: path of the text: ``.npy``, int32 word ids by frequency.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // context.world_size))
    # Adagrad builds sparse tensors; saying "no checks" aloud silences torch's warning that there are none.
    torch.sparse.check_sparse_tensor_invariants.disable()
    trainings = [DemoTraining(config, tokens_file, variant) for variant in VARIANTS]
    dist.barrier()
    start, done, in_all = 0.0, 0, 1
    while done < in_all:
        if done <= WARM_UP_STEPS:
            start = time.perf_counter()
        first = done % len(trainings)
        for training in trainings[first:] + trainings[:first]:
            if not done:
                context.send(training.variant.label)
            training.step(done)
        done += 1
        in_all = _of_rank_0(config.steps_in_all(done, time.perf_counter() - start))
        context.send(StepReport(done, trainings[0].columns["loss"][-1], in_all))
    return {training.variant.name: training.result() for training in trainings}


def _of_rank_0(number: int) -> int:
    shared = torch.tensor([number])
    dist.broadcast(shared, 0)
    return int(shared)


class DemoTraining:
    """One variant's model, optimizer and synchronizer, and its measurements so far."""

    def __init__(self, config: TrainConfig, tokens_file: Path, variant: Variant) -> None:
        self.config, self.variant = config, variant
        torch.manual_seed(config.seed)
        # All ranks draw the same parameters, so DDP need not broadcast 120 MB over the link.
        model = LanguageModel(config.model(variant.sparse))
        self.model = DistributedDataParallel(model, init_sync=False)
        # The same rule in both forms. Adagrad that is not fused takes 247 ms of a step for dense gradients, fused 65.
        self.optimizer = config.optimizer(self.model.parameters(), fused=not variant.sparse)
        self.synchronizer = thinwire.attach(self.model) if variant.attached else None
        if self.synchronizer is None:
            self.model._set_ddp_runtime_logging_sample_rate(1)
        self.sampler = LogUniform(config.num_rows, config.candidates)
        self.tokens = np.load(tokens_file, mmap_mode="r", allow_pickle=False)
        self.columns: defaultdict[str, list[float]] = defaultdict(list)

    def step(self, step: int) -> None:
        """Train one step, which all ranks begin together, and record it."""
        config = self.config
        words = batch(self.tokens, config, step, dist.get_rank(), dist.get_world_size())
        sent, busy = self._totals()
        dist.barrier()
        record = timed_step(self.model, self.optimizer, words, self.sampler, config.seed, step)
        if self.synchronizer is None:
            looked_up = self.model.module.looked_up(words, self.sampler.sample(config.seed, step))
            tables = looked_up if self.variant.sparse else ()
            record["bytes_sent"] = stock.sent_bytes(self.model, tables, dist.get_world_size())
            record["comm_seconds"] = stock.comm_seconds(self.model)
        else:
            sent_after, busy_after = self._totals()
            record["bytes_sent"], record["comm_seconds"] = sent_after - sent, busy_after - busy
        for name, value in record.items():
            self.columns[name].append(value)

    def _totals(self) -> tuple[float, float]:
        stats = {} if self.synchronizer is None else self.synchronizer.stats()
        return stats.get("comm/bytes_sent", 0.0), stats.get("comm/seconds", 0.0)

    def result(self) -> RankResult:
        """Return the measurements, and what the model has become."""
        table = [] if self.synchronizer is None else [dict(row) for row in self.synchronizer.table()]
        return RankResult(dict(self.columns), digest_of(self.model.parameters()), table)


def timed_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, words: Tensor, sampler: LogUniform, seed: int, step: int
) -> dict[str, float]:
    """Make one training step and return the seconds of its parts; synchronization happens inside backward."""
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = model(words, sampler.sample(seed, step), sampler)
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    end = time.perf_counter()
    return {
        "loss": loss.item(),
        "step_seconds": end - start,
        "forward_seconds": forward - start,
        "backward_seconds": backward - forward,
        "optimizer_seconds": end - backward,
    }


def batch(tokens: npt.NDArray[np.int32], config: TrainConfig, step: int, rank: int, world_size: int) -> Tensor:
    """Return the rows of the words of one rank and step, int64 ``[batch_size, sequence_length + 1]``.

    The text is cut into ``world_size * batch_size`` streams of equal length; each step reads on in every
    stream, and starts again where a stream ends.
    """
    streams = world_size * config.batch_size
    length = len(tokens) // streams
    windows = (length - 1) // config.sequence_length
    if windows < 1:
        raise ValueError(f"{len(tokens)} words are too few for {streams} streams of {config.sequence_length} words")
    starts = (rank * config.batch_size + np.arange(config.batch_size)) * length
    within = step % windows * config.sequence_length + np.arange(config.sequence_length + 1)
    words = tokens[starts[:, None] + within].astype(np.int64)
    return torch.from_numpy(np.minimum(words, config.num_rows - 1))
