"""Which exchange is taken."""

from __future__ import annotations

import pytest

import thinwire.compress
from tests.compress.reductions.averaged import COMPRESSORS, MATRICES, SCHEME
from thinwire.compress.reductions.choose import AUTO, reduction_for, scattered


@pytest.mark.parametrize(
    ("name", "world_size", "expected"),
    [
        ("fp16", 8, "all_reduce"),
        ("bf16", 2, "all_reduce"),
        ("power_sgd", 8, "all_reduce"),
        ("random_k", 8, "all_reduce"),
        ("top_k", 8, "all_gather"),
        ("gaussian_k", 8, "all_gather"),
        ("qsgd", 2, "all_gather"),
        ("qsgd", 8, "two_shot"),
        ("int8", 8, "two_shot"),
        ("identity", 1, "all_reduce"),
    ],
)
def test_auto_takes_the_fewest_bytes(name: str, world_size: int, expected: str) -> None:
    assert reduction_for(AUTO, COMPRESSORS[name], MATRICES[0], world_size).name == expected


@pytest.mark.parametrize(
    ("name", "exchange", "reason"),
    [
        ("top_k", "all_reduce", "cannot be added element by element"),
        ("qsgd", SCHEME, "use a sparsifier"),
        ("power_sgd", "all_gather", "only the mean of its payloads"),
        ("power_sgd", "two_shot", "only the mean of its payloads"),
        ("atomo", "two_shot", "a piece of a flat gradient"),
    ],
)
def test_an_impossible_exchange_says_why(name: str, exchange: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        reduction_for(exchange, COMPRESSORS[name], MATRICES[0], 4)


@pytest.mark.parametrize(
    ("exchange", "expected"), [(AUTO, "reduce_scatter"), ("two_shot", "reduce_scatter"), ("all_reduce", "all_reduce")]
)
def test_gradients_of_shards_take_an_exchange_by_name(exchange: str, expected: str) -> None:
    """The first of two shots is all that FSDP's shards need."""
    assert scattered(COMPRESSORS["bf16"].by(exchange), MATRICES[0], 4).name == expected
    with pytest.raises(ValueError, match=r"bf16 by all_gather .* leave out \.by\(\)"):
        scattered(thinwire.compress.bf16().by("all_gather"), MATRICES[0], 4)
