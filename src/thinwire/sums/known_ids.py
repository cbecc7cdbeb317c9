"""Parallelism in which every rank knows the ids of all: shares of the union without ids in the pull.

Every rank sends its ids to all, so all know the union. Then the union is a matrix [u, width] that can be dealt out as
if it were dense: to each owner some columns of every row (imbalance exactly 1 in both phases, whatever the ids are), or
an equal number of rows, of those that it holds (see `thinwire.sums.union_shares.deal`), which it need not send. It pays
when few wide rows are spread over many owners.

Once the ranks know how many rows each of them holds, the sizes of all ids and columns are known, and all other sizes
once the ids have arrived. So no header travels, and everything runs as one stream, in which the share of an owner is
cut into chunks: while one is on the wire, the next is gathered, and an earlier one is summed and sent back. By columns,
only the first ones are pushed with the ids, so that the wire is busy until all ranks know the ids; of the other columns
the rows are dealt. With many ranks, or with few or narrow rows, all columns are pushed with the ids.
"""

from collections.abc import Callable, Mapping
from functools import cached_property, partial

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.comm.channel import Channel
from thinwire.comm.frames import Frames, frame_bytes
from thinwire.comm.process_group import check_fits
from thinwire.errors import CorruptMessageError
from thinwire.rows import floats
from thinwire.rows import formats as wire
from thinwire.rows.formats import Format, Kind, Whole
from thinwire.rows.sparse import SparseRows
from thinwire.sums.owners import Arriving, OwnerSum
from thinwire.sums.scheme import Scheme
from thinwire.sums.union_shares import Share, Union, UnionPlan


def all_reduce(rows: SparseRows, scheme: Scheme, channel: Channel, scale: float) -> SparseRows:
    """Sum rows over all ranks, each of which adds up its share of the union.

    Call it after `Channel.open`, which gathers how many of these rows each rank holds.
    """
    plan = UnionPlan(tuple(channel.held), rows.num_rows, rows.width, rows.values.element_size(), scheme)
    if plan.sent_rows(channel.rank) > rows.ids.numel():
        rows = SparseRows.trusted(torch.arange(rows.num_rows), rows.to_dense(), rows.num_rows)
    channel.formats_sent = {Kind.PUSH: {plan.format(channel.rank)}, Kind.PULL: {Format.DENSE}}
    check_fits(plan.least_bytes(), channel.where)
    code = _Shares(rows, plan, channel, scale)
    early = [number for number, share in enumerate(code.mine) if share.early]
    late = [number for number, share in enumerate(code.mine) if not share.early]
    with OwnerSum(channel, code) as run:
        swapped = code.swap_ids(run.frames)
        run.push(early)
        run.post()
        code.learn(swapped, run)
        run.push(late)
        run.finish()
    return SparseRows.trusted(code.union.ids, code.values, rows.num_rows)


