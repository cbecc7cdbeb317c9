"""Comparison of the same training under stock DDP and under thinwire on several workers."""

import json
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from thinwire.lab.demo.corpus import Corpus
from thinwire.lab.demo.model import ModelConfig
from thinwire.lab.demo.stock import ring_bytes
from thinwire.lab.demo.train import MODES, RankResult, TrainConfig, TrainJob, train_worker

OnStep = Callable[[str, int, float], None]
"""Function called with (mode, steps done, last loss of rank 0), a few times a second."""

Launch = Callable[[TrainJob, int], float | None]
"""Function that trains a job on that many workers and returns the measured link in Mbit/s, or None without one."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ModeResult:
    """Measurements of one mode, over all ranks. Arrays are float64 ``[steps]`` and hold means over ranks."""

    loss: Floats
    step_seconds: Floats
    forward_seconds: Floats
    backward_seconds: Floats
    optimizer_seconds: Floats
    comm_seconds: Floats
    bytes_sent: Floats
    bytes_by_rank: Floats
    """Bytes per step of each rank, float64 ``[workers]``."""
    parameters_bitwise_equal: bool
    table: list[dict[str, Any]]

    @property
    def bytes_per_step(self) -> float:
        """Bytes sent per step and rank, mean over all steps."""
        return float(self.bytes_sent.mean())

    @property
    def imbalance(self) -> float:
        """Bytes of the rank that sent most over the mean of all ranks: 1 is perfect."""
        mean = self.bytes_by_rank.mean()
        return float(self.bytes_by_rank.max() / mean) if mean else 1.0

    def bytes_by_parameter(self, separate: Collection[str]) -> dict[str, float]:
        """Return the bytes per step of the parameters in ``separate``, and of "all others" together."""
        sent = dict.fromkeys((*separate, "all others"), 0.0)
        for row in self.table:
            name = row.get("name") if row.get("name") in sent else "all others"
            # A total counts every step of a bucket that DDP rebuilt after the first one.
            total = row.get("total_bytes")
            sent[str(name)] += row.get("bytes", 0.0) if total is None else total / len(self.loss)
        return sent


@dataclass(frozen=True)
class Comparison:
    """Measurements of both modes, and the conditions. ``link_mbit`` is the *measured* link, None on plain loopback."""

    config: TrainConfig
    workers: int
    num_tokens: int
    num_words: int
    link_mbit: float | None
    modes: dict[str, ModeResult]

    @property
    def loss_difference(self) -> Floats:
        """Relative difference of the losses, per step."""
        ddp, thinwire = (self.modes[mode].loss for mode in MODES)
        return np.abs(thinwire - ddp) / np.abs(ddp)

    @property
    def sparse_parameters(self) -> list[str]:
        """Names of the parameters whose gradients stock DDP saw as sparse."""
        return [row["name"] for row in self.modes["ddp"].table if row["kind"] != "dense"]

    @property
    def dense_ddp_bytes_per_step(self) -> float:
        """Bytes that DDP would send with ``sparse=False``: a ring all-reduce of all. Computed, not run."""
        return ring_bytes(4 * parameter_count(self.config.model(self.num_words)), self.workers)

    def to_json(self) -> dict[str, Any]:
        """Return the figures of ``thinwire demo --json``; seconds are medians over steps, of means over ranks."""
        return {
            "steps": self.config.steps,
            "workers": self.workers,
            "seed": self.config.seed,
            "link_mbit": self.link_mbit,
            "corpus": {"tokens": self.num_tokens, "distinct_words": self.num_words},
            "loss_first": self._each(lambda mode: float(mode.loss[0])),
            "loss_last": self._each(lambda mode: float(mode.loss[-1])),
            "loss_max_relative_difference": float(self.loss_difference.max()),
            "parameters_bitwise_equal": all(mode.parameters_bitwise_equal for mode in self.modes.values()),
            "bytes_per_step": self._each(lambda mode: mode.bytes_per_step)
            | {"ddp_dense": self.dense_ddp_bytes_per_step},
            "bytes_per_step_method": {
                "ddp": "formula of torch's Gloo collectives applied to the rows of every step",
                "thinwire": "counted as sent",
                "ddp_dense": "formula, not run",
            },
            "bytes_imbalance": {"thinwire": self.modes["thinwire"].imbalance},
            "step_seconds": self._each(lambda mode: float(np.median(mode.step_seconds))),
            "comm_seconds": self._each(lambda mode: float(np.median(mode.comm_seconds))),
            "parameters": self._each(lambda mode: mode.table),
            "loss": self._each(lambda mode: mode.loss.tolist()),
        }

    def _each(self, of: Callable[[ModeResult], Any]) -> dict[str, Any]:
        return {name: of(mode) for name, mode in self.modes.items()}


def parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of the language model: two tables, one LSTM layer, the projection."""
    tables = 2 * model.num_words * model.embedding_dim
    lstm = 4 * model.hidden_size * (model.embedding_dim + model.hidden_size + 2)
    return tables + lstm + (model.hidden_size + 1) * model.embedding_dim


