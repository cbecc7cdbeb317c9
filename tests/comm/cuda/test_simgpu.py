"""The simulated CUDA device: what it must see; and `attach` on it, without races, and without waits in training."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import thinwire
from clocks import wait_until
from simgpu import capturing, network, peek, simulated
from simgpu.cases import CASES, run_cases
from simgpu.faults import ALONE, FAULTS, HARMLESS, run_alone, run_faults
from simgpu.scenarios import OF_THE_HOST, SCENARIOS, WIDTH, Report, copy_of_a_state, run, staging_alone, two_models
from simgpu.tensors import issue
from simgpu.torch_semantics import Work
from thinwire import kernels
from thinwire.comm.channel import Subject
from thinwire.comm.cuda.device import CudaDevice
from thinwire.comm.cuda.staging import DeviceStaging
from thinwire.comm.lane import Lane
from thinwire.comm.machine import Machine
from thinwire.errors import ThinwireError
from thinwire.gradients.collective import _Stopwatch
from thinwire.gradients.sharded.tables import LEAST_BYTES
from thinwire.gradients.steps import dense
from thinwire.kernels.dispatch import KERNELS, Kernel
from thinwire.lab.testbed.launch import RankContext, run_ranks
from thinwire.sums.lossless import begin
from thinwire.tune.lossless import Code, Ranks, Verdict

# --- the device itself


def test_tensors_say_where_they_are() -> None:
    with simulated():
        there = torch.ones(3, 2, device="cuda")
        assert there.is_cuda
        assert {there.device, there[1:].device, (there + 1).device, there.t().device} == {torch.device("cuda", 0)}
        assert there.cpu().device == torch.device("cpu")
        assert nn.Linear(2, 2).to("cuda:1").weight.device == torch.device("cuda", 1)
        assert there.to_sparse(1).device == torch.device("cuda", 0)
        assert torch.empty_like(torch.empty(0), device="cuda").device == torch.device("cuda", 0)
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


def test_pinned_memory_that_another_thread_saw_copied_is_free_for_all() -> None:
    """The thread that freed it does not know that the copy is done, but the allocator of pinned memory does."""
    with simulated() as world:
        pinned = torch.ones(100).pin_memory()
        there, address = pinned.to("cuda", non_blocking=True), pinned.data_ptr()
        event = torch.cuda.current_stream().record_event()
        del pinned

        def look() -> None:
            event.synchronize()
            torch.ones(1000).pin_memory()
            seen.append(True)

        seen = list[bool]()
        thread = threading.Thread(target=look)
        thread.start()
        wait_until(lambda: bool(seen))  # not by a join, behind which this thread would know what that one knows
        again = torch.zeros(100).pin_memory()
        assert again.data_ptr() == address
        assert (again.to("cuda") + there).tolist() == [1] * 100
        assert world.races == []


def test_pinned_memory_is_not_read_before_the_copy_has_ended() -> None:
    for waits in (False, True):
        with simulated() as world:
            there, room = torch.ones(100, device="cuda"), torch.empty(100, pin_memory=True)
            room.copy_(there, non_blocking=True)
            if waits:
                torch.cuda.current_stream().synchronize()
            room.sum()
            assert bool(world.races) != waits


def test_a_copy_of_pageable_memory_to_the_device_orders_nothing() -> None:
    with simulated() as world:
        there, room = torch.ones(100, device="cuda"), torch.empty(100, pin_memory=True)
        room.copy_(there, non_blocking=True)
        torch.ones(3).to("cuda", non_blocking=True)
        room.sum()
        assert len(world.races) == 1


def test_a_gradient_without_dense_memory_is_summed_in_place() -> None:
    with simulated() as world:
        table = nn.Embedding(9, 2, sparse=True).cuda()
        for numbers in ([1, 2], [2, 5, 7]):
            table(torch.tensor(numbers, device="cuda")).sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.device == torch.device("cuda", 0)
        assert peek(table.weight.grad)[:, 0].tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 0]
        assert (world.races, world.errors) == ([], [])


@pytest.mark.parametrize("is_async", [True, False])
def test_nccl_keeps_tensors_until_they_are_waited_for_and_records_no_stream(is_async: bool) -> None:
    """As in torch since 2.8, where a collective that is not asynchronous runs on the current stream."""
    with simulated() as world:
        memory, side = torch.ones(100, device="cuda"), torch.cuda.Stream()
        stream = issue(world, 0, "all_reduce", "nccl", [memory], is_async)
        if not is_async:
            assert stream == torch.cuda.current_stream()
            return
        work = Work(stream, [memory])
        del memory
        assert world.races == []
        with torch.cuda.stream(side):
            work.wait()
        del work
        assert len(world.races) == 1
        assert "FREED IN USE" in world.races[0]


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
            lambda: there.repeat_interleave(there.long()),
        ]
        for number, wait in enumerate(waiting, 1):
            wait()
            assert sum(world.waits.values()) == number
        there[1:].mul_(2).to("cuda")
        there.repeat_interleave(there.long(), output_size=5)
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


def test_a_stopwatch_is_of_its_own_device() -> None:
    """A backward whose last node is on the CPU ends on a thread whose current device is the first one."""
    with simulated(own=(1,)) as world:
        _Stopwatch(torch.device("cuda", 1)).stop()
        assert world.errors == []
        torch.cuda.Event().record()
        assert len(world.errors) == 1, "what it must not do"


def test_a_node_of_backward_runs_on_the_stream_of_its_forward() -> None:
    """As autograd's engine does it: streams wait for each other where a gradient passes."""
    for is_late in (False, True):
        with simulated() as world:
            leaf, side = torch.ones(8, device="cuda", requires_grad=True), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                doubled = leaf * 2
            torch.cuda.current_stream().wait_stream(side)
            doubled.record_stream(torch.cuda.current_stream())
            seen = []
            doubled.grad_fn.register_hook(lambda *_: seen.append(torch.cuda.current_stream()))  # noqa: B023
            kept = []
            if is_late:  # reads what the side stream has made, where no gradient passes
                doubled.grad_fn.register_hook(lambda made, _: kept.append(made[0]) or (None, None))  # noqa: B023
            (doubled * 3).sum().backward()
            for gradient in kept:
                gradient.add_(1)
            assert seen == [side]
            assert bool(world.races) == is_late
            assert is_late or peek(leaf.grad).tolist() == [6.0] * 8


