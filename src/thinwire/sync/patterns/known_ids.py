"""Parallelism in which every rank knows the ids of all: shares of the union without ids in the pull.

Every rank sends its ids to all, so all know the union. Then the union is a matrix [u, width] that can be dealt out as
if it were dense: to each owner some columns of every row (imbalance exactly 1 in both phases, whatever the ids are), or
every n-th row (imbalance exactly 1 in the pull). It pays when few wide rows are spread over many owners.

Once ranks have told each other how many rows they hold, the sizes of all ids and columns are known, and the sizes of
everything else once the ids are there. So no header travels, and everything runs as one stream, in which the share of
an owner is cut into chunks: while one is on the wire, the next is gathered, and an earlier one is summed and sent back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from thinwire import kernels, wire
from thinwire.errors import CorruptHeaderError, CorruptMessageError
from thinwire.sparse import SparseRows
from thinwire.sync.channel import Channel
from thinwire.sync.parcels import Parcels, parcel_bytes
from thinwire.sync.partition import Whole
from thinwire.sync.stream import Receive
from thinwire.wire import Format, Kind

CHUNK_BYTES = 64 * 1024
"""A chunk for one owner has at least so many bytes: smaller ones cost more in messages than they save in waiting."""
MAX_CHUNKS = 4


@dataclass(frozen=True)
class Share:
    """What an owner has of the union, as a matrix [u, width]: all rows of some columns, or every n-th row of all."""

    rows: slice
    columns: slice

    @property
    def width(self) -> int:
        return self.columns.stop - self.columns.start

    def num_rows(self, union: int) -> int:
        return len(range(union)[self.rows])

    def select(self, positions: Tensor) -> Tensor | None:
        """Which of these positions of the union are of the share; None for all."""
        if self.rows.step is None:
            return None
        return (positions % self.rows.step == self.rows.start).nonzero().flatten()

    def place(self, positions: Tensor) -> Tensor:
        """Where in the share its rows at these positions of the union are."""
        return positions if self.rows.step is None else torch.div(positions, self.rows.step, rounding_mode="floor")


def shares(width: int, world_size: int, by_columns: bool) -> list[Share]:
    """The share of each owner. Columns are consecutive, and their numbers differ by at most one.

    Example:
        >>> [(share.columns.start, share.columns.stop) for share in shares(7, 3, by_columns=True)]
        [(0, 3), (3, 5), (5, 7)]
    """
    if by_columns:
        return [Share(slice(None), columns) for columns in _cut(slice(0, width), world_size)]
    return [Share(slice(owner, None, world_size), slice(0, width)) for owner in range(world_size)]


@dataclass(frozen=True)
class Plan:
    """What every rank knows after `Channel.open`.

    Args:
        held: rows that each rank holds.
        num_rows, width, itemsize: of the tensor; ``itemsize`` in bytes.
        formats: to choose from for the ids.
        by_columns: whether shares are columns of every row, or every n-th row.
    """

    held: tuple[int, ...]
    num_rows: int
    width: int
    itemsize: int
    formats: tuple[Format, ...]
    by_columns: bool

    @property
    def world_size(self) -> int:
        return len(self.held)

    def format(self, rank: int) -> Format:
        """In which the ids of a rank travel; DENSE where all rows do."""
        share_bytes = -(-self.width // self.world_size) * self.itemsize
        return wire.smallest(self.formats, self.held[rank], share_bytes, self.num_rows, self.num_rows)

    def sent_rows(self, rank: int) -> int:
        """Rows that travel: those held, or all of them, zeros included, if there is no other format than DENSE."""
        return self.num_rows if self.format(rank) is Format.DENSE else self.held[rank]

    def ids_bytes(self, rank: int) -> int:
        format = self.format(rank)
        if format is Format.DENSE:
            return 0
        return wire.payload_bytes(format, self.held[rank], 0, self.num_rows, self.num_rows)

    def chunks(self, owner: int) -> list[Share]:
        """The share of an owner in the pieces in which it travels, by columns; as many pieces for each owner."""
        share = self._shares[owner]
        widest = -(-self.width // self.world_size) if self.by_columns else self.width
        push_bytes = -(-self.width // self.world_size) * self._fullest * self.itemsize
        count = max(1, min(MAX_CHUNKS, widest, push_bytes // CHUNK_BYTES))
        return [Share(share.rows, columns) for columns in _cut(share.columns, count)]

    @cached_property
    def _shares(self) -> list[Share]:
        return shares(self.width, self.world_size, self.by_columns)

    @cached_property
    def _fullest(self) -> int:
        """Rows of the rank that sends most; cached, because of 1024 ranks each owner would ask all (17 s a plan)."""
        return max(self.sent_rows(rank) for rank in range(self.world_size))

    def values_bytes(self, num_rows: int, chunk: Share) -> int:
        return num_rows * chunk.width * self.itemsize

    def sent_bytes(self, rank: int, union: int, pushed_rows: Sequence[float] | None = None) -> int:
        """Exact bytes that a rank sends after the opening.

        Args:
            union: rows that all ranks hold together.
            pushed_rows: rows that this rank holds of the share of each owner; None where it holds all that it sends.
        """
        total = (self.world_size - 1) * parcel_bytes(self.ids_bytes(rank))
        for owner in range(self.world_size):
            pushed = self.sent_rows(rank) if pushed_rows is None else round(pushed_rows[owner])
            for chunk in self.chunks(owner):
                if owner == rank:
                    pulled = self.values_bytes(chunk.num_rows(union), chunk)
                    total += (self.world_size - 1) * parcel_bytes(pulled)
                else:
                    total += parcel_bytes(self.values_bytes(pushed, chunk))
        return total


def sent_bytes(plan: Plan, ids_per_rank: Sequence[Tensor]) -> list[int]:
    """Exact bytes that each rank sends after the opening, when the ranks hold these ids (sorted, unique)."""
    sent = [
        torch.arange(plan.num_rows) if plan.format(rank) is Format.DENSE else ids
        for rank, ids in enumerate(ids_per_rank)
    ]
    union = torch.cat(sent).unique()

    def pushed_rows(rank: int) -> list[int] | None:
        if plan.by_columns:
            return None
        owners = torch.searchsorted(union, sent[rank]) % plan.world_size
        return torch.bincount(owners, minlength=plan.world_size).tolist()

    return [plan.sent_bytes(rank, union.numel(), pushed_rows(rank)) for rank in range(plan.world_size)]


def all_reduce(
    rows: SparseRows, formats: tuple[Format, ...], by_columns: bool, channel: Channel, scale: float
) -> SparseRows:
    """Sum rows over all ranks, each of which adds up its share of the union; ``formats`` are for the ids.

    After `Channel.open`, at which ranks told the numbers of these rows.
    """
    plan = Plan(tuple(channel.held), rows.num_rows, rows.width, rows.values.element_size(), formats, by_columns)
    if plan.sent_rows(channel.rank) > rows.ids.numel():
        rows = SparseRows.trusted(torch.arange(rows.num_rows), rows.to_dense(), rows.num_rows)
    channel.formats_sent = {Kind.PUSH: {plan.format(channel.rank)}, Kind.PULL: {Format.DENSE}}
    with channel.exchange.stream() as stream:
        return _Run(rows, plan, channel, Parcels(channel, stream)).sum(scale)


class _Run:
    """One run. Places of parcels: 0 the ids, then the chunks of the push, then those of the pull."""

    def __init__(self, rows: SparseRows, plan: Plan, channel: Channel, parcels: Parcels) -> None:
        self.rows, self.plan, self.channel, self.parcels = rows, plan, channel, parcels
        self.rank, self.world_size = channel.rank, channel.world_size
        self.chunks = [plan.chunks(owner) for owner in range(self.world_size)]
        self.mine = self.chunks[self.rank]
        self.others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def sum(self, scale: float) -> SparseRows:
        ids = self._receive_ids()
        self._send_ids()
        pushes = self._push(None) if self.plan.by_columns else []  # sizes are known: no need to wait for ids
        union, positions = self._union([receive() for receive in ids])
        pushes = pushes or self._push(positions)
        pulls = self._receive_pull(union.numel())
        values = self.rows.values.new_empty(union.numel(), self.rows.width)
        for number, (chunk, received) in enumerate(zip(self.mine, pushes, strict=True)):
            total = self._sum(chunk, received, positions, union.numel(), scale)
            values[chunk.rows, chunk.columns] = total
            self._send_back(number, chunk, total)
        for number, received in enumerate(pulls):
            for owner, receive in received.items():
                chunk = self.chunks[owner][number]
                values[chunk.rows, chunk.columns] = self._matrix(receive(), chunk.num_rows(union.numel()), chunk)
        return SparseRows.trusted(union, values, self.rows.num_rows)

    def _receive_ids(self) -> list[Receive]:
        """For each rank in rank order; a rank has its own."""
        whole = Whole(self.rows.num_rows)

        def decoded(rank: int, receive: Receive) -> Tensor:
            payload = receive()
            try:
                dtype = self.rows.values.dtype
                return wire.decode(self.plan.format(rank), whole, self.plan.held[rank], payload, 0, dtype)[0]
            except CorruptMessageError as error:
                where = f"rank {self.rank}, {self.channel.subject.name}: from rank {rank}"
                raise CorruptHeaderError(f"{where}: {error}") from error

        def awaited(rank: int) -> Receive:
            if rank == self.rank:
                return lambda: self.rows.ids
            if self.plan.format(rank) is Format.DENSE:
                return lambda: torch.arange(self.rows.num_rows)
            receive = self.parcels.receive(rank, 0, self.plan.ids_bytes(rank))
            return lambda: decoded(rank, receive)

        return [awaited(rank) for rank in range(self.world_size)]

    def _send_ids(self) -> None:
        def write(target: Tensor) -> None:
            whole, no_values = Whole(self.rows.num_rows), self.rows.values[:, :0]
            target.copy_(wire.encode(self.plan.format(self.rank), whole, self.rows.ids, no_values))

        self.parcels.send_to_all(0, self.plan.ids_bytes(self.rank), write)

    def _union(self, ids: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The ids of all ranks, and where in them the rows of each rank are."""
        union, places = torch.unique(torch.cat(list(ids)), return_inverse=True)
        return union, list(places.split([part.numel() for part in ids]))

    def _push(self, positions: Sequence[Tensor] | None) -> list[dict[int, Receive]]:
        """Send each owner its share of this rank's rows; returns what awaits the pieces of this rank's chunks.

        ``positions`` of all ranks' rows in the union may be None where shares have all rows.
        """
        counts = [self._count(self.mine[0], rank, positions) for rank in range(self.world_size)]
        receives = [
            {
                source: self.parcels.receive(source, 1 + number, self.plan.values_bytes(counts[source], chunk))
                for source in reversed(self.others)
            }
            for number, chunk in enumerate(self.mine)
        ]
        selected = [None if positions is None else chunks[0].select(positions[self.rank]) for chunks in self.chunks]
        for number in range(len(self.mine)):
            for owner in self.others:
                self._push_chunk(number, owner, selected[owner])
        return receives

    def _count(self, share: Share, rank: int, positions: Sequence[Tensor] | None) -> int:
        selected = None if positions is None else share.select(positions[rank])
        return self.plan.sent_rows(rank) if selected is None else selected.numel()

    def _push_chunk(self, number: int, owner: int, selected: Tensor | None) -> None:
        chunk = self.chunks[owner][number]
        values = self.rows.values[:, chunk.columns]
        count = values.shape[0] if selected is None else selected.numel()

        def write(target: Tensor) -> None:
            matrix = self._matrix(target, count, chunk)
            matrix.copy_(values) if selected is None else torch.index_select(values, 0, selected, out=matrix)

        self.parcels.send(owner, 1 + number, self.plan.values_bytes(count, chunk), write)

    def _sum(
        self, chunk: Share, received: dict[int, Receive], positions: Sequence[Tensor], union: int, scale: float
    ) -> Tensor:
        """The sum of a chunk: added in rank order as the pieces are there, times ``scale``, rounded once."""

        def piece(rank: int) -> tuple[Tensor, Tensor]:
            selected = chunk.select(positions[rank])
            places = chunk.place(positions[rank] if selected is None else positions[rank][selected])
            if rank != self.rank:
                return places, self._matrix(received[rank](), places.numel(), chunk)
            own = self.rows.values[:, chunk.columns]
            return places, own if selected is None else own[selected]

        pieces = (piece(rank) for rank in range(self.world_size))
        return kernels.sum_rows_at(pieces, chunk.num_rows(union), chunk.width, self.rows.values.dtype, scale)

    def _send_back(self, number: int, chunk: Share, total: Tensor) -> None:
        def write(target: Tensor) -> None:
            self._matrix(target, total.shape[0], chunk).copy_(total)

        self.parcels.send_to_all(self._pull_place(number), self.plan.values_bytes(total.shape[0], chunk), write)

    def _receive_pull(self, union: int) -> list[dict[int, Receive]]:
        def receive(number: int, owner: int) -> Receive:
            chunk = self.chunks[owner][number]
            num_bytes = self.plan.values_bytes(chunk.num_rows(union), chunk)
            return self.parcels.receive(owner, self._pull_place(number), num_bytes)

        return [{owner: receive(number, owner) for owner in reversed(self.others)} for number in range(len(self.mine))]

    def _pull_place(self, number: int) -> int:
        return 1 + len(self.mine) + number

    def _matrix(self, data: Tensor, num_rows: int, chunk: Share) -> Tensor:
        return data.view(self.rows.values.dtype).view(num_rows, chunk.width)


def _cut(columns: slice, count: int) -> list[slice]:
    size, rest = divmod(columns.stop - columns.start, count)
    starts = [columns.start + part * size + min(part, rest) for part in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(starts)]
