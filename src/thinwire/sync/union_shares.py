"""Shares of a union that all ranks know, and the sizes of all messages about them: pure functions of shared numbers."""

from __future__ import annotations

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
        return [Share(share.rows, columns) for columns in _cut(share.columns, self._num_chunks)]

    @cached_property
    def _num_chunks(self) -> int:
        narrow = -(-self.width // self.world_size)
        most = min(MAX_CHUNKS, narrow if self.by_columns else self.width)
        return max(1, min(most, narrow * self._fullest * self.itemsize // CHUNK_BYTES))

    @cached_property
    def _shares(self) -> list[Share]:
        return shares(self.width, self.world_size, self.by_columns)

    @cached_property
    def _fullest(self) -> int:
        """Rows of the rank that sends most; cached, because of 1024 ranks each owner would ask all (17 s a plan)."""
        return max(self.sent_rows(rank) for rank in range(self.world_size))

    def lead_bytes(self, rank: int) -> int:
        """Of the ids of a rank in front of the first chunk that it sends; for rows, ids are messages of their own."""
        return self.ids_bytes(rank) if self.by_columns else 0

    def values_bytes(self, num_rows: int, chunk: Share) -> int:
        return num_rows * chunk.width * self.itemsize

    def sent_bytes(self, rank: int, union: int, pushed_rows: Sequence[float] | None = None) -> int:
        """Exact bytes that a rank sends after the opening.

        Args:
            union: rows that all ranks hold together.
            pushed_rows: rows that this rank holds of the share of each owner; None where it holds all that it sends.
        """
        lead, sent_rows = self.lead_bytes(rank), self.sent_rows(rank)
        total = (self.world_size - 1) * parcel_bytes(self.ids_bytes(rank) - lead)
        for owner in range(self.world_size):
            pushed = sent_rows if pushed_rows is None else round(pushed_rows[owner])
            for number, chunk in enumerate(self.chunks(owner)):
                if owner == rank:
                    pulled = self.values_bytes(chunk.num_rows(union), chunk)
                    total += (self.world_size - 1) * parcel_bytes(pulled)
                else:
                    total += parcel_bytes(self.values_bytes(pushed, chunk) + (lead if number == 0 else 0))
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


def _cut(columns: slice, count: int) -> list[slice]:
    size, rest = divmod(columns.stop - columns.start, count)
    starts = [columns.start + part * size + min(part, rest) for part in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(starts)]
