"""Steps of int8, QSGD and TernGrad."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compress.quantized import sent, state_of
from thinwire import compress
from thinwire.compress.base import (
    Compressor,
    Parameter,
)


@given(
    values=st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=1, max_size=40),
    block=st.integers(1, 50),
)
@settings(deadline=None, max_examples=min(200, settings.default.max_examples))
def test_int8_is_wrong_by_at_most_half_a_step(values: list[float], block: int) -> None:
    gradient = torch.tensor(values)
    error = (sent(compress.int8(block), gradient).double() - gradient.double()).abs()
    steps = torch.tensor([float(piece.abs().max()) / 127 for piece in gradient.split(block)]).double()
    steps = steps.clamp_min(torch.finfo(torch.float32).tiny).repeat_interleave(block)[: len(values)]
    assert bool((error <= 0.5001 * steps).all())


@pytest.mark.parametrize(("method", "bits", "levels"), [(compress.qsgd(2), 2, 1), (compress.qsgd(4), 4, 7)])
def test_qsgd_rounds_to_a_neighbouring_level(method: Compressor, bits: int, levels: int) -> None:
    gradient = torch.randn(4096)
    step = gradient.view(-1, 512).abs().amax(1).repeat_interleave(512) / levels
    multiples = sent(method, gradient) / step
    assert bool(((multiples - multiples.round()).abs() < 1e-4).all())
    assert bool(((multiples - gradient / step).abs() < 1.0001).all())
    assert method.packed_bytes(Parameter("weight", (4096,))) == 8 + 4096 * bits // 8 + 8 + 8 * 4


def test_the_scale_of_qsgd_is_the_norm_that_was_asked_for() -> None:
    parameter, gradient = Parameter("weight", (4,)), torch.tensor([3.0, -4.0, 0.0, 0.0])
    for norm, expected in (("max", 4.0), ("l2", 5.0)):
        method = compress.qsgd(8, norm=norm)  # type: ignore[arg-type]
        payload = method.compress(gradient, parameter, state_of(method, parameter))
        assert float(payload.parts[1]) * 127 == pytest.approx(expected)


def test_terngrad_has_three_values_and_clips() -> None:
    gradient = torch.cat([torch.ones(999), torch.tensor([100.0])])
    assert set(sent(compress.terngrad(), gradient).tolist()) <= {0.0, 100.0}
    limit = 2.5 * math.sqrt((999 + 1e4) / 1000)
    assert sorted(set(sent(compress.terngrad(2.5), gradient).tolist())) == pytest.approx([0.0, limit])