# --- kernels


def moved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("cuda")
    return type(value)(map(moved, value)) if isinstance(value, (list, tuple)) else value


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_every_kernel_takes_tensors_of_a_device(kernel: Kernel) -> None:
    """And gives such, with the bits of the host. Those of the memories of compressors are for the host alone."""
    on_host = getattr(kernels, kernel.name) if kernel.equal_bits else kernel.reference
    samples = [(sample, sample.call(on_host)) for sample in islice(kernel.samples(), 4)]
    again = list(islice(kernel.samples(), 4))
    with simulated() as world:
        call = getattr(kernels, kernel.name)
        for (_, expected), sample in zip(samples, again, strict=True):
            got = call(*moved(sample.args), **sample.settings)
            for one, right in zip(tensors_in(got), tensors_in(expected), strict=True):
                assert one.is_cuda
                assert torch.equal(bits(peek(one)), bits(right))
        assert (world.races, world.errors) == ([], [])


# --- whole steps

Reports = dict[str, list[Report]]
FIRST = {
    "plain, tables and layers", "ddp, tables and layers", "ddp, compressed", "nccl, tables and layers",
    "nccl, over the lane", "nccl, two levels", "fsdp, shards", "outer, streaming",
}  # fmt: skip
"""Scenarios of `make test`; the others are slow."""
every_scenario = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in SCENARIOS]
)


