"""Synchronize the gradients of named parameters on a lane, and keep account of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from thinwire.hooks.fusion import TableShape, plan_groups, share, stack, unstack
from thinwire.hooks.table import TableGradient
from thinwire.lane import Lane
from thinwire.observe.ledger import ParameterRecord
from thinwire.sparse import SparseRows
from thinwire.sync.channel import Channel, Subject
from thinwire.sync.cost_two_level import expected_bytes
from thinwire.sync.demand import Demand
from thinwire.sync.exchange import ring_all_reduce_bytes
from thinwire.sync.hosts import ranks_of_hosts
from thinwire.sync.machine import told
from thinwire.sync.named import AUTO, DENSE, name_of
from thinwire.sync.rehearsal import Rehearsal, rehearse, to_rehearse
from thinwire.sync.scheme import Scheme
from thinwire.sync.synchronize import agree, chosen, dense_all_reduce, explained, synchronize
from thinwire.sync.two_level import TwoLevel

DENSE_PAUSE_STEPS = 50
"""For how many steps a table is all-reduced unread after a step in which most of its rows were non-zero."""

Group = Sequence[TableGradient]

_log = logging.getLogger("thinwire")


class GradientSync:
    """What to do with the gradient of each parameter: mean over ranks, exactly.

    Its methods are called by jobs of a lane, on all ranks in the same order.

    Small tables are stacked, see `thinwire.hooks.fusion`, and a group of tables is one synchronization. With "auto",
    the first step of a group asks how many rows the ranks hold; each synchronization tells all ranks that number and
    the size of the union, which decide the scheme of the next one. So all ranks decide the same.
    """

    def __init__(self, scheme: str | Scheme | TwoLevel) -> None:
        self.scheme = scheme
        self.records: dict[str, ParameterRecord] = {}
        self.choices: dict[str, str] = {}  # under "auto": the scheme of a group's next step, by its parameters
        self.pauses: dict[str, int] = {}  # steps for which a table is all-reduced without looking for zeros
        self.unions: dict[str, int] = {}  # rows of a table that any rank held in its last step
        self._rehearsals: dict[str, Rehearsal] = {}  # under "auto": what was found out for a group
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
        predicted = expected_bytes(DENSE, lane.world_size, 1, size_bytes, 1, 1)
        record.add(
            lane.exchange.traffic.sent_bytes - before,
            predicted,
            ring_all_reduce_bytes(size_bytes, lane.world_size),
        )

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
        plan = self.choices.get(_key(group), AUTO) if self.scheme == AUTO else self.scheme
        channel = lane.channel(_subject(group, plan))
        before = lane.exchange.traffic.sent_bytes
        held: list[SparseRows] = []

        def prepare() -> SparseRows:
            held.extend(table.rows() for table in group)
            return stack(held)

        rows, scheme = agree(prepare, plan, channel)
        scale = 1.0 / lane.world_size
        if scheme.is_dense and len(group) == 1 and not group[0].gradient.is_sparse:
            dense_all_reduce(group[0].gradient, channel, scale)
            self.pauses[group[0].name] = DENSE_PAUSE_STEPS
            unions, means = [rows.num_rows], [group[0].gradient]
        else:
            totals = unstack(synchronize(rows, scheme, channel, scale), [table.num_rows for table in held])
            unions = [total.ids.numel() for total in totals]
            means = [table.store(mine, total) for table, mine, total in zip(group, held, totals, strict=True)]
        self._record(group, channel, scheme, held, unions, before)
        self._decide_next(lane, group, channel, rows, unions)
        return means

    def _decide_next(self, lane: Lane, group: Group, channel: Channel, rows: SparseRows, unions: Sequence[int]) -> None:
        """From numbers that all ranks know."""
        key = _key(group)
        for table, union in zip(group, unions, strict=True):
            self.unions[table.name] = union
            last = self._groups.setdefault(table.name, key)
            if last != key:
                self.choices.pop(last, None)
                self._groups[table.name] = key
        if self.scheme == AUTO:
            last = self.choices.get(key)
            rehearsed = self._rehearsed(lane, group, channel, rows, sum(unions))
            following = chosen(rows, channel, sum(unions), last, rehearsed)
            self.choices[key] = AUTO if following.is_dense else name_of(following)
            if self.choices[key] != last:
                self._explain(group, explained(rows, channel, sum(unions), rehearsed), channel.rank)

    def _rehearsed(
        self, lane: Lane, group: Group, channel: Channel, rows: SparseRows, union: int
    ) -> Mapping[str, float]:
        """Seconds of the candidates on these rows, by name, where they were or now are tried; a collective call."""
        key, hosts = _key(group), ranks_of_hosts(channel.exchange.hosts)
        demand = Demand.of(channel.held, rows.num_rows, rows.width, rows.values.element_size(), union)
        known = self._rehearsals.get(key)
        if known is None or not known.is_about(demand):
            machine = channel.machine()
            points = [] if machine is None else to_rehearse(demand, machine, hosts)

            def run(point: Scheme | TwoLevel) -> None:
                aside = lane.rehearsal(_subject(group, point))
                synchronize(*agree(lambda: rows, point, aside), aside)

            def slowest(seconds: float) -> float:
                return max(told(lane.rehearsal(_subject(group, AUTO)).exchange, seconds))

            known = rehearse(points, demand.held, run, slowest)
            self._rehearsals[key] = known
        return known.seconds

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
        predicted = expected_bytes(scheme, world_size, num_rows, row_bytes, mean, sum(unions), itemsize)
        weights = [rows.ids.numel() + union for rows, union in zip(held, unions, strict=True)]
        sent = share(channel.exchange.traffic.sent_bytes - sent_before, weights)
        formats = ", ".join(
            f"{phase.name.lower()} {'/'.join(sorted(formats))}" for phase, formats in channel.formats_sent.items()
        )
        for place, (table, rows) in enumerate(zip(group, held, strict=True)):
            record = self._entry(table.name)
            record.kind, record.scheme, record.formats, record.fused = table.kind, name_of(scheme), formats, len(group)
            record.density = rows.density
            record.density_after = unions[place] / rows.num_rows if rows.num_rows else 0.0
            part = weights[place] / sum(weights) if any(weights) else 1 / len(group)
            record.add(sent[place], predicted * part, ring_all_reduce_bytes(rows.num_rows * row_bytes, world_size))

    def _entry(self, name: str) -> ParameterRecord:
        return self.records.setdefault(name, ParameterRecord(name))


def _key(group: Group) -> str:
    return " + ".join(table.name for table in group)


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
