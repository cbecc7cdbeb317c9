"""Rows of tables in one flat weight, as fbgemm keeps them: which ones a lookup reads, and of which width."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from thinwire.gradients.tables import LookupRows, _flat_rows, _flat_width, lookups_of_features, table_names, tables_of


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
