"""Sparse payloads of several parameters as one vector: nothing changes but bytes and calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.compress import bf16, error_feedback, gaussian_k, momentum_correction, packing, qsgd, random_k, top_k
from thinwire.compress.base import Compressor, Parameter
from thinwire.compress.reductions import stacked
from thinwire.compress.reductions.all_gather import AllGather
from thinwire.compress.reductions.base import Stopwatch, Task
from thinwire.errors import CorruptMessageError
from thinwire.lab.planning.codecs import EchoPeers
from thinwire.rows.formats import Header

SHAPES = ((3, 5), (1,), (17, 9), (0,), (64, 33), (1, 7))
shapes = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6)
densities = st.sampled_from([0.001, 0.05, 0.5, 1.0])


def parameters(some: list[tuple[int, ...]]) -> list[Parameter]:
    return [Parameter(f"layer{place}.weight", shape) for place, shape in enumerate(some)]


def gradients(some: list[Parameter]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(parameter.shape, generator=generator) for parameter in some]


def means(compressor: Compressor, some: list[Parameter], one_by_one: bool) -> tuple[list[torch.Tensor], list[float]]:
    exchange, peers = AllGather(), EchoPeers(0, 3)
    tasks = [
        Task(compressor, parameter, gradient, exchange.init(compressor, parameter, 0, 3))
        for parameter, gradient in zip(some, gradients(some), strict=True)
    ]
    jobs = [[task] for task in tasks] if one_by_one else [tasks]
    results = [result for job in jobs for result in exchange.run(job, peers, Stopwatch())]
    return [result.mean for result in results], [result.density for result in results]


@pytest.mark.parametrize("make", [top_k, lambda d: error_feedback(top_k(d)), lambda d: momentum_correction(top_k(d))])
@given(some=shapes, density=densities)
def test_the_means_are_those_of_each_alone_bit_for_bit(make, some, density) -> None:  # type: ignore[no-untyped-def]
    compressor, named = make(density), parameters(some)
    together, alone = means(compressor, named, False), means(compressor, named, True)
    for mine, other, parameter in zip(together[0], alone[0], named, strict=True):
        assert mine.shape == parameter.shape
        assert torch.equal(mine, other)
    assert together[1] == alone[1]


@given(some=shapes, density=densities)
def test_predicted_bytes_are_sent_bytes(some: list[tuple[int, ...]], density: float) -> None:
    compressor, named = error_feedback(top_k(density)), parameters(some)
    plans = [(compressor, parameter) for parameter in named]
    payloads = [
        compressor.compress(gradient, parameter, compressor.init(parameter))
        for parameter, gradient in zip(named, gradients(named), strict=True)
    ]
    packed = [stack.pack([payloads[place] for place in stack.indices]) for stack in stacked.stacks(plans)]
    message = packing.join(packed)
    assert stacked.predicted_bytes(plans) == Header.NUM_BYTES + message.numel()
    assert message.numel() <= stacked.max_bytes(plans)


@given(some=shapes)
def test_the_shares_of_a_message_add_up(some: list[tuple[int, ...]]) -> None:
    compressor, named = top_k(0.1), parameters(some)
    exchange = AllGather()
    tasks = [Task(compressor, one, gradient, {}) for one, gradient in zip(named, gradients(named), strict=True)]
    results = exchange.run(tasks, EchoPeers(0, 2), Stopwatch())
    plans = [task.plan for task in tasks]
    lengths = [stack.packed_bytes or 0 for stack in stacked.stacks(plans)]
    assert sum(result.payload_bytes for result in results) == sum(lengths)


def test_one_vector_for_each_dtype_and_what_cannot_be_stacked_stays_alone() -> None:
    half = Parameter("half.weight", (8, 8), torch.bfloat16)
    double = Parameter("double.weight", (8, 8), torch.float64)
    plain = [Parameter(f"{number}.weight", (8, 8)) for number in range(3)]
    plans = [(top_k(0.1), one) for one in (plain[0], double, plain[1], half)]
    plans += [(compressor, plain[2]) for compressor in (random_k(0.1), top_k(0.1, values=bf16()), qsgd(8))]
    places = [stack.indices for stack in stacked.stacks(plans)]
    assert sorted(place for some in places for place in some) == list(range(len(plans)))
    assert (0, 2, 3) in places, "gradients of 16 bits are worked on in 32"
    assert [some for some in places if len(some) > 1] == [(0, 2, 3)]


def test_a_size_that_depends_on_the_gradient_has_no_prediction() -> None:
    plans = [(gaussian_k(0.1), parameter) for parameter in parameters([(64, 33), (17, 9)])]
    assert stacked.predicted_bytes(plans) is None
    assert stacked.max_bytes(plans) > 0


def test_what_changed_on_the_way_is_refused_and_named() -> None:
    named = parameters([(64, 33), (17, 9)])
    plans = [(top_k(0.1), parameter) for parameter in named]
    selections = [
        top_k(0.1).select(gradient.view(-1), one, {}) for one, gradient in zip(named, gradients(named), strict=True)
    ]
    message = stacked.pack(selections, plans)
    for (ids, values), (other_ids, other_values) in zip(selections, stacked.unpack(message, plans), strict=True):
        assert torch.equal(ids, other_ids)
        assert torch.equal(values, other_values)
    message[40] ^= 1
    with pytest.raises(CorruptMessageError, match="layer0"):
        stacked.unpack(message, plans)
