"""Sums without order, against exact rational arithmetic."""

from __future__ import annotations

import math
import random
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.reproducible.exact import ExactSum

DTYPES = {torch.float32: (23, 8), torch.bfloat16: (7, 8), torch.float16: (10, 5)}
WORDS = {
    torch.float32: (torch.int32, "<i", 32),
    torch.bfloat16: (torch.int16, "<h", 16),
    torch.float16: (torch.int16, "<h", 16),
}


def to_nearest(value: Fraction, mantissa: int, exponent: int) -> float:
    """Round to nearest, ties to even, by the definition."""
    if value == 0:
        return 0.0
    bias = (1 << (exponent - 1)) - 1
    power = math.floor(math.log2(abs(value))) if 2**-1000 < abs(value) < 2**1000 else 0
    while abs(value) >= Fraction(2) ** (power + 1):
        power += 1
    while abs(value) < Fraction(2) ** power:
        power -= 1
    unit = Fraction(2) ** (max(power, 1 - bias) - mantissa)
    rounded = round(value / unit) * unit  # Python's rounds ties to even
    return (
        math.copysign(math.inf, value) if abs(rounded) >= Fraction(2) ** (bias + 1) else math.copysign(rounded, value)
    )


def of_words(words: list[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor(words, dtype=WORDS[dtype][0]).view(dtype)


def summed(parts: list[Tensor], order: random.Random) -> ExactSum:
    """Some ranks, each with some of the parts in any order, and the sum of theirs."""
    parts = order.sample(parts, len(parts))
    ranks = [ExactSum(torch.zeros(parts[0].numel(), dtype=torch.float64)) for _ in range(order.randint(1, 5))]
    for part in parts:
        order.choice(ranks).add(part)
    whole = ExactSum(torch.zeros(parts[0].numel(), dtype=torch.float64))
    for rank in ranks:
        whole.add(rank.values)
        whole.terms += rank.terms
    return whole


@st.composite
def words(draw: st.DrawFn, dtype: torch.dtype) -> list[int]:
    """Random bits: few exponents, or any; subnormals; cancellation."""
    mantissa, exponent = DTYPES[dtype]
    bits = WORDS[dtype][2]
    top = (1 << exponent) - 2
    center = draw(st.integers(0, top))
    spread = draw(st.sampled_from([0, 3, 40, top]))
    found = []
    for _ in range(draw(st.integers(1, 30))):
        if found and draw(st.booleans()):
            found.append(draw(st.sampled_from(found)) ^ (1 << (bits - 1)))  # cancels
            continue
        power = min(top, max(0, center + draw(st.integers(-spread, spread))))
        low = draw(st.sampled_from([0, 1, (1 << mantissa) - 1, None]))
        low = draw(st.integers(0, (1 << mantissa) - 1)) if low is None else low
        found.append(draw(st.integers(0, 1)) << (bits - 1) | power << mantissa | low)
    return [word - (1 << bits) if word >> (bits - 1) else word for word in (one & ((1 << bits) - 1) for one in found)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_the_mean_is_correctly_rounded_in_any_order(dtype: torch.dtype, data: st.DataObject) -> None:
    parts = list(of_words(data.draw(words(dtype)), dtype).split(1))
    count = data.draw(st.integers(1, 40))
    exact = sum((Fraction(float(part)) for part in parts), Fraction(0)) / count
    expected = torch.tensor([to_nearest(exact, *DTYPES[dtype])], dtype=torch.float64).to(dtype)
    for seed in range(3):
        mean = summed(parts, random.Random(seed)).mean(count, dtype)
        assert mean.view(WORDS[dtype][0]).tolist() == expected.view(WORDS[dtype][0]).tolist(), (parts, count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quotients_near_the_middle_of_two_values_are_rounded_once(dtype: torch.dtype) -> None:
    """Also by float64 on the way, and by float32 on that to sixteen bits, as torch does."""
    mantissa, exponent = DTYPES[dtype]
    draw, wrong = random.Random(0), 0
    for _ in range(3000):
        count, power = (
            draw.choice([3, 7, 24, 25, 1000, (1 << 20) - 1]),
            draw.choice([0, -20, 2 - (1 << (exponent - 1)) - mantissa // 2]),
        )
        middle = Fraction(2 * draw.randrange(1 << mantissa, 2 << mantissa) + 1) * Fraction(2) ** (power - mantissa - 1)
        total = float(middle * count)
        total = draw.choice([math.nextafter(total, math.inf), math.nextafter(total, -math.inf), total])
        whole = ExactSum(torch.tensor([total], dtype=torch.float64))
        expected = to_nearest(Fraction(total) / count, mantissa, exponent)
        assert float(whole.mean(count, dtype)) == expected
        wrong += float(torch.tensor(total / count, dtype=torch.float64).to(dtype)) != expected
    assert (wrong > 0) == (dtype != torch.float32)


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=12))
def test_what_is_not_finite_is_alike_in_any_order(values: list[float]) -> None:
    parts = [torch.tensor([value], dtype=torch.float32) for value in values]
    found = {struct.pack("<f", float(summed(parts, random.Random(seed)).mean(3, torch.float32))) for seed in range(6)}
    assert len(found) == 1
    (result,) = struct.unpack("<f", found.pop())
    infinities = {value for value in values if math.isinf(value)}
    if any(map(math.isnan, values)) or len(infinities) == 2:
        assert math.isnan(result)
    elif infinities:
        assert result == infinities.pop()
    else:
        assert result == to_nearest(sum(map(Fraction, values), Fraction(0)) / 3, 23, 8)


def test_nothing_is_lost_where_float64_is_too_narrow() -> None:
    whole = ExactSum(torch.zeros(2, dtype=torch.float64))
    for value in (1e30, 1.0, -1e30, 2.0**-149, 3e38, -3e38):
        whole.add(torch.tensor([value, 0.5]))
    assert whole.terms
    assert whole.mean(1, torch.float64).tolist() == [1.0, 3.0], "1 + 2**-149 rounded, where the values alone have 0"
    whole.add(torch.tensor([-1.0, 0.0]))
    assert whole.mean(1, torch.float32).tolist() == [2.0**-149, 3.0]


def test_sums_of_zero_have_no_sign() -> None:
    whole = ExactSum(torch.zeros(2, dtype=torch.float64))
    whole.add(torch.tensor([-0.0, 1.0]))
    whole.add(torch.tensor([-0.0, -1.0]))
    assert whole.mean(24, torch.float32).view(torch.int32).tolist() == [0, 0]


def test_nan_has_one_pattern() -> None:
    odd = torch.tensor([0x7FC01234, -0x3FEDCC], dtype=torch.int32).view(torch.float32)
    for values in ([odd[:1], odd[1:]], [odd[1:], odd[:1]], [torch.tensor([math.inf]), torch.tensor([-math.inf])]):
        whole = ExactSum(torch.zeros(1, dtype=torch.float64))
        for value in values:
            whole.add(value)
        assert whole.mean(2, torch.float32).view(torch.int32).tolist() == [0x7FC00000]
