"""Exact means of tables by collectives of the model's own process group, which is NCCL's for gradients on a GPU.

Nothing here runs on the lane: a communicator of NCCL takes calls from one thread in one order, which is the thread that
issues the buckets. All tables of a step are summed at once, behind the last bucket.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.collectives import Collectives
from thinwire.comm.hosts import ranks_of_hosts
from thinwire.comm.lane import Lane
from thinwire.comm.machine import Machine, measure_collectives
from thinwire.comm.process_group import ring_all_reduce_bytes, sparse_all_reduce_bytes
from thinwire.errors import ranks_told
from thinwire.gradients.exact import DENSE_PAUSE_STEPS, GradientSync, Started
from thinwire.gradients.tables import TableGradient, share
from thinwire.kernels import dispatch, stack_starts
from thinwire.observe.step import ParameterRecord
from thinwire.sync.choose import Demand, Point, Route
from thinwire.sync.collective import CollectiveSum, Counts, NamedGradient, plan, refusal, sent_bytes, stacks
from thinwire.sync.experience import Routes
from thinwire.sync.named import AGSPARSE_CODED, AUTO, ZEN, name_of
from thinwire.sync.scheme import Scheme

CANDIDATES = (ZEN, AGSPARSE_CODED)
COLLECTIVE = "by collectives"
"""What stands for the formats in `Synchronizer.table`, which both sides compute from the counts of rows."""
TIMED_SUMS, CHECK_SUMS = 6, 50
"""Number of the first sums that are timed under "auto", and the sums between two timings later. One with a table that
comes back from another way is timed, too."""

_log = logging.getLogger("thinwire")


class CollectiveTables:
    """The exact means of tables of a model, by its own process group, on the thread that issues its buckets.

    With a scheme that the group's collectives do not run, tables go over the lane. Under "auto" each goes one of three
    ways in a step (`thinwire.sync.choose.Route`), as all ranks decided after an earlier one from numbers that all of
    them know: the rows that each rank held, the rows of the sums, measured links, and the seconds of real sums. A table
    that goes another way is summed here again after some steps, one at first and twice as many each time, because the
    next batches may differ.

    Args:
        process_group: the group of the model.
        account: the statistics, and what was decided for each table.
        lane: the lane of the same ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup, account: GradientSync, lane: Lane) -> None:
        self._account, self._lane = account, lane
        self._process_group = process_group
        self._exchange = Collectives(process_group)
        self._exchange.hosts = lane.exchange.hosts
        self._sum = CollectiveSum(self._exchange)
        self._is_auto = account.scheme == AUTO
        self._routes: Routes | None = None
        self._staged: dict[str, int] = {}  # tables that go over the lane, and the number of steps left
        self._runs: dict[str, int] = {}  # how often in a row a table was sent another way
        self._schemes: dict[str, Scheme] = {}
        self._last: dict[str, tuple[Route, Point]] = {}
        self._num_sums = 0
        self._watch: _Stopwatch | None = None
        self._timed: tuple[dict[str, tuple[Demand, bool]], dict[str, Scheme]] | None = None
        self._intervals: list[tuple[float, float]] = []

    @property
    def host_waits(self) -> int:
        """How often the host has waited for the device so far."""
        return self._exchange.host_waits

    def takes(self, table: TableGradient) -> bool:
        """Return whether a table is summed here in this step, and not by the lane; call it once a step for each."""
        steps = self._staged.get(table.name, 0)
        self._staged[table.name] = max(0, steps - 1)
        scheme = self._account.scheme
        return not steps if self._is_auto else isinstance(scheme, Scheme) and not refusal(scheme)

    def means(self, tables: Sequence[TableGradient], started: Sequence[Started]) -> list[Tensor]:
        """Return the mean of each gradient: a new coalesced COO tensor, or the dense one, in place.

        Args:
            started: all-reduces of the rest of their buckets, for which the current stream waits, too.

        Raises:
            ThinwireError: an earlier failure left the ranks out of step; MismatchError, PeerError,
                CorruptMessageError: see `CollectiveSum.all_reduce`.
        """
        self._lane.check("the gradients of embedding tables")
        began = time.perf_counter()
        is_due = self._num_sums < TIMED_SUMS or self._num_sums % CHECK_SUMS == 0
        is_timed = self._is_auto and (is_due or any(self._runs.get(table.name, -1) >= 0 for table in tables))
        self._num_sums += 1
        if is_timed:  # the sum waits for them anyhow, and their seconds are not its own
            for one in started:
                one.wait()
        watch = _Stopwatch(tables[0].gradient.device)
        before, unready = self._exchange.traffic.sent_bytes, dispatch.unready_calls()
        schemes = [self._scheme(table) for table in tables]
        self._sum.note = 0 if self._watch is None else self._watch.nanoseconds()
        try:
            gradients = [NamedGradient(table.name, table.gradient) for table in tables]
            means = self._sum.all_reduce(gradients, schemes, 1.0 / self._exchange.world_size)
        except Exception as error:
            if ranks_told(error) < self._exchange.world_size:
                self._lane.break_off(str(error))
            raise
        watch.stop()
        for one in started:
            one.wait()
        self._record(tables, schemes, self._exchange.traffic.sent_bytes - before)
        if self._is_auto:
            self._learn()
            self._decide(tables)
            self._watch = self._timed = None
            if is_timed:
                is_typical = unready == dispatch.unready_calls() and not dispatch.is_compiling()
                self._watch = watch if is_typical else None
                self._timed = self._demands(tables), dict(zip((table.name for table in tables), schemes, strict=True))
        self._intervals.append((began, time.perf_counter()))
        return [mean if table.gradient.is_sparse else table.gradient for table, mean in zip(tables, means, strict=True)]

    def finish_step(self) -> None:
        """Add bytes and seconds to those of the lane, while no job of it runs, which adds too."""
        mine, total = self._exchange.traffic, self._lane.exchange.traffic
        for name, value in vars(mine).items():
            setattr(total, name, getattr(total, name) + value)
            setattr(mine, name, 0)
        intervals, self._intervals = self._intervals, []
        for began, ended in intervals:
            self._lane.note_busy(began, ended)

    def _scheme(self, table: TableGradient) -> Scheme:
        scheme = self._account.scheme
        return self._schemes.get(table.name, ZEN) if self._is_auto else scheme  # type: ignore[return-value]

    def _demands(self, tables: Sequence[TableGradient]) -> dict[str, tuple[Demand, bool]]:
        found = {}
        for table in tables:
            counts, layout, gradient = self._sum.counts[table.name], table.layout, table.gradient
            size = layout.num_rows, layout.width, gradient.element_size()
            found[table.name] = Demand.of(counts.held, *size, union=counts.union), gradient.is_sparse
        return found

    def _learn(self) -> None:
        """Learn the seconds of the last timed sum, of the rank that waited least for the others."""
        if self._timed is None or self._routes is None or min(self._sum.notes) <= 0:
            return
        self._routes.learn(1e-9 * min(self._sum.notes), *self._timed)

    def _decide(self, tables: Sequence[TableGradient]) -> None:
        """Decide the way of the next steps, on all ranks alike."""
        routes = self._known_routes(tables[0].gradient.device)
        if routes is None:
            return
        for name, (choice, *others) in routes.choose(self._demands(tables)).items():
            run = self._runs.get(name, -1) + 1 if choice.route is not Route.COLLECTIVE else -1
            self._runs[name] = run
            steps = min(DENSE_PAUSE_STEPS, 2 ** max(run, 0))
            if choice.route is Route.NATIVE:
                self._account.left[name] = steps
            elif choice.route is Route.STAGED:
                self._staged[name] = steps
            else:
                assert isinstance(choice.price.scheme, Scheme)
                self._schemes[name] = choice.price.scheme
            last, self._last[name] = self._last.get(name), (choice.route, choice.price.scheme)
            if last != self._last[name]:
                entry = self._account.records[name]
                entry.reason = " rather than ".join(way.told for way in (choice, *others[:1]))
                if self._exchange.rank == 0:
                    _log.info("%s: %s", name, entry.reason)

    def _known_routes(self, device: torch.device) -> Routes | None:
        """Return what is known of the routes; the first call measures, on all ranks together."""
        if self._routes is None and self._num_sums == 1:
            exchange = Collectives(self._process_group)
            own = measure_collectives(exchange, device)

            def job(lane: Lane) -> Machine | None:
                lane.setup.sent_bytes += exchange.traffic.sent_bytes
                return lane.machine()

            lane = self._lane.submit(job).wait()
            if own is not None:
                hosts = ranks_of_hosts(self._lane.exchange.hosts)
                self._routes = Routes(own, lane, hosts, CANDIDATES, device.type == "cpu")
        return self._routes

    def _record(self, tables: Sequence[TableGradient], schemes: Sequence[Scheme], sent: int) -> None:
        """Count a sum. Bytes are shared by those of the rows that this rank held and of those in the sums."""
        rank, world_size = self._exchange.rank, self._exchange.world_size
        counts = [self._sum.counts[table.name] for table in tables]
        row_bytes = [table.layout.width * table.gradient.element_size() for table in tables]
        weights = [(one.held[rank] + one.union) * size for one, size in zip(counts, row_bytes, strict=True)]
        kinds = [
            (scheme, table.layout.num_rows, table.layout.width, table.gradient.dtype, table.gradient.is_sparse)
            for table, scheme in zip(tables, schemes, strict=True)
        ]
        for place, (table, each) in enumerate(zip(tables, share(sent, weights), strict=True)):
            one, rows = counts[place], max(1, table.layout.num_rows)
            record = self._account.records.setdefault(table.name, ParameterRecord(table.name))
            is_sparse = table.gradient.is_sparse
            record.kind = "sparse gradient" if is_sparse else "dense gradient, rows scanned"
            record.scheme, record.formats, record.fused = name_of(schemes[place]), COLLECTIVE, len(tables)
            record.density, record.density_after = one.held[rank] / rows, one.union / rows
            part = weights[place] / sum(weights) if any(weights) else 1 / len(tables)
            stock = ring_all_reduce_bytes(table.layout.num_rows * row_bytes[place], world_size)
            if is_sparse:
                stock = sparse_all_reduce_bytes(one.held, rank, row_bytes[place])
            record.add(each, partial(_predicted, part, kinds, counts, rank), stock)
            self._account.unions[table.name] = one.union


