"""Recorded gradients as a workload."""

from __future__ import annotations

import pytest
import torch

from thinwire.lab.bench.dense.workload import DenseWorkload, buckets


def test_a_text_names_a_job_and_how_its_gradients_are_made() -> None:
    workload = DenseWorkload("dense:gpt:num_words=300:autocast:accumulate=4:after=0")
    assert (workload.job.name, workload.job.autocast) == ("gpt:num_words=300", "bfloat16")
    assert (workload.accumulate, workload.after) == (4, 0)
    plain = DenseWorkload("dense:digits")
    assert (plain.job.autocast, plain.accumulate, plain.after) == ("", 1, 10)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpt", "give dense:JOB"),
        ("dense:", "unknown job"),
        ("dense:gtp", "unknown job 'gtp'"),
        ("dense:gpt:width=3", "no setting 'width'"),
        ("dense:gpt:accumulate=0", "accumulate is at least 1"),
        ("dense:gpt:accumulate=-1", "give a whole number"),
        ("dense:gpt:after=x", "give a whole number"),
    ],
)
def test_a_text_that_names_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DenseWorkload(text)


def test_buckets_are_those_of_ddp() -> None:
    """Against the function that DDP itself calls, with one small and other large limits, for two dtypes."""
    mib = 1 << 18
    sizes = [10, mib // 2, mib // 2, 3 * mib, mib // 4, 5, 30 * mib, 1]
    gradients = [torch.full((size,), float(place)) for place, size in enumerate(sizes)]
    gradients.insert(2, torch.full((7,), 9.0, dtype=torch.float64))
    expected, _ = torch.distributed._compute_bucket_assignment_by_size(gradients, [1 << 20, 25 << 20])
    found = buckets(gradients)
    assert sorted(bucket.numel() for bucket in found) == sorted(
        sum(gradients[place].numel() for place in places) for places in expected
    )
    kept = torch.cat([bucket.double() for bucket in found if bucket.dtype == torch.float32])
    assert torch.equal(kept, torch.cat([entry.double() for entry in gradients if entry.dtype == torch.float32]))
    assert buckets([]) == []
