"""Exact means of gradients, with statistics: synchronized on the lane, or all-reduced by a process group.

Dense gradients are sent as stock DDP sends them, by the all-reduce of a process group, straight from the hook.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.comm.channel import Channel, Subject
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import ring_all_reduce_bytes, sparse_all_reduce_bytes
from thinwire.errors import LostPeerError, logger, unknown
from thinwire.gradients.tables import TableGradient, by_dtype, share, stack, unstack
from thinwire.observe.step import JobTimes, ParameterRecords, enabled, show
from thinwire.rows.sparse import SparseRows
from thinwire.sums.cost import DENSIFICATION_EXPONENT, Demand, expected_bytes
from thinwire.sums.named import AUTO, DENSE, name_of, resolve
from thinwire.sums.scheme import Scheme, Unit
from thinwire.sums.synchronize import agree, dense_all_reduce, placed, synchronize
from thinwire.sums.two_level import TwoLevel
from thinwire.tune.prices import Route, adds_in_rank_order, chosen
from thinwire.tune.window import Window

DENSE_PAUSE_STEPS = 50
"""Largest number of steps for which a table is all-reduced unread, after steps in which most of its rows were non-zero:
one step after the first of them, then twice that number each time, because the next batch may differ."""
LEFT_SECONDS, LEFT_BYTES = 0.002, 512 * 1024
"""Largest seconds and bytes at which a dense table goes with its bucket: the sum of a tiny table costs 3 ms of
processors alone. On few bytes a short probe of the link can be wrong without doing harm."""
LEFT_STEPS = 1000
"""Number of steps for which it does, before it is examined again."""
OTHERS = "all other parameters"
"""Name of the row of `Synchronizer.table` for all that is all-reduced in buckets."""
LEFT = "native"
"""Scheme of a table that stock DDP sums, in `Synchronizer.table`."""
ROUTE_VARIABLE, ROWS_AT_ONCE = "THINWIRE_ROUTE", "rows"
SMALL_TABLE_BYTES = 256 * 1024
"""Size of a sum above which a table is synchronized alone: 20 ms at 100 Mbit/s, where a header round costs below 1."""
MAX_WINDOWS = 64
"""Largest number of groups with a `Window`; small tables may be grouped differently in every step."""

Group = Sequence[TableGradient]


class GradientSync:
    """The exact mean over ranks of the gradient of each parameter.

    Its methods are called by jobs of a lane, on all ranks in the same order.

    Small tables are stacked, see `thinwire.gradients.tables`, and a group of tables is one synchronization. With
    "auto", the first step of a group gathers the number of rows of each rank; after each synchronization all ranks
    know that number and the size of the union, from which a `Window` decides what the next one runs. So all ranks
    decide the same.

    Args:
        by_bytes: whether "auto" asks for the number of rows each time, and chooses by them alone: by no clock, so that
            two runs of a job have the same bits.
    """

    def __init__(self, scheme: str | Scheme | TwoLevel, by_bytes: bool = False) -> None:
        self.scheme = resolve(scheme) or AUTO  # a name would be looked up in every step
        self._by_bytes = by_bytes
        self.in_rank_order = torch.are_deterministic_algorithms_enabled()  # tables under "auto": bits by no clock
        self.records = ParameterRecords()
        self.choices: dict[str, str] = {}  # under "auto": the scheme of a group's next step, by its parameters
        self.pauses: dict[str, int] = {}  # steps for which a table is all-reduced without looking for zeros
        self.unions: dict[str, int] = {}  # number of rows in the sum of a table's last step
        self.may_leave = False  # whether tables can be left to the all-reduce beside the lane, see `leave_to`
        self.is_own = False  # whether that is by the model's own group, as on NCCL, which sums no sparse tensors
        self.is_stock = False  # whether stock sums all tables, while their buckets are watched
        self.left: dict[str, int] = {}  # tables that go with their buckets, and the number of steps left
        self.windows: dict[str, Window] = {}  # under "auto": the recent batches of a group
        self.tried: tuple[str, str] | None = None  # the group whose scheme is on trial, and its name
        self._dense_runs: dict[str, int] = {}  # number of consecutive steps in which a table was dense
        self._groups: dict[str, str] = {}  # the group that a table was in last

    def leave_to(self, native: NativeAllReduce, is_on_host: bool) -> None:
        """Allow tables to be left to an all-reduce beside the lane, before the first step."""
        self.is_own, self.may_leave = native.is_own, native.is_own or is_on_host

    def expected_bytes(self, table: TableGradient) -> int:
        """Return the bytes of a table's sum if it has the rows of last time; of the whole table before the first time.

        All ranks know them. The rows of the largest rank would not do: a fused message has the number of rows of each
        rank in all tables together, and only the sum shows the number of each table.
        """
        rows = self.unions.get(table.name, table.layout.num_rows)
        return rows * table.layout.width * table.gradient.dtype.itemsize

    def is_small(self, table: TableGradient) -> bool:
        """Return whether a table may travel with others."""
        return self.expected_bytes(table) <= SMALL_TABLE_BYTES

    def groups(self, tables: Group) -> list[list[TableGradient]]:
        """Return groups of tables that are synchronized together, ordered by their first table."""
        groups: dict[object, list[TableGradient]] = {}
        for table in tables:
            kind = table.layout.width, table.gradient.dtype, table.gradient.device
            groups.setdefault(kind if self.is_small(table) else table.name, []).append(table)
        return list(groups.values())

    def tables(self, lane: Lane, tables: Group) -> list[Tensor]:
        """Return the mean of each gradient, as `TableGradient.store` returns it; small ones travel together."""
        if lane.world_size == 1:
            return [table.gradient for table in tables]
        means: dict[str, Tensor] = {}
        sparse = []
        for table in tables:
            if self._is_all_reduced(table):
                self.dense(lane, table.name, table.gradient)
                means[table.name] = table.gradient
                self.unions.pop(table.name, None)  # that was of another sum
            else:
                sparse.append(table)
        for group in self.groups(sparse):
            means |= zip([table.name for table in group], self._synchronize(lane, group), strict=True)
        return [means[table.name] for table in tables]

    def dense(self, lane: Lane, name: str, gradient: Tensor, account: str | None = None) -> None:
        """All-reduce the mean of a dense gradient in place, counted under ``account`` if given, or ``name``."""
        channel = lane.channel(Subject(name, _describe(gradient, DENSE)))
        before = lane.exchange.traffic.sent_bytes
        channel.open()
        dense_all_reduce(gradient, channel, 1.0 / lane.world_size)
        record = self.records.book(account or name, "all-reduce", name_of(DENSE), "dense")
        size_bytes = gradient.numel() * gradient.element_size()
        record.add(
            lane.exchange.traffic.sent_bytes - before,
            partial(expected_bytes, DENSE, Demand(lane.world_size, 1, size_bytes, 1, 1, 1)),
            ring_all_reduce_bytes(size_bytes, lane.world_size),
        )

    def leaves(self, name: str, dense: Tensor | None = None) -> bool:
        """Return whether stock's own all-reduce synchronizes a table in this step, as all ranks decided before.

        Called once a step for each table, in the hook, so that a dense one goes with the rest of its bucket. Which
        ``dense`` ones do decides about bits: under deterministic algorithms only their shape says so.
        """
        if self.is_stock or (self.is_own and self.scheme == DENSE):
            return True
        if dense is not None and self.in_rank_order and self.scheme == AUTO and self.may_leave:
            is_left = 2 * dense.nbytes <= LEFT_BYTES
        elif is_left := self.left.get(name, 0) > 0:
            self.left[name] -= 1
        if is_left:
            self.records.named(name).leave(LEFT)
        return is_left

    def explain(self, names: Sequence[str], reason: str) -> None:
        """Note why these tables are summed as they are: by stock DDP from the next step on, or as rows at a price."""
        for name in names:
            entry = self.records.named(name)
            if self.is_stock:
                entry.leave(LEFT)
                entry.reason = reason
            else:
                entry.reason = "; ".join(filter(None, (entry.reason.partition("; ")[0], reason)))

    def rivals(self, least_steps: int) -> tuple[str, list[tuple[str, float]]]:
        """Return the group that costs most, and the names and seconds of its choice and of what may be faster.

        Groups of which fewer steps were seen do not count.
        """
        offers = {key: one.rivals() for key, one in self.windows.items() if len(one.sizes) >= least_steps}
        named = {
            key: [(name_of(one.scheme), one.seconds or 0.0) for one in each] for key, each in offers.items() if each
        }
        return max(named.items(), key=lambda pair: pair[1][0][1], default=("", []))

    def learned(self) -> dict[str, Any]:
        """Return what the next decisions depend on, besides times, as plain values for `recall`."""
        windows = {key: [astuple(demand) for demand in one.demands] for key, one in self.windows.items()}
        return {"windows": windows, "left": dict(self.left), "dense_runs": dict(self._dense_runs)}

    def recall(self, learned: Mapping[str, Any] | None) -> None:
        """Restore the result of `learned`, or nothing for None."""
        self.windows = {}
        self.left = dict(learned["left"]) if learned else {}
        self._dense_runs = dict(learned["dense_runs"]) if learned else {}
        for key, window in (learned["windows"] if learned else {}).items():
            last = resolve(self.choices.get(key, AUTO)) or DENSE
            self.windows[key] = Window()
            if self.in_rank_order and not adds_in_rank_order(last):
                self.choices.pop(key, None)
            elif key in self.choices:
                demands = [Demand(*numbers[:6], in_rank_order=bool(numbers[-1])) for numbers in window]
                self.windows[key].recall(last, demands)

    def finish_step(self, steps: int = 1) -> None:
        """Close the statistics of a step, or of so many that were alike."""
        for record in self.records.values():
            record.finish_step(steps)

    def _is_all_reduced(self, table: TableGradient) -> bool:
        """Return whether a dense gradient is not scanned for zeros in this step."""
        if table.gradient.is_sparse:
            return False
        if self.scheme != AUTO:
            return self.scheme in (DENSE, name_of(DENSE))
        paused = self.pauses.get(table.name, 0) > 0 and not self.in_rank_order
        if paused:
            self.pauses[table.name] -= 1
        return paused

    def _synchronize(self, lane: Lane, group: Group) -> list[Tensor]:
        """Synchronize all tables of a group at once."""
        window = self._window(group) if self.scheme == AUTO and not self._by_bytes else None
        plan = self._plan(group, window)
        channel = lane.channel(_subject(group, plan))
        before = lane.exchange.traffic.sent_bytes
        held: list[SparseRows] = []

        def prepare() -> SparseRows:
            held.extend(table.rows() for table in group)
            return stack(held)

        def choose(rows: SparseRows, channel: Channel) -> Scheme | TwoLevel:
            point = None if window is None else window.choice
            if point is None or point.is_dense:
                return chosen(rows, channel, self.in_rank_order, self._by_bytes)
            return placed(point, channel)

        rows, scheme = agree(prepare, plan, channel, choose)
        scale = 1.0 / lane.world_size
        if scheme.is_dense and len(group) == 1 and not group[0].gradient.is_sparse:
            dense_all_reduce(group[0].gradient, channel, scale)
            unions, means = [rows.num_rows], [group[0].gradient]
        else:
            total = synchronize(rows, scheme, channel, scale)
            totals = unstack(total, [table.num_rows for table in held])
            unions = [total.ids.numel() for total in totals]
            means = [table.store(mine, total) for table, mine, total in zip(group, held, totals, strict=True)]
        self._pause(group, scheme)
        self._record(group, channel, scheme, held, unions, before)
        self._remember(group, unions)
        if window is not None:
            sizes = rows.num_rows, rows.width, rows.values.element_size(), sum(unions)
            demand = Demand.of(channel.held, *sizes, self.in_rank_order)
            window.know(channel.machine(), channel.exchange.hosts)
            self._decide_next(group, window, channel, demand)
        return means

    def _plan(self, group: Group, window: Window | None) -> str | Scheme | TwoLevel:
        """Return the scheme that all ranks run, or "auto" if they gather their numbers of rows first."""
        if self.scheme != AUTO:
            return self.scheme
        key = _key(group)
        if window is None or window.choice is None:
            return AUTO
        return self.tried[1] if self.tried is not None and self.tried[0] == key else self.choices.get(key, AUTO)

    def _window(self, group: Group) -> Window:
        key = _key(group)
        if key not in self.windows:
            self.windows[key] = Window()
            if len(self.windows) > MAX_WINDOWS:
                del self.windows[next(iter(self.windows))]
        return self.windows[key]

    def _pause(self, group: Group, scheme: Scheme | TwoLevel) -> None:
        """Decide whether a dense gradient is scanned in the next steps."""
        (table, *others) = group
        if others or table.gradient.is_sparse:
            return
        run = self._dense_runs.get(table.name, 0) if scheme.is_dense else -1
        self._dense_runs[table.name] = run + 1
        if scheme.is_dense:
            unread = self.left if self.is_own else self.pauses
            unread[table.name] = min(DENSE_PAUSE_STEPS, 2**run)

    def _remember(self, group: Group, unions: Sequence[int]) -> None:
        key = _key(group)
        for table, union in zip(group, unions, strict=True):
            self.unions[table.name] = union
            last = self._groups.setdefault(table.name, key)
            if last != key:
                self.choices.pop(last, None)
                self._groups[table.name] = key

    def _decide_next(self, group: Group, window: Window, channel: Channel, demand: Demand) -> None:
        """Decide the next step from numbers that all ranks know."""
        key = _key(group)
        choice = window.observe(demand)
        last, self.choices[key] = self.choices.get(key), AUTO if choice.is_dense else name_of(choice)
        reason = self._leave(group, window, channel)
        if reason or self.choices[key] != last:
            self._explain(group, reason or window.explain(), channel.rank, DENSE if reason else choice)

    def _leave(self, group: Group, window: Window, channel: Channel) -> str:
        """Let dense tables go with their buckets if that costs next to nothing; return the reason, "" if they stay."""
        machine = channel.machine()
        is_any_sparse = any(table.gradient.is_sparse for table in group)
        if not self.may_leave or machine is None or is_any_sparse or self.in_rank_order:
            return ""
        moved = sum(ring_all_reduce_bytes(table.gradient.nbytes, channel.world_size) for table in group)
        seconds = moved * max(machine.byte_seconds, machine.reduced_byte_seconds)
        if moved > LEFT_BYTES or seconds > LEFT_SECONDS:
            return ""
        for table in group:
            self.left[table.name] = LEFT_STEPS
            self.records.named(table.name).leave(LEFT)
        return f"{LEFT} ({moved / 1e6:.3f} MB in {1e3 * seconds:.1f} ms) instead of {window.explain()}"

    def _explain(self, group: Group, reason: str, rank: int, pin: Scheme | TwoLevel) -> None:
        for table in group:
            self.records.named(table.name).reason = reason
        if rank == 0:
            logger.info("%s: %s%s", _key(group), reason, "" if self.in_rank_order else f"; {pinned_by(pin)}")

    def _record(
        self,
        group: Group,
        channel: Channel,
        scheme: Scheme | TwoLevel,
        held: Sequence[SparseRows],
        unions: Sequence[int],
        sent_before: int,
    ) -> None:
        """Count a synchronization. Bytes are shared by the rows that this rank held and those in the sum."""
        world_size, itemsize = channel.world_size, held[0].values.element_size()
        num_rows, row_bytes = sum(rows.num_rows for rows in held), held[0].width * itemsize
        saved, union = channel.saved_bytes, sum(unions)
        demand = Demand(world_size, num_rows, held[0].width, itemsize, sum(channel.held) / world_size, union)
        weights = [rows.ids.numel() + union for rows, union in zip(held, unions, strict=True)]
        sent = share(channel.exchange.traffic.sent_bytes - sent_before, weights)
        formats = ", ".join(
            f"{phase.name.lower()} {'/'.join(sorted(formats))}" for phase, formats in channel.formats_sent.items()
        )
        formats += ", coded values" if saved else ""
        own = sum(rows.ids.numel() for rows in held)  # headers count blocks or elements, where those travel
        counts = channel.held if scheme.unit is Unit.ROWS else [own] * world_size
        stock = share(sparse_all_reduce_bytes(counts, channel.rank, row_bytes, len(group)), weights)
        for index, (table, rows) in enumerate(zip(group, held, strict=True)):
            after = unions[index] / rows.num_rows if rows.num_rows else 0.0
            kind, by = table.kind, name_of(scheme)
            record = self.records.book(table.name, kind, by, formats, rows.density, after, len(group))
            part = weights[index] / sum(weights) if any(weights) else 1 / len(group)
            dense = ring_all_reduce_bytes(rows.num_rows * row_bytes, world_size)
            native = stock[index] if table.gradient.is_sparse else dense
            record.add(sent[index], lambda part=part: part * (expected_bytes(scheme, demand) - saved), native)


def _key(group: Group) -> str:
    """Return the name of a group, which is the same in the other order of DDP's first backward."""
    return " + ".join(sorted(table.name for table in group))


