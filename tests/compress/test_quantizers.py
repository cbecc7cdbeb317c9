"""Casts, small integers, floats and signs: what arrives, what is kept, and what is refused."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.compress.quantized import arrived, sent, state_of
from thinwire import compress
from thinwire.compress import memory
from thinwire.compress.base import (
    Compressor,
    Memory,
    Parameter,
    Summable,
    check_parameter,
)
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


def gradient_of(parameter: Parameter, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, generator=generator, dtype=parameter.working_dtype)


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
