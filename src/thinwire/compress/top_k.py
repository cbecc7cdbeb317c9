"""The elements of largest magnitude, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire import kernels
from thinwire.compress.base import Compressor, Parameter, State
from thinwire.compress.sparsify import DensitySparsifier, Selection


@dataclass(frozen=True)
class TopK(DensitySparsifier):
    """See `top_k`."""

    has_fixed_count: ClassVar[bool] = True

    def select_about(self, k: int, flat: Tensor, parameter: Parameter, state: State) -> Selection:
        del parameter, state
        return kernels.top_magnitudes(flat, k)


def top_k(density: float = 0.01, *, values: Compressor | None = None) -> TopK:
    """Top-K (Aji and Heafield, EMNLP'17; Stich et al., NeurIPS'18): the ``k`` elements of largest magnitude.

    Of equal magnitudes the first are taken. Biased, so it needs error feedback, which `attach` adds.

    Args:
        density: k / numel, in (0, 1].
        values: how chosen values are coded, such as ``bf16()``; None sends them as they are.

    Raises:
        ValueError: a density outside (0, 1].

    Example:
        >>> import torch
        >>> from thinwire.compress.base import Parameter
        >>> parameter, compressor = Parameter("fc.bias", (4,)), top_k(0.5)
        >>> gradient = torch.tensor([1.0, -3.0, 0.0, 2.0])
        >>> payload = compressor.compress(gradient, parameter, compressor.init(parameter))
        >>> compressor.decompress(payload, parameter)
        tensor([ 0., -3.,  0.,  2.])
    """
    return TopK(density=density, values=values)
