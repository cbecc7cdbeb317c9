"""Encoders of texts."""

from __future__ import annotations

import pytest
import torch

from thinwire.lab.bench.jobs.transformers import BertJob, XlmrJob

pytestmark = pytest.mark.usefixtures("small_corpus")


def test_both_texts_of_a_pair_go_through_one_encoder() -> None:
    """The gradient of the encoder is the sum of those of two forwards; shuffled documents cost more than true ones."""
    job = XlmrJob(num_words=300)
    model, calls = job.model(0), []
    model.register_forward_hook(lambda *_: calls.append(1))
    batch = next(job.batches(job.load(), 0, 1, seed=0))
    job.loss(model, batch).backward()
    assert len(calls) == 2
    with torch.no_grad():
        same = torch.equal(model(batch.inputs), model(batch.inputs))
        norms = model(batch.inputs).norm(dim=1)
    assert same
    torch.testing.assert_close(norms, torch.ones(job.batch_size))


def test_masked_words_alone_are_predicted() -> None:
    job = BertJob(num_words=301)
    samples = job.load().train
    is_masked = samples.targets != -100
    assert is_masked.sum(1).unique().tolist() == [round(0.15 * job.length)]
    assert (samples.inputs[is_masked] == 300).all()
    assert samples.targets.max() < 300, "the mask is nobody's target"
    logits, targets = job.model(0)(samples.inputs[:4], samples.targets[:4])
    assert logits.shape == (len(targets), 301)
