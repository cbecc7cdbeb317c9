"""Laws of every sparsifier: nothing is lost, counts keep their promise, bytes are predicted, damage is noticed."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire import compress
from thinwire.compress import bf16, int8
from thinwire.compress.base import Compressor, Memory, Parameter, Payload, State, Summable, check_parameter
from thinwire.compress.memory import ErrorFeedback, MomentumCorrection
from thinwire.compress.methods.sparsify import HEADER_BYTES, DensitySelector, Sparsifier
from thinwire.compress.papers.thresholds import SampledTopK, exponential_excess, gamma_excess, pareto_excess
from thinwire.compress.warm_up import WarmUp, density_of
from thinwire.compress.wrappers import packed_code
from thinwire.errors import CorruptMessageError, MismatchError

METHODS: dict[str, Callable[..., DensitySelector]] = {
    "top_k": compress.top_k,
    "random_k": compress.random_k,
    "gaussian_k": compress.gaussian_k,
    "redsync": compress.redsync,
    "sidco_exponential": compress.sidco,
    "sidco_gamma": lambda density, **more: compress.sidco(density, distribution="gamma", **more),
    "sidco_pareto": lambda density, **more: compress.sidco(density, distribution="pareto", **more),
    "ms_top_k": compress.ms_top_k,
    "sampled_top_k": lambda density, **more: SampledTopK(density, **more),
}
SHAPES = ((0,), (1,), (7,), (1023,), (1025,), (37, 53))
EXACTLY_K = {"top_k", "random_k", "ms_top_k"}

every_method = pytest.mark.parametrize("method", METHODS)
every_threshold_method = pytest.mark.parametrize("method", [name for name in METHODS if name not in EXACTLY_K])
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)


def sparsifiers(density: float) -> list[Sparsifier]:
    return [*(make(density) for make in METHODS.values()), compress.threshold(1.5)]


def gradient_of(parameter: Parameter) -> Tensor:
    return torch.randn(parameter.shape, dtype=parameter.working_dtype)


def sent_by(compressor: Compressor, gradient: Tensor, parameter: Parameter, state: State | None = None) -> Payload:
    return compressor.compress(gradient, parameter, compressor.init(parameter) if state is None else state)


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


def saved_and_loaded(state: State) -> State:
    memory = io.BytesIO()
    torch.save(state, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=True)


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


@pytest.mark.parametrize("method", ["top_k", "redsync", "random_k"])
@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
def test_damage_is_noticed(method: str, density: float) -> None:
    parameter, compressor = Parameter("weight", (300,)), METHODS[method](density)
    data = compressor.pack(sent_by(compressor, gradient_of(parameter), parameter), parameter)
    for place in range(data.numel()):
        damaged = data.clone()
        damaged[place] ^= 1 << int(torch.randint(8, ()))
        with pytest.raises(CorruptMessageError):
            compressor.unpack(damaged, parameter)
    for size in {0, 7, 8, HEADER_BYTES, data.numel() - 8, data.numel() - 1}:
        with pytest.raises(CorruptMessageError):
            compressor.unpack(data[:size].clone(), parameter)
    with pytest.raises(CorruptMessageError):
        compressor.unpack(torch.cat([data, torch.zeros(8, dtype=torch.uint8)]), parameter)


def test_well_sealed_nonsense_is_refused() -> None:
    """A checksum is no secret: counts, formats and ids are looked at too."""
    from thinwire.compress.methods.sparsify import sealed

    parameter, compressor = Parameter("weight", (300,)), compress.top_k(0.01)
    good = compressor.pack(sent_by(compressor, gradient_of(parameter), parameter), parameter)[HEADER_BYTES:]
    for count in (0, 2, 4, 300, 301, (1 << 56) - 1):
        with pytest.raises(CorruptMessageError):
            compressor.unpack(sealed(count, 0, [good]), parameter)
    for code in (0, 1, 2, 3, 4, 255):
        if not torch.equal(wrong := sealed(3, code, [good]), sealed(3, int(_code_of(compressor, parameter)), [good])):
            with pytest.raises(CorruptMessageError):
                compressor.unpack(wrong, parameter)
    for _ in range(200):
        body = torch.randint(256, (good.numel(),), dtype=torch.uint8)
        try:
            payload = compressor.unpack(sealed(3, int(_code_of(compressor, parameter)), [body]), parameter)
        except CorruptMessageError:
            continue
        ids = payload.parts[0]
        assert ids.numel() == 3
        assert 0 <= int(ids[0]) < int(ids[1]) < int(ids[2]) < 300
    shared = compress.random_k(0.01)
    for count, step in ((301, 0), (3, -1), (4, 0)):
        body = [torch.tensor([step]).view(torch.uint8), torch.ones(3).view(torch.uint8)]
        with pytest.raises(CorruptMessageError):
            shared.unpack(sealed(count, 0, body) if count != 4 else sealed(5, 0, body), parameter)


def _code_of(compressor: Compressor, parameter: Parameter) -> int:
    return int(compressor.pack(sent_by(compressor, gradient_of(parameter), parameter), parameter)[7])


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


def test_a_threshold_is_absolute() -> None:
    parameter, compressor = Parameter("weight", (4,)), compress.threshold(2.0)
    assert sent_by(compressor, torch.tensor([1.9, -2.0, 0.0, 3.0]), parameter).parts[0].tolist() == [1, 3]
    assert sent_by(compressor, torch.tensor([1.9, -1.0, 0.0, 0.5]), parameter).parts[0].tolist() == [0]
    assert sent_by(compressor, torch.zeros(4), parameter).parts[0].tolist() == []
    assert sent_by(compressor, torch.zeros(0), Parameter("empty", (0,))).parts[0].tolist() == []


def test_top_k_takes_magnitudes_and_the_first_of_equal_ones() -> None:
    parameter = Parameter("weight", (6,))
    payload = sent_by(compress.top_k(0.5), torch.tensor([1.0, -2.0, 2.0, -5.0, 2.0, 0.0]), parameter)
    assert payload.parts[0].tolist() == [1, 2, 3]
    assert payload.parts[1].tolist() == [-2.0, 2.0, -5.0]


def test_ms_top_k_takes_the_k_largest_up_to_its_resolution() -> None:
    gradient, parameter = torch.randn(50_000), Parameter("weight", (50_000,))
    exact = sent_by(compress.top_k(0.01), gradient, parameter).parts[0]
    assert torch.equal(sent_by(compress.ms_top_k(0.01), gradient, parameter).parts[0], exact)
    coarse = sent_by(compress.ms_top_k(0.01, steps=2), gradient, parameter).parts[0]
    assert coarse.numel() == exact.numel()
    assert not torch.equal(coarse, exact)


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
    assert compressor.memory is Memory.UNBIASED
    gradient, state, total, draws = torch.randn(40), compressor.init(parameter), torch.zeros(40), 10_000
    for _ in range(draws):
        compressor.add(compressor.compress(gradient, parameter, state), parameter, total)
    sigma = gradient.abs() * math.sqrt((1 / 0.25 - 1) / draws)
    assert bool(((total / draws - gradient).abs() <= 4 * sigma).all())


def test_dgc_follows_the_paper() -> None:
    """u, v and masking in plain torch, with the thresholds that were chosen."""
    for nesterov in (False, True):
        parameter = Parameter("weight", (64, 65))
        compressor = compress.dgc(0.01, 0.9, nesterov=nesterov, clip_norm=30.0)
        state, u, v = compressor.init(parameter), torch.zeros(64, 65), torch.zeros(64, 65)
        for _ in range(8):
            gradient = torch.randn(64, 65)
            clipped = gradient * min(1.0, 30.0 / float(gradient.norm()))
            u = 0.9 * (u + clipped) if nesterov else 0.9 * u + clipped
            v = v + u + clipped if nesterov else v + u
            payload = compressor.compress(gradient, parameter, state)
            ids, values = payload.parts
            k = round(0.01 * 64 * 65)
            assert 0.8 * k <= ids.numel() <= k
            mask = v.abs() >= v.view(-1)[ids].abs().min()
            assert torch.equal(mask.view(-1).nonzero().flatten(), ids), "the largest of v"
            torch.testing.assert_close(values, v.view(-1)[ids])
            v, u = v.masked_fill(mask, 0.0), u.masked_fill(mask, 0.0)
            torch.testing.assert_close(state["velocity"], v)
            torch.testing.assert_close(state["momentum"], u)


def test_dgc_warms_up_by_epochs_as_published() -> None:
    warming = compress.dgc(0.001, steps_per_epoch=10).inner
    assert isinstance(warming, WarmUp)
    densities = [warming.density(10 * epoch + step) for epoch in range(6) for step in (0, 9)]
    published = [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]
    coefficient = 0.001 ** (1 / 5)
    for epoch in range(6):
        for density in densities[2 * epoch : 2 * epoch + 2]:
            assert density == pytest.approx(max(coefficient ** (epoch + 1), 0.001))
            assert density == pytest.approx(published[epoch], rel=0.02)
    assert isinstance(compress.dgc(0.001).inner, SampledTopK)
    assert isinstance(compress.dgc(0.001, warm_up_epochs=0, steps_per_epoch=10).inner, SampledTopK)


def test_a_sample_sees_all_columns() -> None:
    """With a stride of 100, a sample of [n, 100] would be one column; here that one holds all that is large."""
    gradient = 1e-3 * torch.randn(10_000, 100)
    gradient[:, 1] = 1 + torch.rand(10_000)
    parameter, compressor = Parameter("weight", (10_000, 100)), SampledTopK(0.005)
    ids = sent_by(compressor, gradient, parameter).parts[0]
    assert 4000 <= ids.numel() <= 5000
    assert bool((ids % 100 == 1).all())


def test_warm_up_reaches_the_density_by_equal_factors() -> None:
    compressor = compress.warm_up(compress.top_k(0.01), 4)
    parameter = Parameter("weight", (10_000,))
    state, counts = compressor.init(parameter), []
    for _ in range(6):
        counts.append(compressor.compress(torch.randn(10_000), parameter, state).parts[0].numel())
    assert counts == [2500, 1118, 500, 224, 100, 100]
    code = packed_code(compressor)
    assert code.packed_bytes(parameter) is None
    assert all(spec.numel is None for spec in code.part_specs(parameter))


@pytest.mark.parametrize(
    "order",
    [
        lambda inner: compress.warm_up(ErrorFeedback(inner), 3),
        lambda inner: ErrorFeedback(compress.warm_up(inner, 3)),
        lambda inner: compress.warm_up(MomentumCorrection(inner), 3),
        lambda inner: MomentumCorrection(compress.warm_up(inner, 3)),
    ],
)  # fmt: skip
def test_warm_up_finds_a_density_through_wrappers(order: Callable[[Compressor], Compressor]) -> None:
    parameter = Parameter("weight", (1000,))
    for inner in (compress.top_k(0.01), compress.random_k(0.01)):
        compressor = order(inner)
        assert density_of(compressor) == 0.01
        assert compressor.memory is Memory.OWN
        code = packed_code(compressor)
        state, sizes = compressor.init(parameter), []
        for _ in range(4):
            payload = compressor.compress(torch.randn(1000), parameter, state)
            sizes.append(payload.parts[-1].numel())
            data = code.pack(payload, parameter)
            again = code.unpack(data, parameter)
            assert torch.equal(compressor.decompress(payload, parameter), compressor.decompress(again, parameter))
        assert sizes == [250, 85, 29, 10]


@pytest.mark.parametrize(
    "order",
    [lambda inner: compress.warm_up(ErrorFeedback(inner), 2), lambda inner: ErrorFeedback(compress.warm_up(inner, 2))],
)
def test_what_has_no_density_is_sent_dense_at_first(order: Callable[[Compressor], Compressor]) -> None:
    parameter, compressor = Parameter("weight", (37, 53)), order(int8())
    code, state = packed_code(compressor), compressor.init(parameter)
    for step in range(4):
        gradient = gradient_of(parameter)
        payload = compressor.compress(gradient, parameter, state)
        data = code.pack(payload, parameter)
        arrived = compressor.decompress(code.unpack(data, parameter), parameter)
        assert torch.equal(arrived, gradient) == (step < 2)
        assert (data.numel() > 4 * parameter.numel) == (step < 2)
    dense, coded = compressor.init(parameter), saved_and_loaded(state)
    mixed = [compressor.compress(gradient_of(parameter), parameter, kept) for kept in (dense, coded)]
    with pytest.raises(MismatchError, match="warming up"):
        code.combine(mixed, parameter)
    for data in (torch.full((24,), 7, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)):
        with pytest.raises(CorruptMessageError):
            code.unpack(data, parameter)


def test_fits_are_exact_on_their_own_distributions() -> None:
    assert exponential_excess(2.0, 0.01) == pytest.approx(2.0 * math.log(100.0))
    assert gamma_excess(2.0, math.log(2.0) - 0.5772156649, 0.01) == pytest.approx(2.0 * math.log(100.0), rel=0.02)
    assert pareto_excess(2.0, 4.0, 0.01) == pytest.approx(2.0 * math.log(100.0), rel=1e-6)
    shape, scale = 0.2, 1.0  # mean scale / (1 - shape), variance scale^2 / (1 - shape)^2 / (1 - 2 shape)
    mean, variance = scale / (1 - shape), scale**2 / (1 - shape) ** 2 / (1 - 2 * shape)
    assert pareto_excess(mean, variance, 0.01) == pytest.approx(scale * (0.01**-shape - 1) / shape)
    assert pareto_excess(1.0, 0.0, 0.01) == gamma_excess(1.0, 0.0, 0.01) == 1.0


def test_sidco_changes_its_stages_every_fifth_step() -> None:
    """A normal distribution has a lighter tail than one exponential has: one stage chooses a tenth of k."""
    parameter, compressor = Parameter("weight", (100_000,)), compress.sidco(0.01)
    state, stages = compressor.init(parameter), []
    for _ in range(20):
        compressor.compress(torch.randn(100_000), parameter, state)
        stages.append(state["stages"])
    assert stages[:4] == [1] * 4
    assert stages[4] == 2
    changes = [step + 1 for step in range(1, 20) if stages[step] != stages[step - 1]]
    assert all(step % 5 == 0 for step in changes)


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
