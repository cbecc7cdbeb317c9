"""The language model: the sampled softmax is the full softmax in the limit, and gradients are sparse."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from thinwire.lab.demo.model import LanguageModel, LogUniform, ModelConfig, sampled_softmax_loss
from thinwire.lab.demo.train import TrainConfig, batch

CONFIG = ModelConfig(num_words=300, embedding_dim=8, hidden_size=12, candidates=40)


def test_with_all_words_as_candidates_it_is_the_full_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    context = torch.randn(50, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    table = torch.randn(30, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(30, (50,), generator=generator)
    everything = torch.arange(30)
    rows, words = torch.cat([table[targets], table]), torch.cat([targets, everything])
    sampled = sampled_softmax_loss(context, rows, words, torch.zeros(80))
    full = functional.cross_entropy(context @ table.T, targets)
    torch.testing.assert_close(sampled, full)
    for mine, expected in zip(
        torch.autograd.grad(sampled, (context, table)), torch.autograd.grad(full, (context, table)), strict=True
    ):
        torch.testing.assert_close(mine, expected)


def test_correction_makes_the_sampled_partition_sum_unbiased() -> None:
    """E[sum over candidates of exp(logit) / P(candidate)] = sum over all words of exp(logit)."""
    sampler = LogUniform(num_words=50, draws=20)
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    sums = []
    for step in range(4000):
        words = sampler.sample(seed=5, step=step)
        sums.append((logits[words] - sampler.log_inclusion(words)).exp().sum())
    assert torch.stack(sums).mean() == pytest.approx(logits.exp().sum().item(), rel=0.02)


def test_candidates_depend_on_seed_and_step_only() -> None:
    sampler = LogUniform(num_words=1000, draws=64)
    first = sampler.sample(seed=1, step=2)
    torch.manual_seed(99)
    assert torch.equal(first, sampler.sample(seed=1, step=2))
    assert not torch.equal(first, sampler.sample(seed=1, step=3))
    assert not torch.equal(first, sampler.sample(seed=2, step=2))


def test_candidates_are_distinct_and_in_range() -> None:
    words = LogUniform(num_words=10, draws=10_000).sample(seed=0, step=0)
    assert words.tolist() == list(range(10))


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_have_rows_for_the_words_used_only(sparse: bool) -> None:
    torch.manual_seed(0)
    model = LanguageModel(replace(CONFIG, sparse=sparse))
    sampler = LogUniform(CONFIG.num_words, CONFIG.candidates)
    words = torch.randint(CONFIG.num_words, (3, 6))
    candidates = sampler.sample(seed=0, step=0)
    model(words, candidates, sampler).backward()
    read = set(words[:, :-1].flatten().tolist())
    scored = set(words[:, 1:].flatten().tolist()) | set(candidates.tolist())
    for table, rows in ((model.words_in, read), (model.words_out, scored)):
        gradient = table.weight.grad
        assert gradient is not None
        assert gradient.is_sparse == sparse
        assert set(gradient.to_dense().any(dim=1).nonzero()[:, 0].tolist()) == rows
    for ids, rows in zip(model.looked_up(words, candidates), (read, scored), strict=True):
        assert set(ids.flatten().tolist()) == rows


@pytest.mark.parametrize("num_words", [49_032, 119_788, 150_000])
def test_tables_do_not_depend_on_the_words_of_the_installed_python(num_words: int) -> None:
    """Debian's standard library has no tests: 49,032 words gave tables and gains that no page mentions."""
    config = TrainConfig(batch_size=2, sequence_length=num_words // 2 - 1)
    model = config.model()
    assert model.num_words == 120_000
    words = batch(np.arange(num_words, dtype=np.int32), config, step=0, rank=0, world_size=1)
    expected = torch.arange(num_words).clamp(max=119_999).reshape(2, -1)
    assert torch.equal(words, expected[:, : words.shape[1]])
    assert LogUniform(model.num_words, 4096).log_inclusion(words).isfinite().all()
