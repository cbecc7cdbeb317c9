"""Short floats: FP8, microscaling and powers of two."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compress.quantized import arrived, sent
from thinwire import compress
from thinwire.compress.base import (
    Parameter,
)
from thinwire.errors import CorruptMessageError


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
