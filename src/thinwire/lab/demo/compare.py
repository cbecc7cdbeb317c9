"""Comparison of the same training under stock DDP and under thinwire, on emulated hosts or on loopback."""

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thinwire.lab.demo.corpus import Corpus
from thinwire.lab.demo.train import (
    KERNELS,
    VARIANTS,
    WARM_UP_STEPS,
    RankResult,
    StepReport,
    TrainConfig,
    Variant,
    train_rank,
)
from thinwire.lab.testbed.kernels import compile_ahead
from thinwire.lab.testbed.launch import preload, values_of_ranks
from thinwire.lab.testbed.network import Link, emulated

OnStep = Callable[[int, int, float], None]
"""Function called with the steps done, the expected number of steps, and the loss under stock DDP, mean over ranks."""
OnStage = Callable[..., None]
"""Function called with what is done before the first measured step, how much of it is done, and of how much."""

Floats = npt.NDArray[np.float64]

LOSS_TOLERANCE = 1e-6
"""Largest relative difference of losses that rounding explains: sums of float32 in another order give 1.5e-7."""
TIMEOUT_SECONDS = 3600.0
BUSY_SHARE = 0.4
"""Share of the cores that other processes may want before step times mean little."""
BUSY_SPREAD = 1.3
"""Ratio of the 90th to the 10th percentile of stock DDP's steps that no quiet machine has; it is 1.02 on one."""


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
        load: other processes that ran or waited for one of the ``cores`` when this began.
    """

    config: TrainConfig
    hosts: int
    num_tokens: int
    num_words: int
    link_mbit: float | None
    results: dict[str, VariantResult]
    load: float = 0.0
    cores: int = 1

    @property
    def is_busy(self) -> bool:
        """Whether other processes had so much of the machine that step times mean little."""
        low, high = self.results["ddp"].step_seconds_range
        return self.load > BUSY_SHARE * self.cores or high > BUSY_SPREAD * low

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
            "load": self.load,
            "machine_is_busy": self.is_busy,
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


def compare(
    corpus: Corpus,
    config: TrainConfig,
    hosts: int,
    link: Link | None = None,
    on_step: OnStep | None = None,
    on_stage: OnStage = lambda *stage: None,
) -> Comparison:
    """Train all variants in turn in the same processes, one for each host.

    Args:
        link: link of each emulated host; None for loopback.

    Raises:
        ValueError: there are too many hosts.
        NetAdminError: emulated hosts are not allowed here.
        RanksFailed: a rank failed.
    """
    preload("torch._dynamo")
    load = _others_running()
    compile_ahead(KERNELS, on_stage)
    with tempfile.TemporaryDirectory(prefix="thinwire-demo-") as directory:
        # A file of our own: the cache of the corpus may be missing or replaced while we run.
        np.save(tokens_file := Path(directory) / "tokens.npy", corpus.tokens)
        progress = _Progress(hosts, on_step, on_stage)
        link_mbit, ranks = _train(config, tokens_file, hosts, link, progress, on_stage)
    results = {variant.name: _collect(variant, [rank[variant.name] for rank in ranks]) for variant in VARIANTS}
    cores = len(os.sched_getaffinity(0))
    return Comparison(config, hosts, len(corpus.tokens), corpus.num_words, link_mbit, results, load, cores)


def _others_running() -> float:
    """Return how many other processes run or wait for a core, over half a second; the load average lags by a minute."""
    seen = []
    for _ in range(10):
        time.sleep(0.05)
        try:
            seen.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1)
        except OSError:
            return 0.0
    return float(np.mean(seen))


def _train(
    config: TrainConfig, tokens_file: Path, hosts: int, link: Link | None, progress: "_Progress", on_stage: OnStage
) -> tuple[float | None, list[dict[str, RankResult]]]:
    """Return the measured link in Mbit/s, and the results of each rank."""
    stage = f"Making {hosts} hosts and measuring their links" if link else f"Starting {hosts} ranks on loopback"
    on_stage(stage, 0, 0)
    with emulated(hosts, link or Link(None)) as network:
        mbit = network.measure() if network else None
        if mbit is not None:
            on_stage(f"Measured links of {mbit:,.0f} Mbit/s; starting {hosts} ranks", 0, 0)
        return mbit, values_of_ranks(
            train_rank,
            config,
            tokens_file,
            world_size=hosts,
            network=network,
            timeout_seconds=TIMEOUT_SECONDS,
            on_message=progress,
            kernels=KERNELS,
        )


class _Progress:
    """Receiver of the reports of all ranks, which calls ``on_step`` once all ranks have done a step."""

    def __init__(self, hosts: int, on_step: OnStep | None, on_stage: OnStage) -> None:
        self._hosts, self._on_step, self._on_stage = hosts, on_step, on_stage
        self._losses: defaultdict[int, list[float]] = defaultdict(list)

    def __call__(self, rank: int, report: StepReport | str) -> None:
        if isinstance(report, str):
            if rank == 0:
                self._on_stage(f"First step of {report}", 0, 0)
            return
        losses = self._losses[report.step]
        losses.append(report.loss)
        if len(losses) == self._hosts and self._on_step is not None:
            self._on_step(report.step, report.steps_in_all, float(np.mean(losses)))


def _collect(variant: Variant, ranks: Sequence[RankResult]) -> VariantResult:
    names = ranks[0].columns
    columns = {name: np.mean([rank.columns[name] for rank in ranks], axis=0) for name in names}
    equal = len({rank.parameters_digest for rank in ranks}) == 1
    return VariantResult(variant, columns, equal, ranks[0].table)
