"""Exact means of gradients, with statistics: synchronized on the lane, or all-reduced by a process group.

Dense gradients are sent as stock DDP sends them, by the all-reduce of a process group, straight from the hook.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
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
from thinwire.errors import unknown
from thinwire.gradients.tables import TableGradient, TableShape, plan_groups, share, stack, unstack
from thinwire.kernels import dispatch
from thinwire.observe.step import JobTimes, ParameterRecord, enabled, show
from thinwire.sparse import SparseRows
from thinwire.sync.choose import MIN_BYTES, TORCHS, Demand, Rehearsal, Route, seen_byte_seconds
from thinwire.sync.cost import expected_bytes
from thinwire.sync.experience import Experience
from thinwire.sync.named import AUTO, DENSE, name_of, resolve
from thinwire.sync.scheme import Scheme, Unit
from thinwire.sync.synchronize import agree, chosen, dense_all_reduce, placed, sparse_all_reduce, synchronize
from thinwire.sync.two_level import TwoLevel

DENSE_PAUSE_STEPS = 50
"""Largest number of steps for which a table is all-reduced unread, after steps in which most of its rows were non-zero:
one step after the first of them, then twice that number each time, because the next batch may differ."""
LEFT_SECONDS, LEFT_BYTES = 0.002, 512 * 1024
"""Largest seconds and bytes at which a table is left to stock DDP: a synchronization of a tiny table costs 3 ms of
processors alone. On few bytes a short probe of the link can be wrong without doing harm."""
LEFT_ROOM = 2.0
"""Ratio of rows in the sum, to those of equal cost, at which a sparse table comes back: all ranks know the rows of the
sum, and not those that the others held."""
LEFT_STEPS = 1000
"""Number of steps for which a table is left, before it is examined again."""
MOST_ALONE = 2
"""Largest number of small sparse tables of one width that are left one by one: more travel together on the lane. Each
costs torch three rounds. 8 tables of a DLRM made a step 1.09 to 1.14 times as long as stock DDP's, and together 0.75 to
0.87 times."""
LEFT = "native"
"""Scheme of a table left to stock DDP, in `Synchronizer.table`."""
ROUTE_VARIABLE = "THINWIRE_ROUTE"
ROWS_OF_A_MASK = 1 << 20
"""Most rows of a table whose touched rows are counted by a mask: its zeros take as long as sorting 1000 ids."""
MAX_EXPERIENCES = 64
"""Largest number of groups with an `Experience`; small tables may be grouped differently in every step."""

Group = Sequence[TableGradient]

_log = logging.getLogger("thinwire")


class GradientSync:
    """The exact mean over ranks of the gradient of each parameter.

    Its methods are called by jobs of a lane, on all ranks in the same order.

    Small tables are stacked, see `thinwire.gradients.tables`, and a group of tables is one synchronization. With
    "auto", the first step of a group gathers the number of rows of each rank; after each synchronization all ranks
    know that number and the size of the union, from which `Experience` decides what the next one runs. So all ranks
    decide the same.
    """

    def __init__(self, scheme: str | Scheme | TwoLevel) -> None:
        self.scheme = resolve(scheme) or AUTO  # a name would be looked up in every step
        self.records: dict[str, ParameterRecord] = {}
        self.choices: dict[str, str] = {}  # under "auto": the scheme of a group's next step, by its parameters
        self.pauses: dict[str, int] = {}  # steps for which a table is all-reduced without looking for zeros
        self.unions: dict[str, int] = {}  # number of rows in the sum of a table's last step
        self.may_leave = False  # whether tables can be left to the all-reduce beside the lane
        self.is_own = False  # whether that is by the model's own group, as on NCCL, which sums no sparse tensors
        self.left: dict[str, int] = {}  # tables that are, and the number of steps left
        self._left_alone: dict[str, object] = {}  # small sparse ones that no other travelled with, and what is alike
        self._most_rows: dict[str, float] = {}  # of the sum of such a sparse one, or it comes back to the lane
        self.rehearsals = 0
        self.experiences: dict[str, Experience] = {}  # under "auto": measurements of a group
        self._rehearsed: dict[str, int] = {}  # how often a table was part of a rehearsal
        self._dense_runs: dict[str, int] = {}  # number of consecutive steps in which a table was dense
        self._groups: dict[str, str] = {}  # the group that a table was in last

    def shape(self, table: TableGradient) -> TableShape:
        """Return the properties of a table that all ranks know; the same on all of them between two steps."""
        layout, gradient = table.layout, table.gradient
        union = self.unions.get(table.name)
        return TableShape(table.name, layout.num_rows, layout.width, gradient.dtype, gradient.device, union)

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
        for places in plan_groups([self.shape(table) for table in sparse]):
            group = [sparse[place] for place in places]
            for table, mean in zip(group, self._synchronize(lane, group), strict=True):
                means[table.name] = mean
        return [means[table.name] for table in tables]

    def dense(self, lane: Lane, name: str, gradient: Tensor, account: str | None = None) -> None:
        """All-reduce the mean of a dense gradient in place, counted under ``account`` if given, or ``name``."""
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
        """Return whether stock's own all-reduce synchronizes a table in this step, as all ranks decided before.

        Called once a step for each table, in the hook, so that a dense one goes with the rest of its bucket.
        """
        if self.is_own and self.scheme == DENSE:
            return True
        steps = self.left.get(name, 0)
        if steps > 0:
            self.left[name] = steps - 1
            self._entry(name).leave(LEFT)
        return steps > 0

    def see_sum(self, name: str, mean: Tensor) -> None:
        """Note the sum of a table that is left; with too many rows, which all ranks know, it comes back to the lane."""
        self.unions[name] = rows = mean._nnz()
        if rows > self._most_rows.get(name, 0):
            self.left[name] = 0

    def book_left(self, name: str, mean: Tensor, held: int, world_size: int) -> int:
        """Count and return the bytes of torch's sparse all-reduce: all rows of a gradient, once for each other rank.

        Ranks forward an unknown number of rows of others; over all ranks together the total is exact.
        """
        row_bytes, union = mean._values()[:1].nbytes, mean._nnz()
        moved = sparse_all_reduce_bytes([held] * world_size, 0, row_bytes)
        record = self._entry(name)
        record.kind, record.scheme, record.formats, record.fused = "sparse gradient", LEFT, "coo", 1
        record.density, record.density_after = (rows / max(1, mean.shape[0]) for rows in (held, union))
        record.add(moved, moved, moved)
        return moved

    def learned(self) -> dict[str, Any]:
        """Return what the next decisions depend on, besides times, as plain values for `recall`."""
        windows = {key: [astuple(demand) for demand in one.demands] for key, one in self.experiences.items()}
        left = {"left": dict(self.left), "most_rows": dict(self._most_rows)}
        return {"windows": windows, **left, "dense_runs": dict(self._dense_runs)}

    def recall(self, learned: Mapping[str, Any] | None) -> None:
        """Restore the result of `learned`, or nothing for None. Times are left out: they may be of another machine."""
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
        """Close the statistics of a step, and bring small tables back that can travel together.

        In the first step each comes alone, because it is not known yet which ones are small.
        """
        alone, self._left_alone = self._left_alone, {}
        kinds = Counter(alone.values())
        self.left.update({name: 0 for name, kind in alone.items() if kinds[kind] > MOST_ALONE})
        for record in self.records.values():
            record.finish_step()

    def _is_all_reduced(self, table: TableGradient) -> bool:
        """Return whether a dense gradient is not scanned for zeros in this step."""
        if table.gradient.is_sparse:
            return False
        if self.scheme != AUTO:
            return self.scheme in (DENSE, name_of(DENSE))
        paused = self.pauses.get(table.name, 0) > 0
        if paused:
            self.pauses[table.name] -= 1
        return paused

    def _synchronize(self, lane: Lane, group: Group) -> list[Tensor]:
        """Synchronize all tables of a group at once."""
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
            is_torchs = learned is not None and scheme == TORCHS
            total = sparse_all_reduce(rows, channel, scale) if is_torchs else synchronize(rows, scheme, channel, scale)
            totals = unstack(total, [table.num_rows for table in held])
            seconds = time.perf_counter() - started
            unions = [total.ids.numel() for total in totals]
            means = [table.store(mine, total) for table, mine, total in zip(group, held, totals, strict=True)]
        self._pause(group, scheme)
        self._record(group, channel, scheme, held, unions, before)
        self._remember(group, unions)
        if learned is not None:
            demand = Demand.of(channel.held, rows.num_rows, rows.width, rows.values.element_size(), sum(unions))
            demand = replace(demand, is_torchs=self._may_be_torchs(group))
            is_typical = unready_calls == dispatch.unready_calls()
            self._learn(lane, learned, channel, scheme, demand, seconds if is_typical else None)
            self._decide_next(group, learned, channel, demand)
        return means

    def _plan(self, group: Group, learned: Experience | None) -> str | Scheme | TwoLevel:
        """Return the scheme that all ranks run, or "auto" if they gather their numbers of rows first."""
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
        """Decide whether a dense gradient is scanned in the next steps."""
        (table, *others) = group
        if others or table.gradient.is_sparse:
            return
        run = self._dense_runs.get(table.name, 0) if scheme.is_dense else -1
        self._dense_runs[table.name] = run + 1
        if scheme.is_dense and self.is_own:
            self.left[table.name] = min(DENSE_PAUSE_STEPS, 2**run)
        elif scheme.is_dense:
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
        """Learn from a timed step, whose longest seconds are gathered from all ranks; None if they mean nothing."""
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
        is_telling = expected is not None and expected.sent_bytes >= MIN_BYTES and not channel.codes_values
        if is_telling and isinstance(scheme, Scheme) and expected is not None:  # else fewer bytes would look like speed
            lane.saw(seen_byte_seconds(scheme, demand, machine, expected.sent_bytes, slowest))
        learned.know(channel.machine(), ranks_of_hosts(channel.exchange.hosts))
        learned.learn(_unplaced(scheme), demand, slowest)

    def _decide_next(self, group: Group, learned: Experience, channel: Channel, demand: Demand) -> None:
        """Decide the next step from numbers that all ranks know."""
        key = _key(group)
        choice = learned.observe(demand)
        is_asked = choice.is_dense or (demand.is_torchs and choice == TORCHS)
        last, self.choices[key] = self.choices.get(key), AUTO if is_asked else name_of(choice)
        points = learned.hopeful(demand)
        reason = self._leave(group, learned, channel)
        if reason:
            if not self._entry(group[0].name).reason.startswith(LEFT):  # else it is logged already
                self._explain(group, reason, channel.rank)
            return
        if points:
            learned.begin(Rehearsal(points, demand.held))
            self.rehearsals += 1
        for table in group:
            self._rehearsed[table.name] = learned.rehearsals
        if self.choices[key] != last:
            self._explain(group, learned.explain(), channel.rank)

    def _leave(self, group: Group, learned: Experience, channel: Channel) -> str:
        """Leave tables to stock DDP if that is faster or costs next to nothing; return the reason, "" if they stay.

        Those that came back go again at once if a step shows that it is faster, else if a whole window of batches is
        small.
        """
        machine, known = channel.machine(), [self.left.get(table.name) for table in group]
        if not self.may_leave or machine is None or not all(map(self._can_leave, group)):
            return ""
        if any(steps is not None for steps in known) and not (learned.is_settled or learned.is_torchs):
            return ""
        dense = [table for table in group if not table.gradient.is_sparse]
        held, now = max(demand.held for demand in learned.demands), learned.demands[-1]
        moved = sum(ring_all_reduce_bytes(table.gradient.nbytes, channel.world_size) for table in dense)
        if len(dense) < len(group):
            counts = [math.ceil(held)] * channel.world_size
            moved += sparse_all_reduce_bytes(counts, 0, now.row_bytes, len(group) - len(dense))
        rounds = 3 * max(0, len(group) - len(dense) - 1) * machine.round_seconds
        seconds = rounds + moved * max(machine.byte_seconds, machine.reduced_byte_seconds)
        if learned.is_torchs:
            growth = LEFT_ROOM * max(demand.union for demand in learned.demands) / max(1.0, now.union)
        elif moved <= LEFT_BYTES and seconds <= LEFT_SECONDS:
            used = max(moved / LEFT_BYTES, seconds / LEFT_SECONDS)
            growth = LEFT_ROOM / used * max(1.0, held) / max(1.0, now.held) if used else math.inf
            if len(group) == 1 and not dense and self.shape(group[0]).is_small:
                self._left_alone[group[0].name] = group[0].layout.width, group[0].gradient.dtype
        else:
            return ""
        for table in group:
            self.left[table.name] = LEFT_STEPS
            self._entry(table.name).leave(LEFT)
        self._limit_rows(group, growth)
        if learned.is_torchs:
            return f"{LEFT}: {learned.explain()}"
        return f"{LEFT} ({moved / 1e6:.3f} MB in {1e3 * seconds:.1f} ms) instead of {learned.explain()}"

    def _can_leave(self, table: TableGradient) -> bool:
        """Return whether torch sums such a gradient as exactly; it has no sparse sum of sixteen-bit values on Gloo."""
        if table.gradient.is_sparse:
            return not self.is_own and table.gradient.dtype in (torch.float32, torch.float64)
        return True

    def _may_be_torchs(self, group: Group) -> bool:
        """Return whether torch's own sparse all-reduce may sum a group: one table, since it has no stacked ones."""
        (table, *others) = group
        return self.may_leave and not others and table.gradient.is_sparse and self._can_leave(table)

    def _limit_rows(self, group: Group, growth: float) -> None:
        """Set the rows of the sum at which left tables come back: ``growth`` times those of this step."""
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
        """Count a synchronization. Bytes are shared by the rows that this rank held and those in the sum."""
        world_size, itemsize = channel.world_size, held[0].values.element_size()
        num_rows, row_bytes = sum(rows.num_rows for rows in held), held[0].width * itemsize
        saved = channel.saved_bytes
        mean = sum(channel.held) / world_size
        union = sum(unions)
        weights = [rows.ids.numel() + union for rows, union in zip(held, unions, strict=True)]
        sent = share(channel.exchange.traffic.sent_bytes - sent_before, weights)
        formats = ", ".join(
            f"{phase.name.lower()} {'/'.join(sorted(formats))}" for phase, formats in channel.formats_sent.items()
        )
        formats += ", coded values" if saved else ""
        own = sum(rows.ids.numel() for rows in held)  # headers count blocks or elements, where those travel
        counts = channel.held if scheme.unit is Unit.ROWS else [own] * world_size
        stock = share(sparse_all_reduce_bytes(counts, channel.rank, row_bytes, len(group)), weights)
        for place, (table, rows) in enumerate(zip(group, held, strict=True)):
            record = self._entry(table.name)
            record.kind, record.scheme, record.formats, record.fused = table.kind, name_of(scheme), formats, len(group)
            record.density = rows.density
            record.density_after = unions[place] / rows.num_rows if rows.num_rows else 0.0
            part = weights[place] / sum(weights) if any(weights) else 1 / len(group)
            dense = ring_all_reduce_bytes(rows.num_rows * row_bytes, world_size)
            predicted = partial(_predicted, part, saved, scheme, world_size, num_rows, row_bytes, mean, union, itemsize)
            if scheme == TORCHS and self.scheme == AUTO:
                record.add(sent[place], sent[place], stock[place])
            else:
                record.add(sent[place], predicted, stock[place] if table.gradient.is_sparse else dense)

    def _entry(self, name: str) -> ParameterRecord:
        return self.records.setdefault(name, ParameterRecord(name))


