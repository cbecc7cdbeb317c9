"""One rank of the demo: train the language model for some steps and record losses, times and bytes."""

import hashlib
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from thinwire.lab.demo import stock
from thinwire.lab.demo.model import LanguageModel, LogUniform, ModelConfig

LOOPBACK_SCHEME = "zen"
"""Scheme on loopback: the demo is about bytes, which cost nothing there, so that "auto" would save none."""
MODES = ("ddp", "thinwire")

INITIAL_ACCUMULATOR = 0.1
"""Initial accumulator of Adagrad: from 0 a gradient of rounding noise would cause a full step."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run: ``batch_size`` sequences of ``sequence_length`` words per rank and step."""

    steps: int = 120
    seed: int = 0
    batch_size: int = 32
    sequence_length: int = 20
    learning_rate: float = 0.2
    embedding_dim: int = 128
    hidden_size: int = 128
    candidates: int = 4096

    def model(self, num_words: int) -> ModelConfig:
        """Return the sizes of the model for a vocabulary."""
        return ModelConfig(num_words, self.embedding_dim, self.hidden_size, self.candidates)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")


@dataclass(frozen=True)
class TrainJob:
    """A run as sent to the workers: text and results are in the directory ``results``."""

    config: TrainConfig
    num_words: int
    results: Path
    scheme: str = "auto"

    @property
    def tokens_file(self) -> Path:
        """Path of the text: ``.npy``, int32 word ids below ``num_words``."""
        return self.results / "tokens.npy"

    def result_file(self, mode: str, rank: int) -> Path:
        """Return the path at which a rank leaves its :class:`RankResult` as JSON."""
        return self.results / f"{mode}-rank{rank}.json"

    def progress_file(self, mode: str) -> Path:
        """Return the path at which rank 0 appends its loss, one float64 per finished step."""
        return self.results / f"{mode}-progress.f64"


class DemoSynchronizer(Protocol):
    """Common interface of the two modes: bytes, seconds and one table row per parameter."""

    def stats(self) -> dict[str, float]: ...

    def table(self) -> Any: ...


@dataclass(frozen=True)
class RankResult:
    """Report of a rank about one mode; lists hold one number per step, of this rank alone."""

    loss: list[float]
    step_seconds: list[float]
    forward_seconds: list[float]
    backward_seconds: list[float]
    optimizer_seconds: list[float]
    comm_seconds: list[float]
    bytes_sent: list[float]
    parameters_digest: str
    table: list[dict[str, Any]]
    stats: dict[str, float]


@record
def train_worker(job: TrainJob) -> None:
    """Join the process group and train, as a worker that torchrun started."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once, without four tracebacks
    dist.init_process_group("gloo")
    try:
        train_rank(replace(job, scheme=LOOPBACK_SCHEME))
    finally:
        dist.destroy_process_group()


def train_on_host(_context: object, job: TrainJob) -> None:
    """Train as a rank on an emulated host, where the testbed has made the process group."""
    train_rank(job)


def train_rank(job: TrainJob, modes: tuple[str, ...] = MODES) -> None:
    """Train the same seed once per mode in the default process group, and write the result files.

    The modes take turns step by step, and alternate in going first, so that a temporary load on the machine
    does not fall on one of them alone.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    # Adagrad builds sparse tensors; saying "no checks" aloud silences torch's warning that there are none.
    torch.sparse.check_sparse_tensor_invariants.disable()
    trainings = [DemoTraining(job, mode) for mode in modes]
    for step in range(job.config.steps):
        for training in trainings if step % 2 == 0 else reversed(trainings):
            training.step(step)
    for training in trainings:
        training.write_result()


class DemoTraining:
    """One mode's model, optimizer and synchronizer, and its measurements so far."""

    def __init__(self, job: TrainJob, mode: str) -> None:
        self.job, self.mode = job, mode
        config = job.config
        torch.manual_seed(config.seed)
        # All ranks draw the same parameters, so DDP need not broadcast 120 MB over the link.
        self.model = DistributedDataParallel(LanguageModel(config.model(job.num_words)), init_sync=False)
        self.optimizer = torch.optim.Adagrad(
            self.model.parameters(), lr=config.learning_rate, initial_accumulator_value=INITIAL_ACCUMULATOR
        )
        self.synchronizer = _attach(mode, self.model, job.scheme)
        self.sampler = LogUniform(job.num_words, config.candidates)
        self.tokens = np.load(job.tokens_file, mmap_mode="r", allow_pickle=False)
        self.records: list[dict[str, float]] = []

    def step(self, step: int) -> None:
        """Train one step, record it, and append to the progress file."""
        config = self.job.config
        words = batch(self.tokens, config, step, dist.get_rank(), dist.get_world_size())
        before = self.synchronizer.stats()
        record = timed_step(self.model, self.optimizer, words, self.sampler, config.seed, step)
        after = self.synchronizer.stats()
        record["comm_seconds"] = after["comm/seconds"] - before["comm/seconds"]
        record["bytes_sent"] = after["comm/bytes_sent"] - before["comm/bytes_sent"]
        self.records.append(record)
        if dist.get_rank() == 0:
            with self.job.progress_file(self.mode).open("ab") as file:
                file.write(np.float64(record["loss"]).tobytes())

    def write_result(self) -> None:
        """Write the :class:`RankResult` for the parent."""
        columns = {name: [record[name] for record in self.records] for name in self.records[0]}
        result = RankResult(
            **columns,
            parameters_digest=digest(self.model),
            table=[dict(row) for row in self.synchronizer.table()],
            stats=self.synchronizer.stats(),
        )
        path = self.job.result_file(self.mode, dist.get_rank())
        path.write_text(json.dumps(asdict(result), default=str))


def _attach(mode: str, model: DistributedDataParallel, scheme: str) -> DemoSynchronizer:
    if mode == "ddp":
        return stock.attach(model)
    import thinwire

    return thinwire.attach(model, scheme=scheme)


def timed_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    words: Tensor,
    sampler: LogUniform,
    seed: int,
    step: int,
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
    """Return the words of one rank and step, int64 ``[batch_size, sequence_length + 1]``.

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
    return torch.from_numpy(tokens[starts[:, None] + within].astype(np.int64))


def digest(model: nn.Module) -> str:
    """Return a hash of the bytes of every parameter, in order of their names."""
    state = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters()):
        state.update(name.encode())
        state.update(parameter.detach().contiguous().numpy().data)
    return state.hexdigest()
