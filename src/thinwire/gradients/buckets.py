"""Split gradient buckets of DDP, and decide which buckets are synchronized by one job of the lane."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from thinwire.comm.lane import Lane
from thinwire.comm.process_group import Staging
from thinwire.compress.assign import NATIVE
from thinwire.errors import ThinwireError
from thinwire.gradients.collective import CollectiveTables
from thinwire.gradients.compressed import CompressedSync
from thinwire.gradients.exact import OTHERS, DenseBucket, GradientSync, NativeAllReduce, Started
from thinwire.gradients.lossless import LosslessSync, Other
from thinwire.gradients.tables import LookupRows, TableGradient, staged
from thinwire.observe.step import Clock, JobTimes, Load, Phase, show

Pending = Future[Tensor] | DenseBucket
"""Work to wait for at the end of backward: a job of the lane, or an all-reduce beside it."""

MAX_WAITING_BYTES = 1024 * 1024
"""Largest size up to which small buckets wait for each other: more would leave the network idle during backward."""


@dataclass(frozen=True, eq=False)
class Contents:
    """The parts of a bucket.

    Args:
        buffer: the buffer of DDP; a sparse bucket holds one COO gradient, a dense one is synchronized in place.
        tables: gradients that are synchronized as rows.
        others: dense gradients between them.
        started: all-reduces of elements that are under way already.
        compressed: gradients that are averaged with compression, in place, by name of their parameters.
        name: name of the bucket, for traces.
        is_compared: whether ranks compare their dtypes first, in a job of the lane: Gloo ends a process that gets a
            message of another size.
        scattered: a flat tensor [n * k] whose sum goes losslessly to the owners of its parts, where this rank's part
            [k] goes, and a factor.
    """

    buffer: Tensor
    tables: tuple[TableGradient, ...]
    others: tuple[Other, ...] = ()
    started: tuple[Started, ...] = ()
    compressed: tuple[tuple[str, Tensor], ...] = ()
    name: str = ""
    is_compared: bool = False
    scattered: tuple[Tensor, Tensor, float] | None = None

    def tensors(self) -> list[Tensor]:
        """Return all tensors whose memory is read or written."""
        tables = (table.gradient for table in self.tables)
        scattered = () if self.scattered is None else self.scattered[:2]
        dense = (one[1] for one in (*self.others, *self.compressed))
        return [self.buffer, *tables, *dense, *scattered]

    @property
    def load(self) -> Load:
        exact = sum(other.gradient.nbytes for other in self.others)
        exact += 0 if self.scattered is None else self.scattered[0].nbytes
        compressed = [gradient.nbytes for _, gradient in self.compressed]
        return Load(self.name, exact, sum(compressed), len(compressed))


Batch = Sequence[tuple[Contents, Future[Tensor]]]
"""Buckets of one job, with the futures of their means."""


@dataclass(frozen=True, eq=False)
class Sums:
    """What sums the gradients of a model, each its own kind.

    Args:
        gradients: tables, and dense gradients on the lane.
        native: what is neither a table nor compressed; None to leave that to the lane.
        collective: tables, by the model's own group; None to leave all of them to the lane.
        compressed: the gradients that are compressed; None if none are.
        lossless: dense gradients that travel coded, on the lane; None if none do.
        beside: sums of parameters that FSDP does not reduce, and the lane of each.
    """

    gradients: GradientSync
    native: NativeAllReduce | None = None
    collective: CollectiveTables | None = None
    compressed: CompressedSync | None = None
    lossless: LosslessSync | None = None
    beside: list[tuple[Sums, Lane]] = field(default_factory=list)

    @property
    def collectives(self) -> list[CollectiveTables]:
        """All sums of tables by a group of the model."""
        return [one.collective for one in (self, *(sums for sums, _ in self.beside)) if one.collective is not None]

    def finish_step(self, lane: Lane) -> None:
        """End a step; ``lane`` is that of the gradients."""
        for sums, own in ((self, lane), *self.beside):
            if sums.native is not None:
                sums.native.finish_step(own)
            if sums.collective is not None:
                sums.collective.finish_step()
        self.gradients.finish_step()
        if self.compressed is not None:
            self.compressed.finish_step()

    def listen(self, listener: Callable[[Phase, float, float], None] | None) -> None:
        """Call ``listener`` with each phase of a sum, its start and its end; None ends that."""
        if self.compressed is not None:
            self.compressed.statistics.stopwatch.listener = listener
        if self.lossless is not None:
            self.lossless.listener = listener


class Buckets:
    """The queue of DDP's gradient buckets, which it submits to the lane as jobs.

    DDP gives each ``sparse=True`` embedding a bucket of its own. Small ones wait, so that one job can synchronize them
    together: until a bucket comes that does not wait, which may be the last one of the step, or until enough of them
    wait. That depends only on numbers known to all ranks, so all ranks form the same jobs. DDP waits for the futures
    after its last bucket only.

    Tables that the model's own group sums wait until the last bucket, or the end of backward, and are then summed
    together on the calling thread. So all collectives of that group are in one order on all ranks: buckets in the order
    of DDP, then the sums.

    A table does not wait the first time it is seen: under ``static_graph`` DDP marks no bucket of its first backward
    as the last one (torch 2.13), and waits for all before this class is notified of the end of backward.

    Args:
        sums: what sums them.
        lookups: the tables, and the rows of each that a backward touched.
        names: names of parameters, by ``id()``.
        lane: the lane that runs the jobs.
        staging: moves gradients to the lane and back; None if they are on the CPU.
        clock: records when buckets come and jobs run.
    """

    def __init__(
        self,
        sums: Sums,
        lookups: LookupRows,
        names: Mapping[int, str],
        lane: Lane,
        staging: Staging | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._gradients, self._native, self._collective = sums.gradients, sums.native, sums.collective
        self._compressed = sums.compressed
        self.may_compress = sums.compressed is not None
        self._lossless = sums.lossless or LosslessSync(sums.gradients.records)  # which takes nothing
        self.has_lossless = sums.lossless is not None  # whether gradients may be summed losslessly
        self.alike = self._lossless.alike or NATIVE  # how all are that are not compressed, if that is one exact sum
        self.is_of_model = self._native is not None and self._native.is_own  # whether sums are by the model's own group
        self._staging = staging or Staging()
        self._lookups = lookups
        self._names = names
        self._lane = lane
        self._clock = clock or Clock()
        self._tables = {id(parameter) for parameter in lookups.parameters}
        self._seen: set[str] = set()
        self.sees_zeros = False  # whether `is_zero` is going to be asked
        self._zeros: set[str] = set()
        self._waiting: list[tuple[Contents, Future[Tensor]]] = []
        self._waiting_bytes = 0
        self._collected: list[_Collected] = []
        self._left: list[Future[Tensor]] = []
        self._blocked_seconds = 0.0
        self._formed: dict[int, tuple[str, ...]] = {}

    def add(self, bucket: dist.GradBucket) -> Pending:
        """Submit a bucket; its mean is a new sparse tensor, or its buffer, in place."""
        name = f"bucket {bucket.index()}"
        self._clock.ready(name)
        return self._start(bucket, name) or self.submit(self._take_apart(bucket), bucket.is_last())

    def ask(self, flag: bool) -> Callable[[], list[float]]:
        """Start to gather a flag of each rank before the buckets of a step; return what waits for them.

        It returns none where the headers of jobs tell ranks apart, or nothing does, as on NCCL.
        """
        return list if self._native is None or self._native.is_own else self._native.ask(flag)

    def submit(self, contents: Contents, is_last: bool = False) -> Pending:
        """Submit a bucket that is already split into its parts, like `add`."""
        is_lossless = self.goes_lossless(contents.name, contents.others)
        is_lossless |= contents.scattered is not None
        is_compared = contents.is_compared and self._native is not None and not self._native.is_own
        if self._native is not None and not (contents.compressed or is_lossless or is_compared):
            dense = [other.gradient for other in contents.others]
            if not contents.tables:
                bucket = self._native.start_bucket(dense, contents.buffer, self._clock.submit(contents.load))
                if is_last:
                    self.flush()
                return bucket
            contents = replace(contents, others=(), started=self._native.start(dense))
        future = self._queue(contents) if self._collective is None else self._collect(contents)
        if is_last:
            self.flush()
        return future

    def _queue(self, contents: Contents) -> Future[Tensor]:
        """Queue a bucket for a job of the lane."""
        future = self._staging.future()
        self._waiting.append((contents, future))
        if self._may_wait(contents):
            self._waiting_bytes += sum(self._gradients.expected_bytes(table) for table in contents.tables)
            if self._waiting_bytes <= MAX_WAITING_BYTES:
                return future
        self._submit_waiting()
        return future

    def _collect(self, contents: Contents) -> Future[Tensor]:
        """Keep the tables that the model's own group sums until `flush`, and queue the rest for the lane."""
        assert self._collective is not None
        taken = tuple(table for table in contents.tables if self._collective.takes(table))
        if not taken:
            return self._queue(contents)
        others = tuple(table for table in contents.tables if table not in taken)
        rest = replace(contents, tables=others, started=())
        queued = self._queue(rest) if others or rest.others or rest.compressed else None
        self._staging.hand_over(())  # refuses the capture of a CUDA graph
        future = self._staging.future()
        self._collected.append(_Collected(replace(contents, tables=taken), future, queued))
        names = {table.name for table in taken}
        if not names <= self._seen:
            self._seen |= names
            self.flush()
        return future

    def start_left(self, table: str, gradient: Tensor, name: str) -> Future[Tensor] | None:
        """Start torch's own sum of a sparse gradient beside the lane; None where it travels otherwise in this step."""
        if self._native is None or table not in self._native.sparse or not self.leaves(table):
            return None
        self._left.append(self._native.start_sparse(table, gradient, self._clock.submit(Load(name))))
        return self._left[-1]

    def count_left(self) -> None:
        """Count the bytes of the sparse gradients of a step that torch has summed, when all of them are known."""
        left, self._left = self._left, []
        if left and self._native is not None:
            means = [future.value() for future in left]
            self._native.count_rows(sum(mean._indices().nbytes + mean._values().nbytes for mean in means), len(means))

    def _start(self, bucket: dist.GradBucket, name: str) -> Pending | None:
        """All-reduce a bucket that travels as a whole, beside the lane; None for any other, and by a model's own group.

        Stock DDP spends no time in Python on it, so this creates nothing that is not needed.
        """
        if self._native is None or self._native.is_own or not self._staging.is_host:
            return None
        buffer = bucket.buffer()
        if buffer.is_sparse:
            pending = self.start_left(self._names[id(bucket.parameters()[0])], buffer, name)
            if pending is not None and bucket.is_last():
                self.flush()
            return pending
        if self._tables or self._compressed is not None:
            return None
        if self._lossless.alike is None or self.goes_lossless(name, [Other(name, buffer, self.alike)]):
            return None
        if bucket.is_last():
            self.flush()
        job = self._clock.submit(Load(name, buffer.nbytes))
        return self._native.start_bucket([as_real(buffer)], buffer, job)

    def how(self, name: str) -> str:
        """Return how the gradient of a parameter is summed if it is not compressed."""
        return self._lossless.how(name) if self.has_lossless else NATIVE

    def goes_lossless(self, name: str, gradients: Sequence[Other]) -> bool:
        """Return whether any gradient of a bucket is summed losslessly in this step."""
        return self.has_lossless and any(self._lossless.taken(name, gradients))

    def expect(self, names: Iterable[str]) -> None:
        """Let tables that another run has seen wait from the first step on, so that groups and bits are as there."""
        self._seen.update(names)

    def take_formed(self) -> list[tuple[str, ...]]:
        """Return the parameters of each bucket that DDP formed since the last call, without tables."""
        formed, self._formed = self._formed, {}
        return list(formed.values())

    def adopt(self) -> list[nn.Parameter]:
        """Return the parameters that are looked up on any rank without a module, which are tables from now on.

        All ranks call it after the first step, which shows them, and return the same.
        """
        candidates = self._lookups.candidates
        mine = [float(id(entry) in self._lookups.looked_up) for entry in candidates]
        gathered = self._lane.agree("which parameters are looked up", mine)
        tables = [entry for entry, ranks in zip(candidates, zip(*gathered, strict=True), strict=True) if any(ranks)]
        self._lookups.adopt(tables)
        self._tables.update(map(id, tables))
        return tables

    def compresses(self, name: str) -> bool:
        """Return whether the gradient of a parameter is compressed in this step."""
        return self._compressed is not None and self._compressed.takes(name)

    def remembered(self, bucket: dist.GradBucket) -> list[tuple[Tensor, Tensor]]:
        """Return the trained parameters of a bucket to whose means a memory may add, with these means."""
        if self._compressed is None or bucket.buffer().is_sparse:
            return []
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        return [pair for pair in pairs if pair[0].requires_grad and self._names[id(pair[0])] in self._compressed.plans]

    def leaves(self, name: str) -> bool:
        """Return whether a table is all-reduced like any other gradient in this step."""
        return self._gradients.leaves(name)

    def is_zero(self, name: str) -> bool:
        """Return whether the mean of a table or a compressed gradient is zero everywhere; once for each backward."""
        was_seen = name in self._zeros
        self._zeros.discard(name)
        return was_seen or self._gradients.unions.get(name) == 0

    def release(self, name: str, gradient: Tensor) -> None:
        """Add the unsent rest of earlier gradients, if compression ended; see `Memories.release`."""
        if self._compressed is not None:
            self._compressed.memories.release(name, gradient)

    def flush(self) -> None:
        """Submit all waiting buckets, and sum the tables that wait. None may be left when backward is over.

        Raises:
            ThinwireError: a sum failed, see `CollectiveTables.means`.
        """
        self._submit_waiting()
        collected, self._collected = self._collected, []
        if collected:
            self._sum(collected)

    def finish(self) -> float:
        """Submit what waits; return when computing ended (`time.perf_counter`), sums on the calling thread left out."""
        self.flush()
        seconds, self._blocked_seconds = self._blocked_seconds, 0.0
        return time.perf_counter() - seconds

    def _sum(self, collected: Sequence[_Collected]) -> None:
        """Sum all collected tables at once, on this thread, and complete the futures of their buckets."""
        assert self._collective is not None
        tables = [table for one in collected for table in one.contents.tables]
        job = self._clock.submit(Load(f"sum of {', '.join(table.name for table in tables)}"))
        job.started = time.perf_counter()
        started = [work for one in collected for work in one.contents.started]
        self._staging.hand_over(())  # which refuses to be captured in a CUDA graph
        try:
            means = dict(zip((table.name for table in tables), self._collective.means(tables, started), strict=True))
            for one in collected:
                if one.queued is not None:
                    one.queued.wait()
                buffer = one.contents.buffer
                one.future.set_result(means[one.contents.tables[0].name] if buffer.is_sparse else buffer)
        except Exception as error:
            set_exception([one.future for one in collected], error)
            raise
        finally:
            job.ended = time.perf_counter()
            self._blocked_seconds += job.seconds

    def _submit_waiting(self) -> None:
        batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not batch:
            return
        handover = self._staging.hand_over([tensor for contents, _ in batch for tensor in contents.tensors()])
        job = self._clock.submit(reduce(add, (contents.load for contents, _ in batch)))
        end = show(lambda: f"synchronize {', '.join(_names(batch))}")

        def fulfil(lane: Lane, begun: Callable[[], None] | None = None) -> None:
            with self._staging.taking(handover):
                if begun is None:
                    results = self._synchronize(lane, [contents for contents, _ in batch], job)
                else:
                    self._clock.run(job)
                    begun()
                    results = [contents.buffer for contents, _ in batch]
                started = [one for contents, _ in batch for one in contents.started]
                # The lane's own stream must not wait for these: it has the next buckets to copy to the host.
                with self._staging.completing() if started else nullcontext():
                    for one in started:
                        one.wait()
                    self._clock.end(job)
                    end()
                    for (_, future), result in zip(batch, results, strict=True):
                        future.set_result(result)

        done = self._lane.submit(fulfil, begin=self._beginning(batch))
        done.add_done_callback(lambda done: _fail(batch, done, end))

    def _may_wait(self, contents: Contents) -> bool:
        """Mark a bucket as seen; return whether it is a small sparse one that was seen before."""
        if not contents.buffer.is_sparse:
            return False
        (table,) = contents.tables
        seen = table.name in self._seen
        self._seen.add(table.name)
        return seen and self._gradients.is_small(table)

    def _beginning(self, batch: Batch) -> Callable[[Lane], Callable[[], None]] | None:
        """Return what begins to sum a bucket while the one before still waits for peers; None if it cannot."""
        contents, _ = batch[0]
        if len(batch) > 1 or contents.tables or contents.compressed or contents.started or not self._staging.is_host:
            return None
        if not self.has_lossless or not all(self._lossless.taken(contents.name, contents.others)):
            return None
        return lambda lane: self._begin_dense(lane, contents)

    def _synchronize(self, lane: Lane, batch: Sequence[Contents], job: JobTimes) -> list[Tensor]:
        tables = [staged(table, self._staging) for contents in batch for table in contents.tables]
        means = {table.name: mean for table, mean in zip(tables, self._gradients.tables(lane, tables), strict=True)}
        self._clock.run(job)
        for contents in batch:
            self._synchronize_dense(lane, contents)
        if self.sees_zeros:
            whole = [(table.name, table.gradient) for table in tables if not table.gradient.is_sparse]
            self._see(whole + [pair for contents in batch for pair in contents.compressed])
        return [means[contents.tables[0].name] if contents.buffer.is_sparse else contents.buffer for contents in batch]

    def _see(self, means: Sequence[tuple[str, Tensor]]) -> None:
        """Note which means are zero. Means of tables that went as rows are not read, and a GPU is asked once."""
        unions = {name: self._gradients.unions.get(name) for name, _ in means}
        unread = [(name, mean) for name, mean in means if (rows := unions[name]) is None or rows >= len(mean)]
        if self._staging.is_host or not unread:
            have_values = [bool(mean.flatten()[:1024].any()) or bool(mean.any()) for _, mean in unread]
        else:
            (flags,) = self._staging.to_host(torch.stack([mean.any() for _, mean in unread]))
            have_values = flags.tolist()
        self._zeros -= unions.keys()
        self._zeros |= {name for (name, _), has_values in zip(unread, have_values, strict=True) if not has_values}

    def _synchronize_dense(self, lane: Lane, contents: Contents) -> None:
        self._begin_dense(lane, replace(contents, others=()) if contents.compressed else contents)()
        if not contents.compressed:
            return
        assert self._compressed is not None
        coded = None
        if self.has_lossless:
            coded = partial(self._lossless.average, bucket=contents.name, gradients=contents.others)
        others = [other.gradient for other in contents.others]
        self._compressed.synchronize(lane, contents.compressed, others, coded)

    def _begin_dense(self, lane: Lane, contents: Contents) -> Callable[[], None]:
        """Begin to sum what is not compressed in a bucket; return a function that completes it."""
        lossless, others = self._lossless, contents.others
        if contents.scattered is not None:
            return lossless.begin_reduce_scatter(lane, contents.name, *contents.scattered, self._staging)
        is_coded, rest = self.has_lossless, partial(list[Other], others)
        complete = lossless.begin(lane, contents.name, others, self._staging) if is_coded else rest

        def finish() -> None:
            for name, gradient, _ in complete():
                self._gradients.dense(lane, name, gradient, OTHERS)

        return finish

    def _take_apart(self, bucket: dist.GradBucket) -> Contents:
        buffer = bucket.buffer()
        name = f"bucket {bucket.index()}"
        if buffer.is_sparse:
            table = TableGradient(self._names[id(bucket.parameters()[0])], buffer.detach())  # see `start_sparse`
            return Contents(buffer, (table,), name=name)
        parameters = [self._names.get(id(parameter), "") for parameter in bucket.parameters()]
        tables: list[TableGradient] = []
        others: list[Other] = []
        compressed: list[tuple[str, Tensor]] = []
        done, how = 0, self.how(parameters[0])
        for parameter, parameter_name, gradient in zip(
            bucket.parameters(), parameters, bucket.gradients(), strict=True
        ):
            is_table = id(parameter) in self._tables and not self._gradients.leaves(parameter_name, gradient)
            begin = int(gradient.storage_offset() - buffer.storage_offset())
            if not is_table and not self.compresses(parameter_name):
                if parameter.requires_grad:
                    self.release(parameter_name, gradient)
                if (before := how) != (how := self.how(parameter_name)):
                    others += _between(bucket, done, begin, before)
                    done = begin
                continue
            others += _between(bucket, done, begin, how)
            done = begin + gradient.numel()
            if is_table:
                assert isinstance(parameter, nn.Parameter)
                touched = self._lookups.take(parameter, buffer)
                tables.append(TableGradient(parameter_name, self._lookups.matrix(parameter, gradient), touched))
            elif parameter.requires_grad:  # frozen since DDP was built, it keeps its memory
                compressed.append((parameter_name, gradient))
        others += _between(bucket, done, buffer.numel(), how)
        self._formed[bucket.index()] = tuple(
            name
            for parameter, name in zip(bucket.parameters(), parameters, strict=True)
            if id(parameter) not in self._tables
        )
        return Contents(buffer, tuple(tables), tuple(others), compressed=tuple(compressed), name=name)


