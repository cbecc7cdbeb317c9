"""Two shots: even pieces in rank order, owners without the workers' memories, and bytes that no rank adds to."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopback import run_ranks
from tests.compress.reductions.averaged import COMPRESSORS, MATRICES, gradient_of, peers_of, train
from thinwire import compress
from thinwire.compress.base import Identity, Parameter
from thinwire.compress.memory import ErrorFeedback, MomentumCorrection, with_memory
from thinwire.compress.reductions.base import Stopwatch, Task
from thinwire.compress.reductions.two_shot import ReduceScatter, TwoShot, pieces, server_side


@given(st.integers(0, 200), st.integers(1, 9), st.sampled_from([torch.float32, torch.float64]))
def test_pieces_are_even_named_and_the_whole(numel: int, world_size: int, dtype: torch.dtype) -> None:
    owned = pieces(Parameter("fc.weight", (numel,), dtype), world_size)
    sizes = [piece.numel for piece in owned]
    assert sum(sizes) == numel
    assert max(sizes) - min(sizes) <= 1
    assert [piece.name for piece in owned] == [f"fc.weight[{owner}/{world_size}]" for owner in range(world_size)]
    assert {piece.dtype for piece in owned} == {dtype}


def test_owners_keep_a_memory_of_their_own_where_means_lose_something() -> None:
    top_k, qsgd = compress.top_k(0.1), compress.qsgd()
    assert server_side(ErrorFeedback(top_k)) == ErrorFeedback(top_k)
    assert server_side(MomentumCorrection(top_k, 0.5)) == ErrorFeedback(top_k)
    assert server_side(ErrorFeedback(qsgd)) == qsgd, "its expectation is the mean"
    assert server_side(Identity()) == Identity()


def test_workers_and_owners_draw_apart() -> None:
    compressor, parameter, world_size = compress.qsgd(), Parameter("a", (10,)), 3
    states = [TwoShot().init(compressor, parameter, rank, world_size) for rank in range(world_size)]
    salts = [state["server"]["salt"] for state in states]
    salts += [{piece["salt"] for piece in state["pieces"].values()} for state in states]
    assert salts == [3, 4, 5, {0}, {1}, {2}]
    assert all(set(state["pieces"]) == {"0", "1", "2"} for state in states)


def test_a_rank_sends_no_more_where_there_are_more_ranks() -> None:
    """2 (n - 1) / n of a payload and some headers, and half of that where each keeps its part."""
    plans = [(Identity(), Parameter("a", (12_000,)))]
    for world_size in (2, 3, 8):
        share = 48_000 * (world_size - 1) / world_size
        headers = 200 * world_size
        both = TwoShot().sent_bytes(plans, 0, world_size)
        first = ReduceScatter().sent_bytes(plans, 0, world_size)
        assert both is not None
        assert first is not None
        assert 2 * share <= both <= 2 * share + headers
        assert share <= first <= share + headers
    assert TwoShot().sent_bytes([(compress.threshold(0.5), Parameter("a", (9,)))], 0, 2) is None


@pytest.mark.parametrize("name", ["identity", "int8", "top_k"])
def test_the_first_shot_leaves_each_rank_the_mean_of_its_piece_and_zeros(name: str) -> None:
    """By the identity the exact mean; by others the sum of what pieces decode to."""
    world_size, parameter, compressor = 3, Parameter("a", (7, 4)), COMPRESSORS[name]

    def run(network: object) -> torch.Tensor:
        rank = network.rank  # type: ignore[attr-defined]
        reduction = ReduceScatter()
        state = reduction.init(compressor, parameter, rank, world_size)
        assert set(state) == {"pieces"}
        task = Task(compressor, parameter, gradient_of(parameter, rank, 0), state)
        (result,) = reduction.run([task], peers_of(network, 0), Stopwatch())  # type: ignore[arg-type]
        return result.mean

    means = [outcome.get() for outcome in run_ranks(world_size, run)]
    ends = list(accumulate((piece.numel for piece in pieces(parameter, world_size)), initial=0))
    for mean, (start, stop) in zip(means, pairwise(ends), strict=True):
        flat = mean.view(-1).clone()
        assert flat[start:stop].any()
        flat[start:stop] = 0
        assert not flat.any()
    if name == "identity":
        dense = torch.stack([gradient_of(parameter, rank, 0) for rank in range(world_size)])
        torch.testing.assert_close(torch.stack(means).sum(0), dense.mean(0))


def test_two_shots_of_the_identity_are_the_exact_mean() -> None:
    outcomes = run_ranks(3, lambda network: train(network, Identity(), "two_shot", MATRICES, 1))
    for index, parameter in enumerate(MATRICES):
        dense = torch.stack([gradient_of(parameter, rank, 0) for rank in range(3)])
        for outcome in outcomes:
            torch.testing.assert_close(outcome.get().results[0][index].mean, dense.mean(0))


def test_what_needs_the_whole_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a piece of a flat gradient cannot be compressed .*'a.weight'.*leave out"):
        TwoShot().check(with_memory(COMPRESSORS["atomo"]), MATRICES[0])
    with pytest.raises(ValueError, match=r"cannot be sent in two shots \(parameter 'a.weight'\)"):
        ReduceScatter().check(COMPRESSORS["power_sgd"], MATRICES[0])
