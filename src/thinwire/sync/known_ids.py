"""Parallelism in which every rank knows the ids of all: shares of the union without ids in the pull.

Every rank sends its ids to all, so all know the union. Then the union is a matrix [u, width] that can be dealt out as
if it were dense: to each owner some columns of every row (imbalance exactly 1 in both phases, whatever the ids are), or
an equal number of rows, of those that it holds (see `thinwire.sync.union_shares.deal`), which it need not send. It pays
when few wide rows are spread over many owners.

Once the ranks know how many rows each of them holds, the sizes of all ids and columns are known, and all other sizes
once the ids have arrived. So no header travels, and everything runs as one stream, in which the share of an owner is
cut into chunks: while one is on the wire, the next is gathered, and an earlier one is summed and sent back. By columns,
only the first ones are pushed with the ids, so that the wire is busy until all ranks know the ids; of the other columns
the rows are dealt. With many ranks, or with few or narrow rows, all columns are pushed with the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property

import torch
from torch import Tensor

from thinwire import kernels, wire
from thinwire.codes import floats
from thinwire.comm.channel import Channel
from thinwire.comm.parcels import Parcels, Write, parcel_bytes, sized_parcel_bytes
from thinwire.comm.process_group import Receive, Stream, check_fits
from thinwire.errors import CorruptHeaderError, CorruptMessageError
from thinwire.sparse import SparseRows
from thinwire.sync.union_shares import Share, Union, UnionPlan
from thinwire.wire import Format, Kind, Whole


def all_reduce(
    rows: SparseRows, formats: tuple[Format, ...], by_columns: bool, channel: Channel, scale: float
) -> SparseRows:
    """Sum rows over all ranks, each of which adds up its share of the union; ``formats`` are for the ids.

    Call it after `Channel.open`, which gathers how many of these rows each rank holds.
    """
    plan = UnionPlan(tuple(channel.held), rows.num_rows, rows.width, rows.values.element_size(), formats, by_columns)
    if plan.sent_rows(channel.rank) > rows.ids.numel():
        rows = SparseRows.trusted(torch.arange(rows.num_rows), rows.to_dense(), rows.num_rows)
    channel.formats_sent = {Kind.PUSH: {plan.format(channel.rank)}, Kind.PULL: {Format.DENSE}}
    check_fits(plan.least_bytes(), channel.where)
    with channel.stream() as stream:
        coded = _CodedParcels(channel, stream, plan, rows.values.dtype) if channel.codes_values else None
        return _Run(rows, plan, channel, coded or Parcels(channel, stream)).sum(scale)


class _Run:
    """One run, whose parcels are numbered: 0 for the ids, unless they lead, then push and pull."""

    def __init__(self, rows: SparseRows, plan: UnionPlan, channel: Channel, parcels: Parcels) -> None:
        self.rows, self.plan, self.channel, self.parcels = rows, plan, channel, parcels
        self.rank, self.world_size = channel.rank, channel.world_size
        self.ranks = range(self.world_size)
        self.shares = [plan.shares(owner) for owner in self.ranks]
        self.mine = self.shares[self.rank]
        self.others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def sum(self, scale: float) -> SparseRows:
        early = [number for number, share in enumerate(self.mine) if share.early]
        late = [number for number, share in enumerate(self.mine) if not share.early]
        ids = {} if self.plan.ids_lead else self._swap_ids()
        pushes = [self._receive_push(number, None) for number in early]
        self._push(early, None)
        posted = None if self.plan.posts_early else self._union(ids or pushes[0])
        pushes += [self._receive_push(number, posted) for number in late]
        pulls = [self._receive_pull(number, posted) for number in early + late]
        union = posted or self._union(ids or pushes[0])
        self._push(late, union)
        values = self.rows.values.new_empty(union.ids.numel(), self.rows.width)
        for number, share in enumerate(self.mine):
            total = self._sum(number, pushes[number], union, scale)
            self._send_back(number, share, total)
            _write(values, union.places(share), share.columns, total)
        for number, received in enumerate(pulls):
            for owner, receive in received.items():
                share = self.shares[owner][number]
                num_rows = union.num_rows(share)
                total = self._matrix(receive(self.plan.values_bytes(num_rows, share)), num_rows, share.width)
                _write(values, union.places(share), share.columns, total)
        return SparseRows.trusted(union.ids, values, self.rows.num_rows)

    def _swap_ids(self) -> dict[int, Receive]:
        receives = {source: self.parcels.receive(source, 0, self.plan.ids_bytes(source)) for source in self.others}
        self.parcels.send_to_all(0, self.plan.ids_bytes(self.rank), lambda target: target.copy_(self._encoded_ids))
        return receives

    @cached_property
    def _encoded_ids(self) -> Tensor:
        format, no_values = self.plan.format(self.rank), self.rows.values[:, :0]
        if format is Format.DENSE:
            return torch.empty(0, dtype=torch.uint8)
        return wire.encode(format, Whole(self.rows.num_rows), self.rows.ids, no_values)

    def _union(self, awaited: dict[int, Receive]) -> Union:
        """Verify and decode messages while later ones are on the wire, that of the rank before this one first."""
        ids = {rank: self._decode_ids(rank, awaited[rank]) for rank in reversed(self.others)}
        ids[self.rank] = self.rows.ids
        in_order = [ids[rank] for rank in self.ranks]
        return Union(*kernels.union_places(in_order, self.rows.num_rows))

    def _decode_ids(self, rank: int, receive: Receive) -> Tensor:
        format, count, whole = self.plan.format(rank), self.plan.held[rank], Whole(self.rows.num_rows)
        if format is Format.DENSE:
            return torch.arange(self.rows.num_rows)
        try:
            return wire.decode(format, whole, count, receive()[: self.plan.ids_bytes(rank)], 0, torch.uint8)[0]
        except CorruptHeaderError:
            raise
        except CorruptMessageError as error:
            raise CorruptHeaderError(f"{self.channel.where(rank)}: {error}") from error

    def _receive_push(self, number: int, union: Union | None) -> dict[int, Receive]:
        """Post receives of the pieces of one of this rank's shares; without the union, of all rows that could come.

        Receives are posted early, because a sender cannot begin before the posted receive is announced to it, and a
        late announcement would arrive behind what was sent meanwhile.
        """
        share = self.mine[number]

        def receive(source: int) -> Receive:
            count = union.pushed(share, source)[0].numel() if union else self.plan.most_pushed(share, source)
            num_bytes = self.plan.lead_bytes(source, number) + self.plan.values_bytes(count, share)
            return cache(self.parcels.receive(source, 1 + number, num_bytes))

        return {source: receive(source) for source in reversed(self.others)}

    def _receive_pull(self, number: int, union: Union | None) -> dict[int, Receive]:
        def receive(owner: int) -> Receive:
            share = self.shares[owner][number]
            count = union.num_rows(share) if union else self.plan.most_sums(share)
            return self.parcels.receive(owner, self._pull_place(number), self.plan.values_bytes(count, share))

        return {owner: receive(owner) for owner in reversed(self.others)}

    def _push(self, numbers: Sequence[int], union: Union | None) -> None:
        """Send each owner its shares of this rank's rows, of all of them where ``union`` is not known."""
        for number in numbers:
            for owner in self.others:
                share = self.shares[owner][number]
                self._push_share(number, owner, union.pushed(share, self.rank)[1] if union else None)

    def _push_share(self, number: int, owner: int, pushed: Tensor | None) -> None:
        share = self.shares[owner][number]
        values, lead = self.rows.values[:, share.columns], self.plan.lead_bytes(self.rank, number)
        count = values.shape[0] if pushed is None else pushed.numel()

        def write(target: Tensor) -> None:
            if lead:
                target[:lead] = self._encoded_ids
            matrix = self._matrix(target[lead:], count, share.width)
            matrix.copy_(values) if pushed is None else torch.index_select(values, 0, pushed, out=matrix)

        self.parcels.send(owner, 1 + number, lead + self.plan.values_bytes(count, share), write)

    def _sum(self, number: int, received: dict[int, Receive], union: Union, scale: float) -> Tensor:
        """Sum a share in rank order as its pieces arrive, times ``scale``, rounded once."""
        share = self.mine[number]

        def piece(rank: int) -> tuple[Tensor, Tensor]:
            places, pushed = union.pushed(share, rank)
            if rank != self.rank:
                data = self._pushed(number, received[rank], rank, places.numel())
                return places, self._matrix(data, places.numel(), share.width)
            own = self.rows.values[:, share.columns]
            return places, own if pushed is None else own[pushed]

        pieces = (piece(rank) for rank in self.ranks)
        return kernels.sum_rows_at(pieces, union.num_rows(share), share.width, self.rows.values.dtype, scale)

    def _pushed(self, number: int, receive: Receive, rank: int, num_rows: int) -> Tensor:
        """Return the values that a rank pushed of a share, as bytes."""
        share = self.mine[number]
        if share.early:
            return receive()[self.plan.lead_bytes(rank, number) :]
        return receive(self.plan.values_bytes(num_rows, share))

    def _send_back(self, number: int, share: Share, total: Tensor) -> None:
        def write(target: Tensor) -> None:
            self._matrix(target, *total.shape).copy_(total)

        self.parcels.send_to_all(self._pull_place(number), self.plan.values_bytes(total.shape[0], share), write)

    def _pull_place(self, number: int) -> int:
        return 1 + len(self.mine) + number

    def _matrix(self, data: Tensor, num_rows: int, width: int) -> Tensor:
        num_bytes = num_rows * width * self.rows.values.element_size()
        return data[:num_bytes].view(self.rows.values.dtype).view(num_rows, width)


