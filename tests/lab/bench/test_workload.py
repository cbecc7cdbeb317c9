"""Workloads of benchmarks: the same gradients in every process, from a recipe or a trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thinwire.lab.bench.recipes import RECIPES
from thinwire.lab.bench.trace import IndexTrace, save_trace
from thinwire.lab.bench.workload import Workload


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_recipe_gives_each_rank_rows_of_its_own_and_the_same_again(recipe: str) -> None:
    workload = Workload(recipe, is_trace=False, scale=0.001, seed=3, world_size=2)
    num_rows, width = workload.shape()
    held = [workload.rows(rank) for rank in range(2)]
    for rank, rows in enumerate(held):
        again = Workload(recipe, is_trace=False, scale=0.001, seed=3, world_size=2).rows(rank)
        assert torch.equal(rows.ids, again.ids)
        assert torch.equal(rows.values, again.values)
        assert (rows.num_rows, rows.width) == (num_rows, width)
        assert torch.equal(rows.ids, workload.ids(rank))
    assert not torch.equal(held[0].values[:1], held[1].values[:1])


def test_a_trace_gives_the_rows_of_its_last_step_to_as_many_ranks_as_it_has(tmp_path: Path) -> None:
    first, last, nothing = torch.tensor([0, 3]), torch.tensor([1, 2, 9]), torch.tensor([], dtype=torch.int64)
    path = str(tmp_path / "trace")
    save_trace(path, IndexTrace(10, 4, ((first, first), (last, nothing))))
    workload = Workload(path, is_trace=True, scale=None, seed=0, world_size=2)
    assert workload.shape() == (10, 4)
    assert torch.equal(workload.ids(0), last)
    assert workload.rows(1).values.shape == (0, 4)
    with pytest.raises(ValueError, match="was recorded on 2 ranks, but 3 are asked for: use --hosts 2 or fewer"):
        Workload(path, is_trace=True, scale=None, seed=0, world_size=3).ids(0)
