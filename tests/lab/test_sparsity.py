"""ZEN's sparsity statistics against hand-counted cases and plain Python sets."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinwire.lab.sparsity import densification, density, imbalance_pull, imbalance_push, overlap_ratio, skewness

NUM_ROWS = 37
id_sets = st.sets(st.integers(0, NUM_ROWS - 1))


def tensor_of(ids: set[int]) -> Tensor:
    return torch.tensor(sorted(ids), dtype=torch.int64)


EMPTY = tensor_of(set())


def test_density_counts_rows() -> None:
    assert density(tensor_of({0, 3}), 8) == 0.25
    assert density(EMPTY, 8) == 0.0


def test_overlap_is_relative_to_the_smaller_set() -> None:
    assert overlap_ratio(tensor_of({1, 2}), tensor_of({2, 5, 7})) == 0.5
    assert overlap_ratio(tensor_of({1, 2}), tensor_of({1, 2, 3})) == 1.0


def test_empty_sets_overlap_nothing() -> None:
    assert overlap_ratio(EMPTY, tensor_of({1})) == 0.0
    assert overlap_ratio(EMPTY, EMPTY) == 0.0


@pytest.mark.slow
@given(id_sets, id_sets)
def test_overlap_matches_sets(a: set[int], b: set[int]) -> None:
    expected = len(a & b) / min(len(a), len(b)) if a and b else 0.0
    assert overlap_ratio(tensor_of(a), tensor_of(b)) == expected
    assert overlap_ratio(tensor_of(b), tensor_of(a)) == expected


def test_densification_extremes() -> None:
    same = [tensor_of({1, 4, 6})] * 5
    disjoint = [tensor_of({rank}) for rank in range(5)]
    assert densification(same) == 1.0
    assert densification(disjoint) == 5.0
    assert densification([EMPTY, EMPTY]) == 1.0


@given(st.lists(id_sets, min_size=1, max_size=6))
def test_densification_matches_sets(ids_per_rank: list[set[int]]) -> None:
    result = densification([tensor_of(ids) for ids in ids_per_rank])
    mean = sum(map(len, ids_per_rank)) / len(ids_per_rank)
    assert result == pytest.approx(len(set().union(*ids_per_rank)) / mean if mean else 1.0)
    assert 1.0 <= result <= len(ids_per_rank)


def test_skewness_by_hand() -> None:
    assert skewness(tensor_of({0, 1, 2, 5}), 8, 2) == 1.5
    assert skewness(tensor_of({0, 2, 4, 6}), 8, 4) == 1.0
    assert skewness(EMPTY, 8, 4) == 1.0


@given(id_sets, st.integers(1, NUM_ROWS))
def test_skewness_matches_a_loop_over_uneven_partitions(ids: set[int], partitions: int) -> None:
    bounds = [j * NUM_ROWS // partitions for j in range(partitions + 1)]
    densities = [len([i for i in ids if low <= i < high]) / (high - low) for low, high in itertools.pairwise(bounds)]
    expected = max(densities) * NUM_ROWS / len(ids) if ids else 1.0
    result = skewness(tensor_of(ids), NUM_ROWS, partitions)
    assert result == pytest.approx(expected)
    assert result >= 1.0 - 1e-12


def test_imbalance_by_hand() -> None:
    counts = torch.tensor([[3, 1], [2, 2], [0, 0]])
    assert imbalance_push(counts) == 1.5
    assert imbalance_push(torch.tensor([[2, 2, 2]])) == 1.0
    assert imbalance_push(torch.tensor([[0, 0, 7]])) == 3.0
    assert imbalance_pull(torch.tensor([3, 1])) == 1.5
    assert imbalance_pull(torch.tensor([5])) == 1.0


def test_imbalance_of_nothing_is_ideal() -> None:
    assert imbalance_push(torch.zeros(3, 2, dtype=torch.int64)) == 1.0
    assert imbalance_pull(torch.zeros(2, dtype=torch.int64)) == 1.0
