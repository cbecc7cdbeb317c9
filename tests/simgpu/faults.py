"""Seeded faults: what thinwire does right is undone, one thing at a time, to show that the simulation would see it.

A fault replaces a function of thinwire by a wrong one, made from the right one, on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from simgpu.scenarios import SCENARIOS, Report, copy_of_a_state, run_one, staging_alone
from thinwire.checkpoint import copier, cycle
from thinwire.comm import collectives
from thinwire.comm.cuda import arena, device, staging
from thinwire.comm.process_group import Handover
from thinwire.gradients import buckets, exact, parameters, tables
from thinwire.gradients import collective as gradients_collective
from thinwire.gradients.sharded import layout
from thinwire.gradients.sharded import tables as sharded_tables
from thinwire.lab.testbed.launch import RankContext
from thinwire.outer import stepped
from thinwire.sums import collective as sums_collective
from thinwire.sums import lossless
from thinwire.sums.collective import CollectiveSum

Function = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """A wrong function in place of ``owner.attribute``, which ``scenario`` must find."""

    scenario: str
    owner: Any
    attribute: str
    wrong: Callable[[Function], Function]

    @contextmanager
    def seeded(self) -> Iterator[None]:
        with patch.object(self.owner, self.attribute, self.wrong(getattr(self.owner, self.attribute))):
            yield


FAULTS: dict[str, Fault] = {}


def fault(scenario: str, owner: Any, attribute: str) -> Callable[[Callable[[Function], Function]], None]:
    def add(wrong: Callable[[Function], Function]) -> None:
        FAULTS[wrong.__name__.replace("_", " ").strip()] = Fault(scenario, owner, attribute, wrong)

    return add


def run_faults(context: RankContext, names: list[str]) -> list[Report]:
    """Run the scenario of each fault with the fault."""
    found = []
    for name in names:
        seed = (FAULTS | HARMLESS)[name]
        with seed.seeded():
            found.append(run_one(context, SCENARIOS[seed.scenario]))
    return found


def run_alone(name: str) -> Report:
    """Run the scenario of a fault that needs no other rank."""
    with FAULTS[name].seeded():
        return ALONE[FAULTS[name].scenario]()


ALONE: dict[str, Callable[[], Report]] = {"staging": staging_alone, "checkpoint": copy_of_a_state}

PLAIN, TABLES, DDP, OVERFLOW = (
    "plain, tables and layers",
    "plain, tables alone",
    "ddp, tables and layers",
    "plain, overflow",
)
NCCL = "nccl, tables and layers"


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


# --- waits between streams


@fault(PLAIN, device.CudaDevice, "wait")
def _the_lane_does_not_wait_for_the_gradients(right: Function) -> Function:
    return nothing


@fault(DDP, device.CudaDevice, "wait")
def _another_stream_waits_for_the_gradients(right: Function) -> Function:
    return lambda self, event: torch.cuda.Stream(self._device).wait_event(event)


@fault(DDP, staging.DeviceStaging, "hand_over")
def _an_old_event_is_handed_over(right: Function) -> Function:
    kept: list[Any] = []

    def hand_over(self: Any, tensors: Any) -> Handover:
        made = right(self, tensors)
        kept.append(made.event)
        return Handover(made.tensors, kept[0])

    return hand_over


@fault(TABLES, parameters.ParameterHooks, "_contents")
def _a_future_is_completed_with_a_tensor_of_the_host(right: Function) -> Function:
    return lambda self, *args: replace(right(self, *args), buffer=torch.empty(0))


@fault(DDP, device.CudaDevice, "future")
def _a_future_has_no_devices(right: Function) -> Function:
    return lambda self: Future()


@fault(PLAIN, buckets.Buckets, "_synchronize")
def _a_future_is_completed_on_another_stream(right: Function) -> Function:
    def synchronize(self: Any, *args: Any) -> list[Tensor]:
        results = right(self, *args)
        torch.cuda.set_stream(torch.cuda.Stream(results[0].device))
        return results

    return synchronize


@fault("outer, local", stepped, "submit")
def _a_round_does_not_hand_its_tensors_over(right: Function) -> Function:
    return lambda lane, staging, tensors, job: right(lane, staging, (), job)


@fault("nccl, over the lane", device.CudaDevice, "completing")
def _the_stream_of_completion_does_not_follow_the_lane(right: Function) -> Function:
    return lambda self: torch.cuda.stream(self._completion)


@fault("nccl, over the lane", exact.Started, "wait")
def _nobody_waits_for_nccl(right: Function) -> Function:
    return nothing


@fault(PLAIN, parameters.ParameterHooks, "take_in_flight")
def _training_does_not_wait_for_the_lane(right: Function) -> Function:
    return lambda self: right(self)[:0]


@fault(DDP, tables.kernels, "scatter_rows")
def _means_are_stored_on_another_stream(right: Function) -> Function:
    def scatter(matrix: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream(matrix.device)) if matrix.is_cuda else nullcontext():
            return right(matrix, ids, values)

    return scatter


@fault("ddp, compressed", staging.DeviceStaging, "to_device")
def _means_are_uploaded_on_another_stream(right: Function) -> Function:
    def to_device(self: Any, *tensors: Tensor) -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream(self._device._device)):
            return right(self, *tensors)

    return to_device


@fault(NCCL, collectives.Collectives, "_all_to_all")
def _rows_are_used_while_nccl_sends_them(right: Function) -> Function:
    def all_to_all(self: Any, *args: Any) -> None:
        dist.all_to_all_single(*args, group=self._group(), async_op=True)

    return all_to_all


@fault(NCCL, collectives.Collectives, "numbers")
def _counts_are_read_while_they_are_copied(right: Function) -> Function:
    def numbers(self: Any, *args: Any) -> Any:
        with patch.object(Tensor, "cpu", lambda tensor: tensor.to("cpu", non_blocking=True)):
            return right(self, *args)

    return numbers


@fault(NCCL, collectives.Collectives, "_all_gather")
def _sums_are_used_while_nccl_sends_them(right: Function) -> Function:
    def all_gather(self: Any, incoming: Tensor, outgoing: Tensor) -> None:
        dist.all_gather_into_tensor(incoming, outgoing, group=self._group(), async_op=True)

    return all_gather


@fault("nccl, grows and shrinks", sums_collective._Job, "misses")
def _rows_that_do_not_fit_are_forgotten(right: Function) -> Function:
    return lambda self, rows: False


@fault("nccl, grows and shrinks", sums_collective._Job, "find_again")
def _nobody_looks_for_rows_that_did_not_fit(right: Function) -> Function:
    return nothing


@fault("nccl, dense", collectives.Collectives, "_all_reduce")
def _dense_sums_are_used_while_nccl_makes_them(right: Function) -> Function:
    def all_reduce(self: Any, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group(), async_op=True)

    return all_reduce


@fault(NCCL, CollectiveSum, "all_reduce")
def _the_host_looks_at_a_sum(right: Function) -> Function:
    def all_reduce(self: Any, *args: Any) -> list[Tensor]:
        sums = right(self, *args)
        bool(sums[0].any())
        return sums

    return all_reduce


@fault("plain, towers", tables.LookupRows, "_can_fold")
def _lookups_on_two_streams_are_added_up(right: Function) -> Function:
    """As before D2: rows of one lookup are kept and added to those of another, whose stream does not wait for them."""

    def can_fold(self: Any, weight: Tensor) -> bool:
        with patch.object(Tensor, "device", torch.device("cpu")):
            return right(self, weight)

    return can_fold


# --- waits of the host


@fault(PLAIN, device.CudaDevice, "synchronize")
def _the_host_never_waits(right: Function) -> Function:
    return nothing


@fault("ddp, sparse", staging.DeviceStaging, "_wait")
def _the_host_reads_what_is_still_copied(right: Function) -> Function:
    return nothing


@fault("ddp, small buckets", staging.DeviceStaging, "_download")
def _a_chunk_is_filled_again_while_it_is_summed(right: Function) -> Function:
    return lambda self, part, number: right(self, part, 0)


@fault(OVERFLOW, staging.DeviceStaging, "_to_host_in_rounds")
def _a_round_is_read_while_it_is_copied(right: Function) -> Function:
    def rounds(self: Any, tensor: Tensor) -> Tensor:
        with patch.object(self._device, "synchronize", nothing):
            return right(self, tensor)

    return rounds


@fault(OVERFLOW, staging.DeviceStaging, "_to_device_in_rounds")
def _a_round_is_written_while_it_is_copied(right: Function) -> Function:
    def rounds(self: Any, tensor: Tensor, target: Tensor) -> None:
        with patch.object(self._device, "synchronize", nothing):
            right(self, tensor, target)

    return rounds


@fault("staging", staging.DeviceStaging, "_to_device")
def _a_job_writes_before_the_copies_of_the_last_one_have_ended(right: Function) -> Function:
    def to_device(self: Any, tensor: Tensor) -> Tensor:
        self._may_write = True
        return right(self, tensor)

    return to_device


@fault(DDP, staging.DeviceStaging, "hand_over")
def _training_waits_at_each_bucket(right: Function) -> Function:
    def hand_over(self: Any, tensors: Any) -> Handover:
        torch.cuda.current_stream(tensors[0].device).synchronize()
        return right(self, tensors)

    return hand_over


@fault(PLAIN, device.CudaDevice, "copy")
def _copies_block(right: Function) -> Function:
    return lambda self, target, source: target.copy_(source)


@fault(PLAIN, device.CudaDevice, "pinned")
def _memory_is_not_pinned(right: Function) -> Function:
    return lambda self, num_bytes: torch.empty(num_bytes, dtype=torch.uint8)


# --- memory


@fault("staging", device.CudaDevice, "keep")
def _memory_is_not_recorded(right: Function) -> Function:
    return nothing


@fault("staging", staging, "_strided")
def _of_a_sparse_gradient_only_the_ids_are_recorded(right: Function) -> Function:
    return lambda tensor: right(tensor)[:1]


@fault("plain, sparse", arena.Arena, "take")
def _the_arena_hands_memory_out_twice(right: Function) -> Function:
    def take(self: Any, num_bytes: int) -> Tensor | None:
        taken = self._taken_bytes
        room = right(self, num_bytes)
        self._taken_bytes = taken
        return room

    return take


@fault(DDP, staging.DeviceStaging, "to_device")
def _means_stay_on_the_host(right: Function) -> Function:
    return lambda self, *tensors: list(tensors)


@fault(DDP, buckets, "staged")
def _a_table_is_read_by_the_host_as_it_is(right: Function) -> Function:
    return lambda table, staging: table


# --- devices and threads


@fault(PLAIN, device.CudaDevice, "selected")
def _the_lane_does_not_select_its_device(right: Function) -> Function:
    return lambda self: nullcontext()


@fault(PLAIN, device.CudaDevice, "lane_stream")
def _the_lane_works_on_the_stream_of_training(right: Function) -> Function:
    return lambda self: self.selected()


@fault("nccl, over the lane", exact.NativeAllReduce, "start")
def _nccl_is_issued_by_the_lane(right: Function) -> Function:
    class Later:
        def __init__(self, native: Any, gradients: Any) -> None:
            self._native, self._gradients = native, gradients

        def wait(self) -> None:
            for one in right(self._native, self._gradients):
                one.wait()

    def start(self: Any, gradients: Any) -> Any:
        is_of_tables = sys._getframe(1).f_code.co_name == "submit"
        return (Later(self, gradients),) if is_of_tables else right(self, gradients)

    return start


# --- checkpoints


@fault("checkpoint", device.CudaDevice, "wait")
def _a_checkpoint_does_not_wait_for_the_optimizer(right: Function) -> Function:
    return nothing


@fault("checkpoint", device.CudaDevice, "synchronize")
def _a_checkpoint_is_read_before_it_is_copied(right: Function) -> Function:
    return nothing


@fault("checkpoint", cycle.Cycle, "settle")
def _the_optimizer_does_not_wait_for_a_checkpoint(right: Function) -> Function:
    return nothing


@fault("checkpoint", device.CudaDevice, "selected")
def _the_thread_of_checkpoints_does_not_select_its_device(right: Function) -> Function:
    return lambda self: nullcontext()


@fault("checkpoint", device.CudaDevice, "pinned")
def _a_checkpoint_goes_through_memory_that_is_not_pinned(right: Function) -> Function:
    return lambda self, num_bytes: torch.empty(num_bytes, dtype=torch.uint8)


@fault("checkpoint", copier.SlotStaging, "copy")
def _a_sub_buffer_is_filled_again_while_it_is_read(right: Function) -> Function:
    def copy(self: Any, *args: Any) -> None:
        self._buffers = self._buffers or [self._device.pinned(self._sub_buffer_bytes)] * self._count
        right(self, *args)

    return copy


# --- of a review by someone who wrote neither the code nor the scenarios


def elsewhere(right: Function) -> Function:
    """On a stream of its own, which waits for nobody."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return right(*args, **kwargs)

    return call


