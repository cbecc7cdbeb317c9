"""Compiled codes of ids and checksums against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.parity import LARGE, assert_same, check_same, every_fill, every_size, some_ids, twins
from thinwire import kernels

pytestmark = pytest.mark.usefixtures("nothing_compiles_after_warm_up")


@every_size
@every_fill
def test_bitmaps(size: int, density: float) -> None:
    positions = (torch.rand(size) < density).nonzero().flatten()
    assert_same(lambda: kernels.pack_bits(positions, size))
    bitmap = kernels.pack_bits(positions, size)
    for offset in range(9):  # as it lies in a payload
        moved = torch.cat([torch.full((offset,), 255, dtype=torch.uint8), bitmap])[offset:]
        assert_same(lambda: kernels.unpack_bits(moved))  # noqa: B023


@every_size
@pytest.mark.parametrize("spread", [1, 2, 19, 1000, 2**40])
def test_elias_fano(size: int, spread: int) -> None:
    positions = some_ids(size, size * spread)
    assert_same(lambda: kernels.elias_fano_encode(positions, size * spread))
    data = torch.cat([torch.zeros(3, dtype=torch.uint8), kernels.elias_fano_encode(positions, size * spread)])[3:]
    expected, got = twins(lambda: kernels.elias_fano_decode(data, positions.numel(), size * spread))
    check_same(expected, got)
    assert torch.equal(got, positions)


@settings(max_examples=min(300, settings.default.max_examples))
@given(st.integers(1, 60), st.sampled_from([0, 1, 40, 3000, 2**40]), st.data())
def test_elias_fano_of_any_bytes(count: int, spare: int, data: st.DataObject) -> None:
    """Half of them with as many ones as there should be, so that the rest is looked at too."""
    size = count + spare
    num_bytes = kernels.elias_fano_bytes(count, size)
    coded = torch.tensor(list(data.draw(st.binary(min_size=num_bytes, max_size=num_bytes))), dtype=torch.uint8)
    if data.draw(st.booleans()):
        valid = kernels.elias_fano_encode(torch.arange(count) * (size // count), size)
        place = data.draw(st.integers(0, num_bytes - 1))
        coded = torch.cat([coded[:place], valid[place:]])
    assert_same(lambda: kernels.elias_fano_decode(coded, count, size))


@pytest.mark.parametrize("size", [0, 8, 56, 4088, 4096, 4104, 8 * LARGE])
def test_checksum(size: int) -> None:
    for buffer in (torch.randint(0, 256, (size,), dtype=torch.uint8), torch.full((size,), 255, dtype=torch.uint8)):
        assert_same(lambda: kernels.checksum(buffer))  # noqa: B023
        moved = torch.cat([torch.zeros(3, dtype=torch.uint8), buffer])[3:]
        assert_same(lambda: kernels.checksum(moved))  # noqa: B023
