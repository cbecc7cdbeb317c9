"""Sums without rounding, so that no order matters, and their mean, rounded once.

A sum is a float64 for each element. Gradients in float32 and narrower have 29 bits to spare there, so additions are
nearly always exact. TwoSum says of each whether it was; what one leaves over is kept beside the sum as a term of its
own. Sum and terms together are exact whatever their width, and so is what owners add up from the ranks' parts.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

CHUNK_VALUES = 1 << 15
"""Number of elements that are added at a time, so that they stay in a core's cache."""
MOST_ADDED = 1 << 20
"""Most parts of a mean, see `divided`."""


class ExactSum:
    """The exact sum of flat tensors.

    A sum that is not finite is what float64 makes of it, in any order: NaN if there is a NaN or infinities of both
    signs, else the infinity. A sum of zero is +0.

    Args:
        values: float64 [numel], zeros to begin with; it is the memory of the sum.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.terms: list[tuple[Tensor, Tensor]] = []  # positions, int64 [k], and what to add there, float64 [k]

    def add(self, part: Tensor, start: int = 0) -> None:
        """Add a flat tensor of floating-point values to the elements from ``start`` on."""
        for at in range(0, part.numel(), CHUNK_VALUES):
            added = part[at : at + CHUNK_VALUES].double()
            total = self.values[start + at : start + at + added.numel()]
            new = total + added
            came = new - total
            kept = new - came
            if not (torch.equal(came, added) and torch.equal(kept, total)):
                error = (total - kept) + (added - came)
                (lost,) = ((error != 0) & new.isfinite()).nonzero(as_tuple=True)
                if lost.numel():
                    self.terms.append((lost + (start + at), error[lost]))
            total.copy_(new)

    def mean(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return the sum divided by ``count``, correctly rounded to ``dtype`` (to nearest, ties to even).

        Elements with terms are rounded one by one, in some 5 us each.
        """
        mean = divided(self.values, count, dtype)
        exact: dict[int, Fraction] = {}
        for ids, terms in self.terms:
            for index, term in zip(ids.tolist(), terms.tolist(), strict=True):
                exact[index] = exact.get(index, Fraction(0)) + Fraction(term)
        for index, term in exact.items():
            value = float(self.values[index])
            if math.isfinite(value):
                mean[index] = _rounded((Fraction(value) + term) / count, dtype)
        return mean


def divided(total: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return a float64 tensor divided by an integer, as if rounded to ``dtype`` once.

    The division rounds too, but never onto the middle of two values, where the second rounding could go wrong: such a
    middle times ``count`` has at most 25 + 20 bits, so a total that differs from it does so by its own last bit at
    least, which is more than half of the last bit of the quotient times ``count``.
    """
    quotient = total / count
    quotient[quotient.isnan()] = math.nan  # one pattern: which of several wins depends on the order
    return _narrowed(quotient, dtype)


def _narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 values rounded to ``dtype`` once: torch rounds to float32 on the way to sixteen bits."""
    if dtype in (torch.float64, torch.float32):
        return values.to(dtype)
    single = values.float()
    bits = single.view(torch.int32) - (single.double().abs() > values.abs()).int()
    odd = (bits | (single.double() != values).int()).view(torch.float32)
    return torch.where(values.isnan(), single, odd).to(dtype)


def _rounded(value: Fraction, dtype: torch.dtype) -> Tensor:
    """Return a fraction rounded to ``dtype`` once."""
    numerator, denominator = abs(value.numerator), value.denominator
    if not numerator or dtype == torch.float64:
        return torch.tensor(numerator / denominator if value >= 0 else -(numerator / denominator), dtype=dtype)
    shift = 54 - numerator.bit_length() + denominator.bit_length()  # 53 to 55 bits remain
    quotient, rest = divmod(numerator << max(shift, 0), denominator << max(-shift, 0))
    spare = quotient.bit_length() - 53
    odd = (quotient >> spare) | bool(rest or quotient & ((1 << spare) - 1))
    result = math.ldexp(odd if value > 0 else -odd, spare - shift)
    return _narrowed(torch.tensor([result], dtype=torch.float64), dtype)[0]
