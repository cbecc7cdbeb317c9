"""Memories: what overflows, and EF21."""

from __future__ import annotations

import math

import pytest
import torch

from compressors import FEEDBACK
from tests.compress.factored import all_reduced, every_method, gradients_of, mean_of, states_of
from tests.compress.laws import PARAMETER, arrived, made
from thinwire import compress
from thinwire.compress.base import Compressor, Memory, Parameter
from thinwire.compress.wrappers import code_of, summable_code
from thinwire.errors import CorruptMessageError


@pytest.mark.few(5)
@every_method
@pytest.mark.parametrize("shape", [(37, 53), (64, 3, 5, 5), (1023,)], ids=str)
def test_ef21_follows_the_mean_of_momenta(method: Compressor, shape: tuple[int, ...]) -> None:
    """Every rank has the same estimate; it and what ranks hold are the mean of their momenta, and it converges."""
    parameter = Parameter("weight", shape)
    tracked = compress.ef21(method, 0.8)
    states, expected = states_of(tracked, parameter, 3), torch.zeros(shape)
    gradients = gradients_of(parameter, 3)
    distances = []
    for step in range(30):
        of_step = gradients if step > 3 else gradients_of(parameter, 3, step)
        expected = 0.8 * expected + 0.2 * mean_of(of_step)
        mean = all_reduced(tracked, of_step, parameter, states)
        assert all(torch.equal(state["estimate"], mean) for state in states)
        torch.testing.assert_close(mean_of([state["average"] for state in states]), expected)
        distances.append(float(torch.linalg.vector_norm(mean - expected) / torch.linalg.vector_norm(expected)))
    assert distances[-1] <= (1e-5 if not summable_code(method).rank_of(parameter) else 0.75 * max(distances[4:6]))


def test_ef21_at_full_rank_is_the_momentum() -> None:
    parameter = Parameter("weight", (8, 12), torch.float64)
    tracked = compress.ef21(compress.power_sgd(100, min_compression_rate=0.0), 0.5)
    states, expected = states_of(tracked, parameter, 3), torch.zeros(8, 12, dtype=torch.float64)
    for step in range(5):
        gradients = gradients_of(parameter, 3, step)
        expected = 0.5 * expected + 0.5 * mean_of(gradients)
        torch.testing.assert_close(all_reduced(tracked, gradients, parameter, states), expected)


@pytest.mark.parametrize("inner", [compress.top_k(0.01), compress.error_feedback(compress.power_sgd(4))])
def test_ef21_refuses_what_it_cannot_follow(inner: Compressor) -> None:
    with pytest.raises(ValueError, match=r"ef21 takes power_sgd or acp_sgd"):
        compress.ef21(inner)
    with pytest.raises(ValueError, match=r"momentum is in \[0, 1\), not 1.0"):
        compress.ef21(compress.power_sgd(4), 1.0)


BIASED = [name for name, code in FEEDBACK.items() if code_of(code).memory is not Memory.UNBIASED and name != "random_k"]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", BIASED)
def test_a_memory_that_overflowed_is_refused_or_shows(name: str, value: float) -> None:
    """No gradient is compressed that is not finite; of a memory nobody looks, so it must not become a small number."""
    compressor = FEEDBACK[name]
    state = compressor.init(PARAMETER)
    state["error"][3, 5] = value
    try:
        mean = arrived(compressor, compressor.compress(made("normal", 0), PARAMETER, state), state)
    except CorruptMessageError:
        return
    assert not float(mean[3, 5].abs()) < torch.finfo(torch.float16).max
