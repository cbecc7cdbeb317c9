"""Signs, blocks of small integers and short floats against the plainest loop one can write."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.kernels.reference import quantize as reference

numbers = st.lists(st.floats(-100, 100, width=32), max_size=40)


def unpacked(packed: Tensor, count: int, bits: int) -> list[int]:
    """Integers of a bit stream, least significant bit first."""
    assert packed.numel() == (count * bits + 7) // 8 == reference.packed_codes_bytes(count, bits)
    stream = int.from_bytes(bytes(packed.tolist()), "little")
    assert stream >> count * bits == 0, "no bit behind the last code"
    return [stream >> bits * index & (1 << bits) - 1 for index in range(count)]


@given(numbers, st.integers(0, 3))
def test_signs_are_bits_and_zeros_take_turns(values: list[float], phase: int) -> None:
    bits = unpacked(reference.pack_signs(torch.tensor(values), phase), len(values), 1)
    assert bits == [int(value < 0) if value else (index + phase) % 2 for index, value in enumerate(values)]


@given(numbers, st.integers(1, 7))
def test_signs_add_the_scale_of_their_block(values: list[float], block: int) -> None:
    total, count = torch.full((len(values),), 10.0), len(values)
    scales = torch.arange(1.0, 1 + -(-count // block))
    reference.add_signs(reference.pack_signs(torch.tensor(values), 0), scales, block, total)
    bits = [int(value < 0) if value else index % 2 for index, value in enumerate(values)]
    assert total.tolist() == [10 - (1 + i // block) if bit else 10 + (1 + i // block) for i, bit in enumerate(bits)]


@given(numbers, st.integers(1, 50))
def test_blocks_have_their_largest_and_their_mean_magnitude(values: list[float], block: int) -> None:
    blocks = [values[start : start + block] for start in range(0, len(values), block)]
    tensor = torch.tensor(values)
    assert reference.largest_of_blocks(tensor, block).tolist() == [max(map(abs, each)) for each in blocks]
    means = reference.mean_of_blocks(tensor, block)
    assert means.dtype == torch.float32
    exact = [float(sum(Fraction(abs(value)) for value in each) / len(each)) for each in blocks]
    assert means.tolist() == pytest.approx(exact, rel=1e-6, abs=1e-40)


@given(numbers, st.integers(2, 8), st.integers(1, 9))
def test_the_nearest_multiple_ties_to_even_and_comes_back(values: list[float], bits: int, block: int) -> None:
    """By steps of powers of two, whose multiples are exact."""
    levels = 2 ** (bits - 1) - 1
    steps = torch.tensor([2.0 ** (index % 5 - 1) for index in range(-(-len(values) // block))])
    packed = reference.quantize(torch.tensor(values), steps, block, levels, bits, None)
    multiples = [
        max(-levels, min(levels, round(Fraction(value) / Fraction(steps[index // block].item()))))
        for index, value in enumerate(values)
    ]
    assert unpacked(packed, len(values), bits) == [multiple + levels for multiple in multiples]
    total = torch.ones(len(values))
    reference.add_quantized(packed, steps, block, levels, bits, total)
    assert total.tolist() == [1 + each * steps[index // block].item() for index, each in enumerate(multiples)]
    reference.add_quantized(packed, -steps, block, levels, bits, total)
    assert total.tolist() == [1.0] * len(values)


def test_codes_above_the_highest_level_count_as_it() -> None:
    total = torch.zeros(4)
    reference.add_quantized(torch.tensor([0xFF, 0xF0], dtype=torch.uint8), torch.ones(1), 4, 5, 4, total)
    assert total.tolist() == [5.0, 5.0, -5.0, 5.0]


@given(st.floats(-7, 7, width=32), st.integers(-(2**63), 2**63 - 1))
def test_stochastic_rounding_takes_a_neighbor_and_a_whole_number_stays(value: float, seed: int) -> None:
    values = torch.full((64,), value)
    codes = unpacked(reference.quantize(values, torch.ones(1), 64, 7, 4, seed), 64, 4)
    low = torch.tensor(value).floor().int().item()
    assert {code - 7 for code in codes} <= ({low} if low == value else {low, low + 1})
    again = unpacked(reference.quantize(values, torch.ones(1), 64, 7, 4, seed), 64, 4)
    assert codes == again, "all twins draw alike"


def test_the_expectation_of_stochastic_rounding_is_the_value() -> None:
    count = 20_000
    values = torch.full((count,), 2.3)
    codes = reference.quantize(values, torch.ones(1), count, 7, 8, 11)
    total = torch.zeros(count)
    reference.add_quantized(codes, torch.ones(1), count, 7, 8, total)
    assert total.mean().item() == pytest.approx(2.3, abs=5 * (0.3 * 0.7 / count) ** 0.5)


def significand(code: int, mantissa_bits: int) -> int:
    exponent, mantissa = divmod(code, 1 << mantissa_bits)
    return mantissa if exponent == 0 else mantissa + (1 << mantissa_bits)


@pytest.mark.parametrize("mantissa_bits", [0, 2, 3])
def test_short_floats_are_the_nearest_of_all(mantissa_bits: int) -> None:
    """Codes count the magnitudes of a format from zero up. Ties go to the even significand, as IEEE 754 says, and
    to the larger number where both have the one digit that is odd."""
    lowest, largest_code = 124, (6 << mantissa_bits) - 1  # the first normal number is 1/8
    step = 2.0 ** (124 - 127 - mantissa_bits)
    magnitudes = [code * step for code in range(1 << mantissa_bits)]  # below the first normal number
    for code in range(len(magnitudes), largest_code + 1):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        magnitudes.append((1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - 1 + lowest - 127))
    between = [(low + high) / 2 for low, high in pairwise(magnitudes)]
    values = magnitudes + between + [low * 0.75 + high * 0.25 for low, high in zip(magnitudes, between, strict=False)]
    values += [1e9, float("inf"), float("nan")]
    codes = reference.round_to_floats(torch.tensor(values), mantissa_bits, lowest, largest_code, None).tolist()
    for value, code in zip(values, codes, strict=True):
        if value in (1e9, float("inf")) or value != value:
            assert code == largest_code
            continue
        least = min(abs(value - magnitude) for magnitude in magnitudes)
        best = [each for each, magnitude in enumerate(magnitudes) if abs(value - magnitude) == least]
        even = [each for each in best if significand(each, mantissa_bits) % 2 == 0]
        assert code == (best[0] if len(best) == 1 else max(even or best))
    negative = reference.round_to_floats(-torch.tensor(values[:-1]), mantissa_bits, lowest, largest_code, None)
    assert (negative & 127).tolist() == codes[:-1]
    assert [code >> 7 for code in negative.tolist()] == [1] * len(codes[:-1]), "also of a negative zero"


def test_numbers_of_a_table_are_added_times_the_step_of_their_block() -> None:
    table, codes = torch.arange(256.0), torch.tensor([3, 0, 255, 7, 1], dtype=torch.uint8)
    total = torch.ones(5)
    reference.add_from_table(codes, table, torch.tensor([2.0, -1.0, 0.5]), 2, total)
    assert total.tolist() == [7.0, 1.0, -254.0, -6.0, 1.5]
