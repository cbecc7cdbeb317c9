"""What has to be synchronized, as numbers that all ranks share: the statistics from which costs follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DENSIFICATION_EXPONENT = 0.6
"""Aggregating n ranks multiplies the density by about n^0.6: the published models lie between n^0.3 (DeepFM,
8 ranks) and n^0.78 (an LLM's top 5 %, 16 ranks); ZEN, sections 2.1, 2.4, 3.3.1 and 5.3."""


@dataclass(frozen=True)
class Demand:
    """A matrix [num_rows, width] of which each of ``world_size`` ranks holds ``held`` rows, all together ``union``.

    Args:
        itemsize: bytes of an element.
        held: mean over ranks.
    """

    world_size: int
    num_rows: int
    width: int
    itemsize: int
    held: float
    union: float

    @classmethod
    def of(
        cls, counts: Sequence[float], num_rows: int, width: int, itemsize: int, union: float | None = None
    ) -> Demand:
        """From the rows that each rank holds; a ``union`` that is None is estimated."""
        world_size = len(counts)
        mean = sum(counts) / max(1, world_size)
        if union is None:
            union = min(num_rows, max([*counts, mean * world_size**DENSIFICATION_EXPONENT, 0.0]))
        return cls(world_size, num_rows, width, itemsize, mean, union)

    @property
    def row_bytes(self) -> int:
        return self.width * self.itemsize

    @property
    def fault(self) -> str | None:
        """Why these numbers cannot be: nothing can be concluded from them. None if they can."""
        if not all(math.isfinite(value) for value in (self.held, self.union)):
            return f"{self.held} rows a rank and {self.union} in all are not finite numbers"
        if not 0 <= self.held <= self.num_rows:
            return f"a rank holds {self.held:g} rows of a tensor that has {self.num_rows}"
        if self.union > self.num_rows or self.union < math.floor(self.held):
            return f"{self.union:g} rows in all, where a rank holds {self.held:g} of {self.num_rows}"
        return None