for scenario, owner, attribute, name in (
    (NCCL, collectives.Collectives, "_run", "collectives run on a stream of their own"),
    ("nccl, tables alone", gradients_collective.CollectiveTables, "means", "tables are summed on another stream"),
    (NCCL, sums_collective.kernels, "put_rows", "sums are stored on another stream"),
    ("nccl, unused", sums_collective._Job, "find", "rows are found on another stream"),
    (PLAIN, parameters.ParameterHooks, "_deliver_flat", "means of layers are stored on another stream"),
):
    FAULTS[name] = Fault(scenario, owner, attribute, elsewhere)


@fault(NCCL, sums_collective.kernels, "merge_rows")
def _sums_are_not_scaled(right: Function) -> Function:
    return lambda ids, values, num_rows, capacity, scale=1.0: right(ids, values, num_rows, capacity)


@fault("nccl, sparse", sums_collective._Job, "_stored")
def _rows_of_the_second_table_are_not_shifted(right: Function) -> Function:
    def stored(self: Any, *args: Any) -> list[Tensor]:
        with patch.object(self, "starts", [0] * len(self.starts)):
            return right(self, *args)

    return stored


@fault("nccl, tables alone", sums_collective._Job, "starts_on_device")
def _starts_come_from_the_host_each_time(right: Function) -> Function:
    return lambda self: torch.tensor(self.starts).to(self.zero.device)


