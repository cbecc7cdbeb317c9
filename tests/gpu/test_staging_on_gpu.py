"""The lane's stream on a GPU: who waits for whom, and that memory in flight is not used again."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from torch import Tensor

from thinwire.comm.cuda.device import CudaDevice
from thinwire.comm.cuda.staging import DeviceStaging, staging_for
from thinwire.errors import ThinwireError
from thinwire.gradients.tables import TableGradient, staged
from thinwire.rows.sparse import SUPPORTED_DTYPES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CYCLES = 1 << 30  # half a second or more


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("limit_bytes", [1 << 20, 4096])
def test_there_and_back_whether_it_fits_or_not(device: torch.device, dtype: torch.dtype, limit_bytes: int) -> None:
    staging = DeviceStaging(CudaDevice(device), first_bytes=4096, limit_bytes=limit_bytes, chunk_bytes=1000)
    tensors = [torch.arange(3000, device=device), torch.randn(3000, 7, device=device).to(dtype)]
    rounds = []
    for _ in range(3):
        with staging.taking(staging.hand_over(tensors)):
            hosts = staging.to_host(*tensors)
            assert all(torch.equal(host, tensor.cpu()) for host, tensor in zip(hosts, tensors, strict=True))
            back = staging.to_device(*hosts)
        torch.cuda.synchronize()
        assert all(map(torch.equal, back, tensors))
        rounds.append(staging.stats()["cuda/overflow_rounds"])
    assert rounds[0] > 0
    assert (rounds[2] == rounds[0]) == (limit_bytes > 4096), "a larger capacity follows from an overflow"


def test_memory_in_flight_is_not_used_again(device: torch.device) -> None:
    """The lane still reads a gradient that the training thread has let go of."""
    staging = staging_for(device)
    gradient = torch.full((1 << 20,), 1.0, device=device)
    address = gradient.data_ptr()
    with staging.taking(staging.hand_over([gradient])):
        torch.cuda._sleep(CYCLES)
        read = gradient * 1
    del gradient
    others = [torch.full((1 << 20,), 7.0, device=device) for _ in range(4)]
    assert address not in [other.data_ptr() for other in others]
    torch.cuda.synchronize()
    assert bool((read == 1).all())


def test_a_future_makes_streams_wait_and_not_the_host(device: torch.device) -> None:
    staging = staging_for(device)
    gradient = torch.zeros(1 << 20, device=device)
    future = staging.future()
    with staging.taking(staging.hand_over([gradient])):
        torch.cuda._sleep(CYCLES)
        gradient.fill_(3.0)
        future.set_result(gradient)
    started = time.perf_counter()
    result = future.wait()
    copy = result.clone()
    assert time.perf_counter() - started < 0.2, "the host has gone on"
    assert bool((copy == 3).all())


def test_a_future_of_another_stream_waits_for_the_lane_too(device: torch.device) -> None:
    """As where a bucket also needs an all-reduce of NCCL; the lane's own stream waits for nothing of that."""
    staging = staging_for(device)
    gradient = torch.zeros(1 << 20, device=device)
    future = staging.future()
    with staging.taking(staging.hand_over([gradient])):
        torch.cuda._sleep(CYCLES)
        gradient.fill_(3.0)
        with staging.completing():
            future.set_result(gradient)
    assert bool((future.wait().clone() == 3).all())


def test_a_capture_is_refused(device: torch.device) -> None:
    staging = staging_for(device)
    gradient = torch.zeros(8, device=device)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        gradient.add_(1)
        with pytest.raises(ThinwireError, match="CUDA graph is being captured"):
            staging.hand_over([gradient])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_thread_that_works_for_the_second_device_leaves_the_first_alone() -> None:
    """In a process of its own, where nothing has used the first one."""
    script = """
import threading, torch
from thinwire.comm.cuda.staging import staging_for
gradient = torch.ones(1000, device="cuda:1")
staging = staging_for(gradient.device)
handover = staging.hand_over([gradient])
def job():
    with staging.taking(handover):
        staging.to_device(*staging.to_host(gradient))
thread = threading.Thread(target=job)
thread.start(), thread.join()
assert torch._C._cuda_hasPrimaryContext(1) and not torch._C._cuda_hasPrimaryContext(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_the_lane_waits_for_what_was_handed_over(device: torch.device) -> None:
    staging = staging_for(device)
    gradient = torch.zeros(1 << 20, device=device)
    torch.cuda._sleep(CYCLES)
    gradient.fill_(5.0)
    with staging.taking(staging.hand_over([gradient])):
        (host,) = staging.to_host(gradient)
        assert bool((host == 5).all())


@pytest.mark.parametrize("size", [0, 1, 1000, 3_000_001])
def test_an_all_reduce_in_chunks(device: torch.device, size: int) -> None:
    staging = staging_for(device)
    mine = torch.randn(size, device=device)
    expected = mine.cpu() * 3

    def triple(chunk: Tensor) -> None:
        chunk.mul_(3)

    for _ in range(2):
        summed = mine.clone()
        with staging.taking(staging.hand_over([summed])):
            staging.all_reduce(summed, triple, 3)
        torch.cuda.synchronize()
        assert torch.equal(summed.cpu(), expected)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["dense", "sparse", "repeated"])
def test_rows_are_those_of_the_cpu(device: torch.device, dtype: torch.dtype, layout: str) -> None:
    dense = torch.randn(5000, 12).to(dtype) * (torch.rand(5000, 1) < 0.1)
    gradient = dense if layout == "dense" else dense.to_sparse(1)
    if layout == "repeated":
        ids, values = torch.randint(0, 5000, (1, 900)), torch.randn(900, 12).to(dtype)
        gradient = torch.sparse_coo_tensor(ids, values, (5000, 12), check_invariants=False)
    plain = TableGradient("table", gradient.clone())
    rows = plain.rows()
    staging = staging_for(device)
    moved = gradient.to(device)
    table = staged(TableGradient("table", moved), staging)
    with staging.taking(staging.hand_over([moved])):
        found = table.rows()
        assert torch.equal(found.ids, rows.ids)
        assert torch.equal(found.values.view(torch.uint8), rows.values.view(torch.uint8))
        stored = table.store(found, rows)
    torch.cuda.synchronize()
    expected = plain.store(rows, rows)
    assert torch.equal(stored.to_dense().cpu(), expected.to_dense())
