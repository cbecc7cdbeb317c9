"""Which scheme, when the user did not say: the one whose busiest rank has the fewest expected bytes.

Pure: equal input gives an equal choice, so ranks that know the same numbers need not talk about it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from thinwire.sync.cost import expected_bytes
from thinwire.sync.named import AGSPARSE, COLUMN_SPLIT, DENSE, ZEN
from thinwire.sync.scheme import Ownership, Scheme

CANDIDATES = (ZEN, COLUMN_SPLIT, AGSPARSE, DENSE)
DENSIFICATION_EXPONENT = 0.6
"""Aggregating n ranks multiplies the density by about n^0.6: the published models lie between n^0.3 (DeepFM,
8 ranks) and n^0.78 (an LLM's top 5 %, 16 ranks); ZEN, sections 2.1, 2.4, 3.3.1 and 5.3."""
MIN_COLUMNS = 8
"""An owner of fewer columns handles every id of every rank for a few bytes of values each."""
STRATIFICATION = 0.5
"""Dealing groups of ids evenly halves the imbalance of independent hashing on the benchmark's recipes: 1.07 where
sqrt(2 ln n n / u) gives 1.16 (lstm, 8 ranks), 1.10 for 1.17 (bert)."""


def choose(counts: Sequence[int], num_rows: int, width: int, itemsize: int, union: int | None = None) -> Scheme:
    """The cheapest scheme for ranks that hold ``counts`` rows of a matrix [num_rows, width].

    ``union`` is how many rows they hold together; None estimates it.
    """
    world_size = len(counts)
    mean = sum(counts) / world_size
    if union is None:
        union = min(num_rows, max(max(counts), round(mean * world_size**DENSIFICATION_EXPONENT)))
    return min(
        CANDIDATES, key=lambda scheme: busiest_rank_bytes(scheme, world_size, num_rows, width, itemsize, mean, union)
    )


def busiest_rank_bytes(
    scheme: Scheme, world_size: int, num_rows: int, width: int, itemsize: int, held: float, union: int
) -> float:
    """Expected bytes of the rank that has most, when each holds ``held`` rows and all together ``union``.

    Infinite for columns that are too narrow to be worth their ids.
    """
    if scheme.ownership is Ownership.COLUMNS and width < MIN_COLUMNS * world_size:
        return math.inf
    even = expected_bytes(scheme, world_size, num_rows, width * itemsize, held, union)
    return even * _imbalance(scheme, world_size, held, union)


def _imbalance(scheme: Scheme, world_size: int, held: float, union: int) -> float:
    """The busiest rank over the mean, for rows dealt at random: 1 + sqrt(2 ln n / rows of an owner), both phases.

    The maximum of n sums of independent 0/1 variables with mean m exceeds it by about sqrt(2 m ln n). An
    owner receives ``held`` rows in the push, over all ranks, and sends ``union`` / n in the pull.
    """
    if scheme.ownership is not Ownership.PERMUTATION or world_size == 1 or held == 0:
        return 1.0
    push = math.sqrt(2 * math.log(world_size) / held)
    pull = math.sqrt(2 * math.log(world_size) * world_size / union)
    return 1.0 + STRATIFICATION * (push * held + pull * union) / (held + union)