@fault(NCCL, gradients_collective.CollectiveTables, "means")
def _sums_do_not_wait_for_the_rest_of_the_bucket(right: Function) -> Function:
    return lambda self, tables, started: right(self, tables, ())


@fault(NCCL, exact.NativeAllReduce, "_start")
def _gradients_are_written_to_after_the_all_reduce_has_begun(right: Function) -> Function:
    def start(self: Any, *gradients: Tensor) -> Any:
        begun = right(self, *gradients)
        for gradient in gradients:
            gradient.mul_(1.0)
        return begun

    return start


@fault("ddp, on a side stream", device.CudaDevice, "record")
def _events_are_recorded_on_the_default_stream(right: Function) -> Function:
    def record(self: Any) -> Any:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.default_stream(self._device))
        return event

    return record


@fault(PLAIN, arena.Arena, "begin")
def _the_arena_is_new_in_each_job(right: Function) -> Function:
    def begin(self: Any) -> None:
        self._memory = None
        right(self)

    return begin


@fault("plain, tight", arena.Arena, "begin")
def _the_arena_is_taken_back_once_only(right: Function) -> Function:
    return lambda self: right(self) if self._memory is None else None


@fault(PLAIN, device.CudaDevice, "empty_like")
def _means_get_memory_of_the_stream_of_training(right: Function) -> Function:
    def empty_like(self: Any, host: Tensor) -> Tensor:
        with torch.cuda.stream(torch.cuda.default_stream(self._device)):
            return right(self, host)

    return empty_like


