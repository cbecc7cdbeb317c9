"""The largest elements and the moments of a tensor."""

from __future__ import annotations

import pytest
import torch

from thinwire import kernels
from thinwire.kernels.reference import select as reference_select

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)

pytest.importorskip("numba")

pytestmark = pytest.mark.usefixtures("nothing_compiles_after_warm_up")


def test_moments_by_hand() -> None:
    values = torch.tensor([3.0, 0.0, -4.0, -0.0, 0.5])
    for mode in ("reference", "numba"):
        with kernels.using(mode):
            assert kernels.magnitude_moments(values) == kernels.Moments(3, 7.5, 25.25)
            assert kernels.magnitude_moments(values, 0.75) == kernels.Moments(2, 7.0, 25.0)
            assert kernels.magnitude_moments(values, 9.0) == kernels.Moments(0, 0.0, 0.0)


@every_dtype
def test_the_largest_are_those_of_a_stable_sort(dtype: torch.dtype) -> None:
    values = torch.randint(-9, 10, (400,)).to(dtype)  # many are equal
    for k in (1, 13, 200, 399):
        expected = values.abs().sort(descending=True, stable=True).indices[:k].sort().values
        ids, chosen = reference_select.top_magnitudes(values, k)
        assert torch.equal(ids, expected)
        assert torch.equal(chosen, values[expected])
