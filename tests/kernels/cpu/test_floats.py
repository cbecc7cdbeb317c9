"""Compiled codes of floats against their definition."""

from __future__ import annotations

import pytest
import torch

from references import float_codes
from tests.rows.kinds import SIZES, bytes_of, every_dtype, kinds
from thinwire import kernels
from thinwire.rows.floats import bits_per_value, decode


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("size", SIZES)
def test_compiled_codes_are_those_of_the_definition(dtype: torch.dtype, size: int) -> None:
    pytest.importorskip("numba")
    for name, values in kinds(size, dtype, torch.Generator().manual_seed(size)).items():
        expected, bits = float_codes.encode_floats(values), float_codes.estimate_floats(values)
        out = torch.empty_like(values)
        with kernels.using("numba"):
            assert torch.equal(kernels.encode_floats(values), expected), name
            assert bits_per_value(values) == pytest.approx(bits, rel=1e-12), name
            decode(expected, out)
        assert float_codes.decode_floats(expected, expected_out := torch.empty_like(values))
        assert torch.equal(bytes_of(expected_out), bytes_of(values)), name
        assert torch.equal(bytes_of(out), bytes_of(values)), name