@fault("plain, dense", staging.DeviceStaging, "all_reduce")
def _a_chunk_is_summed_before_it_has_come(right: Function) -> Function:
    def all_reduce(self: Any, *args: Any) -> None:
        with patch.object(self._device, "synchronize", nothing):
            right(self, *args)

    return all_reduce


@fault(PLAIN, parameters.ParameterHooks, "_deliver_flat")
def _flags_are_read_in_each_step(right: Function) -> Function:
    def deliver(self: Any, done: Any, places: Any, flat: Tensor) -> None:
        flat[-1:].tolist()
        right(self, done, places, flat)

    return deliver


@fault("nccl, auto", gradients_collective._Stopwatch, "nanoseconds")
def _the_stopwatch_waits(right: Function) -> Function:
    def nanoseconds(self: Any) -> int:
        self._ended.synchronize()
        return right(self)

    return nanoseconds


@fault("ddp, sparse", staging, "_strided")
def _sparse_tensors_are_recorded_as_they_are(right: Function) -> Function:
    return lambda tensor: (tensor,)


@fault("checkpoint", copier.Copier, "_begin_download")
def _small_tensors_are_not_copied_at_once(right: Function) -> Function:
    return lambda self, device, numbers, encoded, waiting: right(self, device, numbers, encoded, set(numbers))


