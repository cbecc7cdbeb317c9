"""Recording of a run's gradients, of each rank and of all together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.lab.bench.trace import IndexTrace


@dataclass(frozen=True)
class Table:
    """A parameter as a matrix of rows: `dtype` is a name such as "float32", `kind` "sparse" or "dense" gradient."""

    name: str
    num_rows: int
    width: int
    dtype: str
    kind: str

    @property
    def size_bytes(self) -> int:
        return self.num_rows * self.width * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True, eq=False)
class TableSteps:
    """One table on one rank, step by step: the share of non-zero rows, and their ids if they were kept."""

    table: Table
    densities: list[float]
    ids: list[Tensor | None]


@dataclass(frozen=True, eq=False)
class Recording:
    """Recording of all ranks. `traces` has the tables whose ids were kept in every step of every rank."""

    world_size: int
    num_models: int
    tables: tuple[Table, ...]
    densities: dict[str, torch.Tensor]
    """Densities of each table, float64 [steps, ranks]."""
    traces: dict[str, IndexTrace]

    @property
    def num_steps(self) -> int:
        """Largest number of steps of any table: one model of several may be trained more rarely."""
        return max((densities.shape[0] for densities in self.densities.values()), default=0)


RankRecording = tuple[int, list[TableSteps]]
"""What one rank has recorded: the number of its models, and the tables of all of them."""


def recording_of(ranks: Sequence[RankRecording]) -> Recording:
    """Return the recording of all ranks, from those of each, in rank order.

    Steps that some rank did not reach are left out. Raises ValueError if the ranks saw different parameters.
    """
    num_models, first = ranks[0]
    tables = tuple(seen.table for seen in first)
    for rank, (_, seen) in enumerate(ranks):
        if {one.table for one in seen} != set(tables):
            raise ValueError(f"rank {rank} synchronized other parameters than rank 0: all ranks need the same model")
    by_name = [{one.table.name: one for one in seen} for _, seen in ranks]
    densities, traces = {}, {}
    for table in tables:
        seen = [names[table.name] for names in by_name]
        num_steps = min(len(one.densities) for one in seen)
        densities[table.name] = torch.tensor([one.densities[:num_steps] for one in seen], dtype=torch.float64).T
        if (trace := _trace(table, seen, num_steps)) is not None:
            traces[table.name] = trace
    return Recording(len(ranks), num_models, tables, densities, traces)


def _trace(table: Table, ranks: Sequence[TableSteps], num_steps: int) -> IndexTrace | None:
    steps: Any = tuple(zip(*(rank.ids[:num_steps] for rank in ranks), strict=True))
    if not steps or any(ids is None for step in steps for ids in step):
        return None
    return IndexTrace(table.num_rows, table.width, steps)
