"""Values as curves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from thinwire.compress import polynomial, top_k
from thinwire.compress.base import Compressor, Parameter, Payload
from thinwire.compress.papers.deep_reduce.values import SortedCurves, double_exponential
from thinwire.compress.wrappers import packed_code
from thinwire.errors import CorruptMessageError

pytestmark = pytest.mark.slow


def coded(code: Compressor, values: Tensor) -> Tensor:
    parameter, packed = Parameter("values", tuple(values.shape), values.dtype), packed_code(code)
    payload = code.compress(values, parameter, code.init(parameter))
    data = packed.pack(payload, parameter)
    assert data.numel() == packed.packed_bytes(parameter)
    decoded = packed.decompress(packed.unpack(data, parameter), parameter)
    assert torch.equal(decoded, packed.decompress(payload, parameter))
    return decoded


CURVES = [polynomial(), polynomial(1, 2), polynomial(0, 256), polynomial(12, 3), double_exponential()]
SHAPES = {
    "normal": lambda n: torch.randn(n),
    "top": lambda n: top_k(0.05).select(torch.randn(20 * n).double().float(), Parameter("w", (20 * n,)), {})[1],
    "one sign": lambda n: torch.rand(n) + 0.1,
    "negative": lambda n: -torch.rand(n),
    "equal": lambda n: torch.full((n,), 0.3),
    "zeros": lambda n: torch.zeros(n),
    "one outlier": lambda n: torch.randn(n).index_fill_(0, torch.tensor([n // 2]), 1e30),
    "denormal": lambda n: torch.randn(n) * 1e-41,
    "largest": lambda n: torch.randn(n).sign() * torch.finfo(torch.float32).max,
    "few": lambda n: torch.zeros(n).index_fill_(0, torch.tensor([3]), -2.0),
    "all scales": lambda n: torch.randn(n) * 10.0 ** torch.linspace(-44, 37, n),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("code", CURVES, ids=lambda code: code.name)
def test_a_curve_never_loses_more_than_the_values(code: Compressor, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for size in (1, 2, 13, 200, 5000):
        values = SHAPES[kind](max(size, 4)).to(dtype)
        decoded = coded(code, values)
        assert bool(torch.isfinite(decoded).all())
        lost = (decoded.double() - values.double()).norm()
        assert float(lost) <= (1 + 1e-5) * float(values.double().norm())


def test_sorted_values_lie_on_the_curves() -> None:
    torch.manual_seed(0)
    values = SHAPES["top"](2000)

    def error(code: Compressor) -> float:
        return float((coded(code, values) - values).norm() / values.norm())

    by_pieces = [error(polynomial(5, pieces)) for pieces in (2, 4, 8, 16)]
    by_degree = [error(polynomial(degree)) for degree in (0, 1, 5)]
    assert by_pieces == sorted(by_pieces, reverse=True)
    assert by_degree == sorted(by_degree, reverse=True)
    assert by_pieces[2] < 0.01
    assert error(double_exponential()) < 0.05


def test_curves_of_their_own_kind_are_found() -> None:
    x = torch.linspace(0, 1, 1000, dtype=torch.float64)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    sums = {"both fall": 3 * torch.exp(-9 * x) + torch.exp(-1.5 * x), "from both ends": 2 - 0.01 * torch.exp(5 * x)}
    for name, values in sums.items():
        assert bool((values > 0).all())
        torch.testing.assert_close(coded(double_exponential(), values[order]), values[order], atol=2e-4, rtol=0), name
    quintic = 4 - x - x**3 - x**5
    torch.testing.assert_close(coded(polynomial(5, 2), quintic[order]), quintic[order], atol=1e-12, rtol=0)


def test_no_curve_is_larger_than_the_values() -> None:
    for code in CURVES:
        assert isinstance(code, SortedCurves)
        sizes = [code.packed_bytes(Parameter("values", (count,))) for count in range(400)]
        assert all(size <= 8 + 8 * -(-4 * count // 8) for count, size in enumerate(sizes) if size is not None)
        assert None not in sizes
    assert polynomial().packed_bytes(Parameter("values", (1000,))) == 3 * 8 + 200 + 32 + 1256


def test_curves_that_cannot_be_are_refused() -> None:
    parameter, code = Parameter("values", (1000,)), polynomial()
    payload = code.compress(torch.randn(1000), parameter, {})
    numbers, ends, mapping = payload.parts
    for parts in (
        (numbers.index_fill(0, torch.tensor([5]), math.nan), ends, mapping),
        (numbers.index_fill(0, torch.tensor([0]), math.inf), ends, mapping),
        (numbers, ends.index_fill(0, torch.tensor([2]), 1001), mapping),
        (numbers, ends.index_fill(0, torch.tensor([2]), -1), mapping),
        (numbers, ends, mapping.index_fill(0, torch.tensor([0]), 0)),
    ):
        with pytest.raises(CorruptMessageError, match=r"curves with|no permutation"):
            code.unpack(code.pack(Payload(parts), parameter), parameter)


def test_curves_without_sense_are_refused() -> None:
    for degree, pieces in ((-1, 8), (13, 8), (5, 1), (5, 257), ("5", 8)):
        with pytest.raises(ValueError, match="degree from 0 to 12 and 2 to 256 pieces"):
            polynomial(degree, pieces)  # type: ignore[arg-type]
