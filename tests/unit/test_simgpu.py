"""The simulated CUDA device: what it must see; and `attach` on it, without races, and without waits in training."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

from simgpu import peek, simulated
from simgpu.scenarios import SCENARIOS, Report, run
from thinwire import kernels
from thinwire.kernels.reference import rows as reference
from thinwire.lab.testbed.launch import run_ranks

# --- the device itself


def test_tensors_say_where_they_are() -> None:
    with simulated():
        there = torch.ones(3, 2, device="cuda")
        assert there.is_cuda
        assert {there.device, there[1:].device, (there + 1).device, there.t().device} == {torch.device("cuda", 0)}
        assert there.cpu().device == torch.device("cpu")
        assert nn.Linear(2, 2).to("cuda:1").weight.device == torch.device("cuda", 1)
        assert there.to_sparse(1).device == torch.device("cuda", 0)
    assert torch.ones(3).device == torch.device("cpu")


def test_streams_without_an_order_race() -> None:
    with simulated() as world:
        memory, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
        with torch.cuda.stream(side):
            memory.add_(1)
        assert len(world.races) == 1
        assert "add_" in world.races[0]
    with simulated() as world:
        memory, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
        event = torch.cuda.Event()
        event.record()
        with torch.cuda.stream(side):
            side.wait_event(event)
            memory[:4].add_(1)
        memory[4:].add_(1)
        memory.record_stream(side)
        assert world.races == [], "other bytes"


def test_memory_that_is_freed_while_a_stream_uses_it() -> None:
    for is_recorded in (False, True):
        with simulated() as world:
            memory, side = torch.ones(100, device="cuda"), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                memory.mul_(2)
            if is_recorded:
                memory.record_stream(side)
            address = memory.data_ptr()
            del memory
            again = torch.zeros(100, device="cuda")
            assert (again.data_ptr() == address) != is_recorded, "the allocator hands it out again"
            assert bool(world.races) != is_recorded


def test_pinned_memory_is_not_read_before_the_copy_has_ended() -> None:
    for waits in (False, True):
        with simulated() as world:
            there, room = torch.ones(100, device="cuda"), torch.empty(100, pin_memory=True)
            room.copy_(there, non_blocking=True)
            if waits:
                torch.cuda.current_stream().synchronize()
            room.sum()
            assert bool(world.races) != waits


def test_devices_do_not_mix() -> None:
    with simulated() as world:
        there = torch.ones(3, device="cuda")
        for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
            with pytest.raises(RuntimeError, match="same device"):
                there + other
        assert len(world.errors) == 2
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()


def test_waits_of_the_host_are_counted_with_their_line() -> None:
    with simulated() as world:
        there = torch.ones(3, device="cuda")
        waiting = [
            lambda: there.tolist(),
            lambda: there.sum().item(),
            lambda: there.nonzero(),
            lambda: there[there > 0],
            lambda: bool(there.any()),
            lambda: there.cpu(),
            lambda: torch.cuda.synchronize(),
        ]
        for number, wait in enumerate(waiting, 1):
            wait()
            assert sum(world.waits.values()) == number
        there[1:].mul_(2).to("cuda")
        torch.ones(3).pin_memory().to("cuda", non_blocking=True)
        assert sum(world.waits.values()) == len(waiting)
        assert all("test_simgpu.py" in where for _, _, where in world.waits)


def test_a_future_takes_an_event_only_for_devices_in_its_value() -> None:
    for value_is_there in (False, True):
        with simulated() as world:
            memory = torch.ones(100, device="cuda")
            event, future = torch.cuda.Event(), Future(devices=[torch.device("cuda", 0)])
            event.record()

            def work(memory: Tensor = memory, event: torch.cuda.Event = event, future: Future[Tensor] = future) -> None:
                with torch.cuda.stream(torch.cuda.Stream()):
                    event.wait()
                    memory.mul_(2)
                    future.set_result(memory if value_is_there else torch.empty(0))  # noqa: B023

            thread = threading.Thread(target=work)
            thread.start()
            future.wait()
            memory.add_(1)
            assert peek(memory).tolist() == [3.0] * 100
            assert bool(world.races) != value_is_there
            thread.join()


def test_a_device_of_another_rank_is_not_touched() -> None:
    with simulated(own=(1,)) as world:
        torch.cuda.set_device(1)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.ones(3, device="cuda")
        assert world.errors == []
        done = threading.Thread(target=lambda: torch.cuda.stream(side).__enter__())
        done.start()
        done.join()
        assert world.errors == []

        def leaves() -> None:
            with torch.cuda.stream(side):
                pass

        done = threading.Thread(target=leaves)
        done.start()
        done.join()
        assert len(world.errors) == 1
        assert "a context on cuda:0" in world.errors[0]


# --- kernels


@pytest.mark.xfail(strict=False, reason="it concatenates ids of the host and of the device")
def test_blocks_of_a_gradient_are_found_on_its_device() -> None:
    dense = torch.zeros(1000)
    dense[::70] = 1
    with simulated() as world:
        found = kernels.nonzero_blocks(dense.to("cuda"))
        assert torch.equal(peek(found), reference.nonzero_blocks(dense))
        assert world.errors == []


# --- whole steps

Reports = dict[str, list[Report]]
ZEROS = "a mean of compressed or dense gradients is read to see whether it is zero everywhere"
UNUSED = "whether a parameter was used is read from the device"
WAITS = {
    "plain, compressed alone": ZEROS,
    "plain, compressed and exact": ZEROS,
    "plain, fused": ZEROS,
    "plain, planned": ZEROS,
    "plain, dense": ZEROS,
    "plain, unused on a rank": UNUSED,
}
"""Scenarios in which training waits for the device, and why."""


def each(known: dict[str, str]) -> pytest.MarkDecorator:
    """Every scenario; those with a known defect fail."""
    marked = {name: pytest.mark.xfail(strict=False, reason=reason) for name, reason in known.items()}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marked.get(name, ())) for name in SCENARIOS])


@pytest.fixture(scope="module")
def reports() -> Reports:
    names = list(SCENARIOS)
    outcomes = run_ranks(run, names, world_size=2)
    return {name: [outcome.value[place] for outcome in outcomes] for place, name in enumerate(names)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_steps_have_no_races_and_right_means(reports: Reports, name: str) -> None:
    for report in reports[name]:
        assert report.found == []
        assert report.reused > 20, "memory is used again"


@each(WAITS)
def test_training_waits_for_the_device_nowhere(reports: Reports, name: str) -> None:
    """Beyond what DDP does by itself: it reads which parameters were used, and Gloo sums what is left to it."""
    assert [wait for report in reports[name] for wait in report.waits if "scenarios.py" not in wait] == []


def test_a_rank_makes_no_context_on_the_device_of_another(reports: Reports) -> None:
    assert [report.contexts for name in SCENARIOS for report in reports[name] if report.contexts] == []
