"""Payloads inside of an all-reduce: one tensor for each dtype, the same bits in any company, bytes of a ring."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopback import run_ranks
from tests.compress.reductions.averaged import COMPRESSORS, MATRICES, train
from thinwire import compress
from thinwire.compress.base import Compressor, Identity, Parameter
from thinwire.compress.memory import with_memory
from thinwire.compress.reductions.all_reduce import AllReduce, _padded
from thinwire.rows.formats import ring_all_reduce_bytes

CODED = with_memory(compress.power_sgd(0.3, values=compress.mxfp4(), min_compression_rate=1.0))


@given(st.lists(st.integers(0, 100), min_size=1, max_size=6), st.integers(1, 5))
def test_parts_and_pieces_of_owners_begin_with_a_block(numels: list[int], world_size: int) -> None:
    code = compress.mxfp4()
    block = code.block
    sizes = _padded(numels, code, world_size)
    assert len(sizes) == len(numels) + 1
    assert sum(sizes) % (block * world_size) == 0
    for numel, size in zip(numels, sizes, strict=False):
        assert size % block == 0
        assert 0 <= size - numel < block
    assert _padded(numels, None, world_size) == numels, "nothing is added where values travel as they are"


@pytest.mark.parametrize("compressor", [Identity(), COMPRESSORS["bf16"], CODED], ids=lambda each: each.name)
def test_a_mean_has_the_same_bits_in_any_company(compressor: Compressor) -> None:
    first, last = Parameter("a", (33, 17)), Parameter("z", (40, 8))

    def run(parameters: tuple[Parameter, ...]) -> torch.Tensor:
        outcomes = run_ranks(3, lambda network: train(network, compressor, "all_reduce", parameters, 1))
        return outcomes[0].get().results[0][parameters.index(last)].mean

    alone = run((last,))
    assert torch.equal(run((first, last)), alone)
    assert torch.equal(run((last, first)), alone)


def test_all_of_a_dtype_is_one_ring() -> None:
    """A ring of two elements, and not two rings of one, whose bytes are rounded."""
    parameters = [Parameter("a", (1,)), Parameter("b", (5,), torch.float64), Parameter("c", (1,))]
    plans = [(Identity(), parameter) for parameter in parameters]
    for world_size in (1, 2, 3):
        expected = ring_all_reduce_bytes(8, world_size) + ring_all_reduce_bytes(5 * 8, world_size)
        assert AllReduce().sent_bytes(plans, 0, world_size) == expected
    assert ring_all_reduce_bytes(8, 3) != 2 * ring_all_reduce_bytes(4, 3)


@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_means_in_half_the_bytes_are_scaled_before_they_are_added(world_size: int) -> None:
    """Sums of what float16 just holds would overflow; of thirds that were rounded up, too."""
    most = torch.finfo(torch.float16).max

    def gradient(parameter: Parameter, rank: int, step: int) -> Tensor:
        return torch.full(parameter.shape, most)

    compressor = COMPRESSORS["fp16"]
    outcomes = run_ranks(
        world_size, lambda network: train(network, compressor, "all_reduce", [MATRICES[1]], 1, gradient)
    )
    for outcome in outcomes:
        assert torch.equal(outcome.get().results[0][0].mean, torch.full(MATRICES[1].shape, most))


def test_payloads_that_cannot_be_added_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot travel inside an all-reduce \(parameter 'a.weight'\): leave out"):
        AllReduce().check(COMPRESSORS["top_k"], MATRICES[0])
