"""Rows of tables in one flat weight, as fbgemm keeps them: which ones a lookup reads, and of which width."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.gradients.fused import DTYPES, random_rows
from thinwire.gradients.tables import (
    LookupRows,
    TableGradient,
    _flat_rows,
    _flat_width,
    lookups_of_features,
    share,
    stack,
    table_names,
    tables_of,
    unstack,
)
from thinwire.rows.sparse import SparseRows


class DenseTableBatchedEmbeddingBagsCodegen(nn.Module):
    """A stand-in with the attributes of fbgemm's module of this name; one table for each (rows, width)."""

    def __init__(self, specs: list[tuple[int, int]], features: list[int]) -> None:
        super().__init__()
        begins = [0, *accumulate(rows * width for rows, width in specs)]
        self.embedding_specs = specs
        self.weights = nn.Parameter(torch.zeros(begins[-1]))
        self.weights_offsets = torch.tensor([begins[table] for table in features])
        widths = [specs[table][1] for table in features]
        self.D_offsets = torch.tensor([0, *accumulate(widths)], dtype=torch.int32)

    def touched(self, table: int, row: int) -> Tensor:
        """The elements of a row of a table."""
        begin = sum(rows * width for rows, width in self.embedding_specs[:table])
        width = self.embedding_specs[table][1]
        return torch.arange(begin + row * width, begin + (row + 1) * width)


@given(
    specs=st.lists(st.tuples(st.integers(1, 9), st.sampled_from([4, 8, 12])), min_size=1, max_size=4),
    data=st.data(),
)
def test_rows_are_exactly_the_elements_that_a_lookup_reads(specs: list[tuple[int, int]], data: st.DataObject) -> None:
    features = list(range(len(specs))) + data.draw(st.lists(st.integers(0, len(specs) - 1), max_size=2))
    module = DenseTableBatchedEmbeddingBagsCodegen(specs, features)
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=len(features), max_size=len(features)))
    sizes = sizes if data.draw(st.booleans()) else [2] * len(features)
    bags = [[data.draw(st.lists(st.integers(0, specs[table][0] - 1), max_size=3)) for _ in range(size)]
            for table, size in zip(features, sizes, strict=True)]  # fmt: skip
    indices = torch.tensor([row for feature in bags for bag in feature for row in bag], dtype=torch.int64)
    lengths = [len(bag) for feature in bags for bag in feature]
    offsets = torch.tensor([0, *accumulate(lengths)])
    per_rank = None if len(set(sizes)) == 1 else [[size] for size in sizes]

    rows = _flat_rows(module, indices, offsets, batch_size_per_feature_per_rank=per_rank)

    width = _flat_width(module)
    expected = torch.zeros(module.weights.numel(), dtype=torch.bool)
    for table, feature in zip(features, bags, strict=True):
        for row in (row for bag in feature for row in bag):
            expected[module.touched(table, row)] = True
    found = torch.zeros(module.weights.numel() // width, dtype=torch.bool)
    found[rows] = True
    assert torch.equal(found.repeat_interleave(width), expected)
    counts = lookups_of_features(offsets, len(features), per_rank)
    assert counts.tolist() == [sum(map(len, feature)) for feature in bags]


@pytest.mark.parametrize(("widths", "width"), [((64, 64), 64), ((64, 16), 16), ((12, 8), 4)])
def test_a_flat_weight_is_a_table_of_rows(widths: tuple[int, int], width: int) -> None:
    specs = [(4000, width) for width in widths]
    model = nn.ModuleDict({"bags": DenseTableBatchedEmbeddingBagsCodegen(specs, [0, 1]), "over": nn.Linear(3, 3)})
    weight = model["bags"].weights
    assert [id(table) for table in tables_of(model)] == [id(weight)]
    assert table_names(model, {id(weight): "bags"}) == ["bags"]
    lookups = LookupRows(model)
    assert lookups.parameters == [weight]
    gradient = torch.zeros_like(weight)
    matrix = lookups.matrix(weight, gradient)
    assert matrix.shape == (weight.numel() // width, width)
    assert matrix.data_ptr() == gradient.data_ptr(), "means are stored in the gradient itself"
    dense = model["over"].weight
    assert lookups.matrix(dense, dense) is dense
    lookups.remove()


@given(
    sizes=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6),
    width=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
def test_what_is_stacked_is_cut_apart_again(
    sizes: list[tuple[int, int]], width: int, dtype: torch.dtype, seed: int
) -> None:
    """Also empty tables, and tables without rows."""
    tables = [random_rows(rows, count, width, dtype, seed + place) for place, (rows, count) in enumerate(sizes)]
    stacked = stack(tables)
    checked = SparseRows(stacked.ids, stacked.values, stacked.num_rows)  # sorted, unique, in range
    assert torch.equal(checked.to_dense(), torch.cat([table.to_dense() for table in tables]))
    for ours, table in zip(unstack(stacked, [table.num_rows for table in tables]), tables, strict=True):
        assert torch.equal(ours.ids, table.ids)
        assert torch.equal(ours.values, table.values)
        assert ours.num_rows == table.num_rows


@given(total=st.integers(0, 10**12), weights=st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
def test_shares_lose_nothing(total: int, weights: list[int]) -> None:
    shares = share(total, weights)
    assert sum(shares) == total
    if any(weights):
        assert all(abs(part - total * weight / sum(weights)) <= 1 for part, weight in zip(shares, weights, strict=True))
    else:
        assert max(shares) - min(shares) <= 1


def test_a_row_that_cancelled_is_zero_in_a_dense_gradient_afterwards() -> None:
    """A sum by blocks does not tell of it, and this rank's share of it must not stay."""
    table = TableGradient("t", torch.tensor([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]), torch.tensor([2, 1, 2]))
    mean = SparseRows(torch.tensor([0, 2]), torch.full((2, 2), 9.0), 3)
    assert table.store(table.rows(), mean) is table.gradient
    assert table.gradient.tolist() == [[9.0, 9.0], [0.0, 0.0], [9.0, 9.0]]


def test_a_weight_that_an_output_layer_shares_is_no_table() -> None:
    """Its gradient is dense, so it can be compressed; others of embeddings have rows."""
    model = nn.ModuleDict(
        {"words": nn.Embedding(600, 16), "output": nn.Linear(16, 600), "users": nn.Embedding(600, 16)}
    )
    users = model["users"].weight
    assert {id(weight) for weight in tables_of(model)} == {id(model["words"].weight), id(users)}
    model["output"].weight = model["words"].weight
    assert [id(weight) for weight in tables_of(model)] == [id(users)]
    assert [id(weight) for weight in LookupRows(model, compressed={id(model["words"].weight)}).parameters] == [
        id(users)
    ]