def run_with(kernels: str, function: Callable[..., Any], names: Sequence[str], world_size: int = 2) -> Reports:
    """The reports of all ranks, by name: with the reference kernels, or with those of Triton in its interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1") if kernels == "triton" else patch.delenv("TRITON_INTERPRET", False)
        outcomes = run_ranks(function, list(names), world_size=world_size, timeout_seconds=600)
    return {name: [outcome.value[place] for outcome in outcomes] for place, name in enumerate(names)}


@cache
def reports_of(kernels: str, kind: tuple[int, str]) -> Reports:
    """The reports of the scenarios of a kind, which run in one start of the ranks."""
    return run_with(kernels, run, [name for name in SCENARIOS if kind_of(name) == kind], kind[0])


def kind_of(name: str) -> tuple[int, str]:
    """The number of ranks, and the first word of a slow scenario; the others may run in any worker, each alone."""
    return len(SCENARIOS[name].devices), name if name in FIRST else name.split(",")[0]


TRITON = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture(params=["reference", pytest.param("triton", marks=TRITON)])
def reports(request: pytest.FixtureRequest, name: str) -> list[Report]:
    found = reports_of(request.param, kind_of(name))[name]
    waits = zip(*(report.num_waits for report in found), strict=True)
    print(f"{name} ({request.param}): waits of training in each step: {', '.join(str(max(pair)) for pair in waits)}")
    return found


@pytest.mark.slow
@every_scenario
def test_steps_have_no_races_and_right_means(reports: list[Report], name: str) -> None:
    for report in reports:
        assert report.found == [], report.trace
        assert report.reused > 20, "memory is used again"


def most_waits(name: str) -> int:
    """Of a step: on NCCL two for all tables together, three in two levels; one for gradients that a rank lacks."""
    scenario = SCENARIOS[name]
    if scenario.mesh:  # two for each lookup of a table in shards, and two for all that has replicas or is ignored
        is_summed = bool(scenario.tables) and (scenario.is_ignored or len(scenario.mesh) == 2)
        in_shards = sum(rows * WIDTH * 4 >= LEAST_BYTES for rows in scenario.tables) * (scenario.mesh[-1] > 1)
        return 2 * is_summed + 2 * scenario.lookups * in_shards * (not scenario.is_ignored)
    by_collectives = scenario.nccl and scenario.tables and scenario.scheme != OF_THE_HOST
    levels = 1 + scenario.scheme.startswith("two_level")
    grows = bool(scenario.batches)  # rows that did not fit into the memory of the last step are looked for again
    return (1 + levels) * bool(by_collectives) + grows + (scenario.optional and scenario.ddp is None)


@every_scenario
def test_waits_of_training_for_the_device(reports: list[Report], name: str) -> None:
    """Beyond those of DDP, which reads which parameters were used, and of reference kernels, which Triton's have not.

    From the third step on: before, ranks agree on the order of gradients, and measure links.
    """
    for report in reports:
        assert len(report.num_waits) == SCENARIOS[name].steps
        assert max(report.num_waits[2:]) <= most_waits(name), report.waits


def test_training_waits_for_nothing_without_tables_and_two_times_for_tables_on_nccl() -> None:
    assert {most_waits(name) for name in SCENARIOS if not name.startswith("nccl") and "ddp" in name} == {0}
    assert {most_waits(name) for name in ("plain, layers", "plain, tables and layers", "plain, sparse")} == {0}
    assert max(most_waits(name) for name in SCENARIOS if not name.startswith("fsdp")) <= 3


@cache
def reports_of_cases(world_size: int) -> Reports:
    return run_with(
        "reference", run_cases, [name for name in CASES if CASES[name].world_size == world_size], world_size
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_models_of_other_kinds_have_no_races_and_right_means(name: str) -> None:
    case = CASES[name]
    most = 2 if case.nccl else 0
    for report in reports_of_cases(case.world_size)[name]:
        assert report.found == [], report.trace
        assert max(report.num_waits[3:]) <= most


@pytest.mark.slow
@pytest.mark.parametrize("nccl", [False, True])
@pytest.mark.parametrize("ddp", [False, True])
def test_two_models_that_accumulate_and_one_that_is_attached_again(nccl: bool, ddp: bool) -> None:
    for outcome in run_ranks(two_models, nccl, ddp, world_size=2):
        assert outcome.value.found == []


def test_staging_alone() -> None:
    assert staging_alone().found == []


def test_a_checkpoint_is_of_one_step_while_training_goes_on() -> None:
    assert copy_of_a_state().found == []


# --- the power of the simulation

QUICK = ("the lane does not wait for the gradients", "the host never waits", "nobody waits for nccl")


def is_found(most: int, *reports: Report) -> bool:
    return any(report.found or max(report.num_waits[2:], default=0) > most for report in reports)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.scenario in ALONE])
def test_a_fault_is_found_on_one_rank(name: str) -> None:
    assert is_found(0, run_alone(name))


OTHERS = [name for name, fault in FAULTS.items() if fault.scenario not in ALONE and name not in QUICK]
TOGETHER = 12
"""Faults that are seeded in one start of the ranks."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="some"),
        *[
            pytest.param(tuple(OTHERS[first : first + TOGETHER]), id=f"from {first}", marks=pytest.mark.slow)
            for first in range(0, len(OTHERS), TOGETHER)
        ],
    ],
)
def test_faults_are_found(names: tuple[str, ...]) -> None:
    found = run_with("reference", run_faults, names)
    assert [name for name, reports in found.items() if not is_found(most_waits(FAULTS[name].scenario), *reports)] == []
    errors = [error for reports in found.values() for report in reports for error in report.errors]
    assert [error for error in errors if error.startswith("AttributeError")] == [], "the fault itself is broken"


