"""Gradients as matrices of low rank: PowerSGD, ACP-SGD and ATOMO.

PowerSGD makes one step of power iteration for each gradient (Vogels et al., NeurIPS'19), ACP-SGD sends one of the two
factors in each step (Zhang et al., ICDCS'23), ATOMO some singular vectors at random (Wang et al., NeurIPS'18).
"""

from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.base import (
    Compressor,
    Joint,
    Memory,
    Packed,
    Parameter,
    Payload,
    State,
    Summable,
    WholeTensor,
    counters,
    next_seed,
    stable_seed,
)
from thinwire.compress.methods.sparsify import check_values
from thinwire.compress.packing import PartSpec, unpack
from thinwire.errors import CorruptMessageError

_KEPT = 1e-6  # of a unit vector, relative to the largest element of a new factor


@dataclass(frozen=True)
class LowRank(Compressor):
    """A compressor of a gradient [n, ...] as a matrix [n, m], approximated by factors [n, r] and [m, r].

    Factors are kept transposed, as contiguous rows [r, n] and [r, m]: the products of a large matrix with a thin one
    are 3 to 10 times as fast that way. `power_sgd` describes the settings; vectors are always sent whole.
    """

    label: ClassVar[str]

    rank: int | float = 4
    _: KW_ONLY
    min_compression_rate: float = 2.0
    start_step: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if not (self.rank >= 1 if isinstance(self.rank, int) else 0.0 < self.rank < 1.0):
            raise ValueError(
                f"{kind} has a rank of at least 1, not {self.rank!r}; 1 to 4 are usual, up to 32 for transformers, or"
                " a part of the smaller side of each matrix, such as 0.1"
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
        seed = f", seed={self.seed}" if self.seed else ""  # ranks of other seeds would add factors that do not match
        return f"{self.label}({self.rank}{rate}{start}{seed})"

    def rank_of(self, parameter: Parameter) -> int:
        """Return the rank with which a parameter is sent, or 0 if it is sent whole."""
        n, m = matrix_shape(parameter)
        rank = min(n, m, self.rank if isinstance(self.rank, int) else max(1, round(self.rank * min(n, m))))
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
    return torch.linalg.qr((rows / largest if largest > 0 else rows).t())[0].t()


def next_basis(rows: Tensor, before: Tensor) -> Tensor:
    """Return orthonormal rows [r, n] with the span of ``rows``, completed from the basis ``before``.

    A gradient of zeros, or of a rank below r, would otherwise leave directions that no later gradient has.
    """
    largest = rows.abs().max()
    return orthonormal(torch.add(rows / largest, before, alpha=_KEPT)) if largest > 0 else before


@dataclass(frozen=True)
class PowerSGD(LowRank, Summable, Joint):
    """PowerSGD (Algorithm 1): ``P = orthonormal(mean of M Q)``, ``Q = mean of M^T P``, mean ``P Q^T``.

    Both means are taken inside an all-reduce of r (n + m) elements instead of n m. It is biased, so it needs error
    feedback, which `attach` puts around it: ``e = g + e - P Q^T`` (Algorithm 2).

    In two rounds, ``P^T`` [r, n] and ``Q^T`` [r, m]; or in one, the gradient [n m].

    With ``values`` both means are taken in two shots of that code, and P and Q are what arrived. All that the code
    loses, of what ranks send and of what owners answer, is in the difference to the mean, so error feedback keeps it.
    A rank sends 2 (n - 1) / n of the code's bytes in each round: with ``mxfp4()`` 4.25 bits an element, not 32.

    State: ``step``; the orthonormal basis ``q`` [r, m] of the next step. Between the rounds also ``matrix`` and ``p``.

    Args:
        rank: r. A matrix whose smaller side is below it has that rank, which is then exact, and is usually sent whole
            because nothing is saved. Below 1 it is the part of the smaller side of each matrix, rounded, at least 1.
        values: code of the factors, one that rounds to the nearest, such as ``mxfp4()``; None sends them as they are.
        min_compression_rate: a parameter is sent whole unless this factor is saved: r (n + m) times it < n m.
        start_step: number of first steps that send everything whole; try a tenth of all steps if the loss suffers.
        warm_start: whether to begin with the Q of the last step, instead of random numbers.
        seed: seed of the first Q, which depends on the name of the parameter too.

    Raises:
        ValueError: settings out of range.

    Example:
        >>> compressor = power_sgd(rank=4)
        >>> compressor.rank_of(Parameter("fc.weight", (512, 512))), compressor.rank_of(Parameter("fc.bias", (512,)))
        (4, 0)
    """

    warm_start: bool = field(default=True, kw_only=True)
    values: Packed | None = field(default=None, kw_only=True)

    label = "power_sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_values("power_sgd", self.values, may_draw=False)

    @property
    def name(self) -> str:
        coded = "" if self.values is None else f", values={self.values.name}"
        return super().name[:-1] + coded + ")" + ("" if self.warm_start else " without warm start")

    def init(self, parameter: Parameter) -> State:
        state = super().init(parameter)
        if self.rank_of(parameter):
            state["q"] = self.random_rows(parameter, matrix_shape(parameter)[1])
        return state

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        if self.is_whole(parameter, state):
            return whole(gradient)
        state["matrix"] = as_matrix(gradient, parameter)
        state.pop("p", None)
        return Payload((torch.mm(state["q"], state["matrix"].t()),), code=self.values)

    def next_round(self, mean: Payload, parameter: Parameter, state: State) -> Payload | None:
        if self.is_whole(parameter, state) or "p" in state:
            return None
        state["p"] = orthonormal(mean.parts[0].view(self.rank_of(parameter), -1))
        return Payload((torch.mm(state["p"], state["matrix"]),), code=self.values)

    def reconstruct(self, mean: Payload, parameter: Parameter, state: State) -> Tensor:
        if self.is_whole(parameter, state):
            return mean.parts[0].clone().view(parameter.shape)
        del state["matrix"]
        p, q = state.pop("p"), mean.parts[0].view(self.rank_of(parameter), -1)
        if self.warm_start:
            state["q"] = next_basis(q, state["q"])
        else:
            state["q"] = self.random_rows(parameter, q.shape[1], state["step"] + 1)
        return torch.mm(p.t(), q).view(parameter.shape)

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        """Return the gradient of the parts of all rounds together."""
        rank = self.rank_of(parameter)
        if rank == 0 or len(payload.parts) == 1:
            return payload.parts[0].clone().view(parameter.shape)
        p, q = (part.view(rank, -1) for part in payload.parts)
        return torch.mm(p.t(), q).view(parameter.shape)

    def residual_of_sum(self, gradient: Tensor, mean: Tensor, parameter: Parameter, state: State) -> None:
        """Leave nothing of a gradient sent whole; else the difference from the mean, as in the authors' code."""
        if self.is_whole(parameter, state):
            gradient.zero_()
        else:
            gradient.sub_(mean)

    def round_specs(self, parameter: Parameter) -> tuple[tuple[PartSpec, ...], ...]:
        """Return the lengths after ``start_step``; they are not fixed if there is one."""
        rank, dtype = self.rank_of(parameter), parameter.working_dtype
        if not rank:
            return ((PartSpec(dtype, parameter.numel),),)
        if self.start_step:
            return ((PartSpec(dtype, None, parameter.numel),),) * 2
        return tuple((PartSpec(dtype, rank * side, code=self.values),) for side in matrix_shape(parameter))

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        return tuple(spec for specs in self.round_specs(parameter) for spec in specs)


power_sgd = PowerSGD


@dataclass(frozen=True)
class ACPSGD(LowRank, Summable, Joint):
    """ACP-SGD: odd steps send ``P = M Q``, even ones ``Q = M^T P``, in the basis that the last step made.

    Half the bytes and half the messages of `power_sgd`, whose power iteration takes two steps here. The
    gradient of a step is projected on a basis that is one step old. `attach` puts error feedback around it.

    One part: the gradient in a basis of its columns, [r n], or of its rows, [r m].

    In a basis of columns ``P^T = Q^T M^T``. State: ``step``; orthonormal bases ``p`` [r, n] and ``q`` [r, m], which
    steps use in turn; between `compress` and `finish` also ``sent``, the part. The projection is linear and the same on
    all ranks, so a rank can compute its loss itself: ``e = M - M Q Q^T``.

    Args:
        rank, min_compression_rate, start_step, seed: as in `power_sgd`.

    Raises:
        ValueError: settings out of range.
    """

    label = "acp_sgd"

    def init(self, parameter: Parameter) -> State:
        state = super().init(parameter)
        if self.rank_of(parameter):
            n, m = matrix_shape(parameter)
            state["p"], state["q"] = self.random_rows(parameter, n, "p"), self.random_rows(parameter, m)
        return state

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        if self.is_whole(parameter, state):
            return whole(gradient)
        matrix = as_matrix(gradient, parameter)
        state["sent"] = torch.mm(state["q"], matrix.t()) if self._sends_p(state) else torch.mm(state["p"], matrix)
        return Payload((state["sent"].view(-1),))

    def decompress(self, payload: Payload, parameter: Parameter) -> Tensor:
        if self.rank_of(parameter) == 0:
            return payload.parts[0].clone().view(parameter.shape)
        raise ValueError(
            f"{self.name}: a payload stands for a gradient only with the bases of its step; see reconstruct"
        )

    def reconstruct(self, mean: Payload, parameter: Parameter, state: State) -> Tensor:
        if self.is_whole(parameter, state):
            return mean.parts[0].clone().view(parameter.shape)
        part = mean.parts[0].view(self.rank_of(parameter), -1)
        factor = "p" if self._sends_p(state) else "q"
        state[factor] = next_basis(part, state[factor])
        return torch.mm(*self._factors(part, state)).view(parameter.shape)

    def residual_of_sum(self, gradient: Tensor, mean: Tensor, parameter: Parameter, state: State) -> None:
        if self.is_whole(parameter, state):
            gradient.zero_()
        else:
            as_matrix(gradient, parameter).addmm_(*self._factors(state["sent"], state), alpha=-1.0)

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:
        state.pop("sent", None)
        super().finish(mean, parameter, state)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        """Return specs; P and Q take turns, so only a gradient sent whole has a fixed length."""
        rank, dtype = self.rank_of(parameter), parameter.working_dtype
        if rank == 0:
            return (PartSpec(dtype, parameter.numel),)
        longest = parameter.numel if self.start_step else rank * max(matrix_shape(parameter))
        return (PartSpec(dtype, None, longest),)

    def _sends_p(self, state: State) -> bool:
        return (state["step"] - self.start_step) % 2 == 0

    def _factors(self, part: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Return [n, r] and [r, m], whose product is the approximation."""
        return (part.t(), state["q"]) if self._sends_p(state) else (state["p"].t(), part)


acp_sgd = ACPSGD


_LONGEST_UNIT = 1.01  # no element of a unit vector is larger, with any rounding


@dataclass(frozen=True)
class Atomo(LowRank, Packed, WholeTensor):
    """ATOMO in its spectral form (Algorithm 1): it keeps component i of the SVD with probability p_i.

    It scales a kept component by 1 / p_i. On average ``rank`` components travel, gathered and not summed. The
    expectation is right, so no memory is needed; but the SVD costs O(n m min(n, m)) operations in every step:
    `power_sgd` is the practical method.

    ``parts``: k left singular vectors times s_i / p_i [k n], right ones [k m]; or all.

    Args:
        rank: expected number of components.
        min_compression_rate: a parameter is sent whole unless rank (n + m) times it < n m.
        seed: seed of the random choice, which also depends on the parameter, the step and the rank of the process.

    Raises:
        ValueError: settings out of range.
    """

    start_step: int = field(default=0, init=False)  # of the others

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


atomo = Atomo
