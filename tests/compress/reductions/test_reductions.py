"""Exchanges of compressed gradients, on ranks that are threads: every compressor by every exchange that it allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from loopback import LoopbackExchange, run_ranks
from tests.compress.reductions.averaged import COMPRESSORS, MATRICES, SCHEME, Steps, gradient_of, mean_memory, train
from thinwire.compress.base import Compressor, Identity, Memory, Parameter, Payload, State, check_parameter
from thinwire.compress.memory import ErrorFeedback, with_memory
from thinwire.compress.methods.select import TopK, top_k
from thinwire.compress.reductions.choose import REDUCTIONS, reduction_for
from thinwire.compress.wrappers import code_of
from thinwire.errors import LostPeerError, PeerError

ALL_REDUCTIONS = (*REDUCTIONS, SCHEME)


def is_possible(name: str, compressor: Compressor) -> bool:
    try:
        for parameter in fitting(compressor):
            reduction_for(name, compressor, parameter, 2)
    except ValueError:
        return False
    return bool(fitting(compressor))


def fitting(compressor: Compressor, dtype: torch.dtype = torch.float32) -> tuple[Parameter, ...]:
    """The parameters that a compressor takes."""
    found = []
    for parameter in MATRICES:
        try:
            check_parameter(compressor, parameter)
        except ValueError:
            continue
        found.append(replace(parameter, dtype=dtype))
    return tuple(found)


CASES = [
    (name, exchange) for name in COMPRESSORS for exchange in ALL_REDUCTIONS if is_possible(exchange, COMPRESSORS[name])
]


def has_fixed_size(compressor: Compressor, parameters: Sequence[Parameter]) -> bool:
    return all(code_of(compressor).packed_bytes(parameter) is not None for parameter in parameters)


def check(name: str, exchange: str, world_size: int) -> None:
    compressor = COMPRESSORS[name]
    parameters = fitting(compressor)
    outcomes = run_ranks(world_size, lambda network: train(network, compressor, exchange, parameters))
    ranks = [outcome.get() for outcome in outcomes]
    for step, results in enumerate(ranks[0].results):
        for place, result in enumerate(results):
            assert result.mean.shape == parameters[place].shape
            assert result.mean.dtype == torch.float32
            assert bool(torch.isfinite(result.mean).all())
            assert all(torch.equal(result.mean, other.results[step][place].mean) for other in ranks)
            assert 0.0 <= result.density <= 1.0
    for rank in ranks:
        assert rank.predicted_bytes is not None or not has_fixed_size(compressor, parameters) or exchange == SCHEME
        if rank.predicted_bytes is not None:
            assert rank.sent_bytes == [rank.predicted_bytes] * len(rank.sent_bytes)


@pytest.mark.few(47)
@pytest.mark.parametrize(("name", "exchange"), CASES)
def test_ranks_agree_bitwise_and_send_what_was_predicted(name: str, exchange: str) -> None:
    check(name, exchange, 3)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("exchange", ALL_REDUCTIONS)
def test_every_world_size(exchange: str, world_size: int) -> None:
    wanted = ("error_feedback(identity)", "top_k", "random_k", "qsgd", "power_sgd")
    for name in wanted:
        if (name, exchange) in CASES:
            check(name, exchange, world_size)


def test_every_exchange_is_tried_by_several_compressors() -> None:
    for exchange in ALL_REDUCTIONS:
        assert len([name for name, tried in CASES if tried == exchange]) >= 3
    assert {name for name, _ in CASES} == set(COMPRESSORS)


@pytest.mark.few(6)
@pytest.mark.parametrize("exchange", ALL_REDUCTIONS)
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_without_loss_it_is_the_dense_mean(exchange: str, world_size: int) -> None:
    candidates: list[Compressor] = [Identity(), ErrorFeedback(Identity()), with_memory(top_k(1.0))]
    for compressor in candidates:
        try:
            reduction_for(exchange, compressor, MATRICES[0], world_size)
        except ValueError:
            continue
        parameters = fitting(compressor)

        def run(
            network: LoopbackExchange, compressor: Compressor = compressor, parameters: Sequence[Parameter] = parameters
        ) -> Steps:
            return train(network, compressor, exchange, parameters)

        seen = run_ranks(world_size, run)[0].get()
        for step, results in enumerate(seen.results):
            for parameter, result in zip(parameters, results, strict=True):
                dense = torch.stack([gradient_of(parameter, rank, step) for rank in range(world_size)]).mean(0)
                torch.testing.assert_close(result.mean, dense, atol=1e-6, rtol=1e-5)


CONSERVING = ("top_k", "random_k", "gaussian_k", "threshold", "fp8", "int8", "top_k, bf16", "error_feedback(identity)")


CONSERVING += ("power_sgd", "power_sgd, mxfp4", "mxfp4")


CONSERVING += ("deep_reduce", "deep_reduce, huffman", "deep_reduce, bloom:p0", "deep_reduce, bloom:p2")


@pytest.mark.few(15)
@pytest.mark.parametrize(("name", "exchange"), [(name, exchange) for name, exchange in CASES if name in CONSERVING])
@pytest.mark.parametrize("world_size", [2, 5])
def test_nothing_is_lost(name: str, exchange: str, world_size: int) -> None:
    """What all ranks were given = what they got in all steps, and what workers and owners still keep."""
    compressor = COMPRESSORS[name] if COMPRESSORS[name].memory is Memory.OWN else ErrorFeedback(COMPRESSORS[name])
    parameters = fitting(compressor, torch.float64)
    outcomes = run_ranks(world_size, lambda network: train(network, compressor, exchange, parameters, num_steps=3))
    ranks = [outcome.get() for outcome in outcomes]
    for place, parameter in enumerate(parameters):
        given = sum(gradient_of(parameter, rank, step) for rank in range(world_size) for step in range(3))
        got = torch.stack([results[place].mean for results in ranks[0].results]).sum(0)
        kept = mean_memory([rank.states[place] for rank in ranks], parameter)
        torch.testing.assert_close(world_size * (got + kept), given, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("exchange", ["all_gather", "two_shot", SCHEME])
def test_elements_that_several_ranks_chose_add_up(exchange: str) -> None:
    """9 and 7 at one place give 16, so the mean of two ranks is 8."""
    parameter = Parameter("fc.weight", (4, 5))

    def gradient(parameter: Parameter, rank: int, step: int) -> Tensor:
        dense = torch.zeros(parameter.shape)
        dense[2, 3] = (9.0, 7.0)[rank]
        return dense

    outcomes = run_ranks(
        2, lambda network: train(network, with_memory(top_k(0.05)), exchange, [parameter], 1, gradient)
    )
    for outcome in outcomes:
        mean = outcome.get().results[0][0].mean
        assert mean[2, 3] == 8.0
        assert mean.count_nonzero() == 1


@dataclass(frozen=True)
class Failing(Identity):
    """Cannot compress on rank 1, which its state tells."""

    def init(self, parameter: Parameter) -> State:
        return {"salt": 0}

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        if state["salt"] == 1:
            raise ValueError("the singular values did not converge")
        return super().compress(gradient, parameter, state)


@dataclass(frozen=True)
class FailingSparse(TopK):
    """The same, of a sparsifier."""

    def init(self, parameter: Parameter) -> State:
        return Failing().init(parameter)

    def compress(self, gradient: Tensor, parameter: Parameter, state: State) -> Payload:
        Failing().compress(gradient, parameter, state)
        return super().compress(gradient, parameter, state)


@pytest.mark.parametrize("exchange", ALL_REDUCTIONS)
def test_a_failing_compressor_fails_all_ranks(exchange: str) -> None:
    compressor = FailingSparse() if exchange == SCHEME else Failing()
    outcomes = run_ranks(3, lambda network: train(network, compressor, exchange, [MATRICES[1]], 1))
    assert "did not converge" in str(outcomes[1].error)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, LostPeerError if exchange == "all_reduce" else PeerError)
