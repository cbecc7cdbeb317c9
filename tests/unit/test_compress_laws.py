"""What every compressor promises under error feedback: how much is sent, and that nothing is lost or made up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from thinwire import compress
from thinwire.compress.base import Parameter
from thinwire.compress.dgc import SampledTopK
from thinwire.compress.memory import ErrorFeedback, MomentumCorrection
from thinwire.compress.sparsify import DensitySparsifier

EXACTLY, NEAR = (1.0, 1.0), (2 / 3, 4 / 3)
SPARSIFIERS: dict[str, tuple[DensitySparsifier, tuple[float, float]]] = {
    "top_k": (compress.top_k(), EXACTLY),
    "random_k": (compress.random_k(), EXACTLY),
    "ms_top_k": (compress.ms_top_k(), EXACTLY),
    "gaussian_k": (compress.gaussian_k(), NEAR),
    "sidco exponential": (compress.sidco(), NEAR),
    "sidco gamma": (compress.sidco(distribution="gamma"), NEAR),
    "sidco pareto": (compress.sidco(distribution="pareto"), NEAR),
    "redsync": (compress.redsync(), (1.0, 2.0)),
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
    compressor, parameter = wrap(sparsifier.with_density(0.01)), Parameter("weight", (20_000,))
    state, k = compressor.init(parameter), 200
    for gradient in stream(20_000, 60, spread, drift):
        payload = compressor.compress(gradient, parameter, state)
        assert fewest * k <= payload.parts[-1].numel() <= most * k