class _CodedParcels(Parcels):
    """Parcels whose values travel as their code where it pays, behind their ids; all but the ids alone say their size.

    A parcel that is shorter than both ends know has coded values.
    """

    def __init__(self, channel: Channel, stream: Stream, plan: UnionPlan, dtype: torch.dtype) -> None:
        super().__init__(channel, stream)
        self._plan, self._dtype = plan, dtype

    def send(self, target: int, place: int, num_bytes: int, write: Write) -> None:
        self._send([target], place, num_bytes, write)

    def send_to_all(self, place: int, num_bytes: int, write: Write) -> None:
        rank, world_size = self._channel.rank, self._channel.world_size
        if place == 0:
            super().send_to_all(place, num_bytes, write)
        else:
            self._send([(rank + step) % world_size for step in range(1, world_size)], place, num_bytes, write)

    def _send(self, targets: Sequence[int], place: int, num_bytes: int, write: Write) -> None:
        def make() -> Tensor:
            data = torch.empty(num_bytes, dtype=torch.uint8)
            write(data)
            lead = self._plan.lead_bytes(self._channel.rank, place - 1)
            code = wire.code_of(data[lead:].view(self._dtype))
            data = data if code is None else torch.cat([data[:lead], code])
            self._channel.saved_bytes += len(targets) * (parcel_bytes(num_bytes) - sized_parcel_bytes(data.numel()))
            return data

        if num_bytes:
            self.send_sized(targets, place, make)

    def receive(self, source: int, place: int, num_bytes: int) -> Callable[..., Tensor]:
        if place == 0 or not num_bytes:
            return super().receive(source, place, num_bytes)
        posted, receive = num_bytes, self.receive_sized(source, place, num_bytes)

        def wait(num_bytes: int | None = None) -> Tensor:
            data, lead = receive(), self._plan.lead_bytes(source, place - 1)
            size = posted if num_bytes is None else num_bytes
            if data.numel() == size:
                return data
            values = torch.empty(size, dtype=torch.uint8)
            try:
                if not lead < data.numel() < size:
                    raise CorruptMessageError(f"{data.numel()} bytes, where {size} are expected")
                values[:lead] = data[:lead]
                floats.decode(data[lead:], values[lead:].view(self._dtype))
            except CorruptMessageError as error:
                raise CorruptHeaderError(f"{self._channel.where(source)}: {error}") from error
            return values

        return wait


def _write(values: Tensor, places: Tensor | slice, columns: slice, rows: Tensor) -> None:
    if isinstance(places, slice):
        values[places, columns] = rows
    else:
        values[:, columns].index_copy_(0, places, rows)
