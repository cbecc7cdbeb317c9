"""Exact means of gradients: synchronized on the lane, or by the all-reduce of a process group.

Synchronize the gradients of named parameters on a lane, and keep account of it.

Dense gradients as stock DDP sends them: by the all-reduce of a process group, straight from the hook.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.comm.agree import longest_of_all
from thinwire.comm.channel import Channel, Subject
from thinwire.comm.hosts import ranks_of_hosts
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import lost_peer, ring_all_reduce_bytes, sparse_all_reduce_bytes
from thinwire.gradients.tables import TableGradient, TableShape, plan_groups, share, stack, unstack
from thinwire.kernels import dispatch
from thinwire.observe.step import JobTimes, ParameterRecord
from thinwire.sparse import SparseRows
from thinwire.sync.choose import MIN_BYTES, Demand, rehearse, seen_byte_seconds
from thinwire.sync.cost import expected_bytes
from thinwire.sync.experience import Experience
from thinwire.sync.named import AUTO, DENSE, name_of, resolve
from thinwire.sync.scheme import Scheme, Unit
from thinwire.sync.synchronize import agree, chosen, dense_all_reduce, placed, synchronize
from thinwire.sync.two_level import TwoLevel

DENSE_PAUSE_STEPS = 50
"""For how many steps a table is all-reduced unread, at most, after steps in which most of its rows were non-zero: one
step after the first of them, then twice as many each time, because the next batch may be another."""
LEFT_SECONDS, LEFT_BYTES = 0.002, 512 * 1024
"""A table is left to what stock DDP does with it where that takes so few seconds and bytes: a synchronization of a tiny
table takes 3 ms of processors alone. On few bytes a short probe of the link can be wrong without doing harm."""
LEFT_ROOM = 2.0
"""A sparse table comes back when its sum has so many times the rows with which it would take as much: that number all
ranks see, and not how many rows the others held."""
LEFT_STEPS = 1000
"""For how many steps, before it is looked at again."""
LEFT = "native"
"""The scheme of such a table, in `Synchronizer.table`."""
MAX_EXPERIENCES = 64
"""Groups of which something is remembered; small tables may come together in other groups in every step."""

Group = Sequence[TableGradient]

_log = logging.getLogger("thinwire")


class GradientSync:
    """What to do with the gradient of each parameter: mean over ranks, exactly.

    Its methods are called by jobs of a lane, on all ranks in the same order.

    Small tables are stacked, see `thinwire.gradients.tables`, and a group of tables is one synchronization. With
    "auto",
    the first step of a group asks how many rows the ranks hold; each synchronization tells all ranks that number and
    the size of the union, from which `Experience` decides what the next one runs. So all ranks decide the same.
    """

    def __init__(self, scheme: str | Scheme | TwoLevel) -> None:
        self.scheme = resolve(scheme) or AUTO  # by a name it would be looked up in every step
        self.records: dict[str, ParameterRecord] = {}
        self.choices: dict[str, str] = {}  # under "auto": the scheme of a group's next step, by its parameters
        self.pauses: dict[str, int] = {}  # steps for which a table is all-reduced without looking for zeros
        self.unions: dict[str, int] = {}  # rows of a table that any rank held in its last step
        self.may_leave = False  # whether tables can be left to what stock DDP does
        self.left: dict[str, int] = {}  # tables that are, and for how many steps more
        self._most_rows: dict[str, float] = {}  # of the sum of such a sparse one, or it comes back to the lane
        self.rehearsals = 0
        self.experiences: dict[str, Experience] = {}  # under "auto": what was learned of a group
        self._rehearsed: dict[str, int] = {}  # how often a table was part of a rehearsal
        self._dense_runs: dict[str, int] = {}  # how often in a row a table was found dense
        self._groups: dict[str, str] = {}  # the group that a table was in last

    def shape(self, table: TableGradient) -> TableShape:
        """What all ranks know of a table; the same on all of them between two steps of the table."""
        layout, gradient = table.layout, table.gradient
        union = self.unions.get(table.name)
        return TableShape(table.name, layout.num_rows, layout.width, gradient.dtype, gradient.device, union)

    def tables(self, lane: Lane, tables: Group) -> list[Tensor]:
        """The mean of each gradient, as `TableGradient.store` returns it; small ones travel together."""
        if lane.world_size == 1:
            return [table.gradient for table in tables]
        means: dict[str, Tensor] = {}
        sparse = []
        for table in tables:
            if self._is_all_reduced(table):
                self.dense(lane, table.name, table.gradient)
                means[table.name] = table.gradient
            else:
                sparse.append(table)
        for places in plan_groups([self.shape(table) for table in sparse]):
            group = [sparse[place] for place in places]
            for table, mean in zip(group, self._synchronize(lane, group), strict=True):
                means[table.name] = mean
        return [means[table.name] for table in tables]

    def dense(self, lane: Lane, name: str, gradient: Tensor, account: str | None = None) -> None:
        """The mean of a dense gradient, all-reduced in place; booked on ``account`` if it is not ``name``."""
        channel = lane.channel(Subject(name, _describe(gradient, DENSE)))
        before = lane.exchange.traffic.sent_bytes
        channel.open()
        dense_all_reduce(gradient, channel, 1.0 / lane.world_size)
        record = self._entry(account or name)
        record.kind, record.scheme, record.formats, record.fused = "all-reduce", name_of(DENSE), "dense", 1
        record.density = record.density_after = 1.0
        size_bytes = gradient.numel() * gradient.element_size()
        record.add(
            lane.exchange.traffic.sent_bytes - before,
            partial(expected_bytes, DENSE, lane.world_size, 1, size_bytes, 1, 1),
            ring_all_reduce_bytes(size_bytes, lane.world_size),
        )

    def leaves(self, name: str) -> bool:
        """Whether stock's own all-reduce takes a table in this step, as all ranks decided in an earlier one."""
        steps = self.left.get(name, 0)
        if steps > 0:
            self.left[name] = steps - 1
        return steps > 0

    def see_sum(self, name: str, mean: Tensor) -> None:
        """Of a table that is left: where the sum has too many rows, which all ranks see, it comes back to the lane."""
        self.unions[name] = rows = mean._nnz()
        if rows > self._most_rows.get(name, 0):
            self.left[name] = 0

    def book_left(self, name: str, mean: Tensor, held: int, world_size: int) -> int:
        """A sparse gradient was all-reduced by torch, which returns bytes: all of its rows, once for each other rank.

        Ranks pass on rows of others, of which they are not told how many; of all ranks together that is what they send.
        """
        row_bytes, union = mean._values()[:1].nbytes, mean._nnz()
        moved = sparse_all_reduce_bytes([held] * world_size, 0, row_bytes)
        record = self._entry(name)
        record.kind, record.scheme, record.formats, record.fused = "sparse gradient", LEFT, "coo", 1
        record.density, record.density_after = (rows / max(1, mean.shape[0]) for rows in (held, union))
        record.add(moved, moved, moved)
        return moved

    def learned(self) -> dict[str, Any]:
        """What the next decisions follow from, besides times: plain values, for `recall`."""
        windows = {key: [astuple(demand) for demand in one.demands] for key, one in self.experiences.items()}
        left = {"left": dict(self.left), "most_rows": dict(self._most_rows)}
        return {"windows": windows, **left, "dense_runs": dict(self._dense_runs)}

    def recall(self, learned: Mapping[str, Any] | None) -> None:
        """Go on where another run ended; None for one that learned nothing. Times are of another machine, maybe."""
        self.experiences = {}
        self.left = dict(learned["left"]) if learned else {}
        self._most_rows = dict(learned.get("most_rows", {})) if learned else {}
        self._dense_runs = dict(learned["dense_runs"]) if learned else {}
        for key, window in (learned["windows"] if learned else {}).items():
            last = self.choices.get(key)
            self.experiences[key] = Experience()
            if last is not None:
                self.experiences[key].recall(resolve(last) or DENSE, [Demand(*numbers) for numbers in window])

    def finish_step(self) -> None:
        """Close the books on a step."""
        for record in self.records.values():
            record.finish_step()

    def _is_all_reduced(self, table: TableGradient) -> bool:
        """Whether a dense gradient is not looked at for zeros in this step."""
        if table.gradient.is_sparse:
            return False
        if self.scheme != AUTO:
            return self.scheme in (DENSE, name_of(DENSE))
        paused = self.pauses.get(table.name, 0) > 0
        if paused:
            self.pauses[table.name] -= 1
        return paused

    def _synchronize(self, lane: Lane, group: Group) -> list[Tensor]:
        """One synchronization of all tables of a group."""
        learned = self._experience(group) if self.scheme == AUTO and lane.world_size > 1 else None
        plan = self._plan(group, learned)
        channel = lane.channel(_subject(group, plan))
        before = lane.exchange.traffic.sent_bytes
        held: list[SparseRows] = []

        def prepare() -> SparseRows:
            held.extend(table.rows() for table in group)
            return stack(held)

        def choose(rows: SparseRows, channel: Channel) -> Scheme | TwoLevel:
            point = None if learned is None else learned.take(sum(channel.held) / channel.world_size)
            return chosen(rows, channel) if point is None or point.is_dense else placed(point, channel)

        rows, scheme = agree(prepare, plan, channel, choose)
        unready_calls = dispatch.unready_calls()
        started = time.perf_counter()
        scale = 1.0 / lane.world_size
        if scheme.is_dense and len(group) == 1 and not group[0].gradient.is_sparse:
            dense_all_reduce(group[0].gradient, channel, scale)
            seconds = time.perf_counter() - started
            unions, means = [rows.num_rows], [group[0].gradient]
        else:
            totals = unstack(synchronize(rows, scheme, channel, scale), [table.num_rows for table in held])
            seconds = time.perf_counter() - started
            unions = [total.ids.numel() for total in totals]
            means = [table.store(mine, total) for table, mine, total in zip(group, held, totals, strict=True)]
        self._pause(group, scheme)
        self._record(group, channel, scheme, held, unions, before)
        self._remember(group, unions)
        if learned is not None:
            demand = Demand.of(channel.held, rows.num_rows, rows.width, rows.values.element_size(), sum(unions))
            is_typical = unready_calls == dispatch.unready_calls()
            self._learn(lane, learned, channel, scheme, demand, seconds if is_typical else None)
            self._decide_next(group, learned, channel, demand)
        return means

    def _plan(self, group: Group, learned: Experience | None) -> str | Scheme | TwoLevel:
        """What all ranks run, or "auto" where they tell how many rows they hold first."""
        if self.scheme != AUTO:
            return self.scheme
        return AUTO if learned is None or learned.is_timed else self.choices.get(_key(group), AUTO)

    def _experience(self, group: Group) -> Experience:
        key = _key(group)
        if key not in self.experiences:
            rehearsals = max(self._rehearsed.get(table.name, 0) for table in group)
            self.experiences[key] = Experience(rehearsals=rehearsals)
            if len(self.experiences) > MAX_EXPERIENCES:
                del self.experiences[next(iter(self.experiences))]
        return self.experiences[key]

    def _pause(self, group: Group, scheme: Scheme | TwoLevel) -> None:
        """Whether a dense gradient is looked at in the next steps."""
        (table, *others) = group
        if others or table.gradient.is_sparse:
            return
        run = self._dense_runs.get(table.name, 0) if scheme.is_dense else -1
        self._dense_runs[table.name] = run + 1
        if scheme.is_dense:
            self.pauses[table.name] = min(DENSE_PAUSE_STEPS, 2**run)

    def _remember(self, group: Group, unions: Sequence[int]) -> None:
        key = _key(group)
        for table, union in zip(group, unions, strict=True):
            self.unions[table.name] = union
            last = self._groups.setdefault(table.name, key)
            if last != key:
                self.choices.pop(last, None)
                self._groups[table.name] = key

    def _learn(
        self,
        lane: Lane,
        learned: Experience,
        channel: Channel,
        scheme: Scheme | TwoLevel,
        demand: Demand,
        seconds: float | None,
    ) -> None:
        """From a timed step, whose seconds on the slowest rank all ranks are told; None if they tell nothing."""
        machine = channel.machine()
        learned.know(machine, ranks_of_hosts(channel.exchange.hosts))
        if not learned.is_told or machine is None:
            return
        with lane.setting_up():
            slowest = longest_of_all(channel.exchange, None if dispatch.is_compiling() else seconds)
        if slowest is None:
            learned.put_off()
            return
        expected = learned.estimate(scheme, demand) if isinstance(scheme, Scheme) else None
        if isinstance(scheme, Scheme) and expected is not None and expected.sent_bytes >= MIN_BYTES:
            lane.saw(seen_byte_seconds(scheme, demand, machine, expected.sent_bytes, slowest))
        learned.know(channel.machine(), ranks_of_hosts(channel.exchange.hosts))
        learned.learn(_unplaced(scheme), demand, slowest)

    def _decide_next(self, group: Group, learned: Experience, channel: Channel, demand: Demand) -> None:
        """From numbers that all ranks know."""
        key = _key(group)
        choice = learned.observe(demand)
        last, self.choices[key] = self.choices.get(key), AUTO if choice.is_dense else name_of(choice)
        points = learned.hopeful(demand)
        reason = self._leave(group, learned, channel)
        if reason:
            if not self._entry(group[0].name).reason.startswith(LEFT):  # else it was said when the group was left first
                self._explain(group, reason, channel.rank)
            return
        if points:
            learned.begin(rehearse(points, demand.held))
            self.rehearsals += 1
        for table in group:
            self._rehearsed[table.name] = learned.rehearsals
        if self.choices[key] != last:
            self._explain(group, learned.explain(), channel.rank)

    def _leave(self, group: Group, learned: Experience, channel: Channel) -> str:
        """Leave tables to stock DDP where that takes next to nothing, and say why; "" if they stay.

        Those that came back stay until all batches of a window are small.
        """
        machine, known = channel.machine(), [self.left.get(table.name) for table in group]
        if not self.may_leave or machine is None or not all(map(_can_leave, group)):
            return ""
        if any(steps is not None for steps in known) and not learned.is_settled:
            return ""
        dense = [table for table in group if not table.gradient.is_sparse]
        held, now = max(demand.held for demand in learned.demands), learned.demands[-1]
        moved = sum(ring_all_reduce_bytes(table.gradient.nbytes, channel.world_size) for table in dense)
        if len(dense) < len(group):
            counts = [math.ceil(held)] * channel.world_size
            moved += sparse_all_reduce_bytes(counts, 0, now.row_bytes, len(group) - len(dense))
        rounds = 3 * max(0, len(group) - len(dense) - 1) * machine.round_seconds
        seconds = rounds + moved * max(machine.byte_seconds, machine.reduced_byte_seconds)
        if moved > LEFT_BYTES or seconds > LEFT_SECONDS:
            return ""
        for table in group:
            self.left[table.name] = LEFT_STEPS
            self._entry(table.name).leave(LEFT)
        used = max(moved / LEFT_BYTES, seconds / LEFT_SECONDS)
        self._limit_rows(group, LEFT_ROOM / used * max(1.0, held) / max(1.0, now.held) if used else math.inf)
        return f"{LEFT} ({moved / 1e6:.3f} MB in {1e3 * seconds:.1f} ms) instead of {learned.explain()}"

    def _limit_rows(self, group: Group, growth: float) -> None:
        """Of tables that are left: they come back when their sum has so many times the rows of this step's."""
        for table in group:
            self._most_rows[table.name] = growth * (1 + self.unions[table.name])

    def _explain(self, group: Group, reason: str, rank: int) -> None:
        for table in group:
            self._entry(table.name).reason = reason
        if rank == 0:
            _log.info("%s: %s", _key(group), reason)

    def _record(
        self,
        group: Group,
        channel: Channel,
        scheme: Scheme | TwoLevel,
        held: Sequence[SparseRows],
        unions: Sequence[int],
        sent_before: int,
    ) -> None:
        """Book a synchronization. Each table pays for the rows that this rank held and those in its sum."""
        world_size, itemsize = channel.world_size, held[0].values.element_size()
        num_rows, row_bytes = sum(rows.num_rows for rows in held), held[0].width * itemsize
        mean = sum(channel.held) / world_size
        union = sum(unions)
        weights = [rows.ids.numel() + union for rows, union in zip(held, unions, strict=True)]
        sent = share(channel.exchange.traffic.sent_bytes - sent_before, weights)
        formats = ", ".join(
            f"{phase.name.lower()} {'/'.join(sorted(formats))}" for phase, formats in channel.formats_sent.items()
        )
        own = sum(rows.ids.numel() for rows in held)  # ranks tell their blocks or elements, where those travel
        counts = channel.held if scheme.unit is Unit.ROWS else [own] * world_size
        stock = share(sparse_all_reduce_bytes(counts, channel.rank, row_bytes, len(group)), weights)
        for place, (table, rows) in enumerate(zip(group, held, strict=True)):
            record = self._entry(table.name)
            record.kind, record.scheme, record.formats, record.fused = table.kind, name_of(scheme), formats, len(group)
            record.density = rows.density
            record.density_after = unions[place] / rows.num_rows if rows.num_rows else 0.0
            part = weights[place] / sum(weights) if any(weights) else 1 / len(group)
            dense = ring_all_reduce_bytes(rows.num_rows * row_bytes, world_size)
            predicted = partial(_predicted, part, scheme, world_size, num_rows, row_bytes, mean, union, itemsize)
            record.add(sent[place], predicted, stock[place] if table.gradient.is_sparse else dense)

    def _entry(self, name: str) -> ParameterRecord:
        return self.records.setdefault(name, ParameterRecord(name))


