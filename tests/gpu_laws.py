"""What Triton kernels must hold, wherever they run: a module of tests imports all of this and has a fixture ``device``.

Expected is what the reference gives on the CPU, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.kernels.dispatch import KERNELS, Kernel
from thinwire.kernels.gpu import bits as gpu_bits
from thinwire.kernels.gpu import codes as gpu_codes
from thinwire.kernels.gpu import find as gpu_find
from thinwire.kernels.gpu import hash as gpu_hash
from thinwire.kernels.gpu import ids as gpu_ids
from thinwire.kernels.gpu import rows as gpu_rows
from thinwire.kernels.gpu import union as gpu_union
from thinwire.kernels.reference import codes as reference_codes
from thinwire.kernels.reference import rows as reference
from thinwire.sparse import SUPPORTED_DTYPES

SIZES = (0, 1, 7, 1023, 1024, 1025, 9_001)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WAITS = ("_local_scalar_dense", "nonzero", "unique", "_unique2", "masked_select", "bincount")

every_size = pytest.mark.parametrize("size", SIZES)
every_dtype = pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)


def check_same(expected: Any, got: Any) -> None:
    if isinstance(expected, Tensor):
        assert (expected.dtype, expected.shape) == (got.dtype, got.shape)
        bits = BITS[expected.element_size()]
        assert torch.equal(expected.contiguous().view(bits), got.cpu().contiguous().view(bits))
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(got)
        for one, other in zip(expected, got, strict=True):
            check_same(one, other)
    else:
        assert expected == got


def some_ids(count: int, size: int) -> Tensor:
    return torch.randint(0, max(size, 1), (count if size else 0,)).unique()


def some_rows(num_rows: int, width: int, dtype: torch.dtype, density: float) -> Tensor:
    dense = torch.randn(num_rows, width).to(dtype)
    dense[torch.rand(num_rows) >= density] = 0
    return dense


class _Unwaiting(TorchDispatchMode):
    """Raises where an operation would need a value of the device on the host, or give a tensor of unknown length."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        with _Unwaiting():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_waiting_is_seen(device: torch.device) -> None:
    with pytest.raises((AssertionError, RuntimeError)), without_waiting(device):
        gpu_find.nonzero_rows(torch.ones(3, 1, device=device))


