"""PowerSGD, one step of power iteration for each gradient (Vogels et al., NeurIPS'19), and ACP-SGD.

ACP-SGD sends one of the two factors in each step (Zhang et al., ICDCS'23).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.base import Joint, Parameter, Payload, State, Summable
from thinwire.compress.methods.low_rank import (
    LowRank,
    RoundSpecs,
    as_matrix,
    matrix_shape,
    next_basis,
    orthonormal,
    whole,
)
from thinwire.compress.packing import PartSpec


@dataclass(frozen=True)
class PowerSGD(LowRank, Summable, Joint):
    """The compressor of `power_sgd`, in two rounds, ``P^T`` [r n] and ``Q^T`` [r m]; or in one, the gradient [n m].

    State: ``step``; the orthonormal basis ``q`` [r, m] of the next step. Between the rounds also ``matrix`` and ``p``.
    """

    warm_start: bool = True

    label = "power_sgd"

    @property
    def name(self) -> str:
        return super().name + ("" if self.warm_start else " without warm start")

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
        return Payload((torch.mm(state["q"], state["matrix"].t()).view(-1),))

    def next_round(self, mean: Payload, parameter: Parameter, state: State) -> Payload | None:
        if self.is_whole(parameter, state) or "p" in state:
            return None
        state["p"] = orthonormal(mean.parts[0].view(self.rank_of(parameter), -1))
        return Payload((torch.mm(state["p"], state["matrix"]).view(-1),))

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

    def round_specs(self, parameter: Parameter) -> RoundSpecs:
        """Return the lengths after ``start_step``; they are not fixed if there is one."""
        rank, dtype = self.rank_of(parameter), parameter.working_dtype
        lengths = [rank * length for length in matrix_shape(parameter)] if rank else [parameter.numel]
        if rank and self.start_step:
            return tuple((PartSpec(dtype, None, parameter.numel),) for _ in lengths)
        return tuple((PartSpec(dtype, length),) for length in lengths)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        return tuple(spec for specs in self.round_specs(parameter) for spec in specs)


def power_sgd(
    rank: int = 4,
    *,
    min_compression_rate: float = 2.0,
    start_step: int = 0,
    warm_start: bool = True,
    seed: int = 0,
) -> PowerSGD:
    """Return PowerSGD (Algorithm 1): ``P = orthonormal(mean of M Q)``, ``Q = mean of M^T P``, mean ``P Q^T``.

    Both means are taken inside an all-reduce of r (n + m) elements instead of n m. It is biased, so it needs error
    feedback, which `attach` puts around it: ``e = g + e - P Q^T`` (Algorithm 2).

    Args:
        rank: r. A matrix whose smaller side is below it has that rank, which is then exact, and is usually sent whole
            because nothing is saved.
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
    return PowerSGD(rank, min_compression_rate, start_step, seed, warm_start)


@dataclass(frozen=True)
class ACPSGD(LowRank, Summable, Joint):
    """The compressor of `acp_sgd`. One part: the gradient in a basis of its columns, [r n], or of its rows, [r m].

    In a basis of columns ``P^T = Q^T M^T``. State: ``step``; orthonormal bases ``p`` [r, n] and ``q`` [r, m], which
    steps use in turn; between `compress` and `finish` also ``sent``, the part. The projection is linear and the same on
    all ranks, so a rank can compute its loss itself: ``e = M - M Q Q^T``.
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


def acp_sgd(rank: int = 4, *, min_compression_rate: float = 2.0, start_step: int = 0, seed: int = 0) -> ACPSGD:
    """Return ACP-SGD: odd steps send ``P = M Q``, even ones ``Q = M^T P``, in the basis that the last step made.

    Half the bytes and half the messages of `power_sgd`, whose power iteration it does in two steps instead of one; the
    gradient of a step is projected on a basis that is one step old. `attach` puts error feedback around it.

    Args:
        rank, min_compression_rate, start_step, seed: as in `power_sgd`.

    Raises:
        ValueError: settings out of range.
    """
    return ACPSGD(rank, min_compression_rate, start_step, seed)
