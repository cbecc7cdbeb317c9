"""Jobs by name, with their scale and settings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.lab.bench.jobs.small import DENSE, WITH_ROWS, loaded
from thinwire.gradients.tables import tables_of
from thinwire.lab.bench.jobs.language import LstmJob
from thinwire.lab.bench.jobs.named import JOBS, get_job
from thinwire.lab.bench.jobs.transformers import GptJob

pytestmark = pytest.mark.usefixtures("small_corpus")


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.published])
def test_at_scale_1_a_job_has_the_published_number_of_parameters(name: str) -> None:
    job = get_job(name, 1.0)
    assert job.num_parameters == pytest.approx(job.published.parameters, rel=0.01)
    assert {key: getattr(job, key) for key in job.published.sizes} == job.published.sizes


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.published])
def test_between_its_own_size_and_the_published_one_a_job_grows(name: str) -> None:
    own = get_job(name)
    scales = (own.num_parameters / own.published.parameters, 0.05, 0.2, 1.0)
    numbers = [get_job(name, scale).num_parameters for scale in scales]
    assert numbers[0] == own.num_parameters
    assert numbers == sorted(numbers)
    for scale, number in zip(scales[1:], numbers[1:], strict=True):
        assert 0.5 < number / (scale * own.published.parameters) < 1.7


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DENSE, *WITH_ROWS])
def test_rows_of_a_table_are_touched_by_what_a_batch_holds(name: str) -> None:
    """Jobs with dense gradients have no table that would escape compression; others touch few rows of theirs."""
    job = get_job(name)
    model = job.model(0)
    assert bool(tables_of(model)) == (name in WITH_ROWS)
    training = job.training(loaded(job), 0, 1, seed=0)
    training.loss(training.model, training.batch()).backward()
    touched = [
        (module.weight.grad.abs().sum(1) > 0).float().mean().item()
        for module in training.model.modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings > 1000 and module.weight.grad is not None
    ]
    assert (max(touched, default=0.0) > 0.0) == (name in WITH_ROWS)
    assert all(share < 0.25 for share in touched)


def test_autocast_is_an_option_of_a_job() -> None:
    job, plain = get_job("gpt:autocast=bfloat16:num_layers=1"), GptJob(num_layers=1)
    model, seen = job.model(0), []
    model.words.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    batch = next(job.batches(job.load(), 0, 1, seed=0))
    loss, other = job.loss(model, batch), plain.loss(model, batch)
    assert seen == [torch.bfloat16, torch.float32]
    assert loss.item() == pytest.approx(other.item(), rel=0.01)
    loss.backward()
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}


def test_settings_behind_a_name_come_after_the_scale() -> None:
    job = get_job("lstm:sampled=32:batch_size=4", 0.05)
    assert isinstance(job, LstmJob)
    assert (job.sampled, job.batch_size, job.name) == (32, 4, "lstm:sampled=32:batch_size=4 at scale 0.05")


def test_only_stochastic_gradient_descent_has_a_momentum() -> None:
    """What has its own momentum, as DGC, asks the job for it."""
    assert [get_job(name).momentum for name in ("lstm", "gpt", "dlrm")] == [0.9, 0.0, 0.0]
