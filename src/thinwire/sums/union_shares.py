"""Shares of a union that all ranks know, and the sizes of their messages, as pure functions of shared numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire.comm.frames import frame_bytes
from thinwire.rows import formats as wire
from thinwire.rows.formats import Format
from thinwire.sums.scheme import Ownership, Scheme

CHUNK_BYTES = 96 * 1024
"""Fewest bytes of a chunk for one owner: smaller ones cost more in messages than they save in waiting. Of
8 ranks on two cores at 100 Mbit/s, in seconds: lstm (113 kB for an owner) 0.305 in one chunk, 0.318 in two; nmt
(247 kB) 0.928 in one, 0.888 in two, 0.912 in four."""
MAX_CHUNKS = 4

MIN_DEALT_BYTES = 64 * 1024
"""Fewest bytes that a rank pushes to each owner for rows to be dealt: with less, the messages cost more than dealing
saves."""

MAX_DEALT_RANKS = 8
"""Most ranks on which rows are dealt to owners: the gain falls as 1 / n, while the messages cost processor time, and
the ids have to be known first."""

EARLY_SHARE = 4
"""Divisor of the columns that are pushed right behind the ids, so that the wire is busy while the ids travel. On 8
ranks on two cores the round of ids cost 20 ms; a quarter of the push of lstm costs 16 ms at 100 Mbit/s."""


@dataclass(frozen=True)
class Share:
    """The share of the union that an owner adds up: some columns of all rows, or of the rows dealt to that owner.

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
    """The union of the ids of all ranks, equal on all of them, and the deal of its rows to owners.

    Args:
        ids: int64 [u], increasing.
        positions: indices in the union of the rows of each rank, increasing.
    """

    ids: Tensor
    positions: Sequence[Tensor]

    @cached_property
    def owned(self) -> list[Tensor]:
        """Positions of the rows that each rank owns, increasing."""
        return deal(self.positions, self.ids.numel())

    @cached_property
    def _owners_and_indices(self) -> tuple[Tensor, Tensor]:
        """The owner of each row, and the index of the row among the rows of its owner."""
        owners, indices = torch.empty_like(self.ids), torch.empty_like(self.ids)
        for rank, rows in enumerate(self.owned):
            owners[rows], indices[rows] = rank, torch.arange(rows.numel())
        return owners, indices

    def num_rows(self, share: Share) -> int:
        return self.ids.numel() if share.dealt_to is None else self.owned[share.dealt_to].numel()

    def indices(self, share: Share) -> Tensor | slice:
        """Return the indices in the union of the rows of a share."""
        return slice(None) if share.dealt_to is None else self.owned[share.dealt_to]

    def pushed(self, share: Share, rank: int) -> tuple[Tensor, Tensor | None]:
        """Return the indices in a share of the rows that a rank pushes, and those in its own rows (None for all)."""
        held = self.positions[rank]
        if share.dealt_to is None:
            return held, None
        owners, indices = self._owners_and_indices
        selected = (owners[held] == share.dealt_to).nonzero().flatten()
        return indices[held[selected]], selected


