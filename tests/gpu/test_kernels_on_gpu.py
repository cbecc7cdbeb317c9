"""Triton kernels on a GPU against the reference: the tests of tests/common/gpu_laws.py, and some that need a GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is missing, which torch for CUDA brings on Linux")
if os.environ.get("TRITON_INTERPRET", "0") != "0":
    pytest.skip("TRITON_INTERPRET is set, so nothing would run on the GPU", allow_module_level=True)

from gpu_laws import *  # noqa: F403
from gpu_laws import check_same, some_ids
from thinwire import kernels
from thinwire.kernels.gpu import find as gpu_find
from thinwire.kernels.gpu import ids as gpu_ids
from thinwire.kernels.gpu import rows as gpu_rows
from thinwire.kernels.reference import codes as reference_codes
from thinwire.kernels.reference import rows as reference

pytestmark = pytest.mark.gpu
LARGE = 20_000_003


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.mark.parametrize("mode", ["auto", "reference"])
def test_a_round_trip_by_dispatch(device: torch.device, mode: str) -> None:
    """By Triton, and by the reference on the GPU, which must know CUDA tensors too."""
    dense = torch.randn(5000, 3) * (torch.rand(5000, 1) < 0.1)
    with kernels.using(mode):
        ids = kernels.nonzero_rows(dense.to(device))
        check_same(reference.nonzero_rows(dense), ids)
        check_same(reference.find_rows(dense, 900), kernels.find_rows(dense.to(device), 900))
        check_same(reference.deal_rows(ids.cpu(), 5000, 8, 5), kernels.deal_rows(ids, 5000, 8, 5))
        bitmap = kernels.pack_bits(ids, 5000)
        check_same(reference_codes.pack_bits(ids.cpu(), 5000), bitmap)
        assert torch.equal(kernels.find_bits(bitmap, ids.numel())[0], ids)
        rows = kernels.gather_rows(dense.to(device), ids)
        total = kernels.sum_rows([(ids, rows), (ids, rows)])
        check_same(reference.sum_rows([(ids.cpu(), rows.cpu())] * 2), total)
        taken = kernels.take_rows(dense.to(device), torch.cat([ids, ids.new_tensor([-1, 5000])]))
        assert torch.equal(taken[:-2], rows)
        assert not taken[-2:].any()
        assert torch.equal(kernels.put_rows(torch.zeros_like(dense, device=device), ids, rows).cpu(), dense)
        merged = kernels.merge_rows(ids.repeat(2), rows.repeat(2, 1), 5000, 900)
        check_same(reference.merge_rows(ids.cpu().repeat(2), rows.cpu().repeat(2, 1), 5000, 900), merged)


def test_large_finds_are_right_and_the_same_each_time(device: torch.device) -> None:
    """With as many programs as run at once, races would show."""
    dense = (torch.rand(LARGE, 1, device=device) < 0.05).float()
    ids = dense.flatten().nonzero().flatten()
    dealt = reference.deal_rows(ids.cpu(), LARGE, 8, 1)
    for _ in range(5):
        assert torch.equal(gpu_find.nonzero_rows(dense), ids)
        check_same(dealt, gpu_ids.deal_rows(ids, LARGE, 8, 1))


@pytest.mark.parametrize("mode", ["auto", "reference"])
def test_a_long_run_is_summed_alike_each_time(device: torch.device, mode: str) -> None:
    """As the gradient of a token seen 5,000 times; by Triton in the order of the CPU."""
    ids = torch.randint(0, 1000, (20_000,))
    ids[torch.randperm(20_000)[:5000]] = 7
    values = torch.randn(20_000, 48)
    moved = ids.to(device), values.to(device)
    with kernels.using(mode):
        first = kernels.sum_rows([moved])
        for _ in range(3):
            check_same([each.cpu() for each in first], kernels.sum_rows([moved]))
    if mode == "auto":
        check_same(reference.sum_rows([(ids, values)]), first)


def test_large_sums_are_the_same_each_time(device: torch.device) -> None:
    pieces = [(some_ids(200_000, 10**6), None) for _ in range(8)]
    moved = [(ids.to(device), torch.randn(ids.numel(), 16, device=device)) for ids, _ in pieces]
    expected = reference.sum_rows([(ids.cpu(), values.cpu()) for ids, values in moved])
    for _ in range(3):
        check_same(expected, gpu_rows.sum_rows(moved))


def test_ids_above_2_to_31(device: torch.device) -> None:
    """Of 2^31 + 5000 elements, one byte each."""
    size = 2**31 + 5000
    if torch.cuda.mem_get_info()[0] < 3 * size:
        pytest.skip("too little GPU memory is free")
    dense = torch.zeros(size, 1, dtype=torch.uint8, device=device)
    expected = [0, 2**31 - 1, 2**31, size - 1]
    dense[expected] = 1
    assert gpu_find.nonzero_rows(dense).tolist() == expected