@dataclass(frozen=True, eq=False)
class _Collected:
    """A bucket whose tables wait for the sum at the end of backward.

    Args:
        queued: the rest of the bucket, which the lane synchronizes; None if there is none.
    """

    contents: Contents
    future: Future[Tensor]
    queued: Future[Tensor] | None


def _names(batch: Batch) -> list[str]:
    """Return the names of all tables, and then of all buckets that have anything else."""
    tables = [table.name for contents, _ in batch for table in contents.tables]
    return tables + [contents.name for contents, _ in batch if contents.others or contents.compressed]


def _fail(batch: Batch, done: Future[None], end: Callable[[], None]) -> None:
    """Pass the failure of a job to every bucket of its batch, whether the job itself or its lane failed."""
    end()
    try:
        done.value()
    except Exception as error:
        set_exception([future for _, future in batch], error)


def set_exception(futures: Sequence[Future[Tensor]], error: Exception) -> None:
    """Complete the futures that are not done with an error."""
    for future in futures:
        if future.done():
            continue
        try:
            future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it as a result
        except RuntimeError:  # one of a device pickles it, to find tensors; uncompleted, DDP would wait for ever
            future.set_exception(ThinwireError(f"{type(error).__name__}: {error}"))  # type: ignore[arg-type]


def _between(bucket: dist.GradBucket, begin: int, stop: int, how: str) -> list[Other]:
    name = f"elements {begin} to {stop} of gradient bucket {bucket.index()}"
    return [Other(name, as_real(bucket.buffer()[begin:stop]), how)] if stop > begin else []


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs, which is how they are summed, and any other tensor unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
