"""The demo's training on real ranks: four variants train one model, and stock DDP is measured without a hook."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire import kernels
from thinwire.kernels import warm
from thinwire.kernels.dispatch import Kernel
from thinwire.lab.demo import stock
from thinwire.lab.demo.compare import LOSS_TOLERANCE, Comparison, compare
from thinwire.lab.demo.corpus import Corpus
from thinwire.lab.demo.train import (
    KERNELS,
    LEAST_MEASURED,
    VARIANTS,
    WARM_UP_STEPS,
    DemoTraining,
    TrainConfig,
    TrainJob,
    train_rank,
)
from thinwire.lab.testbed.launch import RankContext, run_ranks

pytestmark = pytest.mark.ranks

NUM_WORDS = 500
SMALL = {"owner_by_hash"}
"""Kernels that the demo calls for fewer values than numba is worth."""
CONFIG = TrainConfig(
    steps=3, batch_size=4, sequence_length=6, num_rows=500, embedding_dim=8, hidden_size=12, candidates=60
)


def corpus() -> Corpus:
    generator = np.random.default_rng(0)
    tokens = np.minimum(generator.zipf(1.3, 4000) - 1, NUM_WORDS - 1).astype(np.int32)
    return Corpus(tokens, tuple(f"word{rank}" for rank in range(NUM_WORDS)))


def job(directory: Path) -> TrainJob:
    result = TrainJob(CONFIG, directory / "tokens.npy")
    np.save(result.tokens_file, corpus().tokens)
    return result


@pytest.fixture(scope="module")
def seen() -> list[tuple[int, int, float]]:
    """What `compare` reported while it ran."""
    return []


@pytest.fixture(scope="module")
def stages() -> list[str]:
    return []


@pytest.fixture(scope="module")
def comparison(seen: list[tuple[int, int, float]], stages: list[str]) -> Comparison:
    """One real run of ``thinwire demo``'s comparison."""

    def on_stage(description: str | None = None, done: int | None = None, total: int | None = None) -> None:
        stages.extend([description] if description else [])

    return compare(corpus(), CONFIG, 2, None, lambda *report: seen.append(report), on_stage)


@pytest.mark.slow
def test_all_variants_have_the_losses_of_stock_ddp(comparison: Comparison) -> None:
    assert list(comparison.results) == ["ddp", "thinwire", "ddp_sparse", "thinwire_sparse"]
    assert comparison.loss_difference <= LOSS_TOLERANCE == 1e-6
    assert comparison.parameters_bitwise_equal
    assert comparison.is_exact
    assert len(set(comparison.results["ddp"].loss)) == CONFIG.steps


@pytest.mark.slow
def test_progress_has_the_losses_of_the_table(comparison: Comparison, seen: list[tuple[int, int, float]]) -> None:
    expected = [(done, CONFIG.steps, pytest.approx(comparison.results["ddp"].loss[done - 1])) for done in (1, 2, 3)]
    assert seen == expected


@pytest.mark.slow
def test_every_stage_before_the_first_measured_step_is_shown(comparison: Comparison, stages: list[str]) -> None:
    shown = [stage for stage in stages if not stage.startswith("Compiling")]
    assert shown == ["Starting 2 ranks on loopback", *(f"First step of {variant.label}" for variant in VARIANTS)]


@pytest.mark.slow
def test_every_variant_is_accounted_for(comparison: Comparison) -> None:
    figures = comparison.to_json()
    for variant in figures["variants"]:
        assert all(variant[key] > 0 for key in ("step_seconds", "comm_seconds", "bytes_per_step"))
    tables = {variant["name"]: variant["parameters"] for variant in figures["variants"]}
    assert not tables["ddp"]
    assert not tables["ddp_sparse"]
    kinds = {row["name"]: row["kind"] for row in tables["thinwire_sparse"]}
    assert kinds["words_in.weight"] == kinds["words_out.weight"] == "sparse gradient"


def test_users_get_the_scheme_that_the_demo_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The demo once attached with ``scheme="zen"`` on loopback, which nobody does."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr("thinwire.attach", lambda *args, **settings: calls.append((args, settings)) or "synchronizer")
    monkeypatch.setattr("thinwire.lab.demo.train.DistributedDataParallel", lambda model, **_: model)
    training = DemoTraining(job(tmp_path), VARIANTS[1])
    assert calls == [((training.model,), {})]


def stock_ddp(_context: RankContext, job: TrainJob) -> list[tuple[list[float], bool]]:
    """Losses of the variants of stock DDP, and whether any hook is registered."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    trainings = [DemoTraining(job, variant) for variant in VARIANTS if not variant.attached]
    for training in trainings:
        for step in range(CONFIG.steps):
            training.step(step)
    return [(training.columns["loss"], bool(training.model._comm_hooks)) for training in trainings]


@pytest.mark.slow
def test_stock_ddp_is_measured_without_a_hook(tmp_path: Path) -> None:
    for outcome in run_ranks(stock_ddp, job(tmp_path), world_size=3, timeout_seconds=60):
        (dense, dense_is_hooked), (sparse, sparse_is_hooked) = outcome.value
        assert dense == pytest.approx(sparse, rel=1e-6)
        assert not dense_is_hooked
        assert not sparse_is_hooked


def steps_done(context: RankContext, job: TrainJob) -> list[int]:
    """Numbers of steps that fit into no time at all, as `train_rank` agrees on them."""
    return [len(result.columns["loss"]) for result in train_rank(context, job).values()]


def test_ranks_agree_on_the_end_when_steps_follow_from_a_time(tmp_path: Path) -> None:
    hurried = replace(job(tmp_path), config=replace(CONFIG, steps=None, seconds=0.0))
    for outcome in run_ranks(steps_done, hurried, world_size=2, timeout_seconds=60):
        assert outcome.value == [WARM_UP_STEPS + LEAST_MEASURED] * len(VARIANTS)


def compiled_calls(context: RankContext, job: TrainJob) -> set[str]:
    """Kernels that a training calls, of any size."""
    called: set[str] = set()
    on_cpu = Kernel.on_cpu
    warm._prepare = lambda: None  # it asks for all of them
    Kernel.on_cpu = lambda self: called.add(self.name) or on_cpu(self)  # type: ignore[method-assign]
    with kernels.using("numba"):
        train_rank(context, job)
    return called


@pytest.mark.slow
def test_the_demo_calls_the_kernels_that_it_compiles(tmp_path: Path) -> None:
    """What else is small enough in the demo for the reference to run."""
    for outcome in run_ranks(compiled_calls, job(tmp_path), world_size=2, timeout_seconds=60):
        assert outcome.value <= {*KERNELS, *SMALL}, outcome.value - {*KERNELS, *SMALL}


def stock_bytes(context: RankContext) -> tuple[float, float]:
    """One backward of a sparse table of 10 rows x 3, this rank looking up rank + 1 rows, one of them twice."""
    model = DistributedDataParallel(torch.nn.Embedding(10, 3, sparse=True))
    stock.log_every_step(model)
    ids = torch.tensor([*range(context.rank + 1), 0])
    model(ids).sum().backward()
    dist.barrier()
    return stock.sent_bytes(model, [ids], context.world_size), stock.comm_seconds(model)


def test_stock_bytes_count_distinct_rows_and_seconds_are_those_of_ddp() -> None:
    for rank, outcome in enumerate(run_ranks(stock_bytes, world_size=2, timeout_seconds=60)):
        sent, seconds = outcome.value
        assert sent == 72 + (rank + 1) * (8 + 12)
        assert 0 < seconds < 60
