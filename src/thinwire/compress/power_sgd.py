"""PowerSGD: one step of power iteration for each gradient (Vogels et al., NeurIPS'19)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.base import Joint, Parameter, Payload, State, Summable
from thinwire.compress.low_rank import LowRank, RoundSpecs, as_matrix, matrix_shape, next_basis, orthonormal, whole
from thinwire.compress.packing import PartSpec


@dataclass(frozen=True)
class PowerSGD(LowRank, Summable, Joint):
    """See `power_sgd`. Two rounds, ``P^T`` [r n] and ``Q^T`` [r m]; or one, the gradient [n m], where it is sent whole.

    State: ``step``; the orthonormal basis ``q`` [r, m] of the next step. Between the rounds also ``matrix`` and ``p``.
    """

    warm_start: bool = True

    @property
    def label(self) -> str:
        return "power_sgd"

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
        """Of the parts of all rounds together."""
        rank = self.rank_of(parameter)
        if rank == 0 or len(payload.parts) == 1:
            return payload.parts[0].clone().view(parameter.shape)
        p, q = (part.view(rank, -1) for part in payload.parts)
        return torch.mm(p.t(), q).view(parameter.shape)

    def residual_of_sum(self, gradient: Tensor, mean: Tensor, parameter: Parameter, state: State) -> None:
        """What was sent whole leaves nothing; otherwise the difference from the mean, as in the authors' code."""
        if self.is_whole(parameter, state):
            gradient.zero_()
        else:
            gradient.sub_(mean)

    def round_specs(self, parameter: Parameter) -> RoundSpecs:
        """Lengths are those after ``start_step``, and not fixed where there is one."""
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
    """PowerSGD (Algorithm 1): ``P = orthonormal(mean of M Q)``, ``Q = mean of M^T P``, and ``P Q^T`` for the gradient.

    Both means are taken inside an all-reduce of r (n + m) elements instead of n m. It is biased, so it needs error
    feedback, which `attach` puts around it: ``e = g + e - P Q^T`` (Algorithm 2).

    Args:
        rank: r. A matrix of which the smaller side is below it has that rank, which is then exact, and is usually sent
            whole because nothing is saved.
        min_compression_rate: a parameter is sent whole unless this factor is saved: r (n + m) times it < n m.
        start_step: send everything whole in this many first steps; try a tenth of all steps if the loss suffers.
        warm_start: begin with the Q of the last step, instead of random numbers.
        seed: of the first Q, which depends on the name of the parameter too.

    Raises:
        ValueError: settings out of range.

    Example:
        >>> compressor = power_sgd(rank=4)
        >>> compressor.rank_of(Parameter("fc.weight", (512, 512))), compressor.rank_of(Parameter("fc.bias", (512,)))
        (4, 0)
    """
    return PowerSGD(rank, min_compression_rate, start_step, seed, warm_start)
