"""Which scheme, when the user did not say: the one of fewest expected bytes. Pure: equal input, equal choice."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.sync.cost import expected_bytes
from thinwire.sync.scheme import AGSPARSE, COLUMN_SPLIT, DENSE, ZEN, Scheme

CANDIDATES = (ZEN, COLUMN_SPLIT, AGSPARSE, DENSE)
DENSIFICATION_EXPONENT = 0.6
"""Aggregating n ranks multiplies the density by about n^0.6: the published models lie between n^0.3 (DeepFM,
8 ranks) and n^0.78 (an LLM's top 5 %, 16 ranks); ZEN, sections 2.1, 2.4, 3.3.1 and 5.3."""


def choose(counts: Sequence[int], num_rows: int, width: int, itemsize: int, union: int | None = None) -> Scheme:
    """The cheapest scheme for ranks that hold ``counts`` rows of a matrix [num_rows, width].

    ``union`` is how many rows they hold together; None estimates it.
    """
    world_size = len(counts)
    mean = sum(counts) / world_size
    if union is None:
        union = min(num_rows, max(max(counts), round(mean * world_size**DENSIFICATION_EXPONENT)))
    row_bytes = width * itemsize
    return min(
        CANDIDATES,
        key=lambda scheme: expected_bytes(scheme, world_size, num_rows, row_bytes, mean, union),
    )
