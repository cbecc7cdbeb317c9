"""Two shots: even pieces in rank order, owners without the workers' memories, and bytes that no rank adds to."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopback import LoopbackExchange, run_ranks
from tests.compress.reductions.averaged import COMPRESSORS, MATRICES, gradient_of, peers_of, train
from thinwire import compress
from thinwire.compress.base import Compressor, Identity, Parameter
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


@pytest.mark.parametrize("exchange", ["two_shot", "auto"])
@pytest.mark.parametrize("values", [None, compress.qsgd(8)], ids=["plain", "qsgd"])
def test_owners_do_not_scale_again_what_workers_have_scaled(exchange: str, values: Compressor | None) -> None:
    """Each element that is sent is four times the mean, of which a quarter is sent."""
    compressor, parameter = compress.random_k(0.25, unbiased=True, values=values), Parameter("a", (64,))
    outcomes = run_ranks(
        4, lambda network: train(network, compressor, exchange, [parameter], 2, lambda *_: torch.ones(64))
    )
    for (result,) in outcomes[0].get().results:
        assert result.mean.unique().tolist() == [0.0, 4.0]
        assert float(result.mean.mean()) == 1.0


@pytest.mark.parametrize("reduction", [TwoShot(), ReduceScatter()], ids=lambda each: each.name)
def test_a_gradient_is_clipped_as_a_whole(reduction: TwoShot) -> None:
    """Its pieces are not clipped each to the norm that all of it may have."""
    compressor = compress.warm_up(MomentumCorrection(compress.top_k(1.0), 0.5, clip_norm=1.0), 0, 1.0)
    parameter = Parameter("a", (4, 4))

    def run(network: LoopbackExchange) -> Tensor:
        state = reduction.init(compressor, parameter, network.rank, 4)
        task = Task(compressor, parameter, torch.ones(4, 4), state)
        return reduction.run([task], peers_of(network, 0), Stopwatch())[0].mean

    for rank, outcome in enumerate(run_ranks(4, run)):
        mine = outcome.get()[rank] if isinstance(reduction, ReduceScatter) else outcome.get()
        assert mine.unique().tolist() == [0.25]
