"""States for another number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from loopback import run_ranks
from tests.compress.reductions.averaged import COMPRESSORS, MATRICES, Steps, mean_memory, train
from thinwire.compress.reductions.choose import reduction_for
from thinwire.compress.state import check_fits, copied, redistribute


def states_of(ranks: Sequence[Steps]) -> list[dict[str, object]]:
    return [
        {
            "steps": 3,
            "compress": {
                "rank": rank,
                "world_size": len(ranks),
                "methods": {},
                "states": {parameter.name: state for parameter, state in zip(MATRICES, steps.states, strict=True)},
            },
        }
        for rank, steps in enumerate(ranks)
    ]


@pytest.mark.parametrize(
    ("exchange", "name"), [("all_gather", "top_k"), ("two_shot", "top_k"), ("all_reduce", "random_k")]
)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_redistribution_conserves_the_mean_memory(exchange: str, name: str, world_size: int) -> None:
    compressor = COMPRESSORS[name]
    ranks = [o.get() for o in run_ranks(3, lambda network: train(network, compressor, exchange, MATRICES, 3))]
    old = states_of(ranks)
    before = [copied(state["compress"]) for state in old]  # type: ignore[arg-type]
    dealt = redistribute(old, world_size)
    assert len(dealt) == world_size
    for rank, state in enumerate(dealt):
        assert (state["steps"], state["compress"]["rank"], state["compress"]["world_size"]) == (3, rank, world_size)
    for state, untouched_state in zip(old, before, strict=True):
        check_fits(state["compress"], untouched_state, "unchanged")  # type: ignore[arg-type]
    for parameter in MATRICES:
        kept = [
            mean_memory([s["compress"]["states"][parameter.name] for s in states], parameter) for states in (old, dealt)
        ]  # type: ignore[index]
        torch.testing.assert_close(*kept, atol=1e-6, rtol=1e-5)
        expected = reduction_for(exchange, compressor, parameter, world_size)
        for rank, state in enumerate(dealt):
            fresh = expected.init(compressor, parameter, rank, world_size)
            check_fits(state["compress"]["states"][parameter.name], fresh, parameter.name)


@pytest.mark.parametrize("world_size", [2, 5])
def test_owners_draw_apart_from_workers_after_a_redistribution(world_size: int) -> None:
    """Else an owner rounds a mean up where it has rounded its own part of that up."""
    ranks = [o.get() for o in run_ranks(3, lambda network: train(network, COMPRESSORS["qsgd"], "two_shot", MATRICES))]
    for rank, state in enumerate(redistribute(states_of(ranks), world_size)):
        dealt = state["compress"]["states"][MATRICES[0].name]
        assert {piece["salt"] for piece in dealt["pieces"].values()} == {rank}
        assert dealt["server"]["salt"] == world_size + rank


def test_redistribution_refuses_what_is_not_all_ranks_of_one_run() -> None:
    ranks = [
        o.get() for o in run_ranks(2, lambda network: train(network, COMPRESSORS["top_k"], "all_gather", MATRICES))
    ]
    states = states_of(ranks)
    with pytest.raises(ValueError, match="in rank order"):
        redistribute(states[::-1], 3)
    with pytest.raises(ValueError, match="in rank order"):
        redistribute(states[:1], 3)
    with pytest.raises(ValueError, match="1 or more"):
        redistribute(states, 0)
    with pytest.raises(ValueError, match="no compression"):
        redistribute([{"compress": None}], 2)
