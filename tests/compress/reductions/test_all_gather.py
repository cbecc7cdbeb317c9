"""Payloads that all ranks get: the mean is added in rank order, and what is no gradient alone is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from loopback import run_ranks
from tests.compress.reductions.averaged import COMPRESSORS, train
from thinwire import compress
from thinwire.compress.base import Identity, Parameter
from thinwire.compress.memory import with_memory
from thinwire.compress.reductions.all_gather import AllGather, check_decodes_alone, density, encoded
from thinwire.compress.wrappers import packed_code

PARAMETER = Parameter("fc.weight", (6, 5))


def big_one_less(parameter: Parameter, rank: int, step: int) -> Tensor:
    return torch.full(parameter.shape, (1e8, -1e8, 1.0)[rank])


def test_a_mean_is_added_in_rank_order_on_every_rank() -> None:
    """Another order of 1e8, -1e8 and 1 gives 0 in float32."""
    outcomes = run_ranks(3, lambda network: train(network, Identity(), "all_gather", [PARAMETER], 1, big_one_less))
    for outcome in outcomes:
        mean = outcome.get().results[0][0].mean
        assert torch.equal(mean, torch.full(PARAMETER.shape, 1.0) / 3)


def test_every_rank_sends_its_message_to_each_other() -> None:
    plans = [(Identity(), PARAMETER), (with_memory(compress.top_k(0.1)), PARAMETER)]
    alone = AllGather().sent_bytes(plans, 0, 2)
    assert alone
    assert [AllGather().sent_bytes(plans, 1, n) for n in (1, 2, 5)] == [0, alone, 4 * alone]
    assert AllGather().sent_bytes([(compress.threshold(0.5), PARAMETER)], 0, 3) is None, "it depends on the gradients"


def test_what_is_no_gradient_alone_is_refused() -> None:
    check_decodes_alone(COMPRESSORS["random_k"], PARAMETER, "gathered")
    with pytest.raises(ValueError, match=r"cannot be gathered \(parameter 'fc.weight'\): use .by\(\"all_reduce\"\)"):
        AllGather().check(COMPRESSORS["power_sgd"], PARAMETER)


@dataclass(frozen=True)
class Both(Identity):
    """The identity with a name of its own."""

    name = "both"


def test_a_payload_is_packed_with_the_share_of_elements_in_it() -> None:
    gradient = torch.arange(30.0).view(6, 5)
    sparse = compress.top_k(0.2)
    data, share = encoded(sparse, PARAMETER, gradient, sparse.init(PARAMETER))
    assert share == 6 / 30
    arrived = sparse.decompress(packed_code(sparse).unpack(data, PARAMETER), PARAMETER)
    assert torch.equal(arrived, torch.where(gradient >= 24, gradient, 0.0))
    assert encoded(Both(), PARAMETER, gradient, {})[1] == 1.0
    nothing = Parameter("none", (0,))
    assert density(sparse, nothing, sparse.compress(torch.empty(0), nothing, sparse.init(nothing))) == 0.0
