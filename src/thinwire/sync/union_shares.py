"""Shares of a union that all ranks know, and the sizes of all messages about them: pure functions of shared numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from thinwire import wire
from thinwire.sync.parcels import parcel_bytes
from thinwire.wire import Format

CHUNK_BYTES = 96 * 1024
"""A chunk for one owner has at least so many bytes: smaller ones cost more in messages than they save in waiting. Of
8 ranks on two cores at 100 Mbit/s, in seconds: lstm (113 kB for an owner) 0.305 in one chunk, 0.318 in two; nmt
(247 kB) 0.928 in one, 0.888 in two, 0.912 in four."""
MAX_CHUNKS = 4

MIN_ALONE_BYTES = 16 * 1024
"""Rows that one rank alone holds go straight to all if those of a rank have so many bytes; else a message for each peer
costs more than they save."""

MAX_ALONE_RANKS = 4
"""Columns of rows that one rank alone holds go straight to all on up to so many ranks. What it saves falls as 1 / n,
while the messages that it takes cost processor time, and the ids have to be known first. Seconds without and with it at
100 Mbit/s, all ranks on two cores: nmt 0.511 and 0.458 on 4 hosts, 0.881 and 0.863 on 8; bert 0.248 and 0.227 on 4,
0.444 and 0.466 on 8; lstm on 16 hosts at 50 Mbit/s 0.945 and 1.022. Hosts with cores of their own could go higher."""


EARLY_SHARE = 4
"""One column in so many is pushed right behind the ids, so that the wire is busy while the ids are on their way. Of 8
ranks on two cores the round of ids took 20 ms; a quarter of the push of lstm takes 16 ms at 100 Mbit/s."""


@dataclass(frozen=True)
class Share:
    """What an owner adds up of the union, as a matrix: all rows of some columns, or every n-th row of all.

    ``early``: sent before the ids of other ranks are known, so with the rows that one rank alone holds.
    """

    rows: slice
    columns: slice
    early: bool = False

    @property
    def width(self) -> int:
        return self.columns.stop - self.columns.start


@dataclass(frozen=True, eq=False)
class Union:
    """The union of the ids of all ranks, as all ranks see it once they know them, and how it is dealt with.

    A row that one rank alone holds needs no owner that adds it up: its holder sends it to all, which saves its way to
    the owner. As many rows of each rank are sent so, because a rank with more of them would send more than the others.

    Args:
        ids: int64 [u], increasing.
        positions: of each rank, where in the union its rows are, increasing.
        alone: of each rank, positions in the union of its first m rows that no other rank holds.
        shared: positions in the union of all other rows; None for all rows, where m is 0.
        held: of each rank, where in ``shared`` its other rows are.
        kept: of each rank, which of its rows those are; None for all.
    """

    ids: Tensor
    positions: Sequence[Tensor]
    alone: Sequence[Tensor]
    shared: Tensor | None
    held: Sequence[Tensor]
    kept: Sequence[Tensor | None]

    @classmethod
    def of(cls, ids: Tensor, positions: Sequence[Tensor], row_bytes: int) -> Union:
        """From the union and the positions in it of each rank's rows; ``row_bytes`` of what is sent of a row alone."""
        holders = torch.bincount(torch.cat(list(positions)), minlength=ids.numel())
        singles = [(holders[places] == 1).nonzero().flatten() for places in positions]
        count = min(places.numel() for places in singles)
        count = min(count, min(places.numel() for places in positions) - 1)  # so that every rank pushes something
        if count * row_bytes < MIN_ALONE_BYTES or len(positions) == 1:
            none = positions[0][:0]
            return cls(ids, positions, [none] * len(positions), None, positions, [None] * len(positions))
        alone = [places[single[:count]] for places, single in zip(positions, singles, strict=True)]
        is_shared = torch.ones(ids.numel(), dtype=torch.bool)
        is_shared[torch.cat(alone)] = False
        places_shared = is_shared.cumsum(0) - 1
        kept = [is_shared[places].nonzero().flatten() for places in positions]
        held = [places_shared[places[keep]] for places, keep in zip(positions, kept, strict=True)]
        return cls(ids, positions, alone, is_shared.nonzero().flatten(), held, kept)

    @property
    def num_alone(self) -> int:
        """m, of each rank."""
        return self.alone[0].numel()

    @property
    def num_shared(self) -> int:
        return self.ids.numel() if self.shared is None else self.shared.numel()

    def num_rows(self, share: Share) -> int:
        return len(range(self.ids.numel() if share.early else self.num_shared)[share.rows])

    def places(self, share: Share) -> Tensor | slice:
        """Where in the union the rows of a share are."""
        return share.rows if share.early or self.shared is None else self.shared[share.rows]

    def pushed(self, share: Share, rank: int) -> tuple[Tensor, Tensor | None]:
        """Where in a share the rows that a rank pushes are, and which of its rows those are (None for all)."""
        held, kept = (self.positions[rank], None) if share.early else (self.held[rank], self.kept[rank])
        if share.rows.step is None:
            return held, kept
        selected = (held % share.rows.step == share.rows.start).nonzero().flatten()
        places = torch.div(held[selected], share.rows.step, rounding_mode="floor")
        return places, selected if kept is None else kept[selected]


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
        return self._ids[rank][0]

    def sent_rows(self, rank: int) -> int:
        """Rows that travel: those held, or all of them, zeros included, if there is no other format than DENSE."""
        return self.num_rows if self.format(rank) is Format.DENSE else self.held[rank]

    def ids_bytes(self, rank: int) -> int:
        return self._ids[rank][1]

    @cached_property
    def _ids(self) -> list[tuple[Format, int]]:
        """Format and bytes of the ids of each rank."""
        return [self._format_and_bytes(held) for held in self.held]

    def _format_and_bytes(self, held: int) -> tuple[Format, int]:
        share_bytes = -(-self.width // self.world_size) * self.itemsize
        format = wire.smallest(self.formats, held, share_bytes, self.num_rows, self.num_rows)
        if format is Format.DENSE:
            return format, 0
        return format, wire.payload_bytes(format, held, 0, self.num_rows, self.num_rows)

    @cached_property
    def num_early(self) -> int:
        """Columns that are pushed before the ids are known; as many for each owner."""
        if not self.by_columns:
            return 0
        if self.world_size > MAX_ALONE_RANKS:
            return self.width
        return self.width // EARLY_SHARE // self.world_size * self.world_size

    @property
    def ids_lead(self) -> bool:
        """Whether the ids are not a message of their own, but in front of the first piece that is pushed."""
        return self.by_columns and self.num_early == self.width

    @property
    def alone_bytes(self) -> int:
        """Of a row that its holder sends to all: without its early columns."""
        return (self.width - self.num_early) * self.itemsize

    def shares(self, owner: int) -> list[Share]:
        """What an owner adds up, in the pieces in which it travels; as many for each owner, early ones first.

        Columns are consecutive, and their numbers differ by at most one between owners.
        """
        early, late = slice(0, self.num_early), slice(self.num_early, self.width)
        if not self.by_columns:
            rows = slice(owner, None, self.world_size)
            return [Share(rows, columns) for columns in _cut(late, self._num_chunks)]
        mine = _cut(early if self.ids_lead else late, self.world_size)[owner]
        chunks = [Share(slice(None), columns, self.ids_lead) for columns in _cut(mine, self._num_chunks)]
        if self.ids_lead or not self.num_early:
            return chunks
        return [Share(slice(None), _cut(early, self.world_size)[owner], early=True), *chunks]

    @cached_property
    def _num_chunks(self) -> int:
        narrow = -(-(self.num_early if self.ids_lead else self.width - self.num_early) // self.world_size)
        most = min(MAX_CHUNKS, narrow if self.by_columns else self.width)
        return max(1, min(most, narrow * self._fullest * self.itemsize // CHUNK_BYTES))

    @cached_property
    def _fullest(self) -> int:
        """Rows of the rank that sends most; cached, because of 1024 ranks each owner would ask all (17 s a plan)."""
        return max(self.sent_rows(rank) for rank in range(self.world_size))

    def lead_bytes(self, rank: int, number: int) -> int:
        """Of the ids of a rank in front of what it pushes of the share of that number."""
        return self.ids_bytes(rank) if self.ids_lead and number == 0 else 0

    def least_bytes(self) -> int:
        """A rank allocates no less than this: what others push to it, and the rows of the fullest in the sum."""
        row_bytes = self.width * self.itemsize
        pushed = sum(self.sent_rows(rank) for rank in range(self.world_size)) * row_bytes // self.world_size
        return pushed + self._fullest * row_bytes

    def values_bytes(self, num_rows: int, share: Share) -> int:
        return num_rows * share.width * self.itemsize

    def sent_bytes(self, rank: int, union: int, alone: int, pushed_rows: Sequence[int] | None = None) -> int:
        """Exact bytes that a rank sends after the opening.

        Args:
            union: rows that all ranks hold together.
            alone: rows that each rank sends to all.
            pushed_rows: rows that this rank pushes to each owner; None where it pushes all but those alone.
        """
        shared, sent_rows = union - self.world_size * alone, self.sent_rows(rank)
        ids_bytes = 0 if self.ids_lead else self.ids_bytes(rank)
        total = (self.world_size - 1) * (parcel_bytes(ids_bytes) + parcel_bytes(alone * self.alone_bytes))
        for owner in range(self.world_size):
            for number, share in enumerate(self.shares(owner)):
                if owner == rank:
                    rows = len(range(union if share.early else shared)[share.rows])
                    total += (self.world_size - 1) * parcel_bytes(self.values_bytes(rows, share))
                else:
                    late = sent_rows - alone if pushed_rows is None else pushed_rows[owner]
                    pushed = sent_rows if share.early else late
                    total += parcel_bytes(self.lead_bytes(rank, number) + self.values_bytes(pushed, share))
        return total

    def expected_bytes(self, union: float) -> float:
        """Of a rank, if all hold as many rows, ``union`` in all, and the union of m ranks is a power of m.

        Then a rank adds what the union of n ranks has more than that of n - 1: the rows that it alone holds (lstm of 8
        ranks: 97 expected, 84 to 108 held; nmt 225, 185 to 234).
        """
        held, world_size = self.held[0], self.world_size
        growth = math.log(union / held) / math.log(world_size) if 0 < held < union else 0.0
        alone = int(union * (1 - ((world_size - 1) / world_size) ** growth))
        if alone * self.alone_bytes < MIN_ALONE_BYTES:
            alone = 0
        pushed = None if self.by_columns else [round((self.sent_rows(0) - alone) / world_size)] * world_size
        return self.sent_bytes(0, round(union), alone, pushed)

    def union(self, ids_per_rank: Sequence[Tensor]) -> Union:
        """What all ranks make of these ids (sorted, unique)."""
        sent = [
            torch.arange(self.num_rows) if self.format(rank) is Format.DENSE else ids
            for rank, ids in enumerate(ids_per_rank)
        ]
        union = torch.cat(sent).unique()
        return Union.of(union, [torch.searchsorted(union, ids) for ids in sent], self.alone_bytes)


def sent_bytes(plan: Plan, ids_per_rank: Sequence[Tensor]) -> list[int]:
    """Exact bytes that each rank sends after the opening, when the ranks hold these ids (sorted, unique)."""
    union = plan.union(ids_per_rank)

    def pushed_rows(rank: int) -> list[int] | None:
        if plan.by_columns:
            return None
        owners = union.held[rank] % plan.world_size
        return torch.bincount(owners, minlength=plan.world_size).tolist()

    ranks = range(plan.world_size)
    return [plan.sent_bytes(rank, union.ids.numel(), union.num_alone, pushed_rows(rank)) for rank in ranks]


def _cut(columns: slice, count: int) -> list[slice]:
    size, rest = divmod(columns.stop - columns.start, count)
    starts = [columns.start + part * size + min(part, rest) for part in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(starts)]
