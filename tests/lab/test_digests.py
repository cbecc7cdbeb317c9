"""A digest is of the bits: of all of them, however they lie in memory, and of nothing else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.lab.digests import digest_of


@given(st.integers(0, 5), st.integers(0, 5), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
def test_layouts_do_not_matter_and_tensors_follow_one_another(rows: int, columns: int, dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (rows, columns)).to(dtype)
    assert digest_of([values]) == digest_of([values.t().contiguous().t()]) == digest_of(values)
    assert digest_of([values]) == digest_of([values.clone().requires_grad_(dtype.is_floating_point)])


@given(st.integers(0, 11), st.integers(0, 31))
def test_every_bit_counts(place: int, bit: int) -> None:
    values = torch.randn(12)
    changed = values.clone()
    changed.view(torch.int32)[place] ^= torch.tensor(1 << bit).to(torch.int32)
    assert digest_of([values]) != digest_of([changed])
    assert digest_of([torch.zeros(2)]) != digest_of([-torch.zeros(2)]), "though they compare as equal"
