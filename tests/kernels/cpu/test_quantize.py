"""Signs, blocks of integers and short floats: compiled kernels against the reference, and the reference by itself."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from thinwire import kernels

pytest.importorskip("numba")
JIT = os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
SIZES = (0, 1, 7, 8, 9, 1023, 1024, 1025, 50_001 if JIT else 2_001)
DTYPES = (torch.float32, torch.float64)
SEEDS = (None, 0, 12345678901234567, -5)

pytestmark = pytest.mark.usefixtures("nothing_compiles_after_warm_up")
every_size = pytest.mark.parametrize("size", SIZES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make(size: int, dtype: torch.dtype, largest: float = 3.0) -> Tensor:
    """Of all magnitudes, with zeros of both signs, and within 30 steps of 0.1."""
    values = torch.randn(size, dtype=dtype).clamp_(-largest, largest)
    values[::5] = 0.0
    values[2::11] = -0.0
    values[1::7] *= 1e-38
    values[3::13] *= 1e-44
    return values


def twins(call: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    with kernels.using("reference"):
        expected = call()
    with kernels.using("numba"):
        return expected, call()


def assert_same(call: Callable[[], Tensor]) -> Tensor:
    expected, got = twins(call)
    assert (expected.dtype, expected.shape) == (got.dtype, got.shape)
    assert got.view(torch.uint8).numel() == got.nbytes, "an empty one can be viewed too"
    assert torch.equal(expected.view(torch.uint8), got.view(torch.uint8))
    return got


def added(add: Callable[..., None], *settings: object, total: Tensor) -> Tensor:
    """A copy of ``total``, to which a kernel, that both twins must agree on, has added."""

    def call() -> Tensor:
        result = total.clone()
        add(*settings, result)
        return result

    return assert_same(call)


@every_dtype
@every_size
def test_largest_of_blocks(size: int, dtype: torch.dtype) -> None:
    values = make(size, dtype)
    for block in (1, 7, 512, max(1, size)):
        found = assert_same(lambda block=block: kernels.largest_of_blocks(values, block))
        assert found.tolist() == [float(piece.abs().max()) for piece in values.split(block) if piece.numel()]


@every_dtype
@every_size
def test_signs(size: int, dtype: torch.dtype) -> None:
    values, total = make(size, dtype), torch.randn(size, dtype=dtype)
    for phase in (0, 1, 7):
        packed = assert_same(lambda phase=phase: kernels.pack_signs(values, phase))
        assert packed.numel() == kernels.packed_codes_bytes(size, 1)
        for block in (3, 8, 50, 512, max(1, size)):
            scales = torch.rand(-(-size // block), dtype=dtype)
            added(kernels.add_signs, packed, scales, block, total=total)
        one = torch.ones(min(1, size), dtype=dtype)
        signs = added(kernels.add_signs, packed, one, max(1, size), total=torch.zeros(size, dtype=dtype))
        zero = values == 0
        assert torch.equal(signs[~zero], values[~zero].sign())
        assert torch.equal(signs[zero], 1.0 - 2.0 * ((torch.arange(size)[zero] + phase) % 2).to(dtype))


@pytest.mark.slow
@every_dtype
@every_size
def test_mean_of_blocks(size: int, dtype: torch.dtype) -> None:
    values = make(size, dtype)
    for block in (1, 8, 64, 100, 512, max(1, size)):
        expected, found = twins(lambda block=block: kernels.mean_of_blocks(values, block))
        sizes, counts = (
            nn.functional.pad(each, (0, -size % block)).view(-1, block).sum(dim=1)
            for each in (values.double().abs(), torch.ones(size))
        )
        exact = (sizes / counts).float()
        assert expected.shape == found.shape == (-(-size // block),)
        assert expected.dtype == found.dtype == dtype
        assert torch.allclose(expected, found, rtol=1e-6 if dtype == torch.float32 else 1e-12, atol=0.0)
        assert torch.allclose(found.float(), exact, rtol=1e-6)


@every_dtype
@every_size
@pytest.mark.parametrize("bits", range(2, 9))
def test_quantize(bits: int, size: int, dtype: torch.dtype) -> None:
    levels, block = 2 ** (bits - 1) - 1, 512
    values, total = make(size, dtype), torch.randn(size, dtype=dtype)
    largest = kernels.largest_of_blocks(values, block)
    steps = (largest / levels).clamp_(min=torch.finfo(dtype).tiny)
    for seed in SEEDS:
        packed = assert_same(lambda seed=seed: kernels.quantize(values, steps, block, levels, bits, seed))
        assert packed.numel() == kernels.packed_codes_bytes(size, bits)
        added(kernels.add_quantized, packed, steps, block, levels, bits, total=total)
        decoded = added(kernels.add_quantized, packed, steps, block, levels, bits, total=torch.zeros(size, dtype=dtype))
        of_each = steps.repeat_interleave(block)[:size]
        multiples = decoded / of_each
        assert bool(((multiples - multiples.round()).abs() < 1e-4).all()), "whole steps"
        error = (decoded - values).abs() / of_each
        assert bool((error <= (0.5001 if seed is None else 1.0001)).all())


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_byte_decodes_to_at_most_the_highest_level(bits: int) -> None:
    levels = 2 ** (bits - 1) - 1
    packed, steps = torch.randint(0, 256, (1000,), dtype=torch.uint8), torch.full((3,), 2.0)
    size = 1000 * 8 // bits
    block = -(-size // 3)
    decoded = added(kernels.add_quantized, packed, steps, block, levels, bits, total=torch.zeros(size))
    assert float(decoded.abs().max()) == 2.0 * levels


@every_dtype
@every_size
@pytest.mark.parametrize("base", [0, 1, 30, 127])
def test_powers(base: int, size: int, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and base == 30:
        base = 900
    values, total = make(size, dtype), torch.randn(size, dtype=dtype)
    for seed in (0, -5):
        codes = assert_same(lambda seed=seed: kernels.round_to_floats(values, 0, base + 1, 127, seed))
        integer, shift = (torch.int32, 23) if dtype == torch.float32 else (torch.int64, 52)
        powers = ((torch.arange(128, dtype=integer) + base) << shift).view(dtype)
        powers[0] = 0.0
        table, one = torch.cat([powers, -powers]), torch.ones(1, dtype=dtype)
        added(kernels.add_from_table, codes, table, -one, max(1, size), total=total)
        zeros = torch.zeros(size, dtype=dtype)
        decoded = added(kernels.add_from_table, codes, table, one, max(1, size), total=zeros)
        mantissas = decoded.frexp().mantissa.abs()
        assert bool(((mantissas == 0.5) | (mantissas == 0.0)).all()), "powers of two, or zero"
        if base == 900:
            inside = values.abs() > 2.0 ** (901 - 1023)
            ratios = decoded[inside] / values[inside]
            assert bool(((ratios > 0.5) & (ratios < 2.0)).all())


@every_dtype
def test_powers_of_denormal_values_and_of_what_is_not_finite(dtype: torch.dtype) -> None:
    word = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    tiny = torch.finfo(dtype).tiny
    denormal = torch.linspace(-tiny, tiny, 4099, dtype=dtype)
    smallest = torch.tensor([1, 2, 3, -1], dtype=word).view(dtype)
    not_a_number = torch.tensor([-1, torch.iinfo(word).max, torch.iinfo(word).max - 5], dtype=word).view(dtype)
    infinite = torch.tensor([float("inf"), float("-inf"), float("nan")], dtype=dtype)
    highest = 127 if dtype == torch.float32 else 1919
    for values in (denormal, torch.cat([smallest, not_a_number, infinite]).repeat(500)):
        for base in (0, 1, highest):
            for seed in (0, -5):
                codes = (
                    assert_same(lambda v=values, b=base, s=seed: kernels.round_to_floats(v, 0, b + 1, 127, s)) & 0x7F
                )
                assert bool((codes[~values.isfinite()] == 127).all())


@every_dtype
@every_size
@pytest.mark.parametrize(
    ("format", "mantissa_bits", "lowest", "largest_code"),
    [(torch.float8_e4m3fn, 3, -6, 0x7E), (torch.float8_e5m2, 2, -14, 0x7B)],
    ids=str,
)
def test_short_floats_are_rounded_as_torch_casts(
    format: torch.dtype, mantissa_bits: int, lowest: int, largest_code: int, size: int, dtype: torch.dtype
) -> None:
    limit, bias = torch.finfo(format).max, 127 if dtype == torch.float32 else 1023
    values = make(size, dtype) * torch.exp(3 * torch.randn(size, dtype=dtype))
    ties = torch.arange(size).remainder(256).to(torch.uint8).view(format).to(dtype)
    values[::3] = ((ties + torch.roll(ties, 1)) / 2)[::3]
    settings = mantissa_bits, lowest + bias, largest_code
    codes = assert_same(lambda: kernels.round_to_floats(values, *settings, None))
    finite = values.nan_to_num(limit, limit, -limit).clamp(-limit, limit)
    expected = finite.to(torch.float32).to(format).view(torch.uint8) if dtype == torch.float32 else None
    kept = ~values.isnan()
    assert expected is None or torch.equal(codes[kept], expected[kept])
    at_random = assert_same(lambda: kernels.round_to_floats(values, *settings, 7))
    distance = (at_random & 0x7F).int() - (codes & 0x7F).int()
    assert bool((distance.abs() <= 1).all()), "a neighbour"
    assert size < 1000 or bool(distance.any())


@every_dtype
@every_size
def test_tables(size: int, dtype: torch.dtype) -> None:
    codes, table = torch.randint(0, 256, (size,), dtype=torch.uint8), torch.randn(256, dtype=dtype)
    for block in (1, 7, 512):
        steps = torch.randn(-(-size // block), dtype=dtype)
        expected = table[codes.long()] * steps.repeat_interleave(block)[:size]
        zeros = torch.zeros(size, dtype=dtype)
        assert torch.equal(added(kernels.add_from_table, codes, table, steps, block, total=zeros), expected)


def test_a_table_that_is_too_small_is_an_error() -> None:
    codes, total = torch.full((3,), 200, dtype=torch.uint8), torch.zeros(3)
    for mode in ("reference", "numba"):
        with kernels.using(mode), pytest.raises(IndexError):
            kernels.add_from_table(codes, torch.zeros(100), torch.ones(1), 3, total)


def test_random_numbers_are_uniform_and_seeds_independent() -> None:
    """Of a half, half are rounded up; of two seeds or neighbours, a quarter together; at 4 sigma."""
    count = 40_000
    values, steps = torch.full((count,), 0.5), torch.ones(1)
    ups = torch.stack([kernels.quantize(values, steps, count, 1, 8, seed) for seed in range(20)]).double() - 1
    sigma = 0.5 / count**0.5
    assert bool(((ups.mean(1) - 0.5).abs() < 4.5 * sigma).all())
    correlations = torch.corrcoef(ups) - torch.eye(20)
    assert float(correlations.abs().max()) < 5 / count**0.5
    assert float(((ups[:, 1:] - 0.5) * (ups[:, :-1] - 0.5)).mean(1).abs().max()) < 5 * 0.25 / count**0.5
