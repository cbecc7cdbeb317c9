"""Warm-up: of densities, and dense at first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.compress.sparsified import gradient_of, saved_and_loaded
from thinwire import compress
from thinwire.compress import int8
from thinwire.compress.base import Compressor, Memory, Parameter
from thinwire.compress.memory import ErrorFeedback, MomentumCorrection
from thinwire.compress.warm_up import density_of
from thinwire.compress.wrappers import packed_code
from thinwire.errors import CorruptMessageError, MismatchError


def test_warm_up_reaches_the_density_by_equal_factors() -> None:
    compressor = compress.warm_up(compress.top_k(0.01), 4)
    parameter = Parameter("weight", (10_000,))
    state, counts = compressor.init(parameter), []
    for _ in range(6):
        counts.append(compressor.compress(torch.randn(10_000), parameter, state).parts[0].numel())
    assert counts == [2500, 1118, 500, 224, 100, 100]
    code = packed_code(compressor)
    assert code.packed_bytes(parameter) is None
    assert all(spec.numel is None for spec in code.part_specs(parameter))


@pytest.mark.parametrize(
    "order",
    [
        lambda inner: compress.warm_up(ErrorFeedback(inner), 3),
        lambda inner: ErrorFeedback(compress.warm_up(inner, 3)),
        lambda inner: compress.warm_up(MomentumCorrection(inner), 3),
        lambda inner: MomentumCorrection(compress.warm_up(inner, 3)),
    ],
)  # fmt: skip
def test_warm_up_finds_a_density_through_wrappers(order: Callable[[Compressor], Compressor]) -> None:
    parameter = Parameter("weight", (1000,))
    for inner in (compress.top_k(0.01), compress.random_k(0.01)):
        compressor = order(inner)
        assert density_of(compressor) == 0.01
        assert compressor.memory is Memory.OWN
        code = packed_code(compressor)
        state, sizes = compressor.init(parameter), []
        for _ in range(4):
            payload = compressor.compress(torch.randn(1000), parameter, state)
            sizes.append(payload.parts[-1].numel())
            data = code.pack(payload, parameter)
            again = code.unpack(data, parameter)
            assert torch.equal(compressor.decompress(payload, parameter), compressor.decompress(again, parameter))
        assert sizes == [250, 85, 29, 10]


@pytest.mark.parametrize(
    "order",
    [lambda inner: compress.warm_up(ErrorFeedback(inner), 2), lambda inner: ErrorFeedback(compress.warm_up(inner, 2))],
)
def test_what_has_no_density_is_sent_dense_at_first(order: Callable[[Compressor], Compressor]) -> None:
    parameter, compressor = Parameter("weight", (37, 53)), order(int8())
    code, state = packed_code(compressor), compressor.init(parameter)
    for step in range(4):
        gradient = gradient_of(parameter)
        payload = compressor.compress(gradient, parameter, state)
        data = code.pack(payload, parameter)
        arrived = compressor.decompress(code.unpack(data, parameter), parameter)
        assert torch.equal(arrived, gradient) == (step < 2)
        assert (data.numel() > 4 * parameter.numel) == (step < 2)
    dense, coded = compressor.init(parameter), saved_and_loaded(state)
    mixed = [compressor.compress(gradient_of(parameter), parameter, kept) for kept in (dense, coded)]
    with pytest.raises(MismatchError, match="warming up"):
        code.combine(mixed, parameter)
    for data in (torch.full((24,), 7, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)):
        with pytest.raises(CorruptMessageError):
            code.unpack(data, parameter)