def _predicted(part: float, kinds: Sequence[Any], counts: Sequence[Counts], rank: int) -> float:
    """Return the predicted bytes of one of the tables of a sum, if each rank deals its rows to owners evenly."""
    world_size = len(counts[0].held)
    plans, pushed, unions = [], [], []
    for places in stacks((scheme, *rest) for scheme, _, *rest in kinds):
        scheme, _, width, dtype, _ = kinds[places[0]]
        num_rows = stack_starts([kinds[place][1] for place in places])[-1]
        plans.append(plan(scheme, num_rows, width, dtype, world_size))
        held = [sum(of_rank) for of_rank in zip(*(counts[place].held for place in places), strict=True)]
        pushed.append([share(rows, [1] * world_size) if scheme.is_parallel else [rows] for rows in held])
        unions.append(share(sum(counts[place].union for place in places), [1] * world_size))
    return part * sent_bytes(plans, pushed, unions, rank, len(kinds))


class _Stopwatch:
    """The time of the work of a stream: that of the current one, from here until `stop`. Nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._began = self._ended = self._now()

    def stop(self) -> None:
        self._ended = self._now()

    def nanoseconds(self) -> int:
        """Return the time, or 0 if the work is not known to be done."""
        if not self._is_cuda:
            return self._ended - self._began
        return int(1e6 * self._began.elapsed_time(self._ended)) if self._ended.query() else 0

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
