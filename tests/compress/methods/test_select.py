"""Which elements are selected: the largest, and those above a threshold."""

from __future__ import annotations

import torch

from tests.compress.sparsified import sent_by
from thinwire import compress
from thinwire.compress.base import Parameter


def test_a_threshold_is_absolute() -> None:
    parameter, compressor = Parameter("weight", (4,)), compress.threshold(2.0)
    assert sent_by(compressor, torch.tensor([1.9, -2.0, 0.0, 3.0]), parameter).parts[0].tolist() == [1, 3]
    assert sent_by(compressor, torch.tensor([1.9, -1.0, 0.0, 0.5]), parameter).parts[0].tolist() == [0]
    assert sent_by(compressor, torch.zeros(4), parameter).parts[0].tolist() == []
    assert sent_by(compressor, torch.zeros(0), Parameter("empty", (0,))).parts[0].tolist() == []


def test_top_k_takes_magnitudes_and_the_first_of_equal_ones() -> None:
    parameter = Parameter("weight", (6,))
    payload = sent_by(compress.top_k(0.5), torch.tensor([1.0, -2.0, 2.0, -5.0, 2.0, 0.0]), parameter)
    assert payload.parts[0].tolist() == [1, 2, 3]
    assert payload.parts[1].tolist() == [-2.0, 2.0, -5.0]


def test_ms_top_k_takes_the_k_largest_up_to_its_resolution() -> None:
    gradient, parameter = torch.randn(50_000), Parameter("weight", (50_000,))
    exact = sent_by(compress.top_k(0.01), gradient, parameter).parts[0]
    assert torch.equal(sent_by(compress.ms_top_k(0.01), gradient, parameter).parts[0], exact)
    coarse = sent_by(compress.ms_top_k(0.01, steps=2), gradient, parameter).parts[0]
    assert coarse.numel() == exact.numel()
    assert not torch.equal(coarse, exact)