def moved(value: Any, device: torch.device) -> Any:
    """A copy on the device, of tensors in lists too."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    return type(value)(moved(item, device) for item in value) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("kernel", [row for row in KERNELS.values() if row.gpu], ids=lambda kernel: kernel.name)
def test_every_kernel_gives_the_same_for_its_samples(device: torch.device, kernel: Kernel) -> None:
    """Also in what it writes to."""
    for sample in kernel.samples():
        args = moved(sample.args, device)
        got = kernel.on_gpu()(*args, **sample.settings)
        check_same([sample.call(kernel.reference), sample.args], [got, args])


@every_size
@every_dtype
@pytest.mark.parametrize("width", [1, 3, 8, 300])
def test_nonzero_rows(device: torch.device, size: int, dtype: torch.dtype, width: int) -> None:
    for density in (0.0, 0.05, 1.0):
        dense = some_rows(size // width, width, dtype, density)
        check_same(reference.nonzero_rows(dense), gpu_find.nonzero_rows(dense.to(device)))


@every_dtype
def test_nonzero_rows_wherever_they_lie(device: torch.device, dtype: torch.dtype) -> None:
    rows = some_rows(700, 3, dtype, 0.3)
    rows[5, 1], rows[6, 0] = float("nan"), -0.0
    shifted = torch.empty(2101, dtype=dtype, device=device)[1:].view(700, 3).copy_(rows)
    strided = torch.empty(700, 6, dtype=dtype, device=device)[:, 1:4].copy_(rows)
    for dense in (shifted, strided, rows.to(device).t().contiguous().t()):
        check_same(reference.nonzero_rows(rows), gpu_find.nonzero_rows(dense))


@every_size
@pytest.mark.parametrize("capacity", [0, 5, 20_000])
def test_nonzero_rows_into(device: torch.device, size: int, capacity: int) -> None:
    """The first ids that fit, how many those are, and how many were left out."""
    dense = some_rows(size, 2, torch.float32, 0.4)
    ids = torch.full((capacity,), -7, dtype=torch.int64, device=device)
    count = torch.full((2,), -7, dtype=torch.int64, device=device)
    on_device = dense.to(device)
    with without_waiting(device):
        gpu_find.nonzero_rows_into(on_device, ids, count)
    expected = reference.nonzero_rows(dense)
    fit = min(expected.numel(), capacity)
    assert count.tolist() == [fit, expected.numel() - fit]
    check_same(expected[:fit], ids[:fit])
    assert (ids[fit:] == -7).all(), "what lies behind is untouched"


@every_size
@pytest.mark.parametrize("spread", [1, 10**9])
@pytest.mark.parametrize("world_size", [1, 3, 8, 100])
def test_owners(device: torch.device, size: int, spread: int, world_size: int) -> None:
    """Ids above 2^31 too, and more owners than are split without a sort."""
    ids, seed = some_ids(size, size * spread), 2**63 + 2**50 + 3
    check_same(reference.deal(ids, world_size, seed), gpu_ids.deal(ids.to(device), world_size, seed))
    owner = world_size - 1
    expected = reference.dealt_ids(owner, ids, world_size, seed)
    check_same(expected, gpu_ids.dealt_ids(owner, ids.to(device), world_size, seed))
    owners = ids * 7919 % world_size
    check_same(reference.group_by_owner(owners, world_size), gpu_ids.group_by_owner(owners.to(device), world_size))


def test_as_many_owners_as_are_split_without_a_sort(device: torch.device) -> None:
    ids = some_ids(1500, 9000)
    check_same(reference.deal(ids, 64, 1), gpu_ids.deal(ids.to(device), 64, 1))


@every_size
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 + 2**50 + 3])
def test_hashes(device: torch.device, size: int, seed: int) -> None:
    ids = torch.randint(0, 2**62, (size,))
    check_same(reference.mix(ids, seed), gpu_ids.mix(ids.to(device), seed))
    check_same(reference.owner_by_hash(ids, 7, seed), gpu_ids.owner_by_hash(ids.to(device), 7, seed))


def test_an_owner_that_is_not_there_is_an_error(device: torch.device) -> None:
    with pytest.raises(IndexError, match=r"not in \[0, 3\)"):
        gpu_ids.group_by_owner(torch.tensor([0, 3], device=device), 3)


@every_size
@pytest.mark.parametrize("world_size", [1, 8])
def test_hierarchical_hash(device: torch.device, size: int, world_size: int) -> None:
    """Equal to the reference, whoever came first; in particular every id is in exactly one list."""
    ids = torch.randint(0, 2**40, (size,)).unique()
    for parallel in (2 * size, size // 2, 1):
        expected = reference.hierarchical_hash(ids, world_size, 3, parallel_slots=parallel, serial_slots=1)
        moved = ids.to(device)
        check_same(expected, gpu_hash.hierarchical_hash(moved, world_size, 3, parallel_slots=parallel, serial_slots=1))


@every_size
@pytest.mark.parametrize("density", [0.0, 0.01, 0.6, 1.0])
def test_bitmaps(device: torch.device, size: int, density: float) -> None:
    positions = (torch.rand(size) < density).nonzero().flatten()
    bitmap = reference_codes.pack_bits(positions, size)
    check_same(bitmap, gpu_bits.pack_bits(positions.to(device), size))
    for offset in (0, 1, 3):  # as it lies in a payload
        moved = torch.cat([torch.full((offset,), 255, dtype=torch.uint8), bitmap]).to(device)[offset:]
        check_same(positions, gpu_bits.unpack_bits(moved))


@every_size
@pytest.mark.parametrize("spread", [1, 2, 19, 2**40])
def test_elias_fano(device: torch.device, size: int, spread: int) -> None:
    positions = some_ids(size, size * spread)
    count, limit = positions.numel(), size * spread
    coded = reference_codes.elias_fano_encode(positions, limit)
    check_same(coded, gpu_codes.elias_fano_encode(positions.to(device), limit))
    check_same(positions, gpu_codes.elias_fano_decode(coded.to(device), count, limit))
    for wrong in (coded.bitwise_not(), torch.zeros_like(coded)):
        expected = reference_codes.elias_fano_decode(wrong, count, limit)
        check_same(expected, gpu_codes.elias_fano_decode(wrong.to(device), count, limit))


@pytest.mark.parametrize("size", [0, 8, 4088, 4096, 4104, 40_000])
def test_checksum(device: torch.device, size: int) -> None:
    for buffer in (torch.randint(0, 256, (size,), dtype=torch.uint8), torch.full((size,), 255, dtype=torch.uint8)):
        moved = torch.cat([torch.zeros(3, dtype=torch.uint8), buffer]).to(device)[3:]
        assert gpu_codes.checksum(moved) == gpu_codes.checksum(buffer.to(device)) == reference_codes.checksum(buffer)


@every_size
@pytest.mark.parametrize("spread", [1, 10, 10**7])
def test_union_places(device: torch.device, size: int, spread: int) -> None:
    limit = size * spread
    pieces = [torch.randint(0, max(limit, 1), (size // 2,)), *[some_ids(size // 2, limit) for _ in range(3)]]
    expected = reference.union_places(pieces, limit)
    moved = [piece.to(device) for piece in pieces]
    check_same(expected, gpu_union.union_places(moved, limit))
    if spread > 10:
        return
    for capacity in (3, expected[0].numel()):
        union = torch.full((capacity,), -7, device=device)
        count = torch.zeros(2, dtype=torch.int64, device=device)
        with without_waiting(device):
            _, _, places = gpu_union.union_places_into(moved, limit, union, count)
        fit = min(capacity, expected[0].numel())
        assert count.tolist() == [fit, expected[0].numel() - fit]
        check_same(expected[0][:fit], union[:fit])
        check_same(expected[1], places)


@pytest.mark.parametrize("wrong", [-1, 50])
def test_an_id_outside_of_the_union_is_an_error(device: torch.device, wrong: int) -> None:
    with pytest.raises(IndexError, match=r"not in \[0, 50\)"):
        gpu_union.union_places([torch.tensor([3, wrong], device=device)], 50)


@every_dtype
@pytest.mark.parametrize("size", [0, 1, 1025])
@pytest.mark.parametrize("width", [0, 1, 3, 16, 200])
def test_gather_and_scatter(device: torch.device, size: int, dtype: torch.dtype, width: int) -> None:
    rows = torch.randn(size, width).to(dtype)
    places = torch.randint(0, max(size, 1), (size // 2,))
    expected = reference.gather_rows(rows, places)
    check_same(expected, gpu_rows.gather_rows(rows.to(device), places.to(device)))
    payload = torch.zeros(expected.nbytes + dtype.itemsize, dtype=torch.uint8, device=device)
    out = payload[dtype.itemsize :].view(dtype).view(expected.shape)
    check_same(expected, gpu_rows.gather_rows(rows.to(device), places.to(device), out))
    check_same(expected, out)
    ids = some_ids(size // 2, size)
    expected = reference.scatter_rows(rows.clone(), ids, rows[: ids.numel()])
    check_same(expected, gpu_rows.scatter_rows(rows.clone().to(device), ids.to(device), rows[: ids.numel()].to(device)))


def test_rows_that_are_not_there_are_left_alone(device: torch.device) -> None:
    rows, ids = torch.ones(5, 2, device=device), torch.tensor([3, -1, 5], device=device)
    assert gpu_rows.gather_rows(rows, ids).tolist() == [[1, 1], [0, 0], [0, 0]]
    assert gpu_rows.scatter_rows(rows, ids, torch.full((3, 2), 2.0, device=device)).sum() == 12
    total = gpu_rows.sum_rows_at([(ids, torch.ones(3, 2, device=device))], 5, 2, torch.float32)
    assert total.tolist() == [[0, 0]] * 3 + [[1, 1], [0, 0]]


@every_dtype
@pytest.mark.parametrize("size", [0, 1, 7, 1025, 4_001])
def test_sum_rows(device: torch.device, size: int, dtype: torch.dtype) -> None:
    """In the order of the pieces: float additions do not commute, and these differ by powers of ten."""
    for width, scale in ((1, 1.0), (3, 0.125), (140, 1 / 3)):
        num_rows = max(1, size // width)
        pieces = []
        for exponent in (0, 3, -4, 1):
            ids = some_ids(num_rows // 2, num_rows)
            pieces.append((ids, (torch.randn(ids.numel(), width) * 10.0**exponent).to(dtype)))
        moved = [(ids.to(device), values.to(device)) for ids, values in pieces]
        check_same(reference.sum_rows(pieces, scale), gpu_rows.sum_rows(moved, scale))


@every_dtype
@pytest.mark.parametrize("largest", [40, 2**40])
def test_sum_of_repeated_unsorted_ids(device: torch.device, dtype: torch.dtype, largest: int) -> None:
    """Sorted by `sum_rows`, one after the other by `sum_rows_at`: in either case in their order."""
    pieces = [(torch.randint(0, largest, (200,)), torch.randn(200, 3).to(dtype)) for _ in range(3)]
    moved = [(ids.to(device), values.to(device)) for ids, values in pieces]
    check_same(reference.sum_rows(pieces), gpu_rows.sum_rows(moved))
    if largest == 40:
        with without_waiting(device):
            total = gpu_rows.sum_rows_at(iter(moved), 40, 3, dtype, 0.5)
        check_same(reference.sum_rows_at(pieces, 40, 3, dtype, 0.5), total)
