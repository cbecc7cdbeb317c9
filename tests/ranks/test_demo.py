"""The demo's training on real ranks: thinwire and the measured stock DDP train what plain DDP trains."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.lab.demo import stock, train
from thinwire.lab.demo.compare import Comparison, compare
from thinwire.lab.demo.corpus import Corpus
from thinwire.lab.demo.train import DemoTraining, TrainConfig, TrainJob
from thinwire.lab.testbed.launch import RankContext, run_ranks

NUM_WORDS = 500
CONFIG = TrainConfig(
    steps=3, batch_size=4, sequence_length=6, embedding_dim=8, hidden_size=12, candidates=60, learning_rate=0.2
)


def corpus() -> Corpus:
    generator = np.random.default_rng(0)
    tokens = np.minimum(generator.zipf(1.3, 4000) - 1, NUM_WORDS - 1).astype(np.int32)
    return Corpus(tokens, tuple(f"word{rank}" for rank in range(NUM_WORDS)))


def job(directory: Path) -> TrainJob:
    result = TrainJob(CONFIG, NUM_WORDS, directory)
    np.save(result.tokens_file, corpus().tokens)
    return result


class NoMeter:
    """Stands for a synchronizer where DDP has no hook of any kind."""

    def stats(self) -> dict[str, float]:
        return {"comm/bytes_sent": 0.0, "comm/seconds": 0.0}

    def table(self) -> list[dict[str, Any]]:
        return []


def measured_and_plain_ddp(_context: RankContext, job: TrainJob) -> list[tuple[list[float], str]]:
    """(losses, digest of the parameters) of the demo's stock mode, then of the same training with no hook."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    results = []
    for attach in (train._attach, lambda _mode, _model, _scheme: NoMeter()):
        train._attach = attach
        training = DemoTraining(job, "ddp")
        for step in range(job.config.steps):
            training.step(step)
        results.append(([record["loss"] for record in training.records], train.digest(training.model)))
    return results


def test_measured_stock_ddp_is_bit_for_bit_plain_ddp(tmp_path: Path) -> None:
    # Three ranks: dividing and multiplying by the inverse differ in the last bit where n is no power of two.
    for outcome in run_ranks(measured_and_plain_ddp, job(tmp_path), world_size=3, timeout_seconds=60):
        measured, plain = outcome.value
        assert measured == plain


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """One real run of ``thinwire demo``'s comparison, through torchrun's API."""
    progress: list[tuple[str, int]] = []
    result = compare(corpus(), CONFIG, 2, on_step=lambda mode, step, _loss: progress.append((mode, step)))
    assert {("ddp", CONFIG.steps), ("thinwire", CONFIG.steps)} <= set(progress)
    return result


def test_losses_equal_those_of_stock_ddp(comparison: Comparison) -> None:
    assert comparison.loss_difference.max() < 1e-6
    assert len(set(comparison.modes["ddp"].loss)) == CONFIG.steps


def test_parameters_are_bitwise_equal_on_all_ranks(comparison: Comparison) -> None:
    assert comparison.to_json()["parameters_bitwise_equal"] is True


def test_both_modes_are_accounted_for(comparison: Comparison) -> None:
    figures = comparison.to_json()
    for field in ("bytes_per_step", "step_seconds", "comm_seconds"):
        assert figures[field]["ddp"] > 0
        assert figures[field]["thinwire"] > 0
    for mode in comparison.modes.values():
        sent = mode.bytes_by_parameter(comparison.sparse_parameters)
        assert set(sent) == {"words_in.weight", "words_out.weight", "all others"}
        assert sum(sent.values()) == pytest.approx(mode.bytes_per_step, rel=0.2)


def stock_bytes(context: RankContext) -> tuple[float, list[dict[str, Any]]]:
    """One backward of a sparse table of 10 rows x 3, this rank looking up rank + 1 rows, one of them twice."""
    model = DistributedDataParallel(torch.nn.Embedding(10, 3, sparse=True))
    meter = stock.attach(model)
    model(torch.tensor([*range(context.rank + 1), 0])).sum().backward()
    dist.barrier()
    return meter.stats()["comm/bytes_sent"], meter.table()


def test_stock_bytes_and_densities_count_distinct_rows() -> None:
    for rank, outcome in enumerate(run_ranks(stock_bytes, world_size=2, timeout_seconds=60)):
        sent, (row,) = outcome.value
        assert sent == 72 + (rank + 1) * (8 + 12)
        assert (row["name"], row["density"], row["density_after"]) == ("weight", (rank + 1) / 10, 0.2)
