"""Published statistics of the workloads of `bench sync`, and what their law makes one expect of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from thinwire.lab.bench import recipes
from thinwire.lab.bench.recipes import Recipe


@dataclass(frozen=True)
class Target:
    """A published statistic: `densification` of `count` ranks, or `skewness` over `count` partitions.

    `at_least` marks a lower bound. `reached` is False where the law misses the figure; `source` says where it
    is from.
    """

    statistic: Literal["densification", "skewness"]
    count: int
    value: float
    source: str
    at_least: bool = False
    reached: bool = True


_FIRST_OF_8 = Target(
    "skewness", 8, 4.8, "section 2.1 (C3): over 60 % of the non-zeros in the first of 8", at_least=True
)
_D_N_LLM = "speed-up over all-reduce on 16 machines (section 5.2), solved for a density of 44 % after aggregation"
_TRACED = "not published: ids of the job of that name of `bench train` at scale 1, on 8 ranks"

TARGETS = {
    "lstm": (
        Target("skewness", 128, 70.0, "section 2.1", at_least=True),
        Target("densification", 128, 14.0, "not published: an earlier simulation of this law"),
        _FIRST_OF_8,
    ),
    "nmt": (Target("densification", 128, 24.9, "Figure 8: 36 % below all-reduce"), _FIRST_OF_8),
    "deepfm": (Target("densification", 8, 1.86, "section 5.3: 2.80 % to 5.2 %"), _FIRST_OF_8),
    "bert": (Target("densification", 128, 38.5, "section 3.3.1: 1.06 % to 40.8 %"), _FIRST_OF_8),
    "llm_dgc": (Target("densification", 16, 8.8, _D_N_LLM), replace(_FIRST_OF_8, reached=False)),
    "dlrm": (Target("densification", 8, 4.877, _TRACED),),
    "xlmr": (Target("densification", 8, 4.622, _TRACED),),
    "word2vec": (Target("densification", 8, 6.779, _TRACED),),
}


def expected_densification(recipe: Recipe, world_size: int) -> float:
    """Return the expected rows in the union of n ranks over the rows of one rank: sum 1 - (1 - p)^n over sum p."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1; got {world_size}")
    ids, counts = recipes._blocks(recipe.num_rows)
    with np.errstate(divide="ignore"):  # p = 1 gives log 0 = -inf, and 1 - exp(-inf) = 1 is right
        log_absent = np.log1p(-recipes._probabilities(recipe, ids, recipes._solve_log_t(recipe)))
    return float(counts @ -np.expm1(world_size * log_absent)) / (recipe.density * recipe.num_rows)


def expected_skewness(recipe: Recipe, partitions: int) -> float:
    """Return the expected density of the first of equal partitions (p falls, so the densest) over the whole density."""
    if not 1 <= partitions <= recipe.num_rows:
        raise ValueError(f"partitions must be between 1 and num_rows = {recipe.num_rows}; got {partitions}")
    first = recipe.num_rows // partitions
    ids, counts = recipes._blocks(first)
    rows = float(counts @ recipes._probabilities(recipe, ids, recipes._solve_log_t(recipe)))
    return rows / (first * recipe.density)