MISSED_BY_A_REVIEW = (
    "rows that do not fit are forgotten", "nobody looks for rows that did not fit", "the arena is new in each job",
    "the arena is taken back once only", "rows of the second table are not shifted",
    "events are recorded on the default stream", *HARMLESS,
)  # fmt: skip
"""What no scenario of that time found or decided: nine seeds, of which one was seeded twice."""


@pytest.mark.slow
def test_seeds_that_a_review_missed_are_found_or_harmless() -> None:
    """And one that no two ranks show, because they add once: sums of sixteen bits that are rounded at each addition.
    `test_every_kernel_takes_tensors_of_a_device` compares their bits."""
    assert {*MISSED_BY_A_REVIEW} <= {*FAULTS, *HARMLESS}
    for name, reports in run_with("reference", run_faults, list(HARMLESS)).items():
        assert not is_found(most_waits(HARMLESS[name].scenario), *reports), name


def test_waits_that_are_documented_are_no_fault() -> None:
    right = Report([], [], num_waits=[4, 2, 2])
    assert not is_found(most_waits("nccl, tables and layers"), right)
    assert is_found(most_waits("nccl, layers"), right)


def test_there_are_enough_faults_and_what_they_replace_is_there() -> None:
    assert len(FAULTS) >= 60
    assert [name for name, fault in FAULTS.items() if not hasattr(fault.owner, fault.attribute)] == []


# --- order through the network


def _through_pinned_memory(context: RankContext, forgets: bool) -> list[str]:
    """A sum in pinned memory, which one thread reads to send, and another writes when the sum comes back."""
    with pytest.MonkeyPatch.context() as patch, simulated(own=(context.rank,)) as world:
        if forgets:
            patch.setattr(network.Messages, "waited", lambda self, work: self._awaited.pop(id(work), None))
        torch.cuda.set_device(context.rank)
        staging = DeviceStaging(CudaDevice(torch.device("cuda", context.rank)))
        assert dist.group.WORLD is not None
        lane, gradient = Lane(dist.group.WORLD, None, staging), torch.ones(300, device="cuda")
        handover = staging.hand_over([gradient])

        def job(lane: Lane) -> None:
            with staging.taking(handover):
                (host,) = staging.to_host(gradient)
                channel = lane.channel(Subject("a sum", "of ones"))
                channel.begin_open()
                begin(host, channel)()
                gradient.copy_(*staging.to_device(host))

        lane.submit(job).wait()
        torch.cuda.synchronize()
        assert peek(gradient).unique().tolist() == [context.world_size]
        lane.close()
        assert not world.errors
        return world.races


