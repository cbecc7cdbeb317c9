"""Exact means of tables by collectives of the model's own process group, which is NCCL's for gradients on a GPU.

Nothing here runs on the lane: a communicator of NCCL takes calls from one thread in one order, which is the thread that
issues the buckets. All tables of a step are summed at once, behind the last bucket.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.collectives import Collectives
from thinwire.comm.hosts import has_levels, ranks_of_hosts
from thinwire.comm.lane import Lane
from thinwire.comm.machine import Machine, measure_collectives
from thinwire.comm.process_group import ring_all_reduce_bytes, sparse_all_reduce_bytes
from thinwire.errors import is_of_a_peer, logger, ranks_told
from thinwire.gradients.exact import DENSE_PAUSE_STEPS, GradientSync, Started, pinned_by
from thinwire.gradients.tables import TableGradient, share
from thinwire.kernels import dispatch, stack_starts
from thinwire.sums.collective import CollectiveSum, Counts, NamedGradient, plan, refusal, sent_bytes, stacks
from thinwire.sums.cost import Demand
from thinwire.sums.named import AGSPARSE_CODED, AUTO, ZEN, name_of
from thinwire.sums.two_level import TwoLevel
from thinwire.tune.prices import Point, Route
from thinwire.tune.routes import Routes

CANDIDATES = (ZEN, AGSPARSE_CODED)
COLLECTIVE = "by collectives"
"""What stands for the formats in `Synchronizer.table`, which both sides compute from the counts of rows."""
TIMED_SUMS, CHECK_SUMS = 6, 50
"""Number of the first sums that are timed under "auto", and the sums between two timings later. One with a table that
comes back from another way is timed, too."""


class CollectiveTables:
    """The exact means of tables of a model, by its own process group, on the thread that issues its buckets.

    With a scheme that the group's collectives do not run, tables go over the lane. Under "auto" each goes one of three
    ways in a step (`thinwire.tune.prices.Route`), as all ranks decided after an earlier one from numbers that all of
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
        self.exchange = Collectives(process_group)
        self.exchange.hosts = lane.exchange.hosts
        self._sum = CollectiveSum(self.exchange)
        self._is_auto = account.scheme == AUTO
        self._named, hosts = account.scheme, ranks_of_hosts(lane.exchange.hosts)
        if isinstance(self._named, TwoLevel) and self._named.hosts is None:
            self._named = self._named.placed(lane.exchange.hosts)
        in_two_levels = [TwoLevel(one, hosts) for one in CANDIDATES if has_levels(hosts)]
        self._candidates: list[Point] = [*CANDIDATES, *in_two_levels]
        self._routes: Routes | None = None
        self._staged: dict[str, int] = {}  # tables that go over the lane, and the number of steps left
        self._runs: dict[str, int] = {}  # how often in a row a table was sent another way
        self._schemes: dict[str, Point] = {}
        self._last: dict[str, tuple[Route, Point]] = {}
        self._num_sums = 0
        self._watch: _Stopwatch | None = None
        self._timed: tuple[dict[str, tuple[Demand, bool]], dict[str, Point]] | None = None
        self._intervals: list[tuple[float, float]] = []

    def takes(self, table: TableGradient) -> bool:
        """Return whether a table is summed here in this step, and not by the lane; call it once a step for each."""
        steps = self._staged.get(table.name, 0)
        self._staged[table.name] = max(0, steps - 1)
        return not steps if self._is_auto else not isinstance(self._named, str) and not refusal(self._named)

    def means(self, tables: Sequence[TableGradient], started: Sequence[Started]) -> list[Tensor]:
        """Return the mean of each gradient: a new coalesced COO tensor, or the dense one, in place.

        Args:
            started: all-reduces of the rest of their buckets, for which the current stream waits, too.

        Raises:
            LostPeerError: a rank died; the error names it.
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
        before, unready = self.exchange.traffic.sent_bytes, dispatch.unready_calls()
        schemes = [self._scheme(table) for table in tables]
        self._sum.note = 0 if self._watch is None else self._watch.nanoseconds()
        try:
            gradients = [NamedGradient(table.name, table.gradient) for table in tables]
            means = self._sum.all_reduce(gradients, schemes, 1.0 / self.exchange.world_size)
        except Exception as error:
            if is_of_a_peer(error):  # which one, the connections of the lane show
                raise self._lane.lost_to(error.__cause__ or error) from error
            if ranks_told(error) < self.exchange.world_size:
                self._lane.break_off(str(error), error)
            raise
        watch.stop()
        for one in started:
            one.wait()
        self._record(tables, schemes, self.exchange.traffic.sent_bytes - before)
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
        """Add bytes and seconds to the counts of the lane, while no job of it runs, which adds too."""
        mine, total = self.exchange.traffic, self._lane.exchange.traffic
        for name, value in vars(mine).items():
            setattr(total, name, getattr(total, name) + value)
            setattr(mine, name, 0)
        intervals, self._intervals = self._intervals, []
        for began, ended in intervals:
            self._lane.note_busy(began, ended)

    def state_dict(self) -> dict[str, Any]:
        """Return the ways of tables, as decided so far."""
        schemes = {name: name_of(scheme) for name, scheme in self._schemes.items()}
        return {"staged": dict(self._staged), "runs": dict(self._runs), "schemes": schemes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them. Times are left out: they may be of another machine."""
        self._staged, self._runs = dict(state["staged"]), dict(state["runs"])
        points: dict[str, Point] = {name_of(one): one for one in self._candidates}
        self._schemes = {name: points.get(is_, ZEN) for name, is_ in state["schemes"].items()}

    def _scheme(self, table: TableGradient) -> Point:
        return self._schemes.get(table.name, ZEN) if self._is_auto else self._named  # type: ignore[return-value]

    def _demands(self, tables: Sequence[TableGradient]) -> dict[str, tuple[Demand, bool]]:
        demands = {}
        for table in tables:
            counts, layout, gradient = self._sum.counts[table.name], table.layout, table.gradient
            size = layout.num_rows, layout.width, gradient.element_size()
            in_rank_order = self._account.in_rank_order
            demands[table.name] = Demand.of(counts.held, *size, counts.union, in_rank_order), gradient.is_sparse
        return demands

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
                self._schemes[name] = choice.price.scheme
            last, self._last[name] = self._last.get(name), (choice.route, choice.price.scheme)
            if last != self._last[name]:
                entry = self._account.records[name]
                entry.reason = " rather than ".join(option.text for option in (choice, *others[:1]))
                if self.exchange.rank == 0:
                    logger.info("%s: %s; %s", name, entry.reason, pinned_by(choice.price.scheme))

    def _known_routes(self, device: torch.device) -> Routes | None:
        """Return what is known of the routes; the first call measures, on all ranks together."""
        if self._routes is None and self._num_sums == 1:
            own = measured(self._process_group, self._lane, device)
            lane = self._lane.submit(Lane.machine).wait()
            if own:
                hosts = ranks_of_hosts(self._lane.exchange.hosts)
                self._routes = Routes(own, lane, hosts, self._candidates, device.type == "cpu")
        return self._routes

    def _record(self, tables: Sequence[TableGradient], schemes: Sequence[Point], sent: int) -> None:
        """Count a sum. Bytes are shared in proportion to the rows that this rank held and those in the sums."""
        rank, world_size = self.exchange.rank, self.exchange.world_size
        counts = [self._sum.counts[table.name] for table in tables]
        row_bytes = [table.layout.width * table.gradient.element_size() for table in tables]
        weights = [(one.held[rank] + one.union) * size for one, size in zip(counts, row_bytes, strict=True)]
        kinds = [
            (scheme, table.layout.num_rows, table.layout.width, table.gradient.dtype, table.gradient.is_sparse)
            for table, scheme in zip(tables, schemes, strict=True)
        ]
        for index, (table, each) in enumerate(zip(tables, share(sent, weights), strict=True)):
            one, rows = counts[index], max(1, table.layout.num_rows)
            is_sparse = table.gradient.is_sparse
            kind = "sparse gradient" if is_sparse else "dense gradient, rows scanned"
            densities, by = (one.held[rank] / rows, one.union / rows), name_of(schemes[index])
            record = self._account.records.book(table.name, kind, by, COLLECTIVE, *densities, len(tables))
            part = weights[index] / sum(weights) if any(weights) else 1 / len(tables)
            stock = ring_all_reduce_bytes(table.layout.num_rows * row_bytes[index], world_size)
            if is_sparse:
                stock = sparse_all_reduce_bytes(one.held, rank, row_bytes[index])
            record.add(each, partial(_predicted, part, kinds, counts, rank), stock)
            self._account.unions[table.name] = one.union