class _Shares:
    """The code of a sum: columns of rows, as they are or by a code that loses nothing, some of them behind ids."""

    union: Union
    values: Tensor

    def __init__(self, rows: SparseRows, plan: UnionPlan, channel: Channel, scale: float) -> None:
        self.rows, self.plan, self.channel, self.scale = rows, plan, channel, scale
        self.rank, self.ranks = channel.rank, range(channel.world_size)
        self.shares = [plan.shares(owner) for owner in self.ranks]
        self.mine = self.shares[self.rank]
        self.segments = [len(shares) for shares in self.shares]
        self.first: dict[int, Callable[[], Tensor]] = {}  # what was pushed behind ids, until it is added

    def swap_ids(self, frames: Frames) -> dict[int, Callable[[], Tensor]]:
        """Send the ids of this rank to all, unless they lead; return functions that wait for the ids of the others."""
        if self.plan.ids_lead:
            return {}
        others = [(self.rank + step) % len(self.ranks) for step in self.ranks[1:]]
        sizes = {rank: self.plan.ids_bytes(rank) for rank in reversed(others)}
        swapped = {rank: frames.receive(rank, Kind.GATHER, 0, size) for rank, size in sizes.items() if size}
        if self._ids.numel():
            frames.send(others, Kind.GATHER, 0, lambda: self._ids)
        return swapped

    def learn(self, swapped: Mapping[int, Callable[[], Tensor]], run: OwnerSum) -> None:
        """Decode the ids of all ranks, which were swapped or lead what is pushed first; now the union is known."""
        if self.plan.ids_lead:
            self.first = {source: partial(run.again, source, receive()) for source, receive in run.pushed(0)}
        receives = self.first or swapped
        ids = [run.naming(partial(self._decoded_ids, rank, receives.get(rank)), rank) for rank in self.ranks]
        self.union = Union(*kernels.union_positions(ids, self.rows.num_rows))
        self.values = self.rows.values.new_empty(self.union.ids.numel(), self.rows.width)

    @cached_property
    def _ids(self) -> Tensor:
        """The ids of this rank, encoded."""
        format, no_values = self.plan.format(self.rank), self.rows.values[:, :0]
        if format is Format.DENSE:
            return torch.empty(0, dtype=torch.uint8)
        return wire.encode(format, Whole(self.rows.num_rows), self.rows.ids, no_values)

    def _decoded_ids(self, rank: int, receive: Callable[[], Tensor] | None) -> Tensor:
        format, count, whole = self.plan.format(rank), self.plan.held[rank], Whole(self.rows.num_rows)
        if rank == self.rank:
            return self.rows.ids
        if format is Format.DENSE:
            return torch.arange(self.rows.num_rows)
        data = self._ids[:0] if receive is None else receive()
        return wire.decode(format, whole, count, data[: self.plan.ids_bytes(rank)], 0, torch.uint8)[0]

    def most_pushed(self, source: int, owner: int, number: int) -> int:
        return self.plan.most_push_bytes(self.shares[owner][number], source, number)

    def most_pulled(self, owner: int, number: int) -> int:
        share = self.shares[owner][number]
        return self.plan.values_bytes(self.plan.most_sums(share), share)

    def push(self, owner: int, number: int) -> Tensor:
        share = self.shares[owner][number]
        values = self.rows.values[:, share.columns]
        _, pushed = self.union.pushed(share, self.rank) if not share.early else (None, None)
        if pushed is not None:
            values = values.index_select(0, pushed)
        lead = self._ids if self.plan.lead_bytes(self.rank, number) else self._ids[:0]
        return self._encoded(lead, values, 1)

    def add(self, number: int, arriving: Arriving) -> Tensor:
        """Return the sum of a share, added as its pieces arrive, times the scale, rounded once."""
        share = self.mine[number]
        receives = self.first if number == 0 and self.first else dict(arriving)

        def piece(rank: int) -> tuple[Tensor, Tensor]:
            indices, pushed = self.union.pushed(share, rank)
            if rank != self.rank:
                lead = self.plan.lead_bytes(rank, number)
                content = receives[rank]() if rank in receives else self._ids[:0]
                return indices, self._values(content, lead, indices.numel(), share.width)
            own = self.rows.values[:, share.columns]
            return indices, own if pushed is None else own[pushed]

        num_rows = self.union.num_rows(share)
        dtype = self.rows.values.dtype
        total = kernels.sum_rows_at(map(piece, self.ranks), num_rows, share.width, dtype, self.scale)
        self._write(share, total)
        return total

    def pull(self, number: int, total: Tensor) -> Tensor:
        return self._encoded(self._ids[:0], total, len(self.ranks) - 1)

    def take(self, owner: int, number: int, receive: Callable[[], Tensor]) -> None:
        share = self.shares[owner][number]
        self._write(share, self._values(receive(), 0, self.union.num_rows(share), share.width))

    def _write(self, share: Share, total: Tensor) -> None:
        indices = self.union.indices(share)
        if isinstance(indices, slice):
            self.values[indices, share.columns] = total
        else:
            self.values[:, share.columns].index_copy_(0, indices, total)

    def _encoded(self, lead: Tensor, values: Tensor, copies: int) -> Tensor:
        """Return values behind ids, by their code if that pays; it saves as many bytes for each of some copies."""
        data = values.contiguous().view(-1).view(torch.uint8)
        code = wire.code_of(data.view(values.dtype)) if self.channel.codes_values else None
        if code is not None:
            saved = frame_bytes(lead.numel() + data.numel()) - frame_bytes(lead.numel() + code.numel())
            self.channel.saved_bytes += copies * saved
        return torch.cat([lead, data if code is None else code])

    def _values(self, content: Tensor, lead: int, num_rows: int, width: int) -> Tensor:
        """Return the values behind ids; content that is shorter than both ends know has their code."""
        data, dtype = content[lead:], self.rows.values.dtype
        num_bytes = num_rows * width * dtype.itemsize
        if data.numel() != num_bytes:
            if not 0 < data.numel() < num_bytes:
                raise CorruptMessageError(f"{data.numel()} bytes, where {num_bytes} are expected")
            code, data = data, torch.empty(num_bytes, dtype=torch.uint8)
            floats.decode(code, data.view(dtype))
        return data.view(dtype).view(num_rows, width)
