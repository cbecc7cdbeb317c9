"""A tensor in one message: every bit arrives, coded or not, and what was altered or is another one is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.comm.point_to_point import LEAST_BYTES, check_plain, most_bytes, pack, unpack
from thinwire.errors import CorruptMessageError, MismatchError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def bits_of(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def any_bits(dtype: torch.dtype, numel: int, seed: int) -> Tensor:
    """Of all kinds, numbers or not."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


@given(st.sampled_from(DTYPES), st.integers(0, 70), st.integers(0, 2**31), st.booleans(), st.booleans())
def test_every_bit_arrives(dtype: torch.dtype, numel: int, seed: int, is_coded: bool, is_smooth: bool) -> None:
    values = torch.linspace(-1, 1, numel).to(dtype) if is_smooth else any_bits(dtype, numel, seed)
    data, out = pack(values, 3, is_coded), torch.zeros_like(values)
    assert LEAST_BYTES <= data.numel() <= most_bytes(values)
    assert is_coded or data.numel() == most_bytes(values)
    unpack(torch.cat([data, torch.full((5,), 255, dtype=torch.uint8)]), out, 3)  # received in a longer tensor
    assert torch.equal(bits_of(out), bits_of(values))


def test_a_message_has_memory_of_its_own() -> None:
    values, out = torch.ones(6), torch.zeros(2, 3)
    data = pack(values, 0, is_coded=False)
    values.zero_()
    unpack(data, out, 0)
    assert torch.equal(out, torch.ones(2, 3))


@pytest.mark.parametrize("is_coded", [False, True])
def test_a_bit_that_changed_is_refused(is_coded: bool) -> None:
    values = torch.arange(9.0)
    data = pack(values, 1, is_coded)
    for index in range(LEAST_BYTES + 9 * 4 if not is_coded else LEAST_BYTES):
        changed = data.clone()
        changed[index] ^= 16
        with pytest.raises(CorruptMessageError):
            unpack(changed, torch.zeros(9), 1)


def test_a_message_of_another_rank_is_refused() -> None:
    data = pack(torch.ones(4), 1, is_coded=False)
    with pytest.raises(CorruptMessageError, match="a message of rank 1, where a tensor of rank 2 is expected"):
        unpack(data, torch.zeros(4), 2)


@pytest.mark.parametrize(
    "out", [torch.zeros(4, dtype=torch.float64), torch.zeros(3), torch.zeros(2, dtype=torch.int64)]
)
def test_a_tensor_of_another_dtype_or_size_is_refused(out: Tensor) -> None:
    """Also by a receiver that expects no message."""
    data = pack(torch.ones(4), 1, is_coded=False)
    wants = (
        rf"rank 1 sent 4 values of torch.float32, and this rank receives {out.numel()} of {out.dtype}: pass a tensor"
    )
    if out.is_floating_point():
        with pytest.raises(MismatchError, match=wants):
            unpack(data, out, 1)
        assert not out.any()
    plain = torch.zeros(24, dtype=out.dtype)
    plain.view(torch.uint8)[: data.numel()] = data[: plain.nbytes]
    with pytest.raises(MismatchError, match=rf"receives 24 of {out.dtype}"):
        check_plain(plain, 1)


def test_plain_values_are_no_message() -> None:
    """Nor is a message of another rank one of this source."""
    check_plain(torch.arange(100.0), 1)
    check_plain(torch.zeros(1), 1)
    plain = torch.zeros(24)
    data = pack(torch.ones(4), 1, is_coded=False)
    plain.view(torch.uint8)[: data.numel()] = data
    check_plain(plain, 2)