def compare(
    corpus: Corpus,
    config: TrainConfig,
    workers: int,
    on_step: OnStep | None = None,
    launch: Launch | None = None,
) -> Comparison:
    """Train both modes on ``workers`` ranks, by turns in the same processes.

    ``launch`` starts the workers, by default :func:`launch_on_loopback`. Raises ValueError for bad sizes,
    ``ChildFailedError`` of torchrun when a worker fails.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    with tempfile.TemporaryDirectory(prefix="thinwire-demo-") as directory:
        job = TrainJob(config, corpus.num_words, Path(directory))
        # A file of our own: the cache of the corpus may be missing or replaced while we run.
        np.save(job.tokens_file, corpus.tokens)
        with _watched(job, on_step):
            link_mbit = (launch or launch_on_loopback)(job, workers)
        modes = {mode: _collect(job, mode, workers) for mode in MODES}
    return Comparison(config, workers, len(corpus.tokens), corpus.num_words, link_mbit, modes)


def launch_on_loopback(job: TrainJob, workers: int) -> None:
    """Train in ``workers`` processes of this machine, started as ``torchrun --standalone`` does."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        elastic_launch(_torchrun(workers), train_worker)(job)
    except SignalException as stopped:  # Ctrl-C: the launcher has ended the workers
        raise KeyboardInterrupt from stopped


def _torchrun(workers: int) -> LaunchConfig:
    """Settings of ``torchrun --standalone --nproc-per-node WORKERS``: c10d rendezvous on a free port, no restarts."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id="thinwire-demo",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )


@contextmanager
def _watched(job: TrainJob, on_step: OnStep | None) -> Iterator[None]:
    """Report progress from a thread: the launcher keeps the main thread, where signals arrive."""
    if on_step is None:
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(job, on_step, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch(job: TrainJob, on_step: OnStep, done: threading.Event) -> None:
    seen = dict.fromkeys(MODES, 0)
    last_look = False
    while not last_look:
        last_look = done.wait(0.2)
        for mode in MODES:
            losses = _losses_so_far(job.progress_file(mode))
            if len(losses) > seen[mode]:
                seen[mode] = len(losses)
                on_step(mode, len(losses), float(losses[-1]))


def _losses_so_far(path: Path) -> Floats:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return np.empty(0)
    return np.frombuffer(content[: len(content) // 8 * 8], np.float64)


def _collect(job: TrainJob, mode: str, workers: int) -> ModeResult:
    ranks = [RankResult(**json.loads(job.result_file(mode, rank).read_text())) for rank in range(workers)]

    def mean(column: str) -> Floats:
        return np.mean([getattr(rank, column) for rank in ranks], axis=0)

    return ModeResult(
        loss=mean("loss"),
        step_seconds=mean("step_seconds"),
        forward_seconds=mean("forward_seconds"),
        backward_seconds=mean("backward_seconds"),
        optimizer_seconds=mean("optimizer_seconds"),
        comm_seconds=mean("comm_seconds"),
        bytes_sent=mean("bytes_sent"),
        bytes_by_rank=np.array([rank.bytes_sent for rank in ranks], np.float64).mean(axis=1),
        parameters_bitwise_equal=len({rank.parameters_digest for rank in ranks}) == 1,
        table=_mean_table([rank.table for rank in ranks]),
    )


def _mean_table(tables: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Means over ranks of every numeric column; other columns are rank 0's. Rows are matched by name."""
    rows = []
    for first in tables[0]:
        same = [row for table in tables for row in table if row.get("name") == first.get("name")]
        rows.append({column: _mean_cell([row.get(column) for row in same]) for column in first})
    return rows


def _mean_cell(cells: list[Any]) -> Any:
    numeric = all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in cells)
    return float(np.mean(cells)) if numeric else cells[0]
