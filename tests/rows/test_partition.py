"""Ownership: every row has one owner and one place there, the same on every rank, and hot rows are spread."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.rows.partition import BlockCyclic, Contiguous, HierarchicalHash, Partition, Permutation

Maker = Callable[[int, int], Partition]
WORLD_SIZES = (1, 2, 3, 4, 5, 8, 64)
NUM_ROWS = (0, 1, 3, 8, 63, 64, 65, 1000)
MAKERS = {
    "contiguous": lambda rows, n: Contiguous(rows, n),
    "block_cyclic": lambda rows, n: BlockCyclic(rows, n),
    "permutation": lambda rows, n: Permutation(rows, n, seed=0),
    "permutation_other_seed": lambda rows, n: Permutation(rows, n, seed=2**50 + 3),
    "hierarchical_hash": lambda rows, n: HierarchicalHash(rows, n, seed=0),
}  # fmt: skip
every_partition = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@every_partition
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_every_row_has_one_owner_and_one_place(make: Maker, num_rows: int, world_size: int) -> None:
    partition: Partition = make(num_rows, world_size)
    everything = torch.arange(num_rows)
    owners = partition.owners(everything)
    assert owners.dtype == torch.int64
    parts = partition.parts
    assert len(parts) == world_size
    assert sum(part.size for part in parts) == num_rows
    listed = []
    for owner, part in enumerate(parts):
        assert part.num_rows == num_rows
        ids = part.ids(torch.arange(part.size))
        assert bool((ids[1:] > ids[:-1]).all()), "positions increase with ids"
        assert torch.equal(ids, everything[owners == owner])
        assert torch.equal(part.positions(ids), torch.arange(part.size))
        listed.append(ids)
    assert torch.equal(torch.cat(listed).sort().values, everything)


@every_partition
@settings(max_examples=25)
@given(st.integers(0, 200), st.integers(1, 9), st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 0.7, 1.0]))
def test_split_returns_all_ids_once_and_join_puts_them_together(
    make: Maker, num_rows: int, world_size: int, seed: int, share: float
) -> None:
    partition: Partition = make(num_rows, world_size)
    ids = (torch.rand(num_rows, generator=torch.Generator().manual_seed(seed)) < share).nonzero().flatten()
    shares = partition.split(ids)
    assert len(shares) == world_size
    for owner, (positions, places) in enumerate(shares):
        assert bool((positions[1:] > positions[:-1]).all())
        assert torch.equal(partition.parts[owner].ids(positions), ids[places])
        assert torch.equal(partition.owners(ids[places]), torch.full((places.numel(),), owner))
    assert torch.equal(torch.cat([places for _, places in shares]).sort().values, torch.arange(ids.numel()))
    in_owner_order = torch.cat([ids[places] for _, places in shares])
    assert torch.equal(partition.join([positions for positions, _ in shares]), in_owner_order)


@every_partition
def test_two_ranks_see_the_same(make: Maker) -> None:
    ids = torch.arange(0, 1000, 3)
    first, second = make(1000, 7), make(1000, 7)
    assert torch.equal(first.owners(ids), second.owners(ids))
    for (positions, places), (others, other_places) in zip(first.split(ids), second.split(ids), strict=True):
        assert torch.equal(positions, others)
        assert torch.equal(places, other_places)


@pytest.mark.parametrize("make", [Permutation, HierarchicalHash])
def test_the_seed_matters(make: type[Permutation] | type[HierarchicalHash]) -> None:
    """Two seeds agree about 1 in 8 rows, as two random deals do."""
    ids = torch.arange(4000)
    agreement = (make(4000, 8, 0).owners(ids) == make(4000, 8, 1).owners(ids)).double().mean()
    assert 0.10 < agreement < 0.15


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("num_rows", [*NUM_ROWS, 12_345])
def test_permutation_parts_are_of_equal_size(num_rows: int, world_size: int) -> None:
    partition = Permutation(num_rows, world_size, seed=5)
    sizes = [part.size for part in partition.parts]
    assert max(sizes) - min(sizes) <= 1


NUM_TABLE_ROWS, RANKS = 100_000, 8


def frequency_sorted(exponent: float = 1.2, expected_rows: float = 8000.0) -> Tensor:
    """Rows as a batch meets them in a table sorted by frequency: row i with probability 1 - exp(-T w_i)."""
    weights = (torch.arange(NUM_TABLE_ROWS) + 2.7).double() ** -exponent
    low, high = 0.0, 1e12
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - torch.exp(-middle * weights)).sum() < expected_rows else (low, middle)
    chance = torch.rand(NUM_TABLE_ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (chance < 1 - torch.exp(-low * weights)).nonzero().flatten()


PATTERNS = {
    "frequency_sorted": frequency_sorted(),
    "contiguous_head": torch.arange(8000),
    **{f"stride_{times}n": torch.arange(0, NUM_TABLE_ROWS, times * RANKS) for times in (1, 2, 4)},
    "uniform": torch.randperm(NUM_TABLE_ROWS, generator=torch.Generator().manual_seed(2))[:8000].sort().values,
}  # fmt: skip


def imbalance(partition: Partition, ids: Tensor) -> float:
    """Rows of the busiest owner over the mean: ZEN's push imbalance (section 2.3)."""
    counts = torch.bincount(partition.owners(ids), minlength=partition.world_size)
    return float(counts.max() / counts.double().mean())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_permutation_balances_no_worse_than_the_published_hash(pattern: str) -> None:
    """Mean over ten seeds; each has deviations of some sqrt(8 / k), 1.7 % for 3,125 rows among 8 owners."""
    ids = PATTERNS[pattern]
    mean = {
        make: sum(imbalance(make(NUM_TABLE_ROWS, RANKS, seed), ids) for seed in range(10)) / 10
        for make in (Permutation, HierarchicalHash)
    }
    noise = (RANKS / ids.numel()) ** 0.5
    assert mean[Permutation] <= mean[HierarchicalHash] + 0.5 * noise
    assert mean[Permutation] < 1 + 3 * noise


def test_permutation_is_better_where_hot_rows_are_neighbours() -> None:
    head = PATTERNS["contiguous_head"]
    assert imbalance(Permutation(NUM_TABLE_ROWS, RANKS, 0), head) == 1.0
    assert imbalance(HierarchicalHash(NUM_TABLE_ROWS, RANKS, 0), head) > 1.005


def test_contiguous_ranges_are_bad_on_skewed_rows() -> None:
    """Also the proof that `imbalance` can tell."""
    assert imbalance(Contiguous(NUM_TABLE_ROWS, RANKS), PATTERNS["contiguous_head"]) == RANKS
    assert imbalance(Contiguous(NUM_TABLE_ROWS, RANKS), PATTERNS["frequency_sorted"]) > 2
    assert imbalance(Contiguous(NUM_TABLE_ROWS, RANKS), PATTERNS["uniform"]) < 1.1
