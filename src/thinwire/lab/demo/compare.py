"""Comparison of the same training under stock DDP and under thinwire, on emulated hosts or on loopback."""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.lab.demo.corpus import Corpus
from thinwire.lab.demo.model import ModelConfig
from thinwire.lab.demo.train import (
    VARIANTS,
    WARM_UP_STEPS,
    RankResult,
    StepReport,
    TrainConfig,
    TrainJob,
    Variant,
    train_rank,
)
from thinwire.lab.testbed.launch import preload, run_ranks
from thinwire.lab.testbed.network import EmulatedNetwork, Link

OnStep = Callable[[int, int, float], None]
"""Function called with the steps done, the expected number of steps, and the loss under stock DDP, mean over ranks."""

Floats = npt.NDArray[np.float64]

LOSS_TOLERANCE = 1e-6
"""Largest relative difference of losses that rounding explains: sums of float32 in another order give 1.5e-7."""
TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class VariantResult:
    """Measurements of one variant, over all ranks.

    Args:
        columns: one number per step, means over ranks; see `RankResult`.
        parameters_bitwise_equal: whether all ranks ended with the same parameters.
        table: what `Synchronizer.table` returned on rank 0; empty for stock DDP.
    """

    variant: Variant
    columns: dict[str, Floats]
    parameters_bitwise_equal: bool
    table: list[dict[str, Any]]

    @property
    def loss(self) -> Floats:
        """The loss of each step."""
        return self.columns["loss"]

    @property
    def step_seconds(self) -> float:
        """Median seconds of a step."""
        return float(np.median(self._measured("step_seconds")))

    @property
    def step_seconds_range(self) -> tuple[float, float]:
        """The 10th and the 90th percentile of the seconds of a step."""
        low, high = np.percentile(self._measured("step_seconds"), (10, 90))
        return float(low), float(high)

    @property
    def comm_seconds(self) -> float:
        """Median seconds of a step in which communication was under way, hidden by backward or not."""
        return float(np.median(self._measured("comm_seconds")))

    @property
    def bytes_per_step(self) -> float:
        """Bytes that a rank sends in a step, mean over ranks and steps."""
        return float(self._measured("bytes_sent").mean())

    def to_json(self) -> dict[str, Any]:
        """Return the entry of ``variants`` in ``thinwire demo --json``."""
        low, high = self.step_seconds_range
        return {
            "name": self.variant.name,
            "step_seconds": self.step_seconds,
            "step_seconds_p10": low,
            "step_seconds_p90": high,
            "step_seconds_first": float(self.columns["step_seconds"][0]),
            "comm_seconds": self.comm_seconds,
            "bytes_per_step": self.bytes_per_step,
            "loss_last": float(self.loss[-1]),
            "loss": self.loss.tolist(),
            "parameters": self.table,
        }

    def _measured(self, column: str) -> Floats:
        """Return a column without the steps of warm-up, if there are others."""
        values = self.columns[column]
        return values[min(WARM_UP_STEPS, len(values) - 1) :]


@dataclass(frozen=True)
class Comparison:
    """Measurements of all variants, and the conditions.

    Args:
        link_mbit: the measured link; None on loopback.
        results: by name of the variant.
    """

    config: TrainConfig
    hosts: int
    num_tokens: int
    num_words: int
    link_mbit: float | None
    results: dict[str, VariantResult]

    @property
    def steps(self) -> int:
        """Number of steps of each variant."""
        return len(self.results["ddp"].loss)

    @property
    def measured_steps(self) -> int:
        """Number of steps in the medians."""
        return max(1, self.steps - WARM_UP_STEPS)

    @property
    def loss_difference(self) -> float:
        """Largest relative difference of a loss to that under stock DDP, over all variants and steps."""
        losses = np.array([result.loss for result in self.results.values()])
        return float((np.abs(losses - self.results["ddp"].loss) / np.abs(self.results["ddp"].loss)).max())

    @property
    def parameters_bitwise_equal(self) -> bool:
        """Whether the ranks of each variant ended with the same parameters."""
        return all(result.parameters_bitwise_equal for result in self.results.values())

    @property
    def is_exact(self) -> bool:
        """Whether all variants trained the same model, up to rounding."""
        return self.parameters_bitwise_equal and self.loss_difference <= LOSS_TOLERANCE

    def speedup(self, over: str, of: str) -> float:
        """Return how many times faster a step of the variant ``of`` is than one of ``over``."""
        return self.results[over].step_seconds / self.results[of].step_seconds

    def to_json(self) -> dict[str, Any]:
        """Return the figures of ``thinwire demo --json``; seconds are medians over steps, of means over ranks."""

        def of_dense(what: Callable[[VariantResult], float]) -> dict[str, float]:
            return {name: what(self.results[name]) for name in ("ddp", "thinwire")}

        return {
            "steps": self.steps,
            "warm_up_steps": self.steps - self.measured_steps,
            "hosts": self.hosts,
            "seed": self.config.seed,
            "table_rows": self.config.num_rows,
            "link_mbit": self.link_mbit,
            "corpus": {"tokens": self.num_tokens, "distinct_words": self.num_words},
            "loss_max_relative_difference": self.loss_difference,
            "parameters_bitwise_equal": self.parameters_bitwise_equal,
            "bytes_per_step": of_dense(lambda result: result.bytes_per_step),
            "bytes_per_step_method": {
                "ddp": "formula of torch's Gloo collectives applied to the rows of every step",
                "thinwire": "counted as sent",
            },
            "step_seconds": of_dense(lambda result: result.step_seconds),
            "comm_seconds": of_dense(lambda result: result.comm_seconds),
            "variants": [result.to_json() for result in self.results.values()],
        }


def parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of the language model: two tables, one LSTM layer, the projection."""
    tables = 2 * model.num_words * model.embedding_dim
    lstm = 4 * model.hidden_size * (model.embedding_dim + model.hidden_size + 2)
    return tables + lstm + (model.hidden_size + 1) * model.embedding_dim


def compare(
    corpus: Corpus, config: TrainConfig, hosts: int, link: Link | None = None, on_step: OnStep | None = None
) -> Comparison:
    """Train all variants in turn in the same processes, one for each host.

    Args:
        link: link of each emulated host; None for loopback.

    Raises:
        ValueError: there are no hosts, or too many.
        NetAdminError: emulated hosts are not allowed here.
        RanksFailed: a rank failed.
    """
    if hosts < 1:
        raise ValueError(f"hosts must be at least 1, got {hosts}")
    preload("torch._dynamo")
    with tempfile.TemporaryDirectory(prefix="thinwire-demo-") as directory:
        job = TrainJob(config, Path(directory) / "tokens.npy")
        # A file of our own: the cache of the corpus may be missing or replaced while we run.
        np.save(job.tokens_file, corpus.tokens)
        link_mbit, ranks = _train(job, hosts, link, _Progress(hosts, on_step))
    results = {variant.name: _collect(variant, [rank[variant.name] for rank in ranks]) for variant in VARIANTS}
    return Comparison(config, hosts, len(corpus.tokens), corpus.num_words, link_mbit, results)


def _train(
    job: TrainJob, hosts: int, link: Link | None, progress: "_Progress"
) -> tuple[float | None, list[dict[str, RankResult]]]:
    """Return the measured link in Mbit/s, and the results of each rank."""

    def run(network: EmulatedNetwork | None) -> list[dict[str, RankResult]]:
        outcomes = run_ranks(
            train_rank, job, world_size=hosts, network=network, timeout_seconds=TIMEOUT_SECONDS, on_message=progress
        )
        return [outcome.value for outcome in outcomes]

    if link is None:
        return None, run(None)
    with EmulatedNetwork(hosts, link) as network:
        return network.measure(), run(network)


class _Progress:
    """Receiver of the reports of all ranks, which calls ``on_step`` once all ranks have done a step."""

    def __init__(self, hosts: int, on_step: OnStep | None) -> None:
        self._hosts, self._on_step = hosts, on_step
        self._losses: defaultdict[int, list[float]] = defaultdict(list)

    def __call__(self, rank: int, report: StepReport) -> None:
        losses = self._losses[report.step]
        losses.append(report.loss)
        if len(losses) == self._hosts and self._on_step is not None:
            self._on_step(report.step, report.steps_in_all, float(np.mean(losses)))


def _collect(variant: Variant, ranks: Sequence[RankResult]) -> VariantResult:
    names = ranks[0].columns
    columns = {name: np.mean([rank.columns[name] for rank in ranks], axis=0) for name in names}
    equal = len({rank.parameters_digest for rank in ranks}) == 1
    return VariantResult(variant, columns, equal, ranks[0].table)
