"""Elements drawn at random, the same on all ranks."""

from __future__ import annotations

import math

import pytest
import torch

from tests.compress.sparsified import gradient_of, sent_by
from thinwire import compress
from thinwire.compress import bf16
from thinwire.compress.base import Compressor, Memory, Parameter, Payload, Summable
from thinwire.compress.memory import with_memory
from thinwire.compress.methods.sparsify import Sparsifier


def test_random_k_is_the_same_on_all_ranks_and_new_in_every_step() -> None:
    parameter = Parameter("weight", (10_000,))
    seen = []
    states = [compress.random_k(0.01).init(parameter) for _ in range(2)]
    for _ in range(5):
        ids = [compress.random_k(0.01).compress(torch.randn(10_000), parameter, state).ids for state in states]
        assert torch.equal(*ids)
        assert ids[0].unique().numel() == 100
        seen.append(tuple(ids[0].tolist()))
    assert len(set(seen)) == 5
    for other in (compress.random_k(0.01, seed=1), compress.random_k(0.01)):
        named = Parameter("other" if other.seed == 0 else "weight", (10_000,))
        assert tuple(sent_by(other, torch.randn(10_000), named).ids.tolist()) != seen[0]


@pytest.mark.parametrize("values", [None, bf16()], ids=["plain", "bf16"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_random_k_adds_up_inside_an_all_reduce(unbiased: bool, values: Compressor | None) -> None:
    parameter = Parameter("weight", (37, 53))
    compressor = compress.random_k(0.1, unbiased=unbiased, values=values)
    assert isinstance(compressor, Summable)
    assert not isinstance(compressor, Sparsifier)
    gradients, states = [gradient_of(parameter) for _ in range(3)], [compressor.init(parameter) for _ in range(3)]
    for _ in range(2):
        payloads = [
            compressor.compress(gradient, parameter, state) for gradient, state in zip(gradients, states, strict=True)
        ]
        mean = Payload(
            (torch.stack([payload.parts[0] for payload in payloads]).double().mean(0).to(values_dtype(payloads)),)
        )
        expected = compressor.combine(payloads, parameter)
        for state in states:
            torch.testing.assert_close(compressor.reconstruct(mean, parameter, state), expected, rtol=1e-2, atol=1e-2)


def values_dtype(payloads: list[Payload]) -> torch.dtype:
    return payloads[0].parts[0].dtype


@pytest.mark.slow
@pytest.mark.parametrize(("size", "density"), [(50, 0.1), (50, 0.5), (5000, 0.01), (5000, 0.2)])
def test_every_element_is_drawn_equally_often(size: int, density: float) -> None:
    """4 sigma, of all elements together and in pairs of neighbours, by a permutation and by drawing again."""
    parameter, compressor = Parameter("weight", (size,)), compress.random_k(density)
    k, draws = compressor.target(size), 4000
    state, counts, pairs = compressor.init(parameter), torch.zeros(size), 0
    for _ in range(draws):
        ids = compressor.compress(torch.zeros(size), parameter, state).ids
        counts[ids] += 1
        pairs += int((ids[1:] == ids[:-1] + 1).sum())
    share = k / size
    sigma = math.sqrt(draws * share * (1 - share))
    assert float((counts - draws * share).abs().max()) < 6 * sigma  # the largest of many
    chi_squared = float((counts - draws * share).square().sum()) / sigma**2 * (size - 1) / size
    assert abs(chi_squared - (size - 1)) < 4 * math.sqrt(2 * (size - 1))
    expected = draws * (size - 1) * share * (k - 1) / (size - 1)
    assert abs(pairs - expected) < 4 * math.sqrt(2 * expected) + 4


def test_random_k_is_unbiased() -> None:
    """The mean of many draws is the gradient, within 4 sigma at each element that a scaled coin flip has."""
    parameter, compressor = Parameter("weight", (40,)), compress.random_k(0.25, unbiased=True)
    assert compressor.memory is Memory.OWN
    gradient, state, total, draws = torch.randn(40), compressor.init(parameter), torch.zeros(40), 10_000
    for _ in range(draws):
        compressor.add(compressor.compress(gradient, parameter, state), parameter, total)
    sigma = gradient.abs() * math.sqrt((1 / 0.25 - 1) / draws)
    assert bool(((total / draws - gradient).abs() <= 4 * sigma).all())


@pytest.mark.parametrize("values", [bf16(), compress.int8()], ids=["bf16", "int8"])
def test_no_memory_is_put_around_scaled_values(values: Compressor) -> None:
    """It would keep what the scaling adds: minus nine times the value, and minus nine times that in the next step."""
    parameter, compressor = Parameter("weight", (1000,)), compress.random_k(0.1, unbiased=True, values=values)
    attached, gradient = with_memory(compressor), torch.ones(1000)
    state = attached.init(parameter)
    for _ in range(30):
        sent = attached.decompress(attached.compress(gradient, parameter, state), parameter)
        assert float(sent.abs().max()) < 10.1
    with pytest.raises(ValueError, match="leave error_feedback out"):
        compress.error_feedback(compressor)
