"""Casts, small integers, floats and signs: what arrives, what is kept, and what is refused."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import compress
from thinwire.compress import memory
from thinwire.compress.base import (
    Compressor,
    Memory,
    Parameter,
    Payload,
    State,
    Summable,
    check_parameter,
)
from thinwire.compress.reductions.base import salted
from thinwire.compress.wrappers import code_of, packed_code
from thinwire.errors import CorruptMessageError

METHODS: dict[str, Compressor] = {
    compressor.name: compressor
    for compressor in (
        compress.fp16(),
        compress.bf16(),
        compress.int8(),
        compress.int8(7, stochastic=True),
        compress.fp8(),
        compress.fp8("e5m2", 16),
        compress.fp8(seed=0),
        compress.mxfp8(),
        compress.mxfp8("e5m2", stochastic=True),
        compress.mxfp4(),
        compress.mxfp4(stochastic=True),
        compress.qsgd(),
        compress.qsgd(4),
        compress.qsgd(3, 100),
        compress.qsgd(2, norm="l2"),
        compress.terngrad(),
        compress.terngrad(2.5),
        compress.natural(),
        compress.sign_sgd(),
        compress.sign_sgd(0.9),
        compress.ef_sign_sgd(),
        memory.ErrorFeedback(compress.int8()),
        memory.ErrorFeedback(compress.bf16()),
    )
}
SHAPES = ((0,), (), (1,), (7,), (1023,), (1025,), (37, 53), (3, 4, 5))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

every_method = pytest.mark.parametrize("compressor", METHODS.values(), ids=METHODS)
every_unbiased = pytest.mark.parametrize(
    "compressor",
    [method for method in METHODS.values() if method.memory is Memory.UNBIASED],
    ids=lambda method: method.name,
)
with_memory = [method for method in METHODS.values() if isinstance(method, memory.ErrorFeedback)]
with_memory += [memory.ErrorFeedback(compress.fp8()), memory.ErrorFeedback(compress.fp16())]
every_memory = pytest.mark.parametrize("compressor", with_memory, ids=lambda method: method.name)


def state_of(compressor: Compressor, parameter: Parameter, rank: int = 0) -> State:
    return salted(compressor.init(parameter), rank)


def gradient_of(parameter: Parameter, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, generator=generator, dtype=parameter.working_dtype)


def arrived(compressor: Compressor, payload: Payload, parameter: Parameter) -> Tensor:
    code = packed_code(compressor)
    return code.decompress(code.unpack(code.pack(payload, parameter), parameter), parameter)


def sent(compressor: Compressor, gradient: Tensor, state: State | None = None) -> Tensor:
    parameter = Parameter("weight", tuple(gradient.shape), gradient.dtype)
    state = state_of(compressor, parameter) if state is None else state
    return arrived(compressor, compressor.compress(gradient, parameter, state), parameter)


@every_method
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_travels_in_the_bytes_that_were_said(
    compressor: Compressor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    parameter = Parameter("weight", shape, dtype)
    gradient = gradient_of(parameter)
    before = gradient.clone()
    payload = compressor.compress(gradient, parameter, state_of(compressor, parameter))
    assert torch.equal(gradient, before), "the gradient is not written to"
    code = packed_code(compressor)
    data = code.pack(payload, parameter)
    assert data.dtype == torch.uint8
    assert data.numel() == code.packed_bytes(parameter)
    unpacked = code.unpack(data, parameter)
    for one, other in zip(payload.parts, unpacked.parts, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    result = compressor.decompress(unpacked, parameter)
    assert (result.shape, result.dtype) == (parameter.shape, parameter.working_dtype)
    total = torch.ones(shape, dtype=parameter.working_dtype)
    code.add(payload, parameter, total)
    assert torch.equal(total, 1.0 + result)
    rest = gradient.clone()
    code.add(payload, parameter, rest, negated=True)
    assert torch.equal(rest, gradient - result)


@pytest.mark.few(10)
@every_unbiased
@pytest.mark.parametrize("salted_by", ["rank", "step"])
def test_unbiased_methods_are(compressor: Compressor, salted_by: str) -> None:
    """10 000 draws of a small vector, 100 at once, by other ranks or in other steps, at 4 sigma of the mean."""
    at_once, times = 100, 100
    vector = torch.tensor([3.0, -1.0, 0.26, 0.0, 0.1, -0.003, 1e-5, 1.7, -2.999, 0.5])
    gradient, draws = vector.repeat(at_once, 1), at_once * times
    parameter = Parameter("weight", tuple(gradient.shape))
    state, values = state_of(compressor, parameter), []
    for draw in range(times):
        if salted_by == "rank":
            state = state_of(compressor, parameter, rank=draw)
        values.append(compressor.decompress(compressor.compress(gradient, parameter, state), parameter).double())
    drawn = torch.cat(values)
    sigma = drawn.std(0) / draws**0.5
    rare = 4 * float(vector.abs().max()) / draws  # what is drawn less than four times has no sigma
    assert bool(((drawn.mean(0) - vector).abs() <= 4 * sigma + 1e-6 + (sigma == 0) * rare).all())
    assert bool((sigma[:3] > 0).any()), "it is random"


@every_unbiased
@pytest.mark.parametrize("scale", [1e30, 1.0, 1e-30])
def test_the_mean_of_many_elements_is_right_at_every_scale(compressor: Compressor, scale: float) -> None:
    """Each of 512 equal elements is a draw; the first is the largest."""
    gradient = torch.full((8, 512), 0.3) * scale
    gradient[:, 0] = scale
    value = sent(compressor, gradient).double() / scale
    others = value[:, 1:].flatten()
    assert abs(float(others.mean()) - 0.3) <= 4 * float(others.std()) / math.sqrt(others.numel()) + 1e-6


@every_memory
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_feedback_loses_nothing(compressor: memory.ErrorFeedback, shape: tuple[int, ...]) -> None:
    """What arrives and what is kept are the corrected gradient, to the rounding of one subtraction."""
    parameter = Parameter("weight", shape)
    state = state_of(compressor, parameter)
    for step in range(4):
        gradient = gradient_of(parameter, step)
        corrected = state["error"] + gradient
        payload = compressor.compress(gradient, parameter, state)
        value = arrived(compressor, payload, parameter)
        assert torch.equal(state["error"], corrected - value), "bitwise"
        assert torch.allclose(state["error"] + value, corrected, rtol=1e-6, atol=1e-6)


@every_method
@pytest.mark.parametrize("fill", [0.0, -0.0, 2.5, -1e30, 3e38, 1e-38, 1e-45])
def test_constants_of_every_size_decode_to_finite_values(compressor: Compressor, fill: float) -> None:
    gradient = torch.full((3, 401), fill)
    value = sent(compressor, gradient)
    assert bool(value.isfinite().all())
    if fill == 0.0:
        assert not value.any()


@every_method
def test_one_huge_value_among_small_and_denormal_ones(compressor: Compressor) -> None:
    gradient = torch.tensor([1e30, 1e-30, -1e-40, 0.0, 1.0] * 20)
    assert bool(sent(compressor, gradient).isfinite().all())


@given(
    values=st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=1, max_size=40),
    block=st.integers(1, 50),
)
@settings(deadline=None, max_examples=min(200, settings.default.max_examples))
def test_int8_is_wrong_by_at_most_half_a_step(values: list[float], block: int) -> None:
    gradient = torch.tensor(values)
    error = (sent(compress.int8(block), gradient).double() - gradient.double()).abs()
    steps = torch.tensor([float(piece.abs().max()) / 127 for piece in gradient.split(block)]).double()
    steps = steps.clamp_min(torch.finfo(torch.float32).tiny).repeat_interleave(block)[: len(values)]
    assert bool((error <= 0.5001 * steps).all())


@pytest.mark.parametrize(("format", "relative", "smallest"), [("e4m3", 1 / 16, 2.0**-10), ("e5m2", 1 / 8, 2.0**-17)])
def test_fp8_is_wrong_by_half_of_its_last_bit(format: str, relative: float, smallest: float) -> None:
    gradient = torch.randn(5000) * torch.exp(3 * torch.randn(5000))
    limits = torch.finfo({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]).max
    steps = torch.cat([piece.abs().max().expand(piece.numel()) for piece in gradient.split(512)]) / limits
    error = (sent(compress.fp8(format), gradient) - gradient).abs()  # type: ignore[arg-type]
    assert bool((error <= 1.0001 * torch.maximum(gradient.abs() * relative, steps * smallest)).all())


E8M0_BIAS, BLOCK = 127, 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ELEMENTS = {"e4m3": (torch.float8_e4m3fn, 8, 448.0), "e5m2": (torch.float8_e5m2, 15, 57344.0), "e2m1": (None, 2, 6.0)}


def microscaled(gradient: Tensor, format: str) -> tuple[list[int], list[int], list[float]]:
    """Codes, scales and values by the OCP microscaling standard, one number at a time (sections 5.2 to 6.3)."""
    dtype, top, limit = ELEMENTS[format]
    codes, scales, values = [], [], []
    for block in gradient.flatten().split(BLOCK):
        largest = float(block.abs().max())
        exponent = max(-E8M0_BIAS, (math.frexp(largest)[1] - 1 if largest else -1000) - top)
        exponent = min(exponent, 127 - top)
        scales.append(exponent + E8M0_BIAS)
        for value in block.tolist():
            quotient = max(-limit, min(limit, math.ldexp(value, -exponent)))
            if dtype is not None:
                element = torch.tensor(quotient).to(dtype)
                codes.append(int(element.view(torch.uint8)))
                quotient = float(element)
            else:
                below = max(code for code in range(8) if E2M1[code] <= abs(quotient))
                above = min(below + 1, 7)
                gaps = abs(quotient) - E2M1[below], E2M1[above] - abs(quotient)
                code = below if gaps[0] < gaps[1] or (gaps[0] == gaps[1] and below % 2 == 0) else above
                codes.append(code | 8 * (math.copysign(1.0, quotient) < 0))
                quotient = math.copysign(E2M1[code], quotient)
            values.append(math.ldexp(quotient, exponent))
    return codes, scales, values


BLOCKS = {
    "normal": lambda: torch.randn(999),
    "of all sizes": lambda: torch.randn(1001) * 10.0 ** torch.linspace(-44, 37, 1001)[torch.randperm(1001)],
    "zeros": lambda: torch.zeros(33),
    "denormal": lambda: torch.arange(-40, 41) * 2.0**-149,
    "ties": lambda: torch.cat([torch.tensor([4.0]), torch.arange(-31, 32) / 8]),
    "saturated": lambda: torch.tensor([1.99, 1.76, -1.75, -1.51, 1.5, 1.0]),
    "largest": lambda: torch.tensor([3.4e38, 1e38, -3.0e38, 1.0]),
}


@pytest.mark.parametrize("format", ELEMENTS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_microscaling_is_that_of_the_standard(format: str, blocks: str) -> None:
    """The last block of 32 may have fewer values."""
    method = compress.mxfp4() if format == "e2m1" else compress.mxfp8(format)  # type: ignore[arg-type]
    gradient = BLOCKS[blocks]()
    parameter = Parameter("weight", tuple(gradient.shape))
    codes, scales, values = microscaled(gradient, format)
    payload = method.compress(gradient, parameter, {})
    assert payload.parts[1].tolist() == scales
    if format == "e2m1":
        codes += [0] * (len(codes) % 2)
        codes = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    assert payload.parts[0].tolist() == codes
    assert torch.equal(payload.parts[1][:-1].view(torch.float8_e8m0fnu).float(), 2.0 ** (payload.parts[1][:-1] - 127.0))
    assert torch.equal(arrived(method, payload, parameter), torch.tensor(values))
    again = method.compress(torch.tensor(values), parameter, {})
    assert torch.equal(arrived(method, again, parameter), torch.tensor(values)), "what was sent is exact"


TORCHAO = {"e4m3": "9990e84e77e463bf", "e5m2": "5dd86da13186e9c7", "e2m1": "880fcec2e476fd5a"}
"""Digests of codes and scales that ``to_mx`` of torchao 0.18 made of the gradient of the test."""


@pytest.mark.parametrize("method", [compress.mxfp8("e5m2"), compress.mxfp8(), compress.mxfp4()])
def test_microscaling_has_the_bits_of_torchao(method: Any) -> None:
    words = torch.arange(64_000) * 0x9E3779B1 & 0xBFFF_FFFF | 0x2000_0000  # both signs, 2^-63 to 2^1
    payload = method.compress(words.to(torch.int32).view(torch.float32), Parameter("weight", (64_000,)), {})
    assert (
        hashlib.sha256(b"".join(part.numpy().tobytes() for part in payload.parts)).hexdigest()[:16]
        == TORCHAO[method.format]
    )


@pytest.mark.parametrize("method", [compress.mxfp8(stochastic=True), compress.mxfp4(stochastic=True)])
def test_nothing_is_above_the_largest_float_in_stochastic_rounding(method: Any) -> None:
    gradient = torch.cat([torch.linspace(1.0, 2.0, 1000).repeat_interleave(32), torch.randn(7)])
    steps = 2.0 ** (
        method.compress(gradient, Parameter("weight", (32_007,)), method.init(Parameter("w", ()))).parts[1] - 127.0
    )
    largest = torch.cat([gradient[:32_000:32], gradient[32_000:].abs().max()[None]])
    assert bool((largest <= steps * method.code.largest).all())
    assert bool((largest > steps * method.code.largest / 2).all())


@pytest.mark.parametrize(
    "method", [compress.mxfp8(), compress.mxfp8(stochastic=True), compress.mxfp4(), compress.natural()]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_has_the_scale_of_nan(method: Any, value: float) -> None:
    parameter, gradient = Parameter("weight", (70,)), torch.ones(70)
    gradient[40] = value
    payload = method.compress(gradient, parameter, method.init(parameter))
    is_nan = [scale == 255 for scale in payload.parts[1].tolist()]
    assert is_nan == ([False, True, False] if method.block else [True])
    assert not method.decompress(payload, parameter)[32:64].isfinite().any()
    with pytest.raises(CorruptMessageError, match="steps"):
        method.unpack(method.pack(payload, parameter), parameter)


@pytest.mark.parametrize(("method", "bits", "levels"), [(compress.qsgd(2), 2, 1), (compress.qsgd(4), 4, 7)])
def test_qsgd_rounds_to_a_neighbouring_level(method: Compressor, bits: int, levels: int) -> None:
    gradient = torch.randn(4096)
    step = gradient.view(-1, 512).abs().amax(1).repeat_interleave(512) / levels
    multiples = sent(method, gradient) / step
    assert bool(((multiples - multiples.round()).abs() < 1e-4).all())
    assert bool(((multiples - gradient / step).abs() < 1.0001).all())
    assert method.packed_bytes(Parameter("weight", (4096,))) == 8 + 4096 * bits // 8 + 8 + 8 * 4


def test_the_scale_of_qsgd_is_the_norm_that_was_asked_for() -> None:
    parameter, gradient = Parameter("weight", (4,)), torch.tensor([3.0, -4.0, 0.0, 0.0])
    for norm, expected in (("max", 4.0), ("l2", 5.0)):
        method = compress.qsgd(8, norm=norm)  # type: ignore[arg-type]
        payload = method.compress(gradient, parameter, state_of(method, parameter))
        assert float(payload.parts[1]) * 127 == pytest.approx(expected)


def test_terngrad_has_three_values_and_clips() -> None:
    gradient = torch.cat([torch.ones(999), torch.tensor([100.0])])
    assert set(sent(compress.terngrad(), gradient).tolist()) <= {0.0, 100.0}
    limit = 2.5 * math.sqrt((999 + 1e4) / 1000)
    assert sorted(set(sent(compress.terngrad(2.5), gradient).tolist())) == pytest.approx([0.0, limit])


def test_natural_compression_has_the_variance_of_its_theorem() -> None:
    """At most an eighth of the square (Theorem 1), which 1.5 times a power of two nearly reaches."""
    gradient = 1.0 + torch.arange(1000) / 1000
    squares = (sent(compress.natural(), gradient.repeat(200, 1)) - gradient).square().mean(0)
    assert bool((squares <= 0.125 * gradient.square() * 1.6).all())
    assert float((squares / gradient.square()).mean()) == pytest.approx(0.0794, abs=0.002)  # integral of (2-x)(x-1)/x^2
    powers = torch.tensor([1.0, -2.0, 2.0**-120, 0.0])
    assert torch.equal(sent(compress.natural(), powers), powers)


def test_natural_compression_saturates_at_the_highest_power() -> None:
    value = sent(compress.natural(), torch.tensor([3.4e38, -3.4e38, 4.0]))
    assert value.tolist() == [2.0**127, -(2.0**127), 4.0]


@pytest.mark.parametrize("scale", [1.0, 2.0**-126, 2.0**-125, 2.0**-60], ids=lambda scale: f"largest {scale:g}")
@pytest.mark.parametrize("value", [2.0**-149, 3 * 2.0**-149, 2.0**-140, 2.0**-128, 1.5 * 2.0**-127, 0.7 * 2.0**-126])
def test_natural_compression_is_unbiased_on_denormal_values(value: float, scale: float) -> None:
    """What is below all powers that are sent becomes the smallest or zero, as often as its expectation needs."""
    count = 1 << 16
    gradient = torch.full((count + 1,), value)
    gradient[count] = scale
    drawn = sent(compress.natural(), gradient)[:count].double()
    smallest = max(2.0**-127, scale * 2.0**-126)
    assert bool(((drawn == 0) | ((drawn >= smallest) & (drawn <= 2 * smallest))).all())
    share = value / smallest
    assert abs(float(drawn.mean()) / smallest - share) <= 5 * math.sqrt(share / count) + 1e-9


@pytest.mark.parametrize(("method", "largest"), [(compress.fp16(), 65504.0), (compress.bf16(), 3.3895e38)])
def test_casts_saturate(method: Compressor, largest: float) -> None:
    value = sent(method, torch.tensor([3.4028e38, -3.4028e38, 1.0]))
    assert value.tolist() == pytest.approx([largest, -largest, 1.0], rel=1e-4)


@every_method
def test_ranks_round_differently_and_equal_states_alike(compressor: Compressor) -> None:
    parameter = Parameter("weight", (2000,))
    gradient = gradient_of(parameter)
    one, same, other = (compressor.compress(gradient, parameter, state_of(compressor, parameter, r)) for r in (0, 0, 1))
    assert all(map(torch.equal, one.parts, same.parts))
    draws = compressor.memory is Memory.UNBIASED or compressor.name == "terngrad(2.5)"
    assert all(map(torch.equal, one.parts, other.parts)) != draws


@every_unbiased
def test_seeds_names_and_steps_draw_differently(compressor: Compressor) -> None:
    parameter = Parameter("weight", (2000,))
    gradient, state = gradient_of(parameter), state_of(compressor, parameter)
    first = compressor.compress(gradient, parameter, state).parts[0]
    second = compressor.compress(gradient, parameter, state).parts[0]
    renamed = Parameter("bias", (2000,))
    named = compressor.compress(gradient, renamed, state_of(compressor, renamed)).parts[0]
    reseeded = replace(compressor, seed=1)  # type: ignore[type-var]
    seeded = reseeded.compress(gradient, parameter, state_of(compressor, parameter)).parts[0]
    assert len({tuple(part.tolist()) for part in (first, second, named, seeded)}) == 4


@every_method
def test_a_state_that_was_saved_continues_bitwise(compressor: Compressor) -> None:
    parameter = Parameter("weight", (37, 53))
    state = state_of(compressor, parameter, rank=3)
    for step in range(3):
        compressor.compress(gradient_of(parameter, step), parameter, state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for step in range(3, 6):
        gradient = gradient_of(parameter, step)
        one, other = (compressor.compress(gradient, parameter, each) for each in (state, loaded))
        assert all(map(torch.equal, one.parts, other.parts))


@pytest.mark.few(12)
@every_method
@given(data=st.data())
@settings(deadline=None, max_examples=min(40, settings.default.max_examples))
def test_bytes_that_no_rank_packed_are_refused_or_decode_to_finite_values(
    compressor: Compressor, data: st.DataObject
) -> None:
    parameter = Parameter("weight", (37,))
    code = packed_code(compressor)
    packed = code.pack(
        compressor.compress(gradient_of(parameter), parameter, state_of(compressor, parameter)), parameter
    )
    kind = data.draw(st.sampled_from(["short", "long", "flipped", "random"]))
    if kind == "short":
        packed = packed[: data.draw(st.integers(0, packed.numel() - 1))]
    elif kind == "long":
        packed = torch.cat([packed, torch.zeros(8 * data.draw(st.integers(1, 3)), dtype=torch.uint8)])
    elif kind == "flipped":
        for _ in range(data.draw(st.integers(1, 5))):
            packed[data.draw(st.integers(0, packed.numel() - 1))] ^= data.draw(st.integers(1, 255))
    else:
        packed = torch.tensor(data.draw(st.lists(st.integers(0, 255), max_size=100)), dtype=torch.uint8)
    if kind in ("short", "long"):
        with pytest.raises(CorruptMessageError):
            code.unpack(packed.clone(), parameter)
        return
    try:
        payload = code.unpack(packed.clone(), parameter)
    except CorruptMessageError:
        return
    value = compressor.decompress(payload, parameter)
    checks_values = not isinstance(code_of(compressor), Summable)
    assert value.shape == (37,)
    assert not checks_values or bool(value.isfinite().all())


@pytest.mark.parametrize("method", [compress.int8(), compress.qsgd(4), compress.fp8(), compress.ef_sign_sgd()])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 3.4e38])
def test_scales_that_are_none_are_refused(method: Compressor, scale: float) -> None:
    parameter = Parameter("weight", (5,))
    payload = method.compress(gradient_of(parameter), parameter, state_of(method, parameter))
    payload.parts[1].fill_(scale)
    if scale == 3.4e38 and method.name.startswith("error_feedback"):
        assert bool(arrived(method, payload, parameter).isfinite().all())
        return
    code = packed_code(method)
    with pytest.raises(CorruptMessageError, match=r"step|scale"):
        code.unpack(code.pack(payload, parameter), parameter)


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


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: compress.qsgd(1), "ef_sign_sgd"),
        (lambda: compress.qsgd(9), "2 to 8 bits"),
        (lambda: compress.qsgd(8, 0), "at least 1 element"),
        (lambda: compress.qsgd(norm="l1"), '"max" or "l2"'),  # type: ignore[arg-type]
        (lambda: compress.int8(0), "at least 1 element"),
        (lambda: compress.fp8("e3m4"), "e4m3 and e5m2"),  # type: ignore[arg-type]
        (lambda: compress.fp8(block=-1), "at least 1 element"),
        (lambda: compress.mxfp8("e2m1"), "formats of mxfp8 are e4m3 and e5m2"),  # type: ignore[arg-type]
        (lambda: compress.terngrad(0.0), "None never"),
        (lambda: compress.sign_sgd(1.0), r"momentum is in \[0, 1\)"),
        (lambda: compress.ef_sign_sgd(2.0), r"\[0, 1\]"),
        (lambda: compress.ef_sign_sgd(block=12), "8, 16, 24"),
        (lambda: memory.ErrorFeedback(compress.sign_sgd()), "leave error_feedback out"),
    ],
)
def test_bad_settings_are_refused_with_advice(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@every_method
def test_integer_parameters_are_refused(compressor: Compressor) -> None:
    with pytest.raises(ValueError, match="only floating-point gradients"):
        check_parameter(compressor, Parameter("count", (3,), torch.int64))


def test_names_tell_settings_apart() -> None:
    """`METHODS` is keyed by them, and methods of one name would be one."""
    assert len(METHODS) == 23
