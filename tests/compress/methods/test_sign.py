"""Signs: votes, momentum and scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.compress.quantized import arrived, state_of
from thinwire import compress
from thinwire.compress.base import (
    Parameter,
)


def vote(gradients: list[Tensor], momentum: float = 0.0) -> Tensor:
    method = compress.sign_sgd(momentum)
    parameter = Parameter("weight", tuple(gradients[0].shape))
    payloads = [
        method.compress(gradient, parameter, state_of(method, parameter, rank))
        for rank, gradient in enumerate(gradients)
    ]
    return method.combine(payloads, parameter)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_the_majority_decides(world_size: int) -> None:
    gradients = [torch.randn(37, 53) for _ in range(world_size)]
    assert torch.equal(vote(gradients), sum(gradient.sign() for gradient in gradients).sign())  # type: ignore[union-attr]


def test_ties_are_zero_and_ranks_with_nothing_do_not_vote() -> None:
    assert vote([torch.ones(3), -torch.ones(3)]).tolist() == [0.0, 0.0, 0.0]
    assert vote([torch.zeros(3), -torch.ones(3), torch.zeros(3)]).tolist() == [-1.0, -1.0, -1.0]
    assert vote([torch.zeros(3), torch.zeros(3)]).tolist() == [0.0, 0.0, 0.0]


def test_zeros_cancel_out_between_steps_and_ranks() -> None:
    """A row that is not used moves back and forth, never away."""
    method, parameter = compress.sign_sgd(), Parameter("weight", (101,))
    gradient = torch.zeros(101).index_fill_(0, torch.tensor([3]), 1.0)
    states = [state_of(method, parameter, rank) for rank in range(3)]
    total = torch.zeros(101)
    for _ in range(10):
        total += method.combine([method.compress(gradient, parameter, state) for state in states], parameter)
    assert float(total[3]) == 10.0
    total[3] = 0.0
    assert not total.any()


def test_signum_votes_with_the_momentum() -> None:
    method, parameter = compress.sign_sgd(0.9), Parameter("weight", (2,))
    state = state_of(method, parameter)
    momentum = torch.zeros(2)
    for step in range(5):
        gradient = torch.tensor([1.0, -1.0]) if step < 2 else torch.tensor([-0.1, 0.1])
        momentum = 0.9 * momentum + 0.1 * gradient
        assert torch.allclose(state["momentum"].clone().mul_(0.9).add_(gradient, alpha=0.1), momentum)
        assert torch.equal(method.decompress(method.compress(gradient, parameter, state), parameter), momentum.sign())


def test_ef_sign_sgd_sends_the_mean_magnitude_of_each_block() -> None:
    method, parameter = compress.ef_sign_sgd(block=8), Parameter("weight", (2, 9))
    gradient = torch.arange(-9.0, 9.0).view(2, 9)
    value = arrived(method, method.compress(gradient, parameter, state_of(method, parameter)), parameter).view(-1)
    assert value[:8].tolist() == [-5.5] * 8
    assert value[10:16].tolist() == [2.75] * 6
    assert value[16:].tolist() == [7.5] * 2
    assert [part.numel for part in method.inner.part_specs(parameter)] == [3, 3]


def test_ef_sign_sgd_with_one_scale_sends_the_mean_magnitude() -> None:
    method, parameter = compress.ef_sign_sgd(block=None), Parameter("weight", (4,))
    state = state_of(method, parameter)
    value = arrived(method, method.compress(torch.tensor([1.0, -3.0, 2.0, -2.0]), parameter, state), parameter)
    assert value.tolist() == [2.0, -2.0, 2.0, -2.0]
    assert state["error"].tolist() == [-1.0, -1.0, 0.0, 0.0]
