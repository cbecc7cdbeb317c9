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
from functools import cache, cached_property

import torch
from torch import Tensor

from thinwire import kernels, wire
from thinwire.errors import CorruptHeaderError, CorruptMessageError
from thinwire.sparse import SparseRows
from thinwire.sync.channel import Channel
from thinwire.sync.parcels import Parcels
from thinwire.sync.partition import Whole
from thinwire.sync.stream import Receive
from thinwire.sync.union_shares import Plan, Share
from thinwire.wire import Format, Kind


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
    """One run. Places of parcels: 0 the ids, if they travel alone, then the chunks of the push, then those of the pull.

    Columns are sent at once, the ids in front of the first chunk; for rows of the union the ids must be known before.
    """

    def __init__(self, rows: SparseRows, plan: Plan, channel: Channel, parcels: Parcels) -> None:
        self.rows, self.plan, self.channel, self.parcels = rows, plan, channel, parcels
        self.rank, self.world_size = channel.rank, channel.world_size
        self.chunks = [plan.chunks(owner) for owner in range(self.world_size)]
        self.mine = self.chunks[self.rank]
        self.ranks = range(self.world_size)
        self.others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def sum(self, scale: float) -> SparseRows:
        if self.plan.by_columns:
            pushes = self._push(None)
            union, positions = self._union([self._await_ids(rank, pushes[0].get(rank)) for rank in self.ranks])
        else:
            union, positions = self._union(self._swap_ids())
            pushes = self._push(positions)
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

    def _swap_ids(self) -> list[Receive]:
        receives = {source: self.parcels.receive(source, 0, self.plan.ids_bytes(source)) for source in self.others}
        self.parcels.send_to_all(0, self.plan.ids_bytes(self.rank), lambda target: target.copy_(self._encoded_ids))
        return [self._await_ids(rank, receives.get(rank)) for rank in self.ranks]

    @cached_property
    def _encoded_ids(self) -> Tensor:
        format, no_values = self.plan.format(self.rank), self.rows.values[:, :0]
        if format is Format.DENSE:
            return torch.empty(0, dtype=torch.uint8)
        return wire.encode(format, Whole(self.rows.num_rows), self.rows.ids, no_values)

    def _await_ids(self, rank: int, receive: Receive | None) -> Receive:
        """What gives the ids of a rank, which are the first bytes of what it sends."""
        if receive is None:
            return lambda: self.rows.ids
        if self.plan.format(rank) is Format.DENSE:
            return lambda: torch.arange(self.rows.num_rows)

        def ids() -> Tensor:
            payload, count = receive()[: self.plan.ids_bytes(rank)], self.plan.held[rank]
            try:
                return wire.decode(self.plan.format(rank), Whole(self.rows.num_rows), count, payload, 0, torch.uint8)[0]
            except CorruptMessageError as error:
                where = f"rank {self.rank}, {self.channel.subject.name}: from rank {rank}"
                raise CorruptHeaderError(f"{where}: {error}") from error

        return ids

    def _union(self, awaited: Sequence[Receive]) -> tuple[Tensor, list[Tensor]]:
        """The ids of all ranks, and where in them the rows of each rank are."""
        ids = [receive() for receive in awaited]
        return kernels.union_places(ids, self.rows.num_rows)

    def _push(self, positions: Sequence[Tensor] | None) -> list[dict[int, Receive]]:
        """Send each owner its share of this rank's rows; returns what awaits the pieces of this rank's chunks.

        ``positions`` of all ranks' rows in the union may be None where shares have all rows.
        """
        counts = [self._count(self.mine[0], rank, positions) for rank in range(self.world_size)]
        receives = [
            {source: self._receive_push(number, source, counts[source]) for source in reversed(self.others)}
            for number in range(len(self.mine))
        ]
        selected = [None if positions is None else chunks[0].select(positions[self.rank]) for chunks in self.chunks]
        for number in range(len(self.mine)):
            for owner in self.others:
                self._push_chunk(number, owner, selected[owner])
        return receives

    def _count(self, share: Share, rank: int, positions: Sequence[Tensor] | None) -> int:
        selected = None if positions is None else share.select(positions[rank])
        return self.plan.sent_rows(rank) if selected is None else selected.numel()

    def _receive_push(self, number: int, source: int, count: int) -> Receive:
        lead = self.plan.lead_bytes(source) if number == 0 else 0
        num_bytes = lead + self.plan.values_bytes(count, self.mine[number])
        return cache(self.parcels.receive(source, 1 + number, num_bytes))

    def _push_chunk(self, number: int, owner: int, selected: Tensor | None) -> None:
        chunk = self.chunks[owner][number]
        values = self.rows.values[:, chunk.columns]
        count = values.shape[0] if selected is None else selected.numel()
        lead = self.plan.lead_bytes(self.rank) if number == 0 else 0

        def write(target: Tensor) -> None:
            if lead:
                target[:lead] = self._encoded_ids
            matrix = self._matrix(target[lead:], count, chunk)
            matrix.copy_(values) if selected is None else torch.index_select(values, 0, selected, out=matrix)

        self.parcels.send(owner, 1 + number, lead + self.plan.values_bytes(count, chunk), write)

    def _sum(
        self, chunk: Share, received: dict[int, Receive], positions: Sequence[Tensor], union: int, scale: float
    ) -> Tensor:
        """The sum of a chunk: added in rank order as the pieces are there, times ``scale``, rounded once."""

        def piece(rank: int) -> tuple[Tensor, Tensor]:
            selected = chunk.select(positions[rank])
            places = chunk.place(positions[rank] if selected is None else positions[rank][selected])
            if rank != self.rank:
                payload = received[rank]()
                tail = payload[payload.numel() - self.plan.values_bytes(places.numel(), chunk) :]
                return places, self._matrix(tail, places.numel(), chunk)
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