def _predicted(part: float, scheme: Scheme | TwoLevel, *sizes: Any) -> float:
    """Bytes of one of the tables of a group, for `Synchronizer.table`."""
    return part * expected_bytes(scheme, *sizes)


def _key(group: Group) -> str:
    return " + ".join(table.name for table in group)


def _can_leave(table: TableGradient) -> bool:
    """Whether torch sums such a gradient as exactly; it has no sparse sum of sixteen-bit values on Gloo."""
    return not table.gradient.is_sparse or table.gradient.dtype in (torch.float32, torch.float64)


def _unplaced(point: Scheme | TwoLevel) -> Scheme | TwoLevel:
    """As a candidate is named, which is not told the hosts."""
    return TwoLevel(point.between) if isinstance(point, TwoLevel) else point


def _subject(group: Group, scheme: str | Scheme | TwoLevel) -> Subject:
    lines = [_describe(table.gradient, scheme) for table in group]
    if len(group) == 1:
        return Subject(f"parameter {group[0].name!r}", lines[0])
    first, last = group[0].name, group[-1].name
    named = [f"parameter {table.name!r}: {line}" for table, line in zip(group, lines, strict=True)]
    return Subject(f"{len(group)} small parameters together, {first!r} to {last!r}", "\n".join(named))


def _describe(gradient: Tensor, scheme: str | Scheme | TwoLevel) -> str:
    text = scheme if isinstance(scheme, str) else scheme.describe()
    return f"{gradient.dtype} {list(gradient.shape)} {gradient.layout}, mean, scheme={text}"


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
