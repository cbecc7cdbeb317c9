"""Language models and translations."""

from __future__ import annotations

import pytest
import torch

from thinwire.lab.bench.jobs.language import NmtJob

pytestmark = pytest.mark.usefixtures("small_corpus")


def test_a_translation_follows_from_the_text() -> None:
    job = NmtJob(num_words=301)
    samples = job.load().train
    source, behind = samples.inputs.chunk(2, 1)
    assert torch.equal(behind[:, 1:], samples.targets[:, :-1]), "the decoder reads what it has said"
    pairs = torch.stack((source.reshape(-1, 2).flip(-1).flatten(), samples.targets.flatten()))
    assert len(pairs.unique(dim=1).T) == len(pairs[0].unique()), "a word has one translation"
