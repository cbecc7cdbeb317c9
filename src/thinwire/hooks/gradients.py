"""Synchronize the gradients of named parameters on a lane, in place, and keep account of it."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.lane import Lane
from thinwire.observe.ledger import ParameterRecord
from thinwire.sparse import Layout, SparseRows
from thinwire.sync.channel import Channel, Subject
from thinwire.sync.choose import choose
from thinwire.sync.cost import expected_bytes
from thinwire.sync.exchange import ring_all_reduce_bytes
from thinwire.sync.named import AUTO, DENSE, name_of
from thinwire.sync.scheme import Scheme
from thinwire.sync.synchronize import agree, dense_all_reduce, synchronize

DENSE_PAUSE_STEPS = 50
"""For how many steps a table is all-reduced unread after a step in which most of its rows were non-zero."""


class GradientSync:
    """What to do with the gradient of each parameter: mean over ranks, exactly.

    Its methods are called by jobs of a lane, on all ranks in the same order.

    With "auto", the first step of a parameter asks how many rows the ranks hold; each synchronization tells all ranks
    that number and the size of the union, which decide the scheme of the next one. So all ranks decide the same.
    """

    def __init__(self, scheme: str | Scheme) -> None:
        self.scheme = scheme
        self.records: dict[str, ParameterRecord] = {}
        self.choices: dict[str, str] = {}  # under "auto": the scheme of a parameter's next step
        self.pauses: dict[str, int] = {}  # steps for which a table is all-reduced without looking for zeros

    def sparse(self, lane: Lane, name: str, gradient: Tensor) -> Tensor:
        """The mean of a sparse COO gradient, as a new coalesced COO tensor."""
        layout = Layout.of(gradient)
        plan = self._plan(name)
        channel = lane.channel(Subject(f"parameter {name!r}", _describe(gradient, plan)))
        before = lane.exchange.traffic.sent_bytes
        rows, scheme = agree(lambda: layout.rows(gradient), plan, channel)
        total = synchronize(rows, scheme, channel, 1.0 / lane.world_size)
        self._record(name, "sparse gradient", channel, scheme, rows, total, before)
        return layout.tensor(total)

    def table(self, lane: Lane, name: str, gradient: Tensor, touched: Tensor | None) -> None:
        """The mean of a dense gradient [num_rows, ...] of which most rows are zero, in place.

        ``touched`` are ids of all rows that can be non-zero, or None to look for them.
        """
        plan = self._plan(name)
        if plan in (DENSE, name_of(DENSE)):
            return self.dense(lane, name, gradient)
        matrix = gradient.view(gradient.shape[0], -1)
        channel = lane.channel(Subject(f"parameter {name!r}", _describe(gradient, plan)))
        before = lane.exchange.traffic.sent_bytes
        rows, scheme = agree(lambda: _rows(matrix, touched), plan, channel)
        total = None
        if scheme.is_dense:
            dense_all_reduce(gradient, channel, 1.0 / lane.world_size)
            self.pauses[name] = DENSE_PAUSE_STEPS
        else:
            total = synchronize(rows, scheme, channel, 1.0 / lane.world_size)
            matrix.index_fill_(0, rows.ids, 0.0)  # a sum by blocks leaves out rows that cancelled
            matrix.index_copy_(0, total.ids, total.values)  # all other rows are zero on this rank already
        kind = "dense gradient, rows " + ("scanned" if touched is None else "known")
        self._record(name, kind, channel, scheme, rows, total, before)
        return None

    def _plan(self, name: str) -> str | Scheme:
        """The scheme of this step; "auto" to agree on one first."""
        if self.scheme != AUTO:
            return self.scheme
        if self.pauses.get(name, 0) > 0:
            self.pauses[name] -= 1
            return name_of(DENSE)
        return self.choices.get(name, AUTO)

    def dense(self, lane: Lane, name: str, gradient: Tensor, account: str | None = None) -> None:
        """The mean of a dense gradient, all-reduced in place; booked on ``account`` if it is not ``name``."""
        channel = lane.channel(Subject(name, _describe(gradient, DENSE)))
        before = lane.exchange.traffic.sent_bytes
        channel.open()
        dense_all_reduce(gradient, channel, 1.0 / lane.world_size)
        record = self._entry(account or name)
        record.kind, record.scheme, record.formats = "all-reduce", name_of(DENSE), "dense"
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

    def _record(
        self,
        name: str,
        kind: str,
        channel: Channel,
        scheme: Scheme,
        rows: SparseRows,
        total: SparseRows | None,
        sent_before: int,
    ) -> None:
        """Book a synchronization, and under "auto" decide the next one. ``total`` is None if it was dense."""
        world_size, itemsize = channel.world_size, rows.values.element_size()
        union = rows.num_rows if total is None else total.ids.numel()
        if self.scheme == AUTO:
            following = choose(channel.held, rows.num_rows, rows.width, itemsize, union)
            self.choices[name] = AUTO if following.is_dense else name_of(following)
        record = self._entry(name)
        record.kind, record.scheme = kind, name_of(scheme)
        record.formats = ", ".join(
            f"{phase.name.lower()} {'/'.join(sorted(formats))}" for phase, formats in channel.formats_sent.items()
        )
        record.density = rows.density
        record.density_after = union / rows.num_rows if rows.num_rows else 0.0
        row_bytes, mean = rows.width * itemsize, sum(channel.held) / world_size
        record.add(
            channel.exchange.traffic.sent_bytes - sent_before,
            expected_bytes(scheme, world_size, rows.num_rows, row_bytes, mean, union, itemsize),
            ring_all_reduce_bytes(rows.num_rows * row_bytes, world_size),
        )

    def _entry(self, name: str) -> ParameterRecord:
        return self.records.setdefault(name, ParameterRecord(name))


def _rows(matrix: Tensor, touched: Tensor | None) -> SparseRows:
    if touched is None:
        return SparseRows.from_tensor(matrix)
    ids = touched.to(torch.int64).unique()
    return SparseRows(ids, matrix.index_select(0, ids), matrix.shape[0])


def _describe(gradient: Tensor, scheme: str | Scheme) -> str:
    text = scheme.describe() if isinstance(scheme, Scheme) else scheme
    return f"{gradient.dtype} {list(gradient.shape)} {gradient.layout}, mean, scheme={text}"