def measured(process_group: dist.ProcessGroup, lane: Lane, device: torch.device) -> tuple[Machine, ...]:
    """Return the links of a model's own group, see `measure_collectives`; the lane counts the bytes of that."""
    exchange = Collectives(process_group, lane.setup)
    exchange.hosts = lane.exchange.hosts
    return measure_collectives(exchange, device)


def _predicted(part: float, kinds: Sequence[Any], counts: Sequence[Counts], rank: int) -> float:
    """Return the predicted bytes of one of the tables of a sum, if each rank deals its rows to owners evenly."""
    world_size = len(counts[0].held)
    plans, pushed, unions = [], [], []
    for indices in stacks((scheme, *rest) for scheme, _, *rest in kinds):
        scheme, _, width, dtype, _ = kinds[indices[0]]
        num_rows = stack_starts([kinds[index][1] for index in indices])[-1]
        level = plan(scheme, num_rows, width, dtype, world_size)
        held = [sum(of_rank) for of_rank in zip(*(counts[index].held for index in indices), strict=True)]
        union = sum(counts[index].union for index in indices)
        for is_last in (True,) if not level.groups else (False, True):
            ranks = level.ranks(rank, world_size)
            plans.append(level)
            pushed.append([[rows] if level.partition is None else share(rows, [1] * len(ranks)) for rows in held])
            unions.append(share(union, [1] * len(ranks)))
            if not is_last:
                level, union = level.between(ranks.index(rank)), unions[-1][ranks.index(rank)]
                held = [sum(of_rank) for of_rank in zip(*(counts[index].shares for index in indices), strict=True)]
    return part * sent_bytes(plans, pushed, unions, rank, len(kinds))


class _Stopwatch:
    """The time of the work of a stream: that of the current one, from here until `stop`. Nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._began = self._ended = self._now()

    def stop(self) -> None:
        self._ended = self._now()

    def nanoseconds(self) -> int:
        """Return the time, or 0 if the work is not known to be done."""
        if self._device is None:
            return self._ended - self._began
        return int(1e6 * self._began.elapsed_time(self._ended)) if self._ended.query() else 0

    def _now(self) -> Any:
        if self._device is None:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # the current device may be another one
        return event