@pytest.mark.parametrize("forgets", [False, True])
def test_a_message_orders_what_its_ends_do(forgets: bool) -> None:
    races = [race for outcome in run_ranks(_through_pinned_memory, forgets, world_size=2) for race in outcome.value]
    assert bool(races) == forgets, races


# --- attach where it has no place, and where the current device is another


def _in_capture(context: RankContext, nccl: bool) -> None:
    with simulated(own=(context.rank,), nccl=nccl):
        torch.cuda.set_device(context.rank)
        model = nn.Embedding(500, 16).to("cuda")
        sync = thinwire.attach(model, "zen")
        ids = torch.arange(5).to("cuda")
        loss = model(ids).square().sum()
        with capturing(), pytest.raises(ThinwireError, match=r"CUDA graph is being captured.*make_graphed_callables"):
            loss.backward()
        with pytest.raises(ThinwireError):
            model(ids).square().sum().backward()
        sync.detach()


@pytest.mark.few(1)
@pytest.mark.parametrize("nccl", [False, True])
def test_a_backward_that_is_captured_is_refused_by_name(nccl: bool) -> None:
    run_ranks(_in_capture, nccl, world_size=2, timeout_seconds=60)


def _elsewhere(context: RankContext) -> list[str]:
    """The script never calls ``torch.cuda.set_device``, as stock DDP does not need it."""
    device = torch.device("cuda", 1 + context.rank)
    with simulated(own=(device.index,)) as world:
        model = nn.Sequential(nn.Embedding(500, 16), nn.Linear(16, 3)).to(device)
        sync = thinwire.attach(model, "zen")
        for step in range(3):
            model.zero_grad()
            model(torch.arange(3 + step, device=device)).square().sum().backward()
        sync.detach()
        return world.errors + world.races


def test_the_device_of_the_model_need_not_be_the_current_one() -> None:
    for outcome in run_ranks(_elsewhere, world_size=2, timeout_seconds=60):
        assert outcome.value == []


def _priced(context: RankContext, nccl: bool, pays: bool) -> None:
    """Steps under "auto" on two hosts, with verdicts that no clock decides."""
    seen: list[Code] = []

    def decide(num_bytes: float, ranks: Ranks, link: Machine, code: Code, was_lossless: bool = False) -> Verdict:
        seen.append(code)
        assert ranks == Ranks(2, 1, cores=1)
        assert (link.reduced_byte_seconds != lanes[0].reduced_byte_seconds) == nccl
        return Verdict(pays or not was_lossless, "as asked")

    def measured(lane: Any) -> Machine:
        lanes.append(right(lane))
        return lanes[0]

    os.environ["THINWIRE_HOST"], lanes, right = str(context.rank), list[Machine](), dense._measured
    with pytest.MonkeyPatch.context() as patch, simulated(own=(context.rank,), nccl=nccl) as world:
        patch.setattr(dense, "decide", decide)
        patch.setattr(dense, "_measured", measured)
        torch.cuda.set_device(context.rank)
        model = DistributedDataParallel(nn.Linear(100, 300).to("cuda"))
        sync, coded = thinwire.attach(model), []
        for step in range(9):
            model.zero_grad()
            model(torch.full((4, 100), 1.0 + step + context.rank).pin_memory().to("cuda")).square().sum().backward()
            coded.append(bool(sync._lossless.dtypes))  # pyrefly: ignore
        assert coded == [False] + [True] * 4 + [pays] * 4, "one step to compile, three to look at"
        assert seen[0].push_bits == 12.0, "a code that none reaches"
        assert seen[1].push_bits != 12.0
        assert seen[1].encode_byte_seconds > 0.0
        assert sync.state_dict()["dense"]["dtypes"] == ["float32"] * pays
        sync.detach()
        assert (world.races, world.errors) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize(("nccl", "pays"), [(True, True), (False, False)])
def test_auto_codes_gradients_of_a_gpu_where_a_price_says_that_it_pays(nccl: bool, pays: bool) -> None:
    run_ranks(_priced, nccl, pays, world_size=2, timeout_seconds=60)