def _predicted(part: float, saved_bytes: int, scheme: Scheme | TwoLevel, *sizes: Any) -> float:
    """Return the predicted bytes of one of the tables of a group, less those that codes of values saved."""
    return part * (expected_bytes(scheme, *sizes) - saved_bytes)


def _key(group: Group) -> str:
    return " + ".join(table.name for table in group)


def _unplaced(point: Scheme | TwoLevel) -> Scheme | TwoLevel:
    """Return a scheme as a candidate is named, without the hosts."""
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
        """Wait for the sum. On a GPU the current stream waits, and the thread does not.

        Raises:
            LostPeerError: a peer died, did not take part within the timeout, or hung up.
        """
        try:
            self.work.wait()
        except RuntimeError as error:
            raise lost_peer(error, self.rank, self.world_size) from error


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
        account: the statistics that count the bytes, under ``name``.
        scheme: name of the scheme in these statistics.
        is_own: whether the group is the model's, as on NCCL.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, account: GradientSync, name: str, scheme: str, is_own: bool = False
    ) -> None:
        self._process_group, self.is_own = process_group, is_own
        self._account = account
        self._name, self._scheme = name, scheme
        self._moved_bytes = 0
        self._jobs: list[JobTimes] = []
        self._tables: list[tuple[str, Tensor, int]] = []  # sparse ones, with the rows that this rank held

    def start(self, gradients: Sequence[Tensor]) -> tuple[Started, ...]:
        """Start averaging over the ranks, in place.

        It scales before it sums, and by a product, as DDP without a hook does: the bits are those of stock DDP. The
        model's own group gets the parts of a bucket at once, for which NCCL launches one kernel, not one for each.
        """
        if not self.is_own:
            return tuple(map(self._start, gradients))
        dtypes = dict.fromkeys(gradient.dtype for gradient in gradients)
        return tuple(self._start(*(one for one in gradients if one.dtype == dtype)) for dtype in dtypes)

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
        """Start averaging a sparse gradient in place by torch's own all-reduce, which adds in rank order, as it must.

        Its thread coalesces the gradient, beside backward, and DDP need not copy a mean that is the bucket itself.
        """
        job.started = time.perf_counter()
        self._jobs.append(job)
        held = _distinct_rows(gradient)
        over = show(lambda: f"all_reduce {name}")
        work = dist.all_reduce(gradient, group=self._process_group, async_op=True)
        assert work is not None, "hooks run on ranks of the group"
        rank, world_size = dist.get_rank(), self._process_group.size()  # its thread must not end the group

        future: Future[Tensor] = Future()  # one that `then` makes would lose the type of an exception

        def end(done: Future[list[Tensor]]) -> None:
            over()
            try:
                done.value()
            except RuntimeError as error:
                future.set_exception(lost_peer(error, rank, world_size))  # type: ignore[arg-type]
                return
            gradient._values().mul_(1.0 / world_size)
            self._account.see_sum(name, gradient)
            self._tables.append((name, gradient, held))
            job.ended = time.perf_counter()
            future.set_result(gradient)

        work.get_future().add_done_callback(end)
        return future

    def count(self, num_bytes: int) -> None:
        """Count an all-reduce of a tensor of ``num_bytes``; `finish_step` adds it to the statistics."""
        self._moved_bytes += ring_all_reduce_bytes(num_bytes, self._process_group.size())

    def finish_step(self, lane: Lane) -> None:
        """Add bytes, those of a ring, and seconds to the statistics, while no job of the lane runs, which adds too."""
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

    def _start(self, *gradients: Tensor) -> Started:
        group = self._process_group
        for gradient in gradients:
            gradient.mul_(1.0 / group.size())
            self.count(gradient.nbytes)
        if len(gradients) == 1:
            work = dist.all_reduce(gradients[0], group=group, async_op=True)
        else:
            work = group.allreduce_coalesced(list(gradients), dist.AllreduceCoalescedOptions())
        assert work is not None, "hooks run on ranks of the group"
        return Started(work, dist.get_rank(), group.size())


def _distinct_rows(gradient: Tensor) -> int:
    """Return the number of rows of a COO tensor, without coalescing it; a mask of its rows is seven times as fast."""
    ids = gradient._indices()[0]
    if gradient.is_coalesced() or gradient.shape[0] > ROWS_OF_A_MASK:
        return gradient._nnz() if gradient.is_coalesced() else ids.unique().numel()
    return int(torch.zeros(gradient.shape[0], dtype=torch.bool).index_fill_(0, ids, True).sum())


def route_asked_for() -> str:
    """Return the route of tables that the environment asks for, "auto" unless it is set.

    Raises:
        ValueError: the variable has another value than the legal ones.
    """
    legal = (AUTO, Route.COLLECTIVE, Route.STAGED)
    asked = os.environ.get(ROUTE_VARIABLE, "auto")
    if asked not in legal:
        raise unknown(ROUTE_VARIABLE, asked, legal)
    return asked


def is_native(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the model's own group all-reduces tensors of this device, as NCCL does those of a GPU.

    ``THINWIRE_ROUTE=collective`` says so of any group.
    """
    if route_asked_for() == Route.COLLECTIVE:
        return True
    return device.type == "cuda" and "nccl" in dist.get_backend_config(process_group).lower()
