"""Sampled softmax over words."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire.lab.bench.jobs.text import WordTable

pytestmark = pytest.mark.usefixtures("small_corpus")


def test_a_sampled_softmax_estimates_the_full_one() -> None:
    """The mean of what drawn words add to its denominator is what all others add; ``eval()`` takes them all."""
    torch.manual_seed(0)
    table = WordTable(8, 4, 20_000)
    states, targets = torch.randn(32, 4), torch.randint(0, 8, (32,))
    logits, classes = table.logits(states, targets)
    assert (classes == 0).all()
    table.eval()
    full, same = table.logits(states, targets)
    assert torch.equal(same, targets)
    others = full.detach().exp().scatter(1, targets[:, None], 0.0).sum(1)
    torch.testing.assert_close(logits[:, 1:].detach().exp().mean(1) * math.log(9), others, rtol=0.1, atol=0.0)
