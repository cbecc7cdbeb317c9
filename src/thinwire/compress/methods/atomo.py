"""ATOMO: some singular vectors, selected at random (Wang et al., NeurIPS'18)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.base import Memory, Packed, Parameter, Payload, State, WholeTensor
from thinwire.compress.methods.low_rank import LowRank, as_matrix, matrix_shape, whole
from thinwire.compress.packing import PartSpec, unpack
from thinwire.compress.randomness import counters, next_seed
from thinwire.errors import CorruptMessageError

_LONGEST_UNIT = 1.01  # no element of a unit vector is larger, with any rounding


@dataclass(frozen=True)
class Atomo(LowRank, Packed, WholeTensor):
    """The compressor of `atomo`. ``parts``: k left singular vectors times s_i / p_i [k n], right ones [k m]; or all."""

    label = "atomo"
    memory = Memory.UNBIASED

    def init(self, parameter: Parameter) -> State:
        return counters()

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        if self.rank_of(parameter) == 0:
            return whole(gradient)
        generator = torch.Generator().manual_seed(next_seed(self.seed, parameter, state))
        left, values, right = torch.linalg.svd(as_matrix(gradient, parameter), full_matrices=False)
        chances = probabilities(values.double(), self.rank_of(parameter))
        chosen = torch.rand(values.numel(), generator=generator, dtype=torch.float64) < chances
        scales = (values[chosen] / chances[chosen]).to(values.dtype)
        return Payload(((left.t()[chosen] * scales[:, None]).view(-1), right[chosen].view(-1)))

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:
        """Do nothing: steps are counted where numbers are drawn."""

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        if self.rank_of(parameter) == 0:
            return payload.parts[0].clone().view(parameter.shape)
        n, m = matrix_shape(parameter)
        left, right = payload.parts
        return torch.mm(left.view(-1, n).t(), right.view(-1, m)).view(parameter.shape)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        dtype = parameter.working_dtype
        if self.rank_of(parameter) == 0:
            return (PartSpec(dtype, parameter.numel),)
        n, m = matrix_shape(parameter)
        return PartSpec(dtype, None, min(n, m) * n), PartSpec(dtype, None, min(n, m) * m)

    def unpack(self, data: Tensor, parameter: Parameter) -> Payload:
        parts = unpack(data, self.part_specs(parameter))
        if self.rank_of(parameter):
            _check(parts[0], parts[1], *matrix_shape(parameter))
        elif not bool(parts[0].isfinite().all()):
            raise CorruptMessageError("a gradient that is not finite, which no rank sends")
        return Payload(parts)


def probabilities(singular_values: Tensor, rank: int) -> Tensor:
    """Return the probability of each component: ``min(1, c s_i)`` with the sum ``rank`` (Algorithm 1).

    The variance is the smallest of all with that sum. Components of zero have probability 0; if there are at most
    ``rank`` others, theirs is 1.
    """
    chances = torch.zeros_like(singular_values)
    open_ = singular_values > 0
    while bool(open_.any()):
        left = rank - int((chances == 1.0).sum())
        share = singular_values / singular_values[open_].max()
        wanted = left * share / share[open_].sum()
        certain = open_ & (wanted >= 1.0)
        if not bool(certain.any()):
            return torch.where(open_, wanted, chances)
        chances[certain] = 1.0
        open_ &= ~certain
    return chances


def _check(left: Tensor, right: Tensor, n: int, m: int) -> None:
    """Raise CorruptMessageError for factors that do not fit together or whose product may not be finite."""
    count = left.numel() // n
    if left.numel() != count * n or right.numel() != count * m:
        raise CorruptMessageError(f"{left.numel()} and {right.numel()} elements are no vectors of {n} and {m}")
    if count == 0:
        return
    largest = torch.finfo(left.dtype).max / (count * _LONGEST_UNIT)
    if not (float(left.abs().max()) <= largest and float(right.abs().max()) <= _LONGEST_UNIT):
        raise CorruptMessageError("singular vectors that no matrix has")


def atomo(rank: int = 4, *, min_compression_rate: float = 2.0, seed: int = 0) -> Atomo:
    """Return ATOMO in its spectral form (Algorithm 1): it keeps component i of the SVD with probability p_i.

    It scales a kept component by 1 / p_i. On average ``rank`` components travel, gathered and not summed. The
    expectation is right, so no memory is needed; but the SVD costs O(n m min(n, m)) operations in every step:
    `power_sgd` is the practical method.

    Args:
        rank: expected number of components.
        min_compression_rate: a parameter is sent whole unless rank (n + m) times it < n m.
        seed: seed of the random choice, which also depends on the parameter, the step and the rank of the process.

    Raises:
        ValueError: settings out of range.
    """
    return Atomo(rank, min_compression_rate, seed=seed)
