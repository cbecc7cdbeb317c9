"""Codes of ids against the plainest loop one can write."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels

pytestmark = pytest.mark.usefixtures("twin")


@given(st.sets(st.integers(0, 300)), st.integers(0, 40))
def test_bits_come_back(members: set[int], spare: int) -> None:
    positions = torch.tensor(sorted(members), dtype=torch.int64)
    size = max(members, default=-1) + 1 + spare
    bitmap = kernels.pack_bits(positions, size)
    assert bitmap.dtype == torch.uint8
    assert bitmap.numel() == (size + 7) // 8
    naive = [sum(1 << bit for bit in range(8) if 8 * byte + bit in members) for byte in range(bitmap.numel())]
    assert bitmap.tolist() == naive
    unpacked = kernels.unpack_bits(bitmap)
    assert unpacked.dtype == torch.int64
    assert torch.equal(unpacked, positions)


@pytest.mark.parametrize("stride", [1, 2, 7, 8, 9, 31, 32, 33, 64, 500])
def test_bits_come_back_at_every_density(stride: int) -> None:
    """Sparse and dense bitmaps take different ways, which have to agree."""
    for jitter in (1, stride):
        positions = torch.arange(300) * stride + torch.randint(0, jitter, (300,))
        bitmap = kernels.pack_bits(positions, 300 * stride + 5)
        assert bitmap.numel() == (300 * stride + 5 + 7) // 8
        assert torch.equal(kernels.unpack_bits(bitmap), positions)


def textbook_elias_fano(positions: list[int], size: int) -> list[int]:
    """As docs/reference/wire-format.md has it, with Python's integers; l is found by trying all."""
    count = len(positions)
    if not count:
        return []
    gaps = [position - index for index, position in enumerate(positions)]

    def section_bytes(low_bits: int) -> tuple[int, int, int]:
        stream, vector = count * (low_bits % 8), count + (size - count >> low_bits)
        return -(-stream // 8), count * (low_bits // 8), -(-vector // 8)

    low_bits = min(range((size - count).bit_length() + 1), key=lambda low_bits: sum(section_bytes(low_bits)))
    whole, rest = divmod(low_bits, 8)
    stream = sum(gap % (1 << rest) << rest * index for index, gap in enumerate(gaps))
    above = b"".join((gap % (1 << low_bits) >> rest).to_bytes(whole, "little") for gap in gaps)
    ones = sum(1 << (gap >> low_bits) + index for index, gap in enumerate(gaps))
    stream_bytes, _, vector_bytes = section_bytes(low_bits)
    return list(stream.to_bytes(stream_bytes, "little") + above + ones.to_bytes(vector_bytes, "little"))


def check_elias_fano(positions: Tensor, size: int) -> None:
    data = kernels.elias_fano_encode(positions, size)
    assert data.dtype == torch.uint8
    assert data.numel() == kernels.elias_fano_bytes(positions.numel(), size)
    decoded = kernels.elias_fano_decode(data, positions.numel(), size)
    assert decoded.dtype == torch.int64
    assert torch.equal(decoded, positions)
    if positions.numel() <= 300:
        assert data.tolist() == textbook_elias_fano(positions.tolist(), size)


EDGES = [0, 1, 2, 3, 7, 8, 9, 255, 256, 257, 65_535, 65_536, 65_537]


@given(st.sets(st.integers(0, 700), max_size=300), st.sampled_from([0, 1, 5, 100, 10_000, 2**31, 2**45]))
def test_elias_fano_is_the_documented_layout_and_comes_back(members: set[int], spare: int) -> None:
    check_elias_fano(torch.tensor(sorted(members), dtype=torch.int64), max(members, default=-1) + 1 + spare)


@given(st.sets(st.integers(0, 2**62 - 1), max_size=20))
def test_elias_fano_of_large_ids(members: set[int]) -> None:
    positions = torch.tensor(sorted(members), dtype=torch.int64)
    for size in (max(members, default=0) + 1, 2**62):
        check_elias_fano(positions, size)


@pytest.mark.parametrize("size", EDGES)
def test_elias_fano_of_any_density_at_the_edges(size: int) -> None:
    everything = torch.arange(size)
    counts = {count for count in (0, 1, 2, 3, size // 100, size // 3, size - 1, size) if 0 <= count <= size}
    for count in counts:
        check_elias_fano(everything[:count], size)  # clustered
        check_elias_fano(everything[size - count :], size)
        check_elias_fano(everything[(size - count) // 2 :][:count], size)
        check_elias_fano(torch.randperm(size)[:count].sort().values, size)  # uniform
        check_elias_fano((everything[:count] * size) // max(count, 1), size)  # even
    for position in {0, size // 2, size - 1} if size else ():
        check_elias_fano(torch.tensor([position]), size)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**31 + 1, 2**40])
def test_elias_fano_beyond_32_bits(size: int) -> None:
    check_elias_fano(torch.tensor([size - 1]), size)
    check_elias_fano(torch.tensor([0, size // 2, size - 2, size - 1]), size)
    check_elias_fano(torch.tensor([0]), size)
    check_elias_fano(torch.randint(0, size, (1000,)).unique(), size)


def fewest_elias_fano_bytes(count: int, size: int) -> int:
    span = size - count
    return min((count * low + 7) // 8 + (count + (span >> low) + 7) // 8 for low in range(span.bit_length() + 1))


def test_elias_fano_has_the_fewest_bytes_of_every_split() -> None:
    for size in [*range(1, 200), 255, 256, 257, 1000]:
        for count in range(1, size + 1):
            assert kernels.elias_fano_bytes(count, size) == fewest_elias_fano_bytes(count, size)


@given(st.integers(0, 2**40), st.integers(0, 2**62))
def test_elias_fano_bytes_of_large_parts(count: int, size: int) -> None:
    count = min(count, size)
    num_bytes = kernels.elias_fano_bytes(count, size)
    assert num_bytes == (fewest_elias_fano_bytes(count, size) if count else 0)
    assert num_bytes <= (size + 7) // 8, "a bitmap is the case l = 0"


@pytest.mark.parametrize(
    ("density", "bits"), [(0.001, 11.951), (0.0113, 8.367), (0.0247, 7.234), (0.052, 6.139), (0.2, 4.0), (0.4, 2.5)]
)
def test_elias_fano_bits_an_id_are_the_documented_ones(density: float, bits: float) -> None:
    count = round(density * 20_000_000)
    assert kernels.elias_fano_bytes(count, 20_000_000) * 8 / count == pytest.approx(bits, abs=0.001)


def test_elias_fano_example() -> None:
    """The worked one of docs/reference/wire-format.md."""
    assert kernels.elias_fano_encode(torch.tensor([2, 3, 77]), 100).tolist() == [0x42, 0x2C, 0x13]


@settings(max_examples=min(300, settings.default.max_examples))
@given(st.integers(1, 60), st.integers(0, 3000), st.data())
def test_elias_fano_of_any_bytes_is_nothing_or_as_many_integers(count: int, spare: int, data: st.DataObject) -> None:
    size = count + spare
    num_bytes = kernels.elias_fano_bytes(count, size)
    coded = torch.tensor(list(data.draw(st.binary(min_size=num_bytes, max_size=num_bytes))), dtype=torch.uint8)
    decoded = kernels.elias_fano_decode(coded, count, size)
    assert decoded.dtype == torch.int64
    assert decoded.numel() in (0, count)
    if decoded.numel() and int(decoded[-1]) < size and bool((decoded.diff() > 0).all()):
        assert torch.equal(kernels.elias_fano_encode(decoded, size), coded), "ids have one encoding"