def deal(positions: Sequence[Tensor], num_rows: int) -> list[Tensor]:
    """Deal rows evenly to owners, each row to a rank that holds it if that is possible.

    An owner that holds a row need not send it, so of a row that m of n ranks hold n + m - 2 copies travel, the least.
    The m ranks take turns, among all rows with m holders, so that no owner gets much more than the others. Rows beyond
    u / n of a rank go to those that have fewer. Of 8 ranks the busiest sends 1.014 of the least of lstm and nmt, 1.017
    of bert's, because ranks hold different numbers of rows; it receives 1.013, 1.013 and 1.020.

    Args:
        positions: indices of the rows, of ``num_rows``, that each rank holds; each row is held by one at least.

    Returns:
        The rows that each rank owns, increasing.
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
    """Return how many of ``count`` go into each room, filled in order."""
    filled = []
    for room in rooms:
        filled.append(min(room, count))
        count -= filled[-1]
    return filled


@dataclass(frozen=True)
class UnionPlan:
    """The sizes of all messages, which every rank can compute after `Channel.open`.

    Args:
        held: number of rows that each rank holds.
        num_rows, width, itemsize: size of the tensor; ``itemsize`` in bytes.
        scheme: its push has the formats of ids. If it owns columns, some of every row are pushed before the ids are
            known; else rows are only dealt.
    """

    held: tuple[int, ...]
    num_rows: int
    width: int
    itemsize: int
    scheme: Scheme

    @property
    def world_size(self) -> int:
        return len(self.held)

    def format(self, rank: int) -> Format:
        """Return the format of the ids of a rank; DENSE if it sends all rows."""
        return self._ids[rank][0]

    def sent_rows(self, rank: int) -> int:
        """Return the number of rows that a rank sends: those held, or all, zeros included, if the format is DENSE."""
        return self.num_rows if self.format(rank) is Format.DENSE else self.held[rank]

    def ids_bytes(self, rank: int) -> int:
        return self._ids[rank][1]

    @cached_property
    def _ids(self) -> list[tuple[Format, int]]:
        """Format and number of bytes of the ids of each rank."""
        return [self._format_and_bytes(held) for held in self.held]

    def _format_and_bytes(self, held: int) -> tuple[Format, int]:
        share_bytes = -(-self.width // self.world_size) * self.itemsize
        format = wire.smallest(self.scheme.push_format, held, share_bytes, self.num_rows, self.num_rows)
        if format is Format.DENSE:
            return format, 0
        return format, wire.payload_bytes(format, held, 0, self.num_rows, self.num_rows)

    @cached_property
    def num_early(self) -> int:
        """Number of columns pushed before the ids are known; equal for all owners unless these are all columns."""
        if self.scheme.ownership is not Ownership.COLUMNS:
            return 0
        some = self.width // EARLY_SHARE // self.world_size * self.world_size
        share_bytes = self._fullest * self.width * self.itemsize // self.world_size
        pays = some and self.world_size <= MAX_DEALT_RANKS and share_bytes >= MIN_DEALT_BYTES
        return some if pays else self.width

    @property
    def ids_lead(self) -> bool:
        """Whether the ids are sent in front of the first piece that is pushed, not as a message of their own."""
        return self.num_early == self.width

    def shares(self, owner: int) -> list[Share]:
        """Return the chunks that an owner adds up, equally many for each owner, early ones first.

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
        """Number of rows of the rank that sends most; cached, since each of 1024 owners would ask all (17 s a plan)."""
        return max(self.sent_rows(rank) for rank in range(self.world_size))

    def lead_bytes(self, rank: int, number: int) -> int:
        """Return the bytes of a rank's ids in front of its push of the share of that number."""
        return self.ids_bytes(rank) if self.ids_lead and number == 0 else 0

    def swapped_ids_bytes(self, rank: int) -> int:
        """Return the bytes on the wire of a rank's ids to one other rank, where they do not lead."""
        return frame_bytes(self.ids_bytes(rank)) if self.ids_bytes(rank) and not self.ids_lead else 0

    def least_bytes(self) -> int:
        """Return the least bytes that a rank allocates: pushes of others, and the rows of the fullest in the sum."""
        row_bytes = self.width * self.itemsize
        pushed = sum(self.sent_rows(rank) for rank in range(self.world_size)) * row_bytes // self.world_size
        return pushed + self._fullest * row_bytes

    def values_bytes(self, num_rows: int, share: Share) -> int:
        """Return the bytes of the values of rows of a share."""
        return num_rows * share.width * self.itemsize

    @cached_property
    def most_rows(self) -> int:
        """Most rows that the union can have."""
        return min(self.num_rows, sum(self.sent_rows(rank) for rank in range(self.world_size)))

    def most_sums(self, share: Share) -> int:
        """Return the most rows that a share can have."""
        return self.most_rows if share.early else -(-self.most_rows // self.world_size)

    def most_pushed(self, share: Share, rank: int) -> int:
        """Return the most rows of a share that a rank can push."""
        return self.sent_rows(rank) if share.early else min(self.sent_rows(rank), self.most_sums(share))

    def most_push_bytes(self, share: Share, rank: int, number: int) -> int:
        """Return the most bytes that a rank pushes of the share of that number; 0 if it pushes nothing."""
        return self.lead_bytes(rank, number) + self.values_bytes(self.most_pushed(share, rank), share)

    def push_bytes(self, share: Share, rank: int, number: int, num_rows: int) -> int:
        """Return the bytes on the wire of the push of rows of the share of that number."""
        num_bytes = self.lead_bytes(rank, number) + self.values_bytes(num_rows, share)
        return frame_bytes(num_bytes) if self.most_push_bytes(share, rank, number) else 0

    def pull_bytes(self, share: Share, num_rows: int) -> int:
        """Return the bytes on the wire of the sum of a share to one rank."""
        return frame_bytes(self.values_bytes(num_rows, share)) if self.most_sums(share) * share.width else 0

    def expected_bytes(self, union: float) -> float:
        """Return the bytes that a rank sends after the opening, the same for all if all hold as many rows.

        Args:
            union: rows that all ranks hold together; each rank holds those that are dealt to it.
        """
        others = self.world_size - 1
        owned = round(union / self.world_size)
        pushed = round(max(0, self.sent_rows(0) - owned) / max(1, others))
        total = others * self.swapped_ids_bytes(0)
        for share in self.shares(0):
            total += others * self.pull_bytes(share, round(union) if share.early else owned)
        for owner in range(1, self.world_size):
            for number, share in enumerate(self.shares(owner)):
                rows = self.sent_rows(0) if share.early else pushed
                total += self.push_bytes(share, 0, number, rows)
        return total

    def union(self, ids_per_rank: Sequence[Tensor]) -> Union:
        """Return the union of the ids (sorted, unique) of all ranks."""
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
