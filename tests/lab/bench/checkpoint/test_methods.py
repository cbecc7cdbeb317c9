"""All methods of `thinwire bench checkpoint` in turn on two hosts of this machine, and trainings that are killed."""

from __future__ import annotations

import pytest

from tests.lab.bench.checkpoint.results import check_method, measure_on_two_hosts
from thinwire.lab.bench.checkpoint.methods import METHODS
from thinwire.lab.bench.checkpoint.work import TrainingWork


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("job", ["synthetic", "lstm"])
def test_all_methods_on_all_jobs(job: str) -> None:
    work = TrainingWork(job, state_bytes=500_000, compute_seconds=0.05)
    result, _ = measure_on_two_hosts(work=work, steps=3, repeat=2, kills=1)
    assert [row["method"] for row in result["rows"]] == list(METHODS)
    for row in result["rows"][1:]:
        check_method(row, kills=1)
