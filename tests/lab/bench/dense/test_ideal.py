"""The bytes of an ideal code."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from thinwire.lab.bench.dense.ideal import ideal_bits, mean_bits

DTYPES = {
    torch.float32: (torch.int32, 32, 8),
    torch.float64: (torch.int64, 64, 11),
    torch.bfloat16: (torch.int16, 16, 8),
    torch.float16: (torch.int16, 16, 5),
}


def by_strings(values: Tensor) -> float:
    """The ideal code of one chunk, from the binary digits of each value and conditional entropies one by one."""
    kind, width, exponent_bits = DTYPES[values.dtype]
    symbols, verbatim = [], 0
    for integer in values.view(kind).tolist():
        digits = format(integer & ((1 << width) - 1), f"0{width}b")
        exponent, mantissa = digits[1 : 1 + exponent_bits], digits[1 + exponent_bits :]
        kept = mantissa.rstrip("0")
        if not kept and "1" not in exponent:
            symbols.append((digits, 0))
            continue
        symbols.append((exponent, len(mantissa) - len(kept)))
        verbatim += 1 + max(0, len(kept) - 1)
    exponents = Counter(exponent for exponent, _ in symbols)
    bits = -sum(count * math.log2(count / len(symbols)) for count in exponents.values())
    for (exponent, _), count in Counter(symbols).items():
        bits -= count * math.log2(count / exponents[exponent])
    return bits + verbatim


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ideal_code_by_another_way(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(700, generator=generator, dtype=torch.float64)
    values[::5] = 0.0
    values[1::7] = -0.0
    values[2::9] *= 1e-39
    values[3::50] = float("nan")
    values[4::60] = -float("inf")
    values[5::3] = values[5::3].bfloat16().double()
    values = values.to(dtype)
    assert ideal_bits(values) == pytest.approx(by_strings(values))
    parts = values.split(100)
    assert ideal_bits(values.view(70, 10), chunk=100) == pytest.approx(sum(map(by_strings, parts)))


def test_the_ideal_code_of_what_can_be_said_in_words() -> None:
    assert ideal_bits(torch.empty(0)) == 0.0
    assert ideal_bits(torch.zeros(9)) == ideal_bits(-torch.zeros(9)) == 0.0
    assert ideal_bits(torch.tensor([0.0, -0.0])) == 2.0, "zeros of both signs are two symbols"
    assert ideal_bits(torch.tensor([1.0, -1.0, 1.0, 1.0])) == 4.0, "a sign each"
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert 15.9 < ideal_bits(every) / every.numel() <= 16.0, "nothing is gained where all values are as likely"
    wide = torch.randn(1000).bfloat16()
    assert ideal_bits(wide.float()) == pytest.approx(ideal_bits(wide)), "zero low bits that all have cost nothing"
    pushed, pulled = mean_bits([torch.ones(8), torch.zeros(8)]), mean_bits([torch.ones(4)])
    assert (pushed, pulled) == (0.5, 1.0), "a mean over values"
