"""Thresholds by samples and by fits: DGC and SIDCo."""

from __future__ import annotations

import math

import pytest
import torch

from tests.compress.sparsified import sent_by
from thinwire import compress
from thinwire.compress.base import Parameter
from thinwire.compress.papers.thresholds import SampledTopK, exponential_excess, gamma_excess, pareto_excess
from thinwire.compress.warm_up import WarmUp


def test_dgc_follows_the_paper() -> None:
    """u, v and masking in plain torch, with the thresholds that were chosen."""
    for nesterov in (False, True):
        parameter = Parameter("weight", (64, 65))
        compressor = compress.dgc(0.01, 0.9, nesterov=nesterov, clip_norm=30.0)
        state, u, v = compressor.init(parameter), torch.zeros(64, 65), torch.zeros(64, 65)
        for _ in range(8):
            gradient = torch.randn(64, 65)
            clipped = gradient * min(1.0, 30.0 / float(gradient.norm()))
            u = 0.9 * (u + clipped) if nesterov else 0.9 * u + clipped
            v = v + u + clipped if nesterov else v + u
            payload = compressor.compress(gradient, parameter, state)
            ids, values = payload.parts
            k = round(0.01 * 64 * 65)
            assert 0.8 * k <= ids.numel() <= k
            mask = v.abs() >= v.view(-1)[ids].abs().min()
            assert torch.equal(mask.view(-1).nonzero().flatten(), ids), "the largest of v"
            torch.testing.assert_close(values, v.view(-1)[ids])
            v, u = v.masked_fill(mask, 0.0), u.masked_fill(mask, 0.0)
            torch.testing.assert_close(state["velocity"], v)
            torch.testing.assert_close(state["momentum"], u)


def test_dgc_warms_up_by_epochs_as_published() -> None:
    warming = compress.dgc(0.001, steps_per_epoch=10).inner
    assert isinstance(warming, WarmUp)
    densities = [warming.density(10 * epoch + step) for epoch in range(6) for step in (0, 9)]
    published = [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]
    coefficient = 0.001 ** (1 / 5)
    for epoch in range(6):
        for density in densities[2 * epoch : 2 * epoch + 2]:
            assert density == pytest.approx(max(coefficient ** (epoch + 1), 0.001))
            assert density == pytest.approx(published[epoch], rel=0.02)
    assert isinstance(compress.dgc(0.001).inner, SampledTopK)
    assert isinstance(compress.dgc(0.001, warm_up_epochs=0, steps_per_epoch=10).inner, SampledTopK)


def test_a_sample_sees_all_columns() -> None:
    """With a stride of 100, a sample of [n, 100] would be one column; here that one holds all that is large."""
    gradient = 1e-3 * torch.randn(10_000, 100)
    gradient[:, 1] = 1 + torch.rand(10_000)
    parameter, compressor = Parameter("weight", (10_000, 100)), SampledTopK(0.005)
    ids = sent_by(compressor, gradient, parameter).parts[0]
    assert 4000 <= ids.numel() <= 5000
    assert bool((ids % 100 == 1).all())


def test_fits_are_exact_on_their_own_distributions() -> None:
    assert exponential_excess(2.0, 0.01) == pytest.approx(2.0 * math.log(100.0))
    assert gamma_excess(2.0, math.log(2.0) - 0.5772156649, 0.01) == pytest.approx(2.0 * math.log(100.0), rel=0.02)
    assert pareto_excess(2.0, 4.0, 0.01) == pytest.approx(2.0 * math.log(100.0), rel=1e-6)
    shape, scale = 0.2, 1.0  # mean scale / (1 - shape), variance scale^2 / (1 - shape)^2 / (1 - 2 shape)
    mean, variance = scale / (1 - shape), scale**2 / (1 - shape) ** 2 / (1 - 2 * shape)
    assert pareto_excess(mean, variance, 0.01) == pytest.approx(scale * (0.01**-shape - 1) / shape)
    assert pareto_excess(1.0, 0.0, 0.01) == gamma_excess(1.0, 0.0, 0.01) == 1.0


def test_sidco_changes_its_stages_every_fifth_step() -> None:
    """A normal distribution has a lighter tail than one exponential has: one stage chooses a tenth of k."""
    parameter, compressor = Parameter("weight", (100_000,)), compress.sidco(0.01)
    state, stages = compressor.init(parameter), []
    for _ in range(20):
        compressor.compress(torch.randn(100_000), parameter, state)
        stages.append(state["stages"])
    assert stages[:4] == [1] * 4
    assert stages[4] == 2
    changes = [step + 1 for step in range(1, 20) if stages[step] != stages[step - 1]]
    assert all(step % 5 == 0 for step in changes)
