"""Small jobs."""

from __future__ import annotations

import pytest

from thinwire.lab.bench.jobs.job import Data, Job

DENSE = ("lstm", "digits", "gpt", "bert", "vgg", "resnet")
WITH_ROWS = ("xlmr", "dlrm", "deepfm", "nmt", "word2vec", "lstm:sampled=64", "bert:sampled=64")


def loaded(job: Job) -> Data:
    if job.name.partition(":")[0] in ("digits", "vgg", "resnet"):
        pytest.importorskip("sklearn")
    return job.load()
