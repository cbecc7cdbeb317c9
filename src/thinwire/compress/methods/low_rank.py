"""Gradients as matrices of low rank: the common base of PowerSGD, ACP-SGD and ATOMO."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.base import Compressor, Parameter, Payload, State
from thinwire.compress.packing import PartSpec
from thinwire.compress.randomness import stable_seed

_KEPT = 1e-6  # of a unit vector, relative to the largest element of a new factor
RoundSpecs = tuple[tuple[PartSpec, ...], ...]


@dataclass(frozen=True)
class LowRank(Compressor):
    """A compressor of a gradient [n, ...] as a matrix [n, m], approximated by factors [n, r] and [m, r].

    Factors are kept transposed, as contiguous rows [r, n] and [r, m]: the products of a large matrix with a thin one
    are 3 to 10 times as fast that way.

    Args:
        rank: r; at most min(n, m) is used.
        min_compression_rate: a parameter is sent whole unless r (n + m) elements are fewer by more than this factor
            than n m. Vectors always are.
        start_step: number of first steps that send all parameters whole.
        seed: seed of the first factors, the same on all ranks.
    """

    rank: int
    min_compression_rate: float = 2.0
    start_step: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if not (isinstance(self.rank, int) and self.rank >= 1):
            raise ValueError(
                f"{kind} has a rank of at least 1, not {self.rank!r}; 1 to 4 are usual, up to 32 for transformers"
            )
        if not self.min_compression_rate >= 0.0:
            raise ValueError(
                f"{kind}: min_compression_rate is at least 0, not {self.min_compression_rate!r}; 2 is usual"
            )
        if not (isinstance(self.start_step, int) and self.start_step >= 0):
            raise ValueError(f"{kind} starts at a step from 0 on, not {self.start_step!r}")

    @property
    def name(self) -> str:
        rate = "" if self.min_compression_rate == 2.0 else f", rate {self.min_compression_rate:g}"
        start = f", from step {self.start_step}" if self.start_step else ""
        return f"{self.label}({self.rank}{rate}{start})"

    @property
    def label(self) -> str:
        raise NotImplementedError

    def rank_of(self, parameter: Parameter) -> int:
        """Return the rank with which a parameter is sent, or 0 if it is sent whole."""
        n, m = matrix_shape(parameter)
        rank = min(n, m, self.rank)
        return rank if rank * (n + m) * self.min_compression_rate < n * m else 0

    def is_whole(self, parameter: Parameter, state: State) -> bool:
        """Return whether this step sends the gradient as it is."""
        return state["step"] < self.start_step or self.rank_of(parameter) == 0

    def init(self, parameter: Parameter) -> State:
        return {"step": 0}

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:
        state["step"] += 1

    def random_rows(self, parameter: Parameter, length: int, *draw: int | str) -> Tensor:
        """Return orthonormal random rows [r, length], the same on all ranks."""
        generator = torch.Generator().manual_seed(stable_seed(self.seed, parameter.name, *draw))
        rows = torch.randn(self.rank_of(parameter), length, generator=generator, dtype=parameter.working_dtype)
        return orthonormal(rows)


def matrix_shape(parameter: Parameter) -> tuple[int, int]:
    """Return rows and columns of a gradient as a matrix: the first dimension, and all others together."""
    rows = parameter.shape[0] if parameter.shape else 1
    return rows, parameter.numel // rows if rows else 0


def as_matrix(gradient: Tensor, parameter: Parameter) -> Tensor:
    return gradient.view(matrix_shape(parameter))


def whole(gradient: Tensor) -> Payload:
    return Payload((gradient.view(-1),))


def orthonormal(rows: Tensor) -> Tensor:
    """Return orthonormal rows [r, n], r <= n, with the span of ``rows``; dependent rows are replaced by others.

    It uses Householder reflections, which stay orthogonal if rows are nearly parallel. Rows are divided by the largest
    element first, so that no square overflows or vanishes.
    """
    largest = rows.abs().max()
    scaled = rows / largest if largest > 0 else rows
    return torch.linalg.qr(scaled.t())[0].t()


def next_basis(rows: Tensor, before: Tensor) -> Tensor:
    """Return orthonormal rows [r, n] with the span of ``rows``, completed from the basis ``before``.

    A gradient of zeros, or of a rank below r, would otherwise leave directions that no later gradient has.
    """
    largest = rows.abs().max()
    return orthonormal(torch.add(rows / largest, before, alpha=_KEPT)) if largest > 0 else before
