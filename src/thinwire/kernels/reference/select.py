"""Selection of the largest elements in plain torch: moments of magnitudes, counts, and selection.

Magnitudes are compared as integers, the bits of a float without its sign: they have the order of the magnitudes,
infinities and NaN come last, and none of them can raise. `thinwire.kernels.cpu.select` has the compiled twins, which
give equal bits; except sums, in another order, which agree to 1e-12. So only what a rank chooses for itself may follow
from a sum.
"""

from typing import NamedTuple

import torch
from torch import Tensor

RADIX_BITS = 11
_KEYS = {torch.float32: (torch.int32, 0x7FFFFFFF), torch.float64: (torch.int64, 0x7FFFFFFFFFFFFFFF)}


class Moments(NamedTuple):
    """Moments of magnitudes: their number, their sum, and the sum of their squares, both in float64."""

    count: int
    sum: float
    sum_squares: float


def magnitude_moments(values: Tensor, at_least: float = 0.0) -> Moments:
    """Return the moments of the magnitudes of float32 or float64 [n] that are not zero and at least ``at_least``."""
    if at_least > 0.0:
        values = values[magnitude_keys(values) >= threshold_key(at_least, values.dtype)]
    wide = values.double()
    return Moments(int(torch.count_nonzero(values)), float(wide.abs().sum()), float(wide.square().sum()))


def count_at_least(values: Tensor, threshold: float) -> int:
    """Count the ``values`` (float32 or float64 [n]) with a magnitude of at least ``threshold``, rounded to dtype."""
    return int((magnitude_keys(values) >= threshold_key(threshold, values.dtype)).sum())


def select_at_least(values: Tensor, threshold: float, expected: int | None = None) -> tuple[Tensor, Tensor]:
    """Return indices (int64 [k], increasing) and values [k] of magnitudes of at least ``threshold``, rounded to dtype.

    If their number is known, pass it as ``expected``, so that they need not be counted.
    """
    ids = (magnitude_keys(values) >= threshold_key(threshold, values.dtype)).nonzero().flatten()
    return ids, values.index_select(0, ids)


def top_magnitudes(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return indices (int64 [k], increasing) and values [k] of the ``k`` largest magnitudes, ties by index."""
    if not 0 <= k <= values.numel():
        raise ValueError(f"there are no {k} largest of {values.numel()} elements")
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device), values[:0].clone()
    keys = magnitude_keys(values)
    smallest = torch.topk(keys, k, sorted=False).values.min()
    above = (keys > smallest).nonzero().flatten()
    equal = (keys == smallest).nonzero().flatten()[: k - above.numel()]
    ids = torch.cat([above, equal]).sort().values
    return ids, values.index_select(0, ids)


def leading_magnitudes(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest magnitudes and those that share the `RADIX_BITS` leading bits with the last of them.

    The result is indices int64 [m], increasing, and values [m]. In float32 these bits are the binary order and an
    eighth of it: the candidates of a search for about ``k``.
    """
    if not 1 <= k <= values.numel():
        raise ValueError(f"there is no {k}-th largest of {values.numel()} elements")
    digits = magnitude_keys(values) >> (8 * values.element_size() - 1 - RADIX_BITS)
    ids = (digits >= torch.topk(digits, k, sorted=False).values.min()).nonzero().flatten()
    return ids, values.index_select(0, ids)


def magnitude_keys(values: Tensor) -> Tensor:
    """Return integers in the order of the magnitudes of float32 or float64 values."""
    word, mask = _KEYS[values.dtype]
    return values.view(word) & mask


def threshold_key(threshold: float, dtype: torch.dtype) -> int:
    """Return the key of a threshold; 0, which all magnitudes reach, for one that is not positive."""
    if threshold <= 0.0:
        return 0
    return int(magnitude_keys(torch.tensor([threshold], dtype=torch.float64).to(dtype)))
