"""Dense gradients as stock DDP sends them: by the all-reduce of a process group, straight from the hook."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.hooks.clock import JobTimes
from thinwire.hooks.gradients import GradientSync
from thinwire.lane import Lane
from thinwire.observe.ledger import ParameterRecord
from thinwire.sync.exchange import ring_all_reduce_bytes
from thinwire.sync.stream import lost_peer


@dataclass(frozen=True, eq=False)
class Started:
    """An all-reduce under way."""

    work: dist.Work
    rank: int
    world_size: int

    def wait(self) -> None:
        """On a GPU the current stream waits, and the thread does not.

        Raises:
            LostPeerError: a peer died, did not take part within the timeout, or hung up.
        """
        try:
            self.work.wait()
        except RuntimeError as error:
            raise lost_peer(error, self.rank, self.world_size) from error


@dataclass(frozen=True, eq=False)
class DenseBucket:
    """A bucket without tables: all-reduces under way, and nothing else."""

    started: tuple[Started, ...]
    buffer: Tensor
    job: JobTimes

    def wait(self) -> None:
        """Raises LostPeerError, as `Started.wait` does."""
        for one in self.started:
            one.wait()
        self._end()

    def future(self) -> Future[Tensor]:
        """What DDP takes: one of the buffer."""
        if self.started:
            return self.started[-1].work.get_future().then(self._ended)
        future: Future[Tensor] = Future()
        future.set_result(self.buffer)
        return future

    def _ended(self, done: Future[list[Tensor]]) -> Tensor:
        done.value()  # raises what the all-reduce raised
        self._end()
        return self.buffer

    def _end(self) -> None:
        self.job.ended = self.job.ended or time.perf_counter()


class NativeAllReduce:
    """Starts the all-reduce of dense gradients on the thread of the hook.

    So they are in the order of the buckets, which all ranks share. On a GPU that is on the communicator and after the
    kernels after which stock DDP has them: a communicator of the lane's own would run beside that of the model in an
    order that differs from rank to rank, of which torch and NCCL warn. On the CPU the group is one of the lane, which
    hangs up when this rank fails, so that ranks that wait in an all-reduce hear of it.

    Args:
        process_group: of the ranks of the lane.
        account: whose books the bytes go to, under ``name``.
        scheme: for the account.
    """

    def __init__(self, process_group: dist.ProcessGroup, account: GradientSync, name: str, scheme: str) -> None:
        self._process_group = process_group
        self._account = account
        self._name, self._scheme = name, scheme
        self._moved_bytes = 0
        self._jobs: list[JobTimes] = []
        self._tables: list[tuple[str, Tensor, int]] = []  # sparse ones, with the rows that this rank held

    def start(self, gradients: Sequence[Tensor]) -> tuple[Started, ...]:
        """The mean over the ranks, in place.

        Scaled before it is summed, and by a product, as DDP without a hook does: the bits are those of stock DDP.
        """
        return tuple(map(self._start, gradients))

    def start_bucket(self, gradients: Sequence[Tensor], buffer: Tensor, job: JobTimes) -> DenseBucket:
        """As `start`, of a bucket in which nothing else is."""
        job.started = time.perf_counter()
        self._jobs.append(job)
        return DenseBucket(self.start(gradients), buffer, job)

    def start_sparse(self, name: str, gradient: Tensor, job: JobTimes) -> Future[Tensor]:
        """The mean of a sparse gradient by torch's own all-reduce, which adds in the order of ranks, as it must."""
        job.started = time.perf_counter()
        self._jobs.append(job)
        coalesced = gradient.coalesce()
        held = coalesced._nnz()
        work = dist.all_reduce(coalesced, group=self._process_group, async_op=True)
        assert work is not None, "hooks run on ranks of the group"
        rank, world_size = self._process_group.rank(), self._process_group.size()  # its thread must not end the group

        future: Future[Tensor] = Future()  # one that `then` makes would lose the type of an exception

        def end(done: Future[list[Tensor]]) -> None:
            try:
                total = done.value()[0].coalesce()
            except RuntimeError as error:
                future.set_exception(lost_peer(error, rank, world_size))  # type: ignore[arg-type]
                return
            total._values().mul_(1.0 / world_size)
            self._account.see_sum(name, total)
            self._tables.append((name, total, held))
            job.ended = time.perf_counter()
            future.set_result(total)

        work.get_future().add_done_callback(end)
        return future

    def count(self, num_bytes: int) -> None:
        """An all-reduce of so many bytes was made; booked by `finish_step`."""
        self._moved_bytes += ring_all_reduce_bytes(num_bytes, self._process_group.size())

    def finish_step(self, lane: Lane) -> None:
        """Book bytes, those of a ring, and seconds; while no job of the lane runs, which books there too."""
        moved, self._moved_bytes = self._moved_bytes, 0
        if moved:
            record = self._account.records.setdefault(self._name, ParameterRecord(self._name))
            record.kind, record.scheme, record.formats, record.fused = "all-reduce", self._scheme, "dense", 1
            record.density = record.density_after = 1.0
            record.add(moved, moved, moved)
            lane.exchange.count_all_reduce(moved)
        tables, self._tables = self._tables, []
        for name, mean, held in tables:
            lane.exchange.count_all_reduce(self._account.book_left(name, mean, held, lane.world_size))
        jobs, self._jobs = self._jobs, []
        until = 0.0
        for job in jobs:  # one after the other: the next one begins when the last one has ended
            lane.note_busy(max(job.started, until), job.ended)
            until = job.ended

    def _start(self, gradient: Tensor) -> Started:
        group = self._process_group
        work = dist.all_reduce(gradient.mul_(1.0 / group.size()), group=group, async_op=True)
        assert work is not None, "hooks run on ranks of the group"
        self.count(gradient.nbytes)
        return Started(work, group.rank(), group.size())


def is_native(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group all-reduces tensors of this device by NCCL."""
    return device.type == "cuda" and "nccl" in dist.get_backend_config(process_group).lower()
