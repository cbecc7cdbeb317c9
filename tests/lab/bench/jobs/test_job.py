"""Models, batches and learning rates of the jobs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from tests.lab.bench.jobs.small import DENSE, WITH_ROWS, loaded
from thinwire.lab.bench.jobs.job import Data, Job, Samples
from thinwire.lab.bench.jobs.named import JOBS, get_job


@pytest.fixture(params=JOBS.values(), ids=JOBS)
def job(request: pytest.FixtureRequest) -> Job:
    return request.param


@pytest.mark.few(4)
def test_a_model_follows_from_its_seed_alone(job: Job) -> None:
    models = [job.model(seed) for seed in (3, 3, 4)]
    first, same, other = (torch.cat([parameter.flatten() for parameter in model.parameters()]) for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert 4e6 < 4 * first.numel() < 24e6, "gradients that a link of 100 Mbit/s feels"
    state = torch.random.get_rng_state()
    job.model(5)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_ranks_share_each_batch_of_one_rank(job: Job) -> None:
    """The batches of 4 ranks together are one of a job that has four times the batch: no sample twice in an epoch."""
    number = max(500, 10 * job.batch_size)
    data = Data(Samples(torch.arange(number), torch.arange(number)), Samples(torch.arange(4), torch.arange(4)))
    ranks = [list(islice(job.batches(data, rank, 4, seed=1), 16)) for rank in range(4)]
    again = list(islice(job.batches(data, 2, 4, seed=1), 16))
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(ranks[2], again, strict=True))
    per_epoch = number // (4 * job.batch_size)
    epoch = torch.cat([batch.inputs for batches in ranks for batch in batches[:per_epoch]])
    assert epoch.unique().numel() == epoch.numel() == per_epoch * 4 * job.batch_size
    with pytest.raises(ValueError, match="too few"):
        next(job.batches(data, 0, 1000, seed=0))


def test_the_learning_rate_rises_falls_and_stays() -> None:
    job = get_job("lstm")
    shares = [job.learning_rate_share(step, 300) for step in range(400)]
    assert shares[0] == pytest.approx(1 / job.warm_up_steps)
    assert max(shares) <= 1.0
    assert shares.index(max(shares)) in range(job.warm_up_steps - 1, job.warm_up_steps + 1)
    assert shares[300:] == [pytest.approx(0.05)] * 100


STEPS, LEARNED = 15, 0.97
MARGINS = {"digits": (80, 0.9), "vgg": (40, 0.97), "resnet": (25, 0.9), "dlrm": (25, 0.97)}
"""Steps of a run and the share of the first loss that the last may be, of the jobs that have others."""


def losses_of(job: Job, steps: int) -> Iterator[float]:
    training = job.training(loaded(job), 0, 1, seed=0)
    optimizer = job.optimizer_of(training)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * job.learning_rate_share(step, 100)
        optimizer.zero_grad()
        loss = training.loss(training.model, training.batch())
        loss.backward()
        job.clip(training.model)
        optimizer.step()
        yield loss.item()


@pytest.mark.usefixtures("small_corpus")
@pytest.mark.slow
@pytest.mark.parametrize("name", [*DENSE, *WITH_ROWS])
def test_a_few_steps_lower_the_loss(name: str) -> None:
    steps, share = MARGINS.get(name, (STEPS, LEARNED))
    losses = list(losses_of(get_job(name), steps))
    assert all(map(math.isfinite, losses))
    assert sum(losses[-3:]) < share * sum(losses[:3])
