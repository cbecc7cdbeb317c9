"""What low-rank compressors send of a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire import compress
from thinwire.compress.base import Compressor, Packed, Parameter, Payload, State
from thinwire.compress.reductions.base import salted
from thinwire.compress.wrappers import summable_code, unwrapped

SUMMED = (compress.power_sgd(2), compress.power_sgd(2, warm_start=False), compress.acp_sgd(2))
CODED = (compress.power_sgd(2, values=compress.mxfp4()), compress.power_sgd(0.05, values=compress.mxfp8()))
every_method = pytest.mark.parametrize("method", SUMMED + CODED, ids=lambda method: method.name)


def states_of(method: Compressor, parameter: Parameter, world_size: int) -> list[State]:
    return [salted(method.init(parameter), rank) for rank in range(world_size)]


def all_reduced(method: Compressor, gradients: list[Tensor], parameter: Parameter, states: list[State]) -> Tensor:
    """One step on ranks that share a thread, as the all-reduce does it: what is summed are copies."""
    code, inside = summable_code(method), [unwrapped(method, state)[1] for state in states]
    rounds = 0
    payloads: list[Payload | None] = [
        method.compress(gradient, parameter, state) for gradient, state in zip(gradients, states, strict=True)
    ]
    while all(payloads):
        rounds += 1
        parts = zip(*(payload.parts for payload in payloads if payload), strict=True)
        assert len({payload.code for payload in payloads if payload}) == 1
        mean = Payload(tuple(sum((p / len(gradients) for p in part[1:]), part[0] / len(gradients)) for part in parts))
        mean = coded(mean, payloads[0].code if payloads[0] else None)
        payloads = [code.next_round(mean, parameter, state) for state in inside]
    assert not any(payloads), "all ranks need equally many rounds"
    results = [code.reconstruct(mean, parameter, state) for state in inside]
    assert all(torch.equal(result, results[0]) for result in results), "the same bits on every rank"
    for result, state in zip(results, states, strict=True):
        method.finish(result, parameter, state)
    assert rounds <= len(code.round_specs(parameter))
    return results[0]


def coded(mean: Payload, code: Packed | None) -> Payload:
    """What all get of a mean that its owner codes."""
    if code is None:
        return mean
    plans = [(part, Parameter("part", tuple(part.shape), part.dtype)) for part in mean.parts]
    return Payload(tuple(code.decompress(code.compress(part, plan, {}), plan) for part, plan in plans), code=code)


def gradients_of(parameter: Parameter, world_size: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(parameter.shape, generator=generator, dtype=parameter.working_dtype) for _ in range(world_size)]


def mean_of(gradients: list[Tensor]) -> Tensor:
    return torch.stack(gradients).mean(0)
