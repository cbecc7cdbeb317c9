"""The jobs of `thinwire bench train`: each learns, has the published size at scale 1, and rows where it should."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from torch import nn

from references.recipe_targets import expected_densification
from thinwire.gradients.tables import tables_of
from thinwire.lab.bench.jobs.job import Data, Job
from thinwire.lab.bench.jobs.language import LstmJob, NmtJob
from thinwire.lab.bench.jobs.named import JOBS, get_job
from thinwire.lab.bench.jobs.recommend import CRITEO_ROWS, NUM_COUNTS, DlrmJob
from thinwire.lab.bench.jobs.text import WordTable
from thinwire.lab.bench.jobs.transformers import BertJob, GptJob, XlmrJob
from thinwire.lab.bench.recipes import RECIPES

DENSE = ("lstm", "digits", "gpt", "bert", "vgg", "resnet")
WITH_ROWS = ("xlmr", "dlrm", "deepfm", "nmt", "word2vec", "lstm:sampled=64", "bert:sampled=64")
STEPS, LEARNED = 15, 0.97
MARGINS = {"digits": (80, 0.9), "vgg": (40, 0.97), "resnet": (25, 0.9), "dlrm": (25, 0.97)}
"""Steps of a run and the share of the first loss that the last may be, of the jobs that have others."""


pytestmark = pytest.mark.usefixtures("small_corpus")


def loaded(job: Job) -> Data:
    if job.name.partition(":")[0] in ("digits", "vgg", "resnet"):
        pytest.importorskip("sklearn")
    return job.load()


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


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DENSE, *WITH_ROWS])
def test_a_few_steps_lower_the_loss(name: str) -> None:
    steps, share = MARGINS.get(name, (STEPS, LEARNED))
    losses = list(losses_of(get_job(name), steps))
    assert all(map(math.isfinite, losses))
    assert sum(losses[-3:]) < share * sum(losses[:3])


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.published])
def test_at_scale_1_a_job_has_the_published_number_of_parameters(name: str) -> None:
    job = get_job(name, 1.0)
    assert job.num_parameters == pytest.approx(job.published_parameters, rel=0.01)
    assert {key: getattr(job, key) for key in job.published} == job.published


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.published])
def test_between_its_own_size_and_the_published_one_a_job_grows(name: str) -> None:
    own = get_job(name)
    scales = (own.num_parameters / own.published_parameters, 0.05, 0.2, 1.0)
    numbers = [get_job(name, scale).num_parameters for scale in scales]
    assert numbers[0] == own.num_parameters
    assert numbers == sorted(numbers)
    for scale, number in zip(scales[1:], numbers[1:], strict=True):
        assert 0.5 < number / (scale * own.published_parameters) < 1.7


def test_the_tables_of_criteo_are_those_of_its_data() -> None:
    assert (len(CRITEO_ROWS), sum(CRITEO_ROWS)) == (26, 33_762_577)


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


def test_a_translation_follows_from_the_text() -> None:
    job = NmtJob(num_words=301)
    samples = job.load().train
    source, behind = samples.inputs.chunk(2, 1)
    assert torch.equal(behind[:, 1:], samples.targets[:, :-1]), "the decoder reads what it has said"
    pairs = torch.stack((source.reshape(-1, 2).flip(-1).flatten(), samples.targets.flatten()))
    assert len(pairs.unique(dim=1).T) == len(pairs[0].unique()), "a word has one translation"


def test_a_sampled_softmax_estimates_the_full_one() -> None:
    """The mean of what drawn words add to its denominator is what all others add; ``eval()`` takes them all."""
    torch.manual_seed(0)
    table = WordTable(8, 4, 20_000)
    states, targets = torch.randn(32, 4), torch.randint(0, 8, (32,))
    logits, classes = table.logits(states, targets)
    assert (classes == 0).all()
    table.eval()
    full, same = table.logits(states, targets)
    assert torch.equal(same, targets)
    others = full.detach().exp().scatter(1, targets[:, None], 0.0).sum(1)
    torch.testing.assert_close(logits[:, 1:].detach().exp().mean(1) * math.log(9), others, rtol=0.1, atol=0.0)


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
