"""Recommendation: tables and batches."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from references.recipe_targets import expected_densification
from thinwire.lab.bench.jobs.named import get_job
from thinwire.lab.bench.jobs.recommend import CRITEO_ROWS, NUM_COUNTS, DlrmJob
from thinwire.lab.bench.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("small_corpus")


def test_the_tables_of_criteo_are_those_of_its_data() -> None:
    assert (len(CRITEO_ROWS), sum(CRITEO_ROWS)) == (26, 33_762_577)


def test_the_recipe_of_dlrm_is_what_its_job_looks_up() -> None:
    """Rows of the 26 tables as one, on 8 ranks of 2,048 samples: density and densification of `bench sync`."""
    recipe = RECIPES["dlrm"]
    job = get_job("dlrm:batch_size=2048", 1.0)
    assert isinstance(job, DlrmJob)
    assert sum(job.rows) == recipe.num_rows
    data, starts = job.load(), torch.tensor([0, *accumulate(job.rows[:-1])])
    batches = [next(job.batches(data, rank, 8, seed=0)) for rank in range(8)]
    ids = [(batch.inputs[:, NUM_COUNTS:] + starts).unique() for batch in batches]
    held = sum(map(len, ids)) / 8
    assert held / recipe.num_rows == pytest.approx(recipe.density, rel=0.03)
    assert len(torch.cat(ids).unique()) / held == pytest.approx(expected_densification(recipe, 8), rel=0.03)
