"""ACP-SGD: PowerSGD that sends one factor a step (Zhang et al., ICDCS'23)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.compress.base import Joint, Parameter, Payload, State, Summable
from thinwire.compress.low_rank import LowRank, as_matrix, matrix_shape, next_basis, whole
from thinwire.compress.packing import PartSpec


@dataclass(frozen=True)
class ACPSGD(LowRank, Summable, Joint):
    """See `acp_sgd`. One part: the gradient in a basis of its columns, ``P^T = Q^T M^T`` [r n], or of its rows, [r m].

    State: ``step``; orthonormal bases ``p`` [r, n] and ``q`` [r, m], which steps use in turn; between `compress`
    and `finish` also ``sent``, the part. The projection is linear and the same on all ranks, so a rank knows what it
    lost itself: ``e = M - M Q Q^T``.
    """

    @property
    def label(self) -> str:
        return "acp_sgd"

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
        del mean
        if self.is_whole(parameter, state):
            gradient.zero_()
        else:
            as_matrix(gradient, parameter).addmm_(*self._factors(state["sent"], state), alpha=-1.0)

    def finish(self, mean: Tensor, parameter: Parameter, state: State) -> None:
        state.pop("sent", None)
        super().finish(mean, parameter, state)

    def part_specs(self, parameter: Parameter) -> tuple[PartSpec, ...]:
        """P and Q take turns, so only what is sent whole has a fixed length."""
        rank, dtype = self.rank_of(parameter), parameter.working_dtype
        if rank == 0:
            return (PartSpec(dtype, parameter.numel),)
        longest = parameter.numel if self.start_step else rank * max(matrix_shape(parameter))
        return (PartSpec(dtype, None, longest),)

    def _sends_p(self, state: State) -> bool:
        return (state["step"] - self.start_step) % 2 == 0

    def _factors(self, part: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """[n, r] and [r, m], of which the product is the approximation."""
        return (part.t(), state["q"]) if self._sends_p(state) else (state["p"].t(), part)


def acp_sgd(rank: int = 4, *, min_compression_rate: float = 2.0, start_step: int = 0, seed: int = 0) -> ACPSGD:
    """ACP-SGD: odd steps send ``P = M Q``, even ones ``Q = M^T P``, in the basis that the last step made.

    Half the bytes and half the messages of `power_sgd`, whose power iteration it does in two steps instead of one; the
    gradient of a step is projected on a basis that is one step old. `attach` puts error feedback around it.

    Args:
        rank, min_compression_rate, start_step, seed: as in `power_sgd`.

    Raises:
        ValueError: settings out of range.
    """
    return ACPSGD(rank, min_compression_rate, start_step, seed)
