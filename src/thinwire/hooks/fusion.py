"""Small tables of one step travel as one: which ones, and how they are stacked and cut apart again.

A synchronization costs a header round and a message for each peer and phase, however little it carries. A model with
26 small tables pays that 26 times a step. Tables whose rows have the same width, dtype and device are one taller
matrix: the ids of a table are shifted by the rows of those before it, and one synchronization moves them all. Each row
is still summed over the same ranks, in the same order where the scheme sums in rank order, so the bits are those of
tables sent alone.

Pure: whatever decides here must be known to all ranks, so that all ranks stack the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from thinwire.sparse import SparseRows

SMALL_TABLE_BYTES = 256 * 1024
"""A table whose sum is larger is synchronized alone: at 100 Mbit/s this much takes 20 ms, a header round below 1 ms."""


@dataclass(frozen=True)
class TableShape:
    """What all ranks know of a table before a step.

    Args:
        name: of the parameter.
        num_rows, width, dtype, device: of the table as a matrix [num_rows, width].
        union: rows that any rank held in the last step, all ranks together; None before the first.

    The union is used, and not the rows of the largest rank, because a fused message tells how many rows each rank
    holds in all tables together, and only the sum shows how many rows each table has.
    """

    name: str
    num_rows: int
    width: int
    dtype: torch.dtype
    device: torch.device
    union: int | None = None

    @property
    def expected_bytes(self) -> int:
        """Bytes of the rows in the sum if it has as many as last time; of the whole table before the first time."""
        rows = self.num_rows if self.union is None else self.union
        return rows * self.width * self.dtype.itemsize

    @property
    def is_small(self) -> bool:
        return self.expected_bytes <= SMALL_TABLE_BYTES


def plan_groups(tables: Sequence[TableShape]) -> tuple[tuple[int, ...], ...]:
    """Which tables are synchronized together, as places in ``tables``: each in one group, groups by their first table.

    Example:
        >>> table = TableShape("a", 100, 8, torch.float32, torch.device("cpu"))
        >>> plan_groups([table, TableShape("b", 10**6, 8, torch.float32, torch.device("cpu")), table])
        ((0, 2), (1,))
    """
    groups: dict[object, list[int]] = {}
    for place, table in enumerate(tables):
        alike = (table.width, table.dtype, table.device) if table.is_small else place
        groups.setdefault(alike, []).append(place)
    return tuple(map(tuple, groups.values()))


def stack(tables: Sequence[SparseRows]) -> SparseRows:
    """Tables of the same width and dtype as one matrix, one below the other; a single one as it is, not copied."""
    if len(tables) == 1:
        return tables[0]
    *offsets, num_rows = accumulate((table.num_rows for table in tables), initial=0)
    ids = torch.cat([table.ids + offset for table, offset in zip(tables, offsets, strict=True)])
    return SparseRows.trusted(ids, torch.cat([table.values for table in tables]), num_rows)


def unstack(stacked: SparseRows, num_rows: Sequence[int]) -> list[SparseRows]:
    """The tables of ``num_rows`` rows each that were stacked, or what became of their rows. Values share memory."""
    if len(num_rows) == 1:
        return [stacked]
    ends = list(accumulate(num_rows, initial=0))
    assert ends[-1] == stacked.num_rows
    cuts = torch.searchsorted(stacked.ids, torch.tensor(ends)).tolist()
    return [
        SparseRows.trusted(stacked.ids[start:stop] - offset, stacked.values[start:stop], rows)
        for offset, rows, (start, stop) in zip(ends[:-1], num_rows, pairwise(cuts), strict=True)
    ]


def share(total: int, weights: Sequence[int]) -> list[int]:
    """A whole number cut in proportion to ``weights`` (evenly if all are 0), without losing or adding one.

    Example:
        >>> share(10, [1, 1, 1])
        [3, 3, 4]
    """
    ends = list(accumulate(weights if any(weights) else [1] * len(weights)))
    cuts = [total * end // ends[-1] for end in ends]
    return [stop - start for start, stop in pairwise([0, *cuts])]
