"""Statistics of sparse gradients, as ZEN defines them (OSDI'25, sections 2.1 and 3.1).

Every function is pure. `ids` is a 1-D int64 tensor of the row ids one rank touched, strictly increasing (no
duplicates); an unstructured gradient is the case of one element per row. Results are plain floats; for the
ratios 1.0 is ideal.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def density(ids: Tensor, num_rows: int) -> float:
    """Return the share of the rows that are touched, between 0.0 and 1.0 (ZEN section 2.1).

    >>> density(torch.tensor([0, 3]), num_rows=8)
    0.25
    """
    return ids.numel() / num_rows


def overlap_ratio(a: Tensor, b: Tensor) -> float:
    """Return |a ∩ b| / min(|a|, |b|), between 0.0 and 1.0 (ZEN Definition 3).

    An empty set shares nothing with any set, itself included: the ratio is then 0.0.

    >>> overlap_ratio(torch.tensor([1, 2]), torch.tensor([2, 5, 7]))
    0.5
    """
    smaller = min(a.numel(), b.numel())
    if smaller == 0:
        return 0.0
    return int(torch.isin(a, b, assume_unique=True).sum()) / smaller


def densification(ids_per_rank: Sequence[Tensor]) -> float:
    """Return the rows of the union over the mean rows of a rank, from 1.0 to the world size (ZEN Definition 4).

    1.0 means that all ranks touched the same rows, the world size that no two shared one. 1.0 if no rank
    touched any.

    >>> densification([torch.tensor([0, 1]), torch.tensor([1, 2])])
    1.5
    """
    rows = sum(ids.numel() for ids in ids_per_rank)
    if rows == 0:
        return 1.0
    return torch.cat(list(ids_per_rank)).unique().numel() * len(ids_per_rank) / rows


def skewness(ids: Tensor, num_rows: int, partitions: int) -> float:
    """Return the density of the densest of equal contiguous partitions, over the whole density (ZEN Definition 5).

    Part j holds the rows [j * num_rows // partitions, (j + 1) * num_rows // partitions), and none is empty. 1.0 if no
    row is touched.

    >>> skewness(torch.tensor([0, 1, 2, 5]), num_rows=8, partitions=2)
    1.5
    """
    if ids.numel() == 0:
        return 1.0
    bounds = torch.arange(partitions + 1, device=ids.device) * num_rows // partitions
    counts = torch.searchsorted(ids, bounds).diff().double()
    return float((counts / bounds.diff()).max()) / density(ids, num_rows)


def imbalance_push(counts: Tensor) -> float:
    """Return the fullest message over an even split: max over i, j of n * c_ij / sum_j c_ij (ZEN Definition 8).

    `counts` is an integer tensor [ranks, owners]: rows that rank i sends to owner j; n is the number of
    owners. Ranks that send nothing are skipped; 1.0 if all do.

    >>> imbalance_push(torch.tensor([[3, 1], [2, 2]]))
    1.5
    """
    exact = counts.double()
    totals = exact.sum(dim=1)
    busy = totals > 0
    if not bool(busy.any()):
        return 1.0
    return float((exact[busy].amax(dim=1) / totals[busy]).max()) * counts.shape[1]


def imbalance_pull(union_counts: Tensor) -> float:
    """Return the fullest owner over an even share of the union: max_j n * u_j / sum u (ZEN Definition 8).

    `union_counts` is an integer tensor [owners]: rows of the union that owner j holds; n is the number of
    owners. 1.0 if the union is empty.

    >>> imbalance_pull(torch.tensor([3, 1]))
    1.5
    """
    return imbalance_push(union_counts.unsqueeze(0))
