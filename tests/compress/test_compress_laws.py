"""What every compressor promises under error feedback: how much is sent, that nothing is lost, and what is random."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressors import FEEDBACK
from tests.compress.laws import KINDS, PARAMETER, TINY, arrived, made
from thinwire import compress
from thinwire.compress.base import Compressor, Parameter
from thinwire.compress.memory import ErrorFeedback, MomentumCorrection
from thinwire.compress.methods.sparsify import DensitySparsifier
from thinwire.compress.papers.thresholds import SampledTopK

EXACTLY, NEAR = (1.0, 1.0), (2 / 3, 4 / 3)
SPARSIFIERS: dict[str, tuple[DensitySparsifier, tuple[float, float]]] = {
    "top_k": (compress.top_k(), EXACTLY),
    "random_k": (compress.random_k(), EXACTLY),
    "ms_top_k": (compress.ms_top_k(), EXACTLY),
    "gaussian_k": (compress.gaussian_k(), NEAR),
    "sidco exponential": (compress.sidco(), NEAR),
    "sidco gamma": (compress.sidco(distribution="gamma"), NEAR),
    "sidco pareto": (compress.sidco(distribution="pareto"), NEAR),
    "redsync": (compress.redsync(), NEAR),
    "dgc": (SampledTopK(), (0.8, 1.0)),
}
"""With the fewest and most elements that are sent, over k."""


def stream(numel: int, steps: int, spread: float, drift: float) -> Iterator[Tensor]:
    """Gradients whose elements have each a scale and a mean of its own, so that memories pile up below thresholds."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(spread * torch.randn(numel, generator=generator))
    means = drift * scales * torch.randn(numel, generator=generator)
    for _ in range(steps):
        yield means + scales * torch.randn(numel, generator=generator)


@pytest.mark.parametrize("wrap", [ErrorFeedback, MomentumCorrection])
@pytest.mark.parametrize(("spread", "drift"), [(0.0, 0.0), (0.5, 2.0), (1.0, 0.5), (2.0, 0.5)])
@pytest.mark.parametrize("method", SPARSIFIERS)
def test_as_many_are_sent_as_were_asked_for(method: str, spread: float, drift: float, wrap: type) -> None:
    """In every step, though error feedback leaves a sharp edge where the last thresholds were."""
    sparsifier, (fewest, most) = SPARSIFIERS[method]
    compressor, parameter = wrap(replace(sparsifier, density=0.01)), Parameter("weight", (20_000,))
    state, k = compressor.init(parameter), 200
    for gradient in stream(20_000, 60, spread, drift):
        payload = compressor.compress(gradient, parameter, state)
        assert fewest * k <= payload.parts[-1].numel() <= most * k


gradients = st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 2**31)), min_size=1, max_size=4)


# --- gradients that no model is made for


@pytest.mark.parametrize("name", FEEDBACK)
@settings(max_examples=min(25, settings.default.max_examples // 3))
@given(steps=gradients)
def test_what_arrives_and_what_is_kept_are_what_was_given(name: str, steps: list[tuple[str, int]]) -> None:
    """To the rounding of float32, and of the products of factors where there are any."""
    compressor = FEEDBACK[name]
    state = compressor.init(PARAMETER)
    rounding = 1e-5 if name in ("acp_sgd", "atomo", "power_sgd") else 2.0**-23
    for kind, seed in steps:
        gradient = made(kind, seed)
        given = gradient + state["error"]
        payload = compressor.compress(gradient, PARAMETER, state)
        value = arrived(compressor, payload, state)
        assert bool(value.isfinite().all())
        largest = given.abs().max() if rounding > 1e-6 else torch.maximum(given.abs(), value.abs())
        assert bool(((value + state["error"] - given).abs() <= rounding * largest + TINY * 2.0**-20).all())


@pytest.mark.parametrize("method", SPARSIFIERS)
@settings(max_examples=min(25, settings.default.max_examples // 3))
@given(steps=gradients, density=st.sampled_from([0.001, 0.01, 0.1, 0.5, 0.9]))
def test_counts_of_any_gradient(method: str, steps: list[tuple[str, int]], density: float) -> None:
    """As many as promised, or all that are not zero if there are fewer."""
    sparsifier, (fewest, most) = SPARSIFIERS[method]
    compressor = ErrorFeedback(replace(sparsifier, density=density))
    state, k = compressor.init(PARAMETER), replace(sparsifier, density=density).target(768)
    for kind, seed in steps:
        gradient = made(kind, seed)
        present = 768 if fewest == most else int((gradient + state["error"]).count_nonzero())
        count = compressor.compress(gradient, PARAMETER, state).parts[-1].numel()
        assert min(fewest * k, present) <= count <= most * k


DRAWS = 1 << 13
UNBIASED: dict[str, tuple[Compressor, Callable[[Tensor], Tensor]]] = {
    "int8": (compress.int8(8, stochastic=True), lambda values: _step(values, 127)),
    "qsgd": (compress.qsgd(4, 8), lambda values: _step(values, 7)),
    "terngrad": (compress.terngrad(), lambda values: _step(values, 1)),
    "natural": (compress.natural(), lambda values: _power_below(values)),
    "mxfp8": (compress.mxfp8(stochastic=True), lambda values: _float_gap(values, 3, 448.0, -6)),
    "mxfp4": (compress.mxfp4(stochastic=True), lambda values: _float_gap(values, 1, 6.0, 0)),
}
"""With the distance of the two numbers, one of which each value becomes."""


def _step(values: Tensor, levels: int) -> Tensor:
    return (values.abs().max() / levels).clamp(min=TINY).expand_as(values)


def _power_below(values: Tensor) -> Tensor:
    below = torch.exp2(values.abs().clamp(min=TINY).log2().floor())
    smallest = 2.0 ** max(-126, math.frexp(max(TINY, float(values.abs().max())))[1] - 126)
    return below.clamp(min=smallest)


def _float_gap(values: Tensor, mantissa_bits: int, largest: float, lowest: int) -> Tensor:
    step = 2.0 ** max(-127, math.ceil(math.log2(max(TINY * 2.0**-23, float(values.abs().max())) / largest)))
    below = torch.exp2((values.abs().double() / step).clamp(min=2.0**lowest).log2().floor())
    return below * 2.0**-mantissa_bits * step


# --- what is random is right in expectation


@pytest.mark.parametrize("name", UNBIASED)
@settings(max_examples=min(40, settings.default.max_examples))
@given(
    values=st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-TINY, TINY, width=32) | st.floats(-1, 1, width=32),
        min_size=8,
        max_size=8,
    ),
    seed=st.integers(0, 2**31),
)
def test_the_expectation_is_the_value(name: str, values: list[float], seed: int) -> None:
    """Of eight values, drawn so often: 6 sigma of a draw between two numbers of that distance."""
    compressor, distance = UNBIASED[name]
    pattern, parameter = torch.tensor(values), Parameter(f"weight {seed}", (DRAWS, 8))
    payload = compressor.compress(pattern.repeat(DRAWS, 1), parameter, compressor.init(parameter))
    drawn = compressor.decompress(payload, parameter).double()
    gap, exact = distance(pattern).double(), pattern.double()
    assert bool(((drawn - exact).abs() <= gap * (1 + 1e-6)).all())
    sigma = gap * torch.sqrt((exact.abs() / gap).frac().clamp(min=1 / DRAWS) / DRAWS)
    assert bool(((drawn.mean(0) - exact).abs() <= 6 * sigma + 1e-6 * exact.abs()).all())
