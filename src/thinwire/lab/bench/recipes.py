"""Workloads drawn by chance: sets of row ids with a published density, densification and skewness.

Row i of a table is in a rank's gradient with probability p_i = 1 - exp(-T w_i), w_i = (i + offset)^-exponent,
independently of the other rows and of the other ranks. T is solved so that the expected number of rows is
density * num_rows. Ids are sorted by popularity, as frequency-sorted vocabularies are, so the hot rows are
the first ones.

The targets are figures of ZEN (Zhuang Wang et al., OSDI'25) or traced from jobs; the exponent was fitted to one, at
offset 2.7. The docstring of `RECIPES` says which figures the law meets, and why it cannot meet the others.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DEFAULT_DENSE_BYTES = 80_000_000
DEFAULT_ELEMENT_BYTES = 20_000_000  # of unstructured tensors, whose every value has an id and its own CPU work
MIN_ROWS = 64
VALUE_SCALE = 1e-2
CHUNK_ROWS = 1 << 16  # drawn at a time: 0.5 MB of uniforms stay in cache, 64M rows never need 512 MB
EXACT_ROWS = 4096  # the expectations sum these rows one by one, the rest in blocks 0.1 % wide (error < 1e-4)


@dataclass(frozen=True)
class Recipe:
    """A sparse gradient [num_rows, width] defined by its law (module docstring).

    >>> get_recipe("lstm").scaled(0.01).num_rows
    7935
    """

    name: str
    num_rows: int
    width: int
    density: float
    exponent: float
    offset: float = 2.7

    @property
    def default_scale(self) -> float:
        """The scale at which the dense float32 gradient has 80 MB, 20 MB at width 1; at most 1.0."""
        wanted = DEFAULT_DENSE_BYTES if self.width > 1 else DEFAULT_ELEMENT_BYTES
        return min(1.0, wanted / (4 * self.num_rows * self.width))

    def scaled(self, scale: float) -> Recipe:
        """Return the same law on scale * num_rows rows, but at least 64; width and density stay.

        The offset shrinks with the table so that row i of the small one stands for the middle of the 1/scale
        rows it replaces. Densification and skewness then move by less than 0.1 % down to some 1,000 rows, of which
        tens are drawn. With the offset left at 2.7, 793 rows of `lstm` would have a densification at 128 ranks of 16.5
        instead of 13.7. Raises ValueError unless `scale` is positive and finite.
        """
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be positive and finite; got {scale}")
        num_rows = max(MIN_ROWS, round(self.num_rows * scale))
        offset = 0.5 + (self.offset - 0.5) * num_rows / self.num_rows
        return replace(self, num_rows=num_rows, offset=offset)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (  # name, rows, width, density, exponent
        Recipe("lstm", 793_471, 512, 0.0113, 1.8),
        Recipe("nmt", 109_375, 1024, 0.0247, 1.1385),
        Recipe("deepfm", 13_375_000, 16, 0.0280, 3.3487),
        Recipe("bert", 30_522, 768, 0.0106, 1.0297),
        Recipe("llm_dgc", 64_000_000, 1, 0.05, 0.7508),
        Recipe("dlrm", 33_762_577, 16, 0.000477, 1.2767),
        Recipe("xlmr", 250_002, 768, 0.00836, 1.2562),
        Recipe("word2vec", 3_000_000, 300, 0.00619, 0.7823),
    )
}
"""The workloads of ZEN's table of models, and three traced from jobs of `bench train`, by name:

- `lstm`: LSTM language model on One Billion Word, embedding.
- `nmt`: translation on IWSLT'14 De-En, embedding.
- `deepfm`: DeepFM on Criteo, 214M embedding parameters as rows of 16.
- `bert`: BERT on SQuAD v1.1, word embedding.
- `llm_dgc`: language model after DGC (top 5 %), one fused bucket of 64M elements.
- `dlrm`: DLRM on Criteo (Kaggle), its 26 tables of 16 as one, 2,048 samples a rank.
- `xlmr`: fine-tuning of XLM-R base, word embedding, 64 pairs of 128 words a rank.
- `word2vec`: skip-gram with the words of GoogleNews, table of contexts, 4,096 pairs and 5 negatives each.

In expectation, the law with one exponent reaches:

- `lstm`: skewness 71.0 over 128 partitions, densification 13.7 at 128 ranks. Both targets, one exponent.
- `nmt`, `bert`: densification fitted exactly; 72 % of the non-zeros fall in the first of 8 partitions (over
  60 %).
- `deepfm`: densification 1.86 at 8 ranks fitted exactly. It forces a hot set that nearly every rank touches
  whole, so 99 % of the non-zeros are in the first of 8 partitions: "over 60 %" holds, but more extremely than
  one would expect of 26 features with a frequency order each. The width of 16 is our choice; the paper gives
  parameters, not rows.
