"""The built-in script of `thinwire analyze`: one model on all ranks, batches of each, and no end of its own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.lab.analyze.models import lstm_lm
from thinwire.lab.demo import corpus
from thinwire.lab.demo.train import TrainConfig, batch, timed_step

pytestmark = pytest.mark.usefixtures("small_corpus")

CONFIG = TrainConfig(batch_size=2, num_rows=300, embedding_dim=8, hidden_size=8, candidates=20)


class Stopped(Exception):
    """As by whoever analyzes: the script itself goes on."""


@pytest.fixture
def unchecked() -> Iterator[None]:
    """The script changes what all of the process's sparse tensors do."""
    checks = torch.sparse.check_sparse_tensor_invariants
    before = checks.is_enabled()
    checks.enable()
    yield
    assert not checks.is_enabled(), "Adagrad makes sparse tensors, and torch would warn"
    if before:
        checks.enable()


def trained(monkeypatch: pytest.MonkeyPatch, rank: int, steps: int) -> tuple[list[Tensor], ...]:
    """Train on a rank of two; return its batches, the parameters that it began with, and those after the last."""
    batches: list[Tensor] = []
    first: list[Tensor] = []
    last: list[Tensor] = []

    def step_of(model: Any, optimizer: Any, words: Tensor, *rest: Any) -> None:
        if len(batches) == steps:
            raise Stopped
        assert rest[-1] == len(batches), "steps are numbered from 0"
        if not batches:
            first.extend(parameter.detach().clone() for parameter in model.parameters())
        batches.append(words)
        timed_step(model, optimizer, words, *rest)
        last[:] = [parameter.detach().clone() for parameter in model.parameters()]

    begun: list[str] = []
    ranks = SimpleNamespace(
        init_process_group=begun.append, get_rank=lambda: rank, get_world_size=lambda: 2, barrier=lambda: None
    )
    monkeypatch.setattr(lstm_lm, "dist", ranks)
    monkeypatch.setattr(lstm_lm, "TrainConfig", lambda: CONFIG)
    monkeypatch.setattr(lstm_lm, "timed_step", step_of)
    with pytest.raises(Stopped):
        lstm_lm.main()
    assert begun == ["gloo"]
    return batches, first, last


@pytest.mark.usefixtures("one_rank", "unchecked")
def test_ranks_begin_with_one_model_and_have_batches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP sends no parameters: a model of 120 MB would be the first thing on the link."""
    tokens = corpus.load().tokens
    ranks = [trained(monkeypatch, rank, 3) for rank in range(2)]
    for rank, (batches, _, _) in enumerate(ranks):
        for step, words in enumerate(batches):
            assert torch.equal(words, batch(tokens, CONFIG, step, rank, 2))
    assert not torch.equal(ranks[0][0][0], ranks[1][0][0])
    assert all(torch.equal(*pair) for pair in zip(ranks[0][1], ranks[1][1], strict=True))


@pytest.mark.usefixtures("one_rank", "unchecked")
def test_every_parameter_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    _, first, last = trained(monkeypatch, 0, 2)
    assert not any(torch.equal(*pair) for pair in zip(first, last, strict=True))


@pytest.mark.parametrize(("rank", "expected"), [(0, ["load", "barrier"]), (1, ["barrier", "load"])])
def test_the_first_rank_alone_splits_the_text(monkeypatch: pytest.MonkeyPatch, rank: int, expected: list[str]) -> None:
    calls: list[str] = []
    text = corpus.load()
    monkeypatch.setattr(lstm_lm, "dist", SimpleNamespace(barrier=lambda: calls.append("barrier")))
    monkeypatch.setattr(corpus, "load", lambda: calls.append("load") or text)
    assert lstm_lm._load_once(rank) is text
    assert calls == expected