def pinned_by(scheme: Scheme | TwoLevel) -> str:
    """Return the words of a log line that say how to have a choice of "auto", and so its bits, in each run."""
    return f'rows="{name_of(scheme)}" pins it'


def _subject(group: Group, scheme: str | Scheme | TwoLevel) -> Subject:
    lines = [_describe(table.gradient, scheme) for table in group]
    if len(group) == 1:
        return Subject(f"parameter {group[0].name!r}", lines[0])
    first, last = group[0].name, group[-1].name
    named = [f"parameter {table.name!r}: {line}" for table, line in zip(group, lines, strict=True)]
    return Subject(f"{len(group)} small parameters together, {first!r} to {last!r}", "\n".join(named))


def _describe(gradient: Tensor, scheme: str | Scheme | TwoLevel) -> str:
    text = scheme if isinstance(scheme, str) else scheme.describe()
    return f"{gradient.dtype} {list(gradient.shape)} {gradient.layout}, mean, rows={text}"


@dataclass(frozen=True, eq=False)
class Started:
    """An all-reduce under way."""

    work: dist.Work
    lost: Callable[[BaseException], LostPeerError]

    def wait(self) -> None:
        """Wait for the sum. On a GPU the current stream waits, and the thread does not.

        Raises:
            LostPeerError: a peer died, did not take part within the timeout, or hung up.
        """
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.lost(error) from error


