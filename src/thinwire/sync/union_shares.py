"""Shares of a union that all ranks know, and the sizes of all messages about them: pure functions of shared numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire import wire
from thinwire.comm.parcels import parcel_bytes
from thinwire.wire import ALIGNMENT_BYTES, Format

CHUNK_BYTES = 96 * 1024
"""A chunk for one owner has at least so many bytes: smaller ones cost more in messages than they save in waiting. Of
8 ranks on two cores at 100 Mbit/s, in seconds: lstm (113 kB for an owner) 0.305 in one chunk, 0.318 in two; nmt
(247 kB) 0.928 in one, 0.888 in two, 0.912 in four."""
MAX_CHUNKS = 4

MIN_DEALT_BYTES = 64 * 1024
"""Rows are dealt to owners if a rank pushes so many bytes to each; else the messages that it takes cost more than it
saves."""

MAX_DEALT_RANKS = 8
"""Rows are dealt to owners on up to so many ranks. What it saves falls as 1 / n, while the messages that it takes cost
processor time, and the ids have to be known first."""

EARLY_SHARE = 4
"""One column in so many is pushed right behind the ids, so that the wire is busy while the ids are on their way. Of 8
ranks on two cores the round of ids took 20 ms; a quarter of the push of lstm takes 16 ms at 100 Mbit/s."""

POSTED_BYTES = 64 * 1024 * 1024
"""Receives are posted before the union is known, for as many rows as could come, if these have no more bytes in all."""


@dataclass(frozen=True)
class Share:
    """What an owner adds up of the union, as a matrix: some columns of all rows, or of the rows dealt to that owner.

    Columns of all rows are pushed before the ids of other ranks are known.
    """

    columns: slice
    dealt_to: int | None = None

    @property
    def early(self) -> bool:
        return self.dealt_to is None

    @property
    def width(self) -> int:
        return self.columns.stop - self.columns.start


@dataclass(frozen=True, eq=False)
class Union:
    """The union of the ids of all ranks, as all ranks see it once they know them, and how its rows are dealt.

    Args:
        ids: int64 [u], increasing.
        positions: of each rank, where in the union its rows are, increasing.
    """

    ids: Tensor
    positions: Sequence[Tensor]

    @cached_property
    def owned(self) -> list[Tensor]:
        """For each rank the positions of the rows that it owns, increasing."""
        return deal(self.positions, self.ids.numel())

    @cached_property
    def _owners_and_places(self) -> tuple[Tensor, Tensor]:
        """Of each row its owner, and where among the rows of its owner it is."""
        owners, places = torch.empty_like(self.ids), torch.empty_like(self.ids)
        for rank, rows in enumerate(self.owned):
            owners[rows], places[rows] = rank, torch.arange(rows.numel())
        return owners, places

    def num_rows(self, share: Share) -> int:
        return self.ids.numel() if share.dealt_to is None else self.owned[share.dealt_to].numel()

    def places(self, share: Share) -> Tensor | slice:
        """Where in the union the rows of a share are."""
        return slice(None) if share.dealt_to is None else self.owned[share.dealt_to]

    def pushed(self, share: Share, rank: int) -> tuple[Tensor, Tensor | None]:
        """Where in a share the rows that a rank pushes are, and which of its rows those are (None for all)."""
        held = self.positions[rank]
        if share.dealt_to is None:
            return held, None
        owners, places = self._owners_and_places
        selected = (owners[held] == share.dealt_to).nonzero().flatten()
        return places[held[selected]], selected

    @cached_property
    def _num_dealt(self) -> list[list[int]]:
        owners, _ = self._owners_and_places
        return [torch.bincount(owners[held], minlength=len(self.positions)).tolist() for held in self.positions]

    def num_pushed(self, share: Share, rank: int) -> int:
        """Return how many rows of a share a rank pushes."""
        return self.positions[rank].numel() if share.dealt_to is None else self._num_dealt[rank][share.dealt_to]


def deal(positions: Sequence[Tensor], num_rows: int) -> list[Tensor]:
    """Deal rows to owners, each of them as many: to a rank that holds the row, where that is possible.

    An owner that holds a row saves its way to the owner, so that of a row that m of n ranks hold n + m - 2 travel, the
    least. The m ranks take turns, among all rows of as many holders, so that no owner gets much more than the others.
    What would be more than u / n rows of a rank goes to those that have fewer. Of 8 ranks the busiest sends 1.014 of
    the least of lstm and nmt, 1.017 of bert's, because not all hold as many rows; it gets 1.013, 1.013 and 1.020.

    Args:
        positions: of each rank, which of the ``num_rows`` rows it holds; each row is held by one at least.

    Returns:
        For each rank the rows that it owns, increasing.
    """
    holders = torch.bincount(torch.cat(list(positions)), minlength=num_rows)
    order = holders.to(torch.int16).argsort(stable=True)  # sorted by counting
    turns = torch.empty_like(holders)
    turns[order] = torch.arange(num_rows).remainder_(holders[order])
    owned, rest, quota = [], [], -(-num_rows // len(positions))
    for held in positions:
        turn = turns[held]
        mine = held[turn == 0]
        owned.append(mine[:quota])
        rest.append(mine[quota:])
        turns[held] = turn - 1
    parts = torch.cat(rest).split(_filling(torch.cat(rest).numel(), [quota - rows.numel() for rows in owned]))
    return [torch.cat([rows, part]).sort().values for rows, part in zip(owned, parts, strict=True)]


def _filling(count: int, rooms: Sequence[int]) -> list[int]:
    """How many of ``count`` go into each room, the first ones filled first."""
    filled = []
    for room in rooms:
        filled.append(min(room, count))
        count -= filled[-1]
    return filled


@dataclass(frozen=True)
class UnionPlan:
    """What every rank knows after `Channel.open`.

    Args:
        held: rows that each rank holds.
        num_rows, width, itemsize: of the tensor; ``itemsize`` in bytes.
        formats: to choose from for the ids.
        by_columns: whether some columns of every row are pushed before the ids are known, or rows are dealt alone.
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
        """Columns that are pushed before the ids are known; as many for each owner, where there are others."""
        if not self.by_columns:
            return 0
        some = self.width // EARLY_SHARE // self.world_size * self.world_size
        share_bytes = self._fullest * self.width * self.itemsize // self.world_size
        pays = some and self.world_size <= MAX_DEALT_RANKS and share_bytes >= MIN_DEALT_BYTES
        return some if pays else self.width

    @property
    def ids_lead(self) -> bool:
        """Whether the ids are not a message of their own, but in front of the first piece that is pushed."""
        return self.num_early == self.width

    def shares(self, owner: int) -> list[Share]:
        """What an owner adds up, in the pieces in which it travels; as many for each owner, early ones first.

        Columns are consecutive, and their numbers differ by at most one between owners.
        """
        early = _piece(slice(0, self.num_early), self.world_size, owner)
        if self.ids_lead:
            return [Share(columns) for columns in _cut(early, self._num_chunks)]
        dealt = [Share(columns, owner) for columns in _cut(slice(self.num_early, self.width), self._num_chunks)]
        return [Share(early), *dealt] if self.num_early else dealt

    @cached_property
    def _num_chunks(self) -> int:
        narrow = -(-(self.num_early if self.ids_lead else self.width - self.num_early) // self.world_size)
        most = min(MAX_CHUNKS, narrow if self.ids_lead else self.width - self.num_early)
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
        """Of a message about a share; of rows dealt never nothing, since it may be awaited before that is known."""
        num_bytes = num_rows * share.width * self.itemsize
        return num_bytes if share.early else max(ALIGNMENT_BYTES, num_bytes)

    @cached_property
    def most_rows(self) -> int:
        """That the union may have."""
        return min(self.num_rows, sum(self.sent_rows(rank) for rank in range(self.world_size)))

    def most_sums(self, share: Share) -> int:
        """Rows that a share may have."""
        return self.most_rows if share.early else -(-self.most_rows // self.world_size)

    def most_pushed(self, share: Share, rank: int) -> int:
        """Rows of a share that a rank may push."""
        return self.sent_rows(rank) if share.early else min(self.sent_rows(rank), self.most_sums(share))

    @property
    def posts_early(self) -> bool:
        """Whether receives are posted before the union is known: of up to the fullest's rows and the union's."""
        row_bytes = self.width * self.itemsize
        return (self.world_size * self._fullest + self.most_rows) * row_bytes <= POSTED_BYTES

    def expected_bytes(self, union: float) -> float:
        """Return the bytes that a rank sends after the opening, the same for all if all hold as many rows.

        Args:
            union: rows that all ranks hold together; each rank holds those that are dealt to it.
        """
        others = self.world_size - 1
        owned = round(union / self.world_size)
        pushed = round(max(0, self.sent_rows(0) - owned) / max(1, others))
        total = 0 if self.ids_lead else others * parcel_bytes(self.ids_bytes(0))
        for share in self.shares(0):
            total += others * parcel_bytes(self.values_bytes(round(union) if share.early else owned, share))
        for owner in range(1, self.world_size):
            for number, share in enumerate(self.shares(owner)):
                rows = self.sent_rows(0) if share.early else pushed
                total += parcel_bytes(self.lead_bytes(0, number) + self.values_bytes(rows, share))
        return total

    def union(self, ids_per_rank: Sequence[Tensor]) -> Union:
        """What all ranks make of these ids (sorted, unique)."""
        sent = [
            torch.arange(self.num_rows) if self.format(rank) is Format.DENSE else ids
            for rank, ids in enumerate(ids_per_rank)
        ]
        union = torch.cat(sent).unique()
        return Union(union, [torch.searchsorted(union, ids) for ids in sent])


def _cut(columns: slice, count: int) -> list[slice]:
    return [_piece(columns, count, number) for number in range(count)]


def _piece(columns: slice, count: int, number: int) -> slice:
    """Return one of ``count`` consecutive pieces; all together would take 1024 owners 0.2 s a choice."""
    size, rest = divmod(columns.stop - columns.start, count)
    start = columns.start + number * size + min(number, rest)
    return slice(start, start + size + (number < rest))
