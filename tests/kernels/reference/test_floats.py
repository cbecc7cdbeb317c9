"""Codes of floats where nothing is compiled: values as they are, and the layouts that all twins agree on."""

from __future__ import annotations

import math

import pytest
import torch

from tests.rows.kinds import DTYPES, bytes_of, every_dtype, kinds
from thinwire.kernels.reference import floats


@every_dtype
@pytest.mark.parametrize("size", [0, 1, 33])
def test_values_are_their_own_code(dtype: torch.dtype, size: int) -> None:
    for values in kinds(size, dtype, torch.Generator().manual_seed(size)).values():
        code = floats.encode_floats(values)
        assert torch.equal(code, bytes_of(values))
        out = torch.zeros_like(values)
        assert floats.decode_floats(code, out)
        assert torch.equal(bytes_of(out), bytes_of(values))
        assert floats.estimate_floats(values) == (8 * dtype.itemsize if size else 0)


@every_dtype
def test_a_message_of_another_length_is_none(dtype: torch.dtype) -> None:
    out = torch.zeros(4, dtype=dtype)
    for wrong in (0, 1, 4 * dtype.itemsize - 1, 4 * dtype.itemsize + 1):
        assert not floats.decode_floats(torch.ones(wrong, dtype=torch.uint8), out)
        assert not out.any(), "nor is anything written"


@every_dtype
def test_words_are_the_bits_of_values_and_share_their_memory(dtype: torch.dtype) -> None:
    """Sign, exponent and mantissa fill a word, and 1.0 is where IEEE 754 has it."""
    values = torch.tensor([1.0, -2.0, 0.0], dtype=dtype)
    words, layout = floats.words_of(values)
    assert 1 + layout.exponent + layout.mantissa == 8 * dtype.itemsize == 8 * words.dtype.itemsize
    bias = 2 ** (layout.exponent - 1) - 1
    assert words.tolist() == [
        bias << layout.mantissa,
        1 << layout.exponent + layout.mantissa | bias + 1 << layout.mantissa,
        0,
    ]
    words[2] = words[0]
    assert values[2] == 1.0
    assert set(floats.LAYOUTS) == set(DTYPES)


def test_logarithms_are_those_of_counts_in_256ths() -> None:
    assert len(floats.LOG2) == floats.SAMPLED_VALUES + 1
    for count in (1, 2, 3, 1000, floats.SAMPLED_VALUES):
        assert floats.LOG2[count] == round(256 * math.log2(count))
    assert floats.LOG2[0] == 0, "what is not there takes no bits"
