"""What the demo trains."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.lab.demo.small import CONFIG, corpus
from thinwire import kernels
from thinwire.kernels import warm
from thinwire.kernels.dispatch import Kernel
from thinwire.lab.demo.train import (
    KERNELS,
    LEAST_MEASURED,
    LEAST_STEPS,
    MOST_SECONDS,
    MOST_STEPS,
    VARIANTS,
    WARM_UP_STEPS,
    DemoTraining,
    TrainConfig,
    train_rank,
)
from thinwire.lab.testbed.launch import RankContext, run_ranks

SMALL = {"owner_by_hash"}
"""Kernels that the demo calls for fewer values than numba is worth."""


def text(directory: Path) -> Path:
    tokens_file = directory / "tokens.npy"
    np.save(tokens_file, corpus().tokens)
    return tokens_file


@pytest.mark.ranks
def test_users_get_the_scheme_that_the_demo_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The demo once attached with ``scheme="zen"`` on loopback, which nobody does."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr("thinwire.attach", lambda *args, **settings: calls.append((args, settings)) or "synchronizer")
    monkeypatch.setattr("thinwire.lab.demo.train.DistributedDataParallel", lambda model, **_: model)
    training = DemoTraining(CONFIG, text(tmp_path), VARIANTS[1])
    assert calls == [((training.model,), {})]


def stock_ddp(_context: RankContext, tokens_file: Path) -> list[tuple[list[float], bool]]:
    """Losses of the variants of stock DDP, and whether any hook is registered."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    trainings = [DemoTraining(CONFIG, tokens_file, variant) for variant in VARIANTS if not variant.attached]
    for training in trainings:
        for step in range(CONFIG.steps):
            training.step(step)
    return [(training.columns["loss"], bool(training.model._comm_hooks)) for training in trainings]


@pytest.mark.ranks
@pytest.mark.slow
def test_stock_ddp_is_measured_without_a_hook(tmp_path: Path) -> None:
    for outcome in run_ranks(stock_ddp, text(tmp_path), world_size=3, timeout_seconds=60):
        (dense, dense_is_hooked), (sparse, sparse_is_hooked) = outcome.value
        assert dense == pytest.approx(sparse, rel=1e-6)
        assert not dense_is_hooked
        assert not sparse_is_hooked


def steps_done(context: RankContext, config: TrainConfig, tokens_file: Path) -> list[int]:
    """Numbers of steps that fit into no time at all, as `train_rank` agrees on them."""
    return [len(result.columns["loss"]) for result in train_rank(context, config, tokens_file).values()]


@pytest.mark.ranks
def test_ranks_agree_on_the_end_when_steps_follow_from_a_time(tmp_path: Path) -> None:
    hurried = replace(CONFIG, steps=None, seconds=0.0)
    for outcome in run_ranks(steps_done, hurried, text(tmp_path), world_size=2, timeout_seconds=60):
        assert outcome.value == [WARM_UP_STEPS + LEAST_MEASURED] * len(VARIANTS)


def compiled_calls(context: RankContext, tokens_file: Path) -> set[str]:
    """Kernels that a training calls, of any size."""
    called: set[str] = set()
    on_cpu = Kernel.on_cpu
    warm._prepare = lambda: None  # it asks for all of them
    Kernel.on_cpu = lambda self: called.add(self.name) or on_cpu(self)  # type: ignore[method-assign]
    with kernels.using("numba"):
        train_rank(context, CONFIG, tokens_file)
    return called


@pytest.mark.ranks
@pytest.mark.slow
def test_the_demo_calls_the_kernels_that_it_compiles(tmp_path: Path) -> None:
    """What else is small enough in the demo for the reference to run."""
    for outcome in run_ranks(compiled_calls, text(tmp_path), world_size=2, timeout_seconds=60):
        assert outcome.value <= {*KERNELS, *SMALL}, outcome.value - {*KERNELS, *SMALL}


def test_steps_follow_from_the_time_unless_they_are_given() -> None:
    timed = TrainConfig(seconds=40.0)
    assert timed.steps_in_all(1, 0.0) == 2 + LEAST_MEASURED, "of warm-up, and measured"
    assert timed.steps_in_all(3, 4.0) == 2 + 10, "the time begins with the third step"
    assert timed.steps_in_all(12, 25.0) == 2 + 16
    assert timed.steps_in_all(18, 40.5) == 18
    assert timed.steps_in_all(MOST_STEPS, 10.0) == MOST_STEPS


def test_a_busy_machine_gets_more_time_and_not_fewer_steps() -> None:
    """At a load of 60 on 2 cores it once printed 1.16x, from two steps."""
    timed = TrainConfig(seconds=40.0)
    assert timed.steps_in_all(4, 60.0) == 2 + LEAST_MEASURED
    assert timed.steps_in_all(2 + LEAST_MEASURED, 100.0) == 2 + LEAST_MEASURED
    assert timed.steps_in_all(4, MOST_SECONDS) == LEAST_STEPS
    assert timed.steps_in_all(5, MOST_SECONDS) == 5


def test_step_counts_that_are_given_are_kept() -> None:
    assert TrainConfig(steps=7).steps_in_all(3, 1e9) == 7