- `llm_dgc`: densification 8.8 at 16 ranks fitted exactly; 47 % of the non-zeros in the first of 8 partitions,
  **not** the published 60 %. No independent law has both: with 60 % there, the union of 16 ranks is at most
  39.4 % of the elements even if all is flat inside and outside that partition. We keep the densification
  because bytes follow from it. The 64M elements are our choice.
- `dlrm`, `xlmr`, `word2vec`: density and densification at 8 ranks of the ids that these jobs look up. Rows and widths
  are published (Naumov et al. 2019; Conneau et al., ACL'20; Mikolov et al., NeurIPS'13); the skew is that of the jobs'
  data: Zipf's law with an exponent of 1.05 for each feature of `dlrm`, the text of Python's standard library, and the
  power 0.75 of its word frequencies for the negatives of `word2vec`.
"""


def get_recipe(name: str) -> Recipe:
    """Return the full-size recipe of that name. Raises ValueError with the legal names and the nearest one.

    >>> get_recipe("lstm").width
    512
    """
    if name in RECIPES:
        return RECIPES[name]
    nearest = difflib.get_close_matches(name.lower().replace("-", "_"), RECIPES, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown workload {name!r}.{hint} Workloads: {', '.join(RECIPES)}")


def row_ids(recipe: Recipe, rank: int, seed: int) -> Tensor:
    """Return the ids of the rows in one rank's gradient: 1-D int64, strictly increasing, possibly empty.

    It depends on its arguments alone; ranks and seeds are independent streams (0 <= rank, seed < 2^32, else
    ValueError). 64M rows cost 1 to 2 s on one core and 80 MB. Machines agree, unless
    numpy changes its streams or the last bit of an exp() decides a draw (a chance below 1e-8 per gradient).

    >>> row_ids(get_recipe("bert"), rank=0, seed=0).dtype
    torch.int64
    """
    generator = _generator(rank, seed, stream=0)
    log_t = _solve_log_t(recipe)
    drawn = []
    for start in range(0, recipe.num_rows, CHUNK_ROWS):
        uniform = generator.random(min(CHUNK_ROWS, recipe.num_rows - start))
        # p falls with the id, so the first row bounds the chunk: few rows of the long tail need their own p
        bound = _probabilities(recipe, np.array([float(start)]), log_t)[0]
        candidates = np.flatnonzero(uniform < bound)
        kept = uniform[candidates] < _probabilities(recipe, (start + candidates).astype(np.float64), log_t)
        drawn.append(start + candidates[kept])
    return torch.from_numpy(np.concatenate(drawn).astype(np.int64))


def row_values(num_ids: int, width: int, rank: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return gradient values [num_ids, width], normal with standard deviation 1e-2 and no exact zero.

    They are drawn in float32 and then cast, independent of `row_ids` of the same rank and seed.
    """
    drawn = _generator(rank, seed, stream=1).standard_normal((num_ids, width), dtype=np.float32)
    values = torch.from_numpy(drawn).mul_(VALUE_SCALE).to(dtype)
    # about one draw in 2^23 is exactly 0.0, and more underflow in float16: an element that would not be there
    return values.masked_fill_(values == 0, VALUE_SCALE)


def _generator(rank: int, seed: int, stream: int) -> np.random.Generator:
    if not (0 <= rank < 2**32 and 0 <= seed < 2**32):
        raise ValueError(f"rank and seed must lie in [0, 2^32); got {rank} and {seed}")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, rank], spawn_key=(stream,))))


def _probabilities(recipe: Recipe, ids: NDArray[np.float64], log_t: float) -> NDArray[np.float64]:
    """p at the given, possibly fractional ids; weights relative to row 0, in logarithms against underflow."""
    return -np.expm1(-np.exp(log_t - recipe.exponent * np.log1p(ids / recipe.offset)))


def _blocks(num_rows: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Middles and row counts of blocks over [0, num_rows): single rows first, then 0.1 % wide."""
    exact = np.arange(min(num_rows, EXACT_ROWS) + 1, dtype=np.float64)
    steps = math.ceil(1000 * math.log(max(num_rows / EXACT_ROWS, 1.0)))
    coarse = np.rint(np.geomspace(exact[-1], num_rows, steps + 1))
    edges = np.unique(np.concatenate([exact, coarse]))
    return (edges[:-1] + edges[1:] - 1) / 2, np.diff(edges)


@lru_cache(maxsize=64)
def _solve_log_t(recipe: Recipe) -> float:
    """log T such that the expected number of rows is density * num_rows, by bisection."""
    ids, counts = _blocks(recipe.num_rows)
    low, high = -50.0, 600.0  # exp(600) is finite; T above it would need p = 1 for the whole table
    for _ in range(70):  # 650 / 2^70 is below the last bit
        middle = (low + high) / 2
        if counts @ _probabilities(recipe, ids, middle) < recipe.density * recipe.num_rows:
            low = middle
        else:
            high = middle
    return high
