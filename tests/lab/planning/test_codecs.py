"""What compressors and codes of a model send."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from loopback import run_ranks
from measured import codec, measurement
from thinwire.compress.assign import with_memory
from thinwire.compress.base import Parameter
from thinwire.compress.named import NAMES, parse
from thinwire.compress.reductions.base import Stopwatch, Task
from thinwire.compress.reductions.choose import reduction_for
from thinwire.lab.bench.jobs.named import get_job
from thinwire.lab.planning.codecs import (
    SAMPLED_VALUES,
    SAMPLES,
    EchoPeers,
    GradientSample,
    exchanges_of,
    mean_bits,
    measure_codes,
    pieces_of,
)
from thinwire.lab.planning.speeds import DenseCode
from threaded import LoopbackLane


def test_a_compressor_of_no_fixed_size_cannot_be_planned_with() -> None:
    for text in ("gaussian_k:density=0.01", "sidco", "atomo", "ok_topk", "acp_sgd"):
        with pytest.raises(ValueError, match="nobody can tell beforehand what it takes: plan with"):
            exchanges_of(text)
    unfixed = measurement(codecs=[codec("gaussian_k:density=0.01", "all_gather")])
    with pytest.raises(ValueError, match="depends on the gradients"):
        unfixed.costs("gaussian_k:density=0.01", "all_gather")


def test_exchanges_that_are_planned_with_are_those_that_can_run() -> None:
    assert exchanges_of("bf16") == ("all_reduce",)
    assert exchanges_of("top_k") == ("all_gather",)
    assert exchanges_of("ef_sign_sgd") == ("all_gather", "two_shot")


@pytest.mark.parametrize("text", [name for name in NAMES if name not in ("threshold", "ok_topk", "hi_top_k")])
def test_echoes_are_what_ranks_that_agree_would_send(text: str) -> None:
    """So that timing them is timing a real exchange: the mean of equal gradients, as one rank alone decodes it."""
    compressor, parameter = with_memory(parse(text)), Parameter("weight", (64, 32))
    for world_size in (1, 4):
        exchange = reduction_for("auto", compressor, parameter, world_size)
        state = exchange.init(compressor, parameter, 0, world_size)
        peers, gradient = EchoPeers(0, world_size), torch.randn(64, 32)
        (result,) = exchange.run([Task(compressor, parameter, gradient, state)], peers, Stopwatch())
        assert result.mean.shape == gradient.shape
        assert torch.isfinite(result.mean).all()


def model(*sizes: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"p{place}": torch.zeros(size, dtype=dtype) for place, size in enumerate(sizes)}


def test_a_small_model_is_sampled_whole_in_the_order_of_backward() -> None:
    trained = model(3, 0, 5)
    sample = GradientSample(trained)
    for name, tensor in trained.items():
        sample.take(name, torch.full_like(tensor, float(name[1:])))
    assert sample.values[torch.float32].tolist() == [2.0] * 5 + [0.0] * 3
    assert sample.taken == 2, "nothing is taken of an empty one"


def test_of_a_large_model_runs_are_taken_at_equal_distances() -> None:
    chunk = SAMPLED_VALUES
    trained = model(300 * chunk + 17, 5, chunk // 2, 3 * chunk)
    sample = GradientSample(trained)
    offset, flat = 0, torch.arange(sum(tensor.numel() for tensor in trained.values()), dtype=torch.float32)
    for name in reversed(trained):
        size = trained[name].numel()
        sample.take(name, flat[offset : offset + size])
        offset += size
    values = sample.values[torch.float32]
    assert values.numel() == SAMPLES * chunk
    starts = values[::chunk]
    assert starts[0] == 0
    assert values[-1] == flat[-1]
    assert (starts.diff() - starts.diff().mean()).abs().max() <= 1
    for start, part in zip(starts.tolist(), values.split(chunk), strict=True):
        assert torch.equal(part, flat[int(start) : int(start) + chunk])


def test_what_has_no_dense_gradient_of_the_dtype_is_left_out() -> None:
    trained = {
        **model(4, 4),
        "half": torch.zeros(6, dtype=torch.float16),
        "whole": torch.zeros(2, dtype=torch.complex64),
    }
    sample = GradientSample(trained, left_out={"p0"})
    sample.take("p0", torch.ones(4))
    sample.take("half", torch.ones(6))  # in float32: not what would be sent
    sample.take("whole", torch.ones(2, dtype=torch.complex64))
    sample.take("p1", None)
    sample.take("p1", torch.ones(4).to_sparse())
    assert sample.taken == 0
    assert {dtype: values.numel() for dtype, values in sample.values.items() if values.numel()} == {
        torch.float16: 6,
        torch.float32: 4,
    }


def gradients(job: str, ranks: int, steps: int = 2) -> list[dict[str, torch.Tensor]]:
    """The gradients of each rank in a step of a job, by name."""
    found: list[dict[str, torch.Tensor]] = []
    target = get_job(job)
    data = target.load()
    for rank in range(ranks):
        training = replace(target.training(data, rank, ranks, seed=0), after_backward=None)  # which may clip them
        step = training.stepper()
        for _ in range(steps):
            step()
        named = training.model.named_parameters()
        found.append({name: entry.grad.clone() for name, entry in named if entry.grad is not None})
    return found


def sent_bits(ranks: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """The bits of a value in both halves of a sum of all gradients as one bucket, all of them coded."""
    flat = [torch.cat([gradient.flatten() for gradient in reversed(own.values())]) for own in ranks]
    share = -(-flat[0].numel() // len(flat))
    pushed = [mean_bits(own.split(share)) for own in flat]
    return sum(pushed) / len(pushed), mean_bits(sum(flat).split(share))  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        "lstm:autocast=bfloat16",
        "gpt:autocast=bfloat16",
        "gpt",
        pytest.param("digits:autocast=bfloat16", marks=pytest.mark.slow),
        pytest.param("bert:autocast=bfloat16", marks=pytest.mark.slow),
    ],
)
def test_bytes_are_predicted_within_two_percent_on_gradients_of_jobs(job: str) -> None:
    world_size = 2
    recorded = gradients(job, world_size)

    def run(exchange: Any) -> tuple[DenseCode, ...]:
        own = recorded[exchange.rank]
        sample = GradientSample(own)
        for name, gradient in own.items():
            sample.take(name, gradient)
        return measure_codes(LoopbackLane(exchange), sample)  # type: ignore[arg-type]

    (first,), (second,) = (outcome.get() for outcome in run_ranks(world_size, run))
    assert first == second, "all ranks know the same"
    push, pull = sent_bits(recorded)
    values = sum(gradient.numel() for gradient in recorded[0].values())
    sent = (world_size - 1) / world_size * values * (push + pull) / 8
    assert first.code.sent_bytes(4 * values, world_size) == pytest.approx(sent, rel=0.02)
    assert first.code.push_bits == pytest.approx(push, rel=0.02)
    assert 0.0 < first.cores <= 2.1


def test_ranks_of_which_one_took_no_gradient_measure_nothing() -> None:
    def run(exchange: Any) -> tuple[DenseCode, ...]:
        sample = GradientSample(model(100))
        if exchange.rank == 0:
            sample.take("p0", torch.randn(100))
        return measure_codes(LoopbackLane(exchange), sample)  # type: ignore[arg-type]

    assert [outcome.get() for outcome in run_ranks(2, run)] == [(), ()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_has_bits_of_its_own(dtype: torch.dtype) -> None:
    def run(exchange: Any) -> tuple[DenseCode, ...]:
        sample = GradientSample(model(1000, 3, dtype=dtype))
        sample.take("p1", torch.full((3,), math.nan, dtype=dtype))
        sample.take("p0", torch.randn(1000).to(dtype))
        return measure_codes(LoopbackLane(exchange), sample)  # type: ignore[arg-type]

    for outcome in run_ranks(3, run):
        (found,) = outcome.get()
        assert found.dtype == dtype
        assert found.code.value_bits == 8 * dtype.itemsize
        assert 0 < found.code.push_bits <= 8 * dtype.itemsize
        assert 0 < found.code.pull_bits <= 8 * dtype.itemsize


def test_pieces_are_those_of_ranks_or_runs() -> None:
    assert [piece.numel() for piece in pieces_of(torch.zeros(10), 4)] == [3, 3, 3, 1]
    assert [piece.numel() for piece in pieces_of(torch.zeros(0), 4)] == [0]
    assert {piece.numel() for piece in pieces_of(torch.zeros(8 * SAMPLED_VALUES), 2)} == {SAMPLED_VALUES}
