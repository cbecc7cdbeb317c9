"""Sums in stages: the same bits on any number of ranks, rounded at each stage, and scaled once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loopback import LoopbackExchange, run_ranks
from thinwire import schemes
from thinwire.comm.channel import Channel, Subject
from thinwire.errors import PeerError
from thinwire.rows.formats import Format, FormatChoice
from thinwire.rows.sparse import SparseRows
from thinwire.sums import direct, staged
from thinwire.sums.schedules import Stages

COO, NUM_ROWS = FormatChoice((Format.COO,)), 30
Sum = Callable[[SparseRows, Channel, float], SparseRows]


def rows_of(rank: int) -> SparseRows:
    """Whole numbers, some of which cancel out."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randperm(NUM_ROWS, generator=generator)[: 5 + rank].sort().values
    return SparseRows(ids, torch.randint(-4, 5, (5 + rank, 3), generator=generator).float(), NUM_ROWS)


def doubled(rows: SparseRows, channel: Channel, scale: float) -> SparseRows:
    return staged.recursive_doubling(rows, COO, channel, scale)


def by_parts(scheme: schemes.Scheme) -> Sum:
    def run(rows: SparseRows, channel: Channel, scale: float) -> SparseRows:
        partition, stages = scheme.rows_partition(NUM_ROWS, channel.world_size), Stages(channel)
        total = staged.reduce_scatter(rows, partition, scheme, stages, scale)
        return direct.all_gather(rows, total, partition, scheme, channel, stages)

    return run


SUMS = {"doubling": doubled, "ring": by_parts(schemes.DENSE_RING), "halving": by_parts(schemes.DENSE_HALVING_DOUBLING)}


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", SUMS)
def test_all_ranks_have_the_exact_sum(name: str, world_size: int) -> None:
    """Also where ranks are no power of two; of halves of whole numbers, which are exact in any order."""

    def run(exchange: LoopbackExchange) -> SparseRows:
        channel = Channel(exchange, Subject("table", name), 0)
        rows = rows_of(exchange.rank)
        channel.open(rows.ids.numel())
        return SUMS[name](rows, channel, 0.5)

    expected = 0.5 * torch.stack([rows_of(rank).to_dense() for rank in range(world_size)]).sum(0)
    for outcome in run_ranks(world_size, run):
        assert torch.equal(outcome.get().to_dense(), expected)


def summed_in_16_bits(values: list[float], scale: float) -> list[Tensor]:
    def run(exchange: LoopbackExchange) -> Tensor:
        channel = Channel(exchange, Subject("table", "16 bits"), 0)
        rows = SparseRows(torch.tensor([0]), torch.full((1, 1), values[exchange.rank], dtype=torch.bfloat16), 1)
        channel.open(1)
        return staged.recursive_doubling(rows, COO, channel, scale).values

    return [outcome.get() for outcome in run_ranks(len(values), run)]


def test_partial_sums_are_rounded_at_each_stage_and_scaled_in_the_last() -> None:
    """256 + 1 is 256 in bfloat16, so two ones are lost that in one sum would give 258."""
    for total in summed_in_16_bits([256.0, 1.0, 256.0, 1.0], 1.0):
        assert total.item() == 512.0
    for total in summed_in_16_bits([256.0, 1.0, 1.0, 1.0], 1.0):
        assert total.item() == 258.0
    for total in summed_in_16_bits([1.0, 1.0, 1.0, 0.0], 1 / 3):
        assert total.item() == 1.0, "not a third of two, rounded, and a third of one"


def test_a_failure_in_a_stage_is_heard_by_whoever_needs_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot add in the first stage, and rank 3 meets it in the second; nobody has a wrong sum."""
    merged = staged._merged

    def fails(*arguments: object) -> object:
        if arguments[-1].rank == 1:  # type: ignore[attr-defined]
            raise ArithmeticError("no memory for the sum")
        return merged(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(staged, "_merged", fails)

    def run(exchange: LoopbackExchange) -> SparseRows:
        channel = Channel(exchange, Subject("table", "fails"), 0)
        rows = rows_of(exchange.rank)
        channel.open(rows.ids.numel())
        return doubled(rows, channel, 1.0)

    outcomes = run_ranks(4, run)
    for rank, kind in ((1, ArithmeticError), (3, PeerError)):
        assert isinstance(outcomes[rank].error, kind)
        assert "no memory for the sum" in str(outcomes[rank].error)
    expected = torch.stack([rows_of(rank).to_dense() for rank in range(4)]).sum(0)
    for rank in (0, 2):
        assert torch.equal(outcomes[rank].get().to_dense(), expected)