@dataclass(frozen=True, eq=False)
class DenseBucket:
    """A bucket without tables, whose all-reduces are under way."""

    started: tuple[Started, ...]
    buffer: Tensor
    job: JobTimes
    end: Callable[[], None]

    def wait(self) -> None:
        """Wait for the sums; raise LostPeerError, as `Started.wait` does."""
        try:
            for one in self.started:
                one.wait()
        finally:
            self.end()
        self._note_end()

    def future(self) -> Future[Tensor]:
        """Return a future of the buffer, as DDP expects it."""
        if self.started:
            return self.started[-1].work.get_future().then(self._ended)
        self.end()
        future: Future[Tensor] = Future()
        future.set_result(self.buffer)
        return future

    def _ended(self, done: Future[list[Tensor]]) -> Tensor:
        self.end()
        done.value()  # raises the error of the all-reduce
        self._note_end()
        return self.buffer

    def _note_end(self) -> None:
        self.job.ended = self.job.ended or time.perf_counter()


class NativeAllReduce:
    """The all-reduce of dense gradients beside the lane, started on the thread of the hook.

    So they are in the order of the buckets, which all ranks share. On a GPU that is on the communicator and after the
    kernels after which stock DDP has them: a communicator of the lane's own would run beside that of the model in an
    order that differs from rank to rank, of which torch and NCCL warn. On the CPU the group is one of the lane, which
    hangs up when this rank fails, so that ranks that wait in an all-reduce fail too.

    Args:
        process_group: a group of the ranks of the lane.
        account: the statistics that count the bytes.
        lost: returns the error to raise when torch lost a peer, see `Lane.lost_to`.
        is_own: whether the group is the model's, as on NCCL.
        sparse: names of the tables whose sparse gradients it can sum.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        account: GradientSync,
        lost: Callable[[BaseException], LostPeerError],
        is_own: bool = False,
        sparse: Container[str] = (),
    ) -> None:
        self._lost, self.sparse = lost, sparse
        self.process_group, self.is_own = process_group, is_own
        self.account = account
        self._moved_bytes = 0
        self._asked_bytes = 0  # setup, as other agreements are
        self._jobs: list[JobTimes] = []

    def start(self, gradients: Sequence[Tensor]) -> tuple[Started, ...]:
        """Start averaging over the ranks, in place.

        It scales before it sums, and by a product, as DDP without a hook does, so the bits are stock DDP's. The
        model's own group gets the parts of a bucket at once, for which NCCL launches one kernel, not one for each.
        """
        if not self.is_own:
            return tuple(map(self._start, gradients))
        return tuple(self._start(*alike) for alike in by_dtype(gradients))

    def start_bucket(self, gradients: Sequence[Tensor], buffer: Tensor, job: JobTimes) -> DenseBucket:
        """Start like `start`, for a bucket that has nothing else."""
        job.started = time.perf_counter()
        self._jobs.append(job)
        started = self.start(gradients)
        end = show(lambda: f"all_reduce {job.load.name}")
        if started and enabled():  # not only when somebody waits for it
            started[-1].work.get_future().add_done_callback(lambda done: end())
        return DenseBucket(started, buffer, job, end)

    def start_sparse(self, name: str, gradient: Tensor, job: JobTimes) -> Future[Tensor]:
        """Start averaging a sparse gradient by torch's own all-reduce, which adds in rank order, as it must.

        Its thread coalesces the gradient beside backward, and then replaces the indices and values of the tensor that
        it was given. That is a shallow copy: the gradient itself is the user's again as soon as a backward fails.
        """
        gradient = gradient.detach()
        job.started = time.perf_counter()
        self._jobs.append(job)
        over = show(lambda: f"all_reduce {name}")
        work = dist.all_reduce(gradient, group=self.process_group, async_op=True)
        assert work is not None, "hooks run on ranks of the group"
        world_size, lost = self.process_group.size(), self._lost  # its thread must not end the group

        future: Future[Tensor] = Future()  # one that `then` makes would lose the type of an exception

        def end(done: Future[list[Tensor]]) -> None:
            over()
            try:
                done.value()
            except RuntimeError as error:
                future.set_exception(lost(error))  # type: ignore[arg-type]
                return
            gradient._values().div_(world_size)  # as DDP does with sparse ones
            job.ended = time.perf_counter()
            future.set_result(gradient)

        work.get_future().add_done_callback(end)
        return future

    def ask(self, flag: bool) -> Callable[[], list[float]]:
        """Start to gather a flag of each rank; return a function that waits for them, as `Started.wait` does."""
        flags = torch.zeros(self.process_group.size())
        flags[self.process_group.rank()] = float(flag)
        work = dist.all_reduce(flags, group=self.process_group, async_op=True)
        assert work is not None, "hooks run on ranks of the group"
        self._asked_bytes += ring_all_reduce_bytes(flags.nbytes, len(flags))
        started = Started(work, self._lost)
        return lambda: started.wait() or flags.tolist()

    def count(self, num_bytes: int) -> None:
        """Count an all-reduce of a tensor of ``num_bytes``; `finish_step` adds it to the statistics."""
        self.count_moved(ring_all_reduce_bytes(num_bytes, self.process_group.size()))

    def count_rows(self, summed_bytes: float, num_tables: int) -> None:
        """Count torch's all-reduces of sparse gradients, of which only the rows of sums are known: an estimate.

        Each rank is taken to hold what `DENSIFICATION_EXPONENT` says that such a sum is made of.

        Args:
            summed_bytes: bytes of ids and rows of all sums of a step.
        """
        size = self.process_group.size()
        held = math.ceil(summed_bytes / size**DENSIFICATION_EXPONENT)
        self.count_moved(sparse_all_reduce_bytes([1] * size, 0, held - 8, num_tables))  # one long row

    def count_moved(self, num_bytes: int) -> None:
        """Count bytes that this rank sends in a sum of another kind."""
        self._moved_bytes += num_bytes

    def finish_step(self, lane: Lane, steps: int = 1) -> None:
        """Add the bytes of a ring, and seconds, to the statistics, while no job of the lane runs, which adds too.

        Args:
            steps: number of steps that moved so many bytes each.
        """
        moved, self._moved_bytes = self._moved_bytes, 0
        if moved:
            scheme = "NCCL" if self.is_own else name_of(DENSE)
            record = self.account.records.book(OTHERS, "all-reduce", scheme, "dense")
            record.add(steps * moved, moved, steps * moved)
            lane.exchange.count_all_reduce(steps * moved)
        if self._asked_bytes:
            with lane.setting_up():
                lane.exchange.count_all_reduce(self._asked_bytes)
            self._asked_bytes = 0
        jobs, self._jobs = self._jobs, []
        until = 0.0
        for job in jobs:  # one after the other: the next one begins when the last one has ended
            lane.note_busy(max(job.started, until), job.ended)
            until = job.ended

    def _start(self, *gradients: Tensor) -> Started:
        group = self.process_group
        for gradient in gradients:
            gradient.mul_(1.0 / group.size())
            self.count(gradient.nbytes)
        if len(gradients) == 1:
            work = dist.all_reduce(gradients[0], group=group, async_op=True)
        else:
            work = group.allreduce_coalesced(list(gradients), dist.AllreduceCoalescedOptions())
        assert work is not None, "hooks run on ranks of the group"
        return Started(work, self._lost)


def route_asked_for() -> str:
    """Return the route of tables that the environment asks for, "auto" unless it is set.

    Raises:
        ValueError: the variable has another value than the legal ones.
    """
    legal = (AUTO, ROWS_AT_ONCE, Route.COLLECTIVE, Route.STAGED)
    asked = os.environ.get(ROUTE_VARIABLE, "auto")
    if asked not in legal:
        raise unknown(ROUTE_VARIABLE, asked, legal)
    return asked


def is_gloo(process_group: dist.ProcessGroup) -> bool:
    """Return whether Gloo itself does a group's collectives of tensors of a CPU, whatever the group was asked for."""
    return "cpu:gloo" in dist.get_backend_config(process_group)


def is_native(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the model's own group all-reduces tensors of this device, as NCCL does on a GPU.

    ``THINWIRE_ROUTE=collective`` says so of any group.
    """
    if route_asked_for() == Route.COLLECTIVE:
        return True
    return device.type == "cuda" and "nccl" in dist.get_backend_config(process_group).lower()
