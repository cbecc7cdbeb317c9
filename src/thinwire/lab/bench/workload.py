"""Workload of a benchmark: one gradient per rank, from a recipe or from a recorded trace."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.lab.bench.recipes import Recipe, get_recipe, row_ids, row_values
from thinwire.lab.bench.trace import load_trace
from thinwire.rows.sparse import SparseRows


@dataclass(frozen=True)
class Workload:
    """A gradient [num_rows, width] for each of ``world_size`` ranks, the same in every process.

    Args:
        source: the name of a recipe, or the path of a trace.
        is_trace: whether ``source`` is a path. The last recorded step of a trace is used.
        scale: factor for the rows of a recipe; None for its default. Ignored for traces.
        seed: seed of ids (recipes) and values.
    """

    source: str
    is_trace: bool
    scale: float | None
    seed: int
    world_size: int
    dtype: torch.dtype = torch.float32

    def shape(self) -> tuple[int, int]:
        """Return (num_rows, width) of the dense gradient."""
        if self.is_trace:
            trace = load_trace(self.source)
            return trace.num_rows, trace.width
        recipe = self._recipe()
        return recipe.num_rows, recipe.width

    def ids(self, rank: int) -> Tensor:
        """Return the sorted row ids of a rank, int64.

        Raises:
            ValueError: an unknown recipe (the message lists them), or a trace of fewer ranks.
        """
        if not self.is_trace:
            return row_ids(self._recipe(), rank, self.seed)
        trace = load_trace(self.source)
        if trace.world_size < self.world_size:
            raise ValueError(
                f"the trace {self.source} was recorded on {trace.world_size} ranks, but {self.world_size} are asked"
                f" for: use --hosts {trace.world_size} or fewer"
            )
        return trace.steps[-1][rank]

    def rows(self, rank: int) -> SparseRows:
        """Return the gradient of a rank: ids and values."""
        num_rows, width = self.shape()
        ids = self.ids(rank)
        return SparseRows(ids, row_values(ids.numel(), width, rank, self.seed, self.dtype), num_rows)

    def _recipe(self) -> Recipe:
        recipe = get_recipe(self.source)
        return recipe.scaled(recipe.default_scale if self.scale is None else self.scale)
