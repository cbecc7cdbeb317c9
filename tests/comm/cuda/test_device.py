"""The operations of a GPU that staging needs, on the simulated one: which stream they are on, and who waits."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from simgpu import capturing, peek, simulated
from thinwire.comm.cuda.device import CudaDevice
from thinwire.errors import ThinwireError

HERE = torch.device("cuda", 1)


def _trained() -> tuple[CudaDevice, Tensor, Any]:
    """Return a gradient that the stream of training makes, and the event after it."""
    device = CudaDevice(HERE)
    with device.selected():
        gradient = torch.ones(100, device=HERE)
        return device, gradient, device.record()


@pytest.mark.parametrize("waits", [True, False])
def test_the_lane_follows_training_only_where_it_waits_for_an_event(waits: bool) -> None:
    with simulated() as world:
        device, gradient, done = _trained()
        with device.lane_stream():
            if waits:
                device.wait(done)
            gradient.mul_(2)
        assert bool(world.races) != waits
        assert not world.waits, "the host goes on"


def test_an_event_is_of_the_device_of_the_model_also_where_another_is_current() -> None:
    with simulated() as world:
        device, gradient = CudaDevice(HERE), torch.ones(100, device=HERE)
        assert torch.cuda.current_device() == 0
        done = device.record()
        with device.lane_stream():
            device.wait(done)
            gradient.mul_(2)
        assert not world.races


def test_contexts_select_the_device_and_its_streams_and_leave_them_after_an_error_too() -> None:
    with simulated():
        device = CudaDevice(HERE)
        before = torch.cuda.current_stream(HERE)
        with device.selected():
            assert torch.cuda.current_device() == 1
            assert torch.cuda.current_stream() == before
        with suppress(KeyError), device.lane_stream():
            assert torch.cuda.current_device() == 1
            lane = torch.cuda.current_stream()
            with device.completing():
                completion = torch.cuda.current_stream()
            assert torch.cuda.current_stream() == lane
            raise KeyError
        assert len({before.stream_id, lane.stream_id, completion.stream_id}) == 3
        assert completion.device == HERE
        assert lane.priority < before.priority, "its kernels are short, and a network waits for them"
        assert (torch.cuda.current_device(), torch.cuda.current_stream(HERE)) == (0, before)


def test_a_thread_that_leaves_the_lane_makes_no_context_on_the_device_on_which_threads_begin() -> None:
    with simulated(own=(HERE.index,)) as world:
        device = CudaDevice(HERE)
        with device.lane_stream():
            torch.ones(3, device=HERE)
        assert world.errors == []


def test_what_completes_follows_what_the_lane_has_done_so_far() -> None:
    with simulated() as world:
        device = CudaDevice(HERE)
        with device.lane_stream():
            mean = torch.ones(100, device=HERE)
            with device.completing():
                mean.add_(1)
            assert not world.races
            mean.mul_(2)
        assert len(world.races) == 1, "and not the other way round"


def test_only_who_synchronizes_waits_and_then_has_what_was_copied() -> None:
    with simulated() as world:
        device = CudaDevice(HERE)
        with device.lane_stream():
            there, host = torch.arange(100, dtype=torch.uint8, device=HERE), device.pinned(100)
            device.copy(host, there)
            done = device.record()
            assert not world.waits
            device.synchronize(done)
        assert sum(world.waits.values()) == 1
        assert torch.equal(host, torch.arange(100, dtype=torch.uint8))
        assert not world.races


def test_memory_of_the_host_comes_back_from_the_device_without_a_wait() -> None:
    with simulated() as world:
        device = CudaDevice(HERE)
        with device.lane_stream():
            host = device.pinned(24).fill_(7).view(torch.int32).view(2, 3)
            there = device.empty_like(host)
            device.copy(there, host)
            assert not world.waits
            device.synchronize(device.record())
        assert (there.device, there.dtype, there.shape) == (HERE, torch.int32, (2, 3))
        assert torch.equal(peek(there), host)
        assert not world.races


@pytest.mark.parametrize("is_kept", [True, False])
def test_memory_that_training_frees_is_used_again_only_when_the_lane_is_done(is_kept: bool) -> None:
    with simulated() as world:
        device, gradient, done = _trained()
        with device.lane_stream():
            device.wait(done)
            gradient.mul_(2)
            if is_kept:
                device.keep(gradient)
        address = gradient.data_ptr()
        del gradient
        with device.selected():
            again = torch.zeros(100, device=HERE)
        assert (again.data_ptr() == address) != is_kept
        assert bool(world.races) != is_kept


def test_tensors_of_the_host_need_no_keeping() -> None:
    with simulated(), mock.patch.object(Tensor, "record_stream") as recorded:
        CudaDevice(HERE).keep(torch.ones(3))
    recorded.assert_not_called()


def test_who_waits_for_a_future_follows_the_stream_that_completed_it() -> None:
    with simulated() as world:
        device = CudaDevice(HERE)
        future = device.future()
        with device.lane_stream():
            mean = torch.ones(100, device=HERE)
            future.set_result(mean)
        with device.selected():
            taken: Tensor = future.wait()
            taken.mul_(2)
        assert not world.races
        assert not world.waits


def test_a_graph_that_is_captured_is_refused_and_what_follows_it_is_not() -> None:
    with simulated() as world:
        device = CudaDevice(HERE)
        says = pytest.raises(ThinwireError, match=r"CUDA graph is being captured.*make_graphed_callables")
        with device.selected(), capturing(), says:
            device.record()
        device.record()
        assert not world.errors
