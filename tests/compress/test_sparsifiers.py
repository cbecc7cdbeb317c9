"""Laws of every sparsifier: nothing is lost, counts keep their promise, bytes are predicted, damage is noticed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compress.sparsified import METHODS, gradient_of, saved_and_loaded, sent_by
from thinwire import compress
from thinwire.compress import bf16, int8
from thinwire.compress.base import Compressor, Parameter, Payload, check_parameter
from thinwire.compress.memory import ErrorFeedback, MomentumCorrection
from thinwire.compress.methods.sparsify import Sparsifier
from thinwire.compress.papers.thresholds import SampledTopK
from thinwire.compress.warm_up import WarmUp

SHAPES = ((0,), (1,), (7,), (1023,), (1025,), (37, 53))
EXACTLY_K = {"top_k", "random_k", "ms_top_k"}
every_method = pytest.mark.parametrize("method", METHODS)
every_threshold_method = pytest.mark.parametrize("method", [name for name in METHODS if name not in EXACTLY_K])
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)


def sparsifiers(density: float) -> list[Sparsifier]:
    return [*(make(density) for make in METHODS.values()), compress.threshold(1.5)]


def ids_of(compressor: Sparsifier, payload: Payload, parameter: Parameter) -> Tensor:
    return compressor.chosen(payload, parameter)[0]


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


@every_dtype
@every_shape
@pytest.mark.parametrize("density", [0.01, 0.2, 0.7])
def test_nothing_is_lost(density: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """What is sent and what error feedback keeps make the gradient and the old memory, to the last bit."""
    parameter = Parameter("weight", shape, dtype)
    for sparsifier in sparsifiers(density):
        compressor = ErrorFeedback(sparsifier)
        state = compressor.init(parameter)
        for _ in range(4):
            gradient = gradient_of(parameter)
            corrected = state["error"] + gradient
            payload = compressor.compress(gradient, parameter, state)
            ids = ids_of(sparsifier, payload, parameter)
            assert bool((ids[1:] > ids[:-1]).all())
            assert bool((state["error"].view(-1)[ids] == 0).all())
            assert_same_bits(compressor.decompress(payload, parameter) + state["error"], corrected)


@every_shape
@pytest.mark.parametrize("code", [bf16(), int8()], ids=lambda code: code.name)
def test_what_a_code_of_values_loses_is_kept(code: Compressor, shape: tuple[int, ...]) -> None:
    parameter = Parameter("weight", shape)
    for make in METHODS.values():
        sparsifier = make(0.3, values=code)
        compressor = ErrorFeedback(sparsifier)
        state = compressor.init(parameter)
        corrected = state["error"] + gradient_of(parameter)
        payload = compressor.compress(corrected.clone(), parameter, state)
        ids, values = sparsifier.chosen(payload, parameter)
        assert torch.equal(state["error"].view(-1)[ids], corrected.view(-1)[ids] - values)
        torch.testing.assert_close(values, corrected.view(-1)[ids], rtol=1e-2, atol=0.05)


@every_dtype
@every_shape
@every_method
def test_density_1_is_the_identity(method: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parameter, compressor = Parameter("weight", shape, dtype), METHODS[method](1.0)
    gradient = gradient_of(parameter)
    assert_same_bits(compressor.decompress(sent_by(compressor, gradient, parameter), parameter), gradient)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"random_k"}))
def test_what_several_ranks_choose_adds_up(method: str) -> None:
    """9 and 7 at one place are 16, the mean of two ranks is 8."""
    parameter, compressor = Parameter("weight", (100,)), METHODS[method](0.01)
    payloads = []
    for value in (9.0, 7.0):
        gradient = 0.001 * torch.rand(100)
        gradient[42] = value
        payloads.append(sent_by(compressor, gradient, parameter))
        assert payloads[-1].parts[0].tolist() == [42]
    total = torch.zeros(100)
    for payload in payloads:
        compressor.add(payload, parameter, total)
    assert float(total[42]) == 16.0
    mean = compressor.combine(payloads, parameter)
    assert float(mean[42]) == 8.0
    assert int(mean.count_nonzero()) == 1


@pytest.mark.parametrize("wrap", [ErrorFeedback, MomentumCorrection, lambda inner: WarmUp(ErrorFeedback(inner), 9)])
def test_a_saved_state_continues_with_the_same_bits(wrap: Callable[[Compressor], Compressor]) -> None:
    parameter = Parameter("weight", (37, 53))
    for sparsifier in sparsifiers(0.05):
        compressor = wrap(sparsifier)
        state = compressor.init(parameter)
        gradients = [gradient_of(parameter) for _ in range(14)]
        for gradient in gradients[:6]:
            compressor.compress(gradient, parameter, state)
        resumed = saved_and_loaded(state)
        for gradient in gradients[6:]:
            payload, again = (compressor.compress(gradient, parameter, kept) for kept in (state, resumed))
            for part, other in zip(payload.parts, again.parts, strict=True):
                assert_same_bits(part, other)


@every_dtype
@every_shape
@pytest.mark.parametrize("density", [0.002, 0.1, 0.6, 1.0])
def test_packed_payloads_arrive(density: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parameter = Parameter("weight", shape, dtype)
    for method, make in METHODS.items():
        for values in (None, bf16(), int8()):
            compressor = make(density, values=values)
            gradient = gradient_of(parameter)
            payload = sent_by(compressor, gradient, parameter)
            data = compressor.pack(payload, parameter)
            assert data.numel() % 8 == 0
            if method in EXACTLY_K:
                assert data.numel() == compressor.packed_bytes(parameter), compressor.name
            else:
                assert compressor.packed_bytes(parameter) is None
            arrived = compressor.unpack(data, parameter)
            for part, other in zip(payload.parts, arrived.parts, strict=True):
                assert_same_bits(part, other)
            assert_same_bits(compressor.decompress(payload, parameter), compressor.decompress(arrived, parameter))


def test_sizes_are_fixed_where_counts_are() -> None:
    fixed = {name for name, make in METHODS.items() if make(0.1).packed_bytes(Parameter("weight", (1000,))) is not None}
    assert fixed == EXACTLY_K


DISTRIBUTIONS: dict[str, Callable[[int], Tensor]] = {
    "normal": torch.randn,
    "laplace": lambda size: torch.distributions.Laplace(0.0, 1.0).sample((size,)),
    "log_normal": lambda size: torch.randn(size).mul(2).exp() * torch.randn(size).sign(),
    "tiny": lambda size: torch.randn(size) * 1e-30,
    "large": lambda size: torch.randn(size) * 1e30,
    "uniform": torch.rand,
}
PROMISE = {
    "gaussian_k": (2 / 3, 4 / 3),
    "redsync": (2 / 3, 4 / 3),
    "sidco_exponential": (2 / 3, 4 / 3),
    "sidco_gamma": (2 / 3, 4 / 3),
    "sidco_pareto": (2 / 3, 4 / 3),
    "sampled_top_k": (0.8, 1.0),
}
"""Of k: fewest and most."""


@every_method
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3])
def test_counts_keep_their_promise(method: str, distribution: str, density: float) -> None:
    parameter, compressor = Parameter("weight", (100_003,)), METHODS[method](density)
    k, state = compressor.target(100_003), compressor.init(parameter)
    fewest, most = (1.0, 1.0) if method in EXACTLY_K else PROMISE[method]
    for _ in range(3):
        gradient = DISTRIBUTIONS[distribution](100_003)
        ids, values = compressor.chosen(compressor.compress(gradient, parameter, state), parameter)
        assert max(1.0, fewest * k) <= ids.numel() <= most * k
        assert torch.equal(values, gradient[ids])
        if method not in ("random_k", "ms_top_k"):  # nothing that is left out is larger
            rest = gradient.abs().index_fill(0, ids, 0.0)
            assert float(rest.max()) <= float(values.abs().min())


@pytest.mark.few(6)
@every_threshold_method
@pytest.mark.parametrize(("distribution", "within"), [("normal", 0.34), ("laplace", 0.34)])
def test_estimates_are_near(method: str, distribution: str, within: float) -> None:
    """On bell-shaped gradients, 1 %, once SIDCo has found its number of stages."""
    parameter, compressor = Parameter("weight", (200_000,)), METHODS[method](0.01)
    state, counts = compressor.init(parameter), []
    for _ in range(30):
        payload = compressor.compress(DISTRIBUTIONS[distribution](200_000), parameter, state)
        counts.append(payload.parts[0].numel() / 2000)
    mean = sum(counts[-10:]) / 10
    assert 1 - within <= mean <= 1 + within


@every_method
@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (5000,)], ids=str)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3e38, 1e-45])
def test_constant_gradients(method: str, shape: tuple[int, ...], value: float) -> None:
    parameter, compressor = Parameter("weight", shape), METHODS[method](0.01)
    state = compressor.init(parameter)
    for _ in range(6):
        payload = compressor.compress(torch.full(shape, value), parameter, state)
        ids, values = compressor.chosen(payload, parameter)
        k = compressor.target(parameter.numel)
        assert ids.numel() <= 2 * k
        assert bool((values == value).all())
        if value or method in EXACTLY_K:
            assert ids.numel() >= 1
        else:
            assert not compressor.decompress(payload, parameter).any()


@every_threshold_method
@pytest.mark.parametrize("present", [1, 2, 30])
def test_a_few_elements_among_zeros_are_sent(method: str, present: int) -> None:
    """Fewer than k: all that a threshold can find, and no zeros."""
    parameter, compressor = Parameter("weight", (10_000,)), METHODS[method](0.01)
    gradient = torch.zeros(10_000)
    gradient[torch.randperm(10_000)[:present]] = 1 + torch.rand(present)
    ids, values = compressor.chosen(sent_by(compressor, gradient, parameter), parameter)
    assert 1 <= ids.numel() <= present
    assert bool((values != 0).all())


def test_a_heavy_tail_and_one_that_is_not_a_number() -> None:
    """Error feedback may overflow: whatever the moments are then, something is chosen."""
    parameter = Parameter("weight", (5000,))
    for value in (math.inf, math.nan):
        gradient = torch.randn(5000)
        gradient[17] = value
        for make in METHODS.values():
            compressor = make(0.01)
            if compressor.name.startswith("random_k"):
                continue
            ids, _ = compressor.chosen(sent_by(compressor, gradient, parameter), parameter)
            assert 17 in ids.tolist()
            assert ids.numel() <= 100


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: compress.top_k(0.0), "in \\(0, 1\\]"),
        (lambda: compress.top_k(1.5), "in \\(0, 1\\]"),
        (lambda: compress.redsync(math.nan), "in \\(0, 1\\]"),
        (lambda: compress.threshold(0.0), "positive, finite"),
        (lambda: compress.threshold(math.inf), "positive, finite"),
        (lambda: compress.ms_top_k(steps=0), "at least once"),
        (lambda: compress.sidco(distribution="normal"), "exponential, gamma, pareto"),
        (lambda: SampledTopK(sample=0.0), "a part of the elements"),
        (lambda: compress.dgc(momentum=1.0), "in \\[0, 1\\)"),
        (lambda: compress.dgc(steps_per_epoch=0), "steps_per_epoch=len"),
        (lambda: compress.warm_up(compress.top_k(0.5), 10), "start_density in"),
        (lambda: compress.warm_up(compress.top_k(0.1), -1), "at least one step"),
        (lambda: compress.top_k(values=compress.top_k()), "bf16\\(\\) or int8\\(\\)"),
        (lambda: compress.top_k(values=ErrorFeedback(bf16())), "error feedback goes around"),
        (lambda: ErrorFeedback(compress.dgc()), "leave error_feedback out"),
        (lambda: compress.leave_small(compress.top_k(), -1), "at least 0"),
    ],
)  # fmt: skip
def test_bad_settings(make: Callable[[], Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        make()


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="only floating-point"):
        check_parameter(compress.top_k(), Parameter("steps", (3,), torch.int64))


def test_small_parameters_are_left_alone() -> None:
    policy = compress.leave_small(compress.top_k())
    assert policy(Parameter("weight", (32, 32))) == compress.top_k()
    assert policy(Parameter("weight", (31, 33))) == "native"
    assert policy(Parameter("bias", (5000,))) == "native"
    assert compress.leave_small(compress.top_k(), 1, 1)(Parameter("bias", (5,))) == compress.top_k()


def test_names_tell_settings_apart() -> None:
    configured = [
        *sparsifiers(0.1),
        *sparsifiers(0.2),
        compress.top_k(0.1, values=bf16()),
        compress.random_k(0.1, seed=1),
        compress.random_k(0.1, unbiased=True),
        compress.ms_top_k(0.1, steps=5),
        SampledTopK(0.1, sample=0.5),
    ]
    names = {compressor.name for compressor in configured}
    assert len(names) == len(set(configured)) == len(configured) - 1  # a fixed threshold has no density
    assert compress.top_k(0.1, values=bf16()).name == "top_k(0.1, values=bf16)"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_gradient_is_not_written_to(method: str) -> None:
    parameter, compressor = Parameter("weight", (5000,)), METHODS[method](0.5)
    gradient = torch.randn(5000)
    before = gradient.clone()
    payload = sent_by(compressor, gradient, parameter)
    payload.parts[-1].zero_()
    assert torch.equal(gradient, before)
