"""The gradient of one table on a GPU: only its rows that are not zero go to the host, and only the mean comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.hooks.table import TableGradient
from thinwire.ranges import named
from thinwire.sparse import SparseRows
from thinwire.sync.staging import HostStaging, Staging


@dataclass(frozen=True, eq=False)
class StagedTable(TableGradient):
    """A `TableGradient` of a device. Its rows are tensors of the host that belong to the job of the lane.

    Rows of a dense gradient are always looked for: a GPU reads 100 MB in a tenth of a millisecond, and to sort the ids
    of a lookup, as a CPU does, takes no less.
    """

    staging: Staging = field(default_factory=HostStaging)

    @property
    def kind(self) -> str:
        return "sparse gradient" if self.gradient.is_sparse else "dense gradient, rows scanned"

    def store(self, held: SparseRows, mean: SparseRows) -> Tensor:
        if self.gradient.is_sparse:
            ids, values = self.staging.to_device(mean.ids, mean.values)
            return self.layout.tensor(SparseRows.trusted(ids, values, mean.num_rows))
        with named("scatter"):
            held_ids, ids, values = self.staging.to_device(held.ids, mean.ids, mean.values)
            matrix = self._matrix()
            matrix.index_fill_(0, held_ids, 0.0)
            kernels.scatter_rows(matrix, ids, values)
        return self.gradient

    def _read(self) -> SparseRows:
        with named("find"):
            ids, values = self._summed() if self.gradient.is_sparse else self._found()
            ids, values = self.staging.to_host(ids, values)
            return SparseRows(ids, values, self.layout.num_rows)

    def _summed(self) -> tuple[Tensor, Tensor]:
        """A row for each id: a lookup gives one for each time that it was looked up."""
        assert self.gradient.sparse_dim() == 1, "embeddings have one sparse dimension"
        ids, values = self.gradient._indices()[0], self.gradient._values()
        values = values.reshape(ids.numel(), self.layout.width)
        return (ids, values) if self.gradient.is_coalesced() else kernels.sum_rows([(ids, values)])

    def _found(self) -> tuple[Tensor, Tensor]:
        """Nothing waits for the number of rows but the lane's thread, in `Staging.to_host`."""
        matrix = self._matrix()
        room = torch.empty(matrix.shape[0], dtype=torch.int64, device=matrix.device)
        _, count = kernels.nonzero_rows_into(matrix, room, room.new_empty(2))
        (count,) = self.staging.to_host(count)
        ids = room[: int(count[0])]
        return ids, kernels.gather_rows(matrix, ids)


def staged(table: TableGradient, staging: Staging) -> TableGradient:
    """The table as the lane can take it."""
    return table if staging.is_host else StagedTable(table.name, table.gradient, table.touched, staging)