@fault("checkpoint", copier.SlotStaging, "record")
def _a_checkpoint_waits_for_an_old_event(right: Function) -> Function:
    kept: list[Any] = []

    def record(self: Any) -> Any:
        kept.append(right(self))
        return kept[0]

    return record


@fault("plain, lossless", staging.DeviceStaging, "working")
def _the_thread_that_sends_codes_on_the_stream_of_training(right: Function) -> Function:
    return lambda self: nullcontext()


@fault("nccl, lossless", staging.DeviceStaging, "working")
def _the_thread_that_sends_codes_on_a_stream_of_its_own(right: Function) -> Function:
    return lambda self: torch.cuda.stream(torch.cuda.Stream(self._device._device))


FAULTS["sums of codes are stored on another stream"] = Fault("fsdp, lossless", lossless._Floats, "add", elsewhere)


# --- FSDP2


@fault("fsdp, compressed", layout.Waiting, "wait")
def _training_does_not_wait_for_what_was_late(right: Function) -> Function:
    def wait(self: Any) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._pending.wait()
            self._then()

    return wait


@fault("fsdp, compressed whole", layout.Waiting, "wait")
def _nobody_waits_for_what_is_late(right: Function) -> Function:
    return nothing


@fault("fsdp, compressed", layout.ShardedHooks, "_finish")
def _what_is_late_is_stored_on_another_stream(right: Function) -> Function:
    def finish(self: Any, unit: Any, flat: Any, waiting: Any, may_be_late: bool = True) -> None:
        waiting._stream = waiting._stream and torch.cuda.Stream()
        right(self, unit, flat, waiting, may_be_late)

    return finish


@fault("fsdp, shards", sharded_tables._Table, "move")
def _rows_travel_on_another_stream(right: Function) -> Function:
    return elsewhere(right)


@fault("fsdp, compressed", layout.Scatter, "__init__")
def _what_is_late_is_in_the_memory_of_the_next_group(right: Function) -> Function:
    memory: dict[Any, Tensor] = {}

    def init(self: Any, stock: Any, reduce: Any) -> None:
        def allocate(size: Any, *, dtype: Any, device: Any) -> Tensor:
            made = stock.allocate(size, dtype=dtype, device=device)
            return memory.setdefault((device, *size), made) if made.is_cuda else made

        right(self, stock, reduce)
        self.allocate = allocate

    return init


@fault("fsdp, shards", sharded_tables, "ALIGNMENT_BYTES")
def _pieces_begin_anywhere(right: Any) -> Any:
    return 1


@fault("fsdp, shards", sharded_tables._Table, "book")
def _the_host_reads_in_backward(right: Function) -> Function:
    def book(self: Any) -> None:
        self._late.tolist()
        right(self)

    return book


@fault("fsdp, shards", sharded_tables._Table, "ask")
def _the_range_of_ids_is_read_for_itself(right: Function) -> Function:
    def ask(self: Any, ids: Tensor) -> Any:
        assert not len(ids) or int(ids[-1]) < self.num_rows
        return right(self, ids)

    return ask


@fault("fsdp, ignored", parameters.ParameterHooks, "_gradient")
def _ignored_gradients_are_read_on_another_stream(right: Function) -> Function:
    def gradient(self: Any, index: int) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            return right(self, index).mul_(1.0)

    return gradient


# --- what was seeded by the same person, and changes nothing

HARMLESS = {
    # The batch of a job keeps its tensors until they are read, and training waits for what is written.
    "nothing is kept for the lane": Fault(
        "plain, sparse", staging.DeviceStaging, "hand_over", lambda right: lambda self, tensors: right(self, [])
    ),
    # Only the parts of sparse tensors are kept.
    "a sparse tensor itself is recorded": Fault(
        "plain, sparse",
        device.CudaDevice,
        "keep",
        lambda right: lambda self, tensor: tensor.record_stream(self._stream),
    ),
    # On a GPU autograd adds up the gradients of lookups: see "lookups on two streams are added up".
    "a second lookup is forgotten": Fault(
        "nccl, lookups", tables._Lookup, "fold", lambda right: lambda self, gradient: gradient
    ),
    "a second lookup is added on another stream": Fault("nccl, lookups", tables._Lookup, "fold", elsewhere),
}
