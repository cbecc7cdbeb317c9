"""Recordings made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.lab.analyze.recording import RankRecording, Recording, Table, TableSteps, recording_of

NUM_ROWS, WIDTH = 512, 16


def ids_of(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


TABLE = Table("words", NUM_ROWS, WIDTH, "float32", "sparse")
BIAS = Table("bias", 4, 1, "float32", "dense")


def ranks_of(steps: Sequence[int], tables: list[Table] | None = None) -> list[RankRecording]:
    """Rank r saw so many steps; in step s it touched the rows s and 10 + r."""
    ranks = []
    for rank, count in enumerate(steps):
        ids = [ids_of(step, 10 + rank) for step in range(count)]
        words = TableSteps(tables[rank] if tables else TABLE, [2 / NUM_ROWS] * count, list(ids))
        ranks.append((1, [words, TableSteps(BIAS, [1.0] * count, [None] * count)]))
    return ranks


def recorded(steps: tuple[int, ...] = (3, 3)) -> Recording:
    return recording_of(ranks_of(steps))
