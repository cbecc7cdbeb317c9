"""The gradient of one table: rows out of it, and their mean back into what DDP takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinwire.ranges import named
from thinwire.sparse import Layout, SparseRows


@dataclass(frozen=True, eq=False)
class TableGradient:
    """A gradient of which few rows are not zero: a COO tensor, or a dense one [num_rows, ...].

    Args:
        name: of the parameter.
        gradient: a dense one is written to in place.
        touched: int64 ids (any order, repeated) of all rows of a dense gradient that can be non-zero; None to look for
            them.
    """

    name: str
    gradient: Tensor
    touched: Tensor | None = None

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.gradient)

    @property
    def kind(self) -> str:
        """For `Synchronizer.table`."""
        if self.gradient.is_sparse:
            return "sparse gradient"
        return "dense gradient, rows " + ("scanned" if self.touched is None else "known")

    def rows(self) -> SparseRows:
        """The rows of this rank.

        Raises:
            ValueError: a gradient that has no rows, as `Layout` tells, with the name of the parameter.
        """
        try:
            return self._read()
        except ValueError as error:
            raise ValueError(f"gradient of {self.name!r}: {error}") from error

    def store(self, held: SparseRows, mean: SparseRows) -> Tensor:
        """The mean as a gradient of the same layout: a new coalesced COO tensor, or the dense one, written to.

        All rows but ``held`` are zero on this rank already.
        """
        if self.gradient.is_sparse:
            return self.layout.tensor(mean)
        matrix = self._matrix()
        with named("scatter"):
            matrix.index_fill_(0, held.ids, 0.0)  # a sum by blocks leaves out rows that cancelled
            matrix.index_copy_(0, mean.ids, mean.values)
        return self.gradient

    def _read(self) -> SparseRows:
        if self.touched is None:
            return self.layout.rows(self.gradient)
        with named("find"):
            ids = self.touched.to(torch.int64).unique()
            return SparseRows(ids, self._matrix().index_select(0, ids), self.layout.num_rows)

    def _matrix(self) -> Tensor:
        return self.gradient.view(self.layout.num_rows, self.layout.width)
