"""The entry of exact sums: ranks agree before they send, all learn of a failure, and the scheme changes no sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loopback import LoopbackExchange, run_ranks, synchronized
from thinwire import schemes
from thinwire.comm.channel import Channel, Subject
from thinwire.errors import PeerError
from thinwire.rows.sparse import SparseRows
from thinwire.schemes import NAMED, Scheme, TwoLevel
from thinwire.sums.synchronize import agree, placed, synchronize


def rows_of(rank: int) -> SparseRows:
    ids = torch.tensor([rank, 4 + rank, 9])
    return SparseRows(ids, torch.arange(1.0, 7.0).view(3, 2) * (rank + 1), 12)


def exact(world_size: int) -> Tensor:
    return torch.stack([rows_of(rank).to_dense() for rank in range(world_size)]).sum(0)


def never(rows: SparseRows, channel: Channel) -> Scheme:
    raise AssertionError("a scheme was given")


@pytest.mark.parametrize("name", NAMED)
def test_every_scheme_gives_the_exact_sum_and_one_rank_its_own_rows(name: str) -> None:
    for world_size in (1, 3):
        for outcome in run_ranks(
            world_size, lambda exchange: synchronized(exchange, rows_of(exchange.rank), name, 0.5)
        ):
            assert torch.equal(outcome.get().to_dense(), 0.5 * exact(world_size))


def test_a_choice_is_made_after_all_ranks_know_what_each_holds() -> None:
    def run(exchange: LoopbackExchange) -> object:
        channel = Channel(exchange, Subject("table", "auto"), 0)
        ids = torch.arange(exchange.rank + 1)
        rows = SparseRows(ids, torch.ones(exchange.rank + 1, 1), 6)

        def choose(rows: SparseRows, channel: Channel) -> Scheme:
            return schemes.DENSE if list(channel.held) == [1, 2, 3] else schemes.ZEN

        taken = agree(lambda: rows, "auto", channel, choose)
        return taken[1], synchronize(*taken, channel).values.view(-1).tolist()

    assert [outcome.get() for outcome in run_ranks(3, run)] == [(schemes.DENSE, [3.0, 2.0, 1.0])] * 3


def prepares(exchange: LoopbackExchange, scheme: str | Scheme) -> None:
    channel = Channel(exchange, Subject("table", "fails"), 0)

    def prepare() -> SparseRows:
        if exchange.rank == 1:
            raise ArithmeticError("a row is infinite")
        return rows_of(exchange.rank)

    synchronize(*agree(prepare, scheme, channel, never), channel)


@pytest.mark.parametrize("scheme", ["zen", "dense", "sparcml", "agsparse"])
def test_a_rank_that_has_no_rows_to_give_tells_all(scheme: str) -> None:
    outcomes = run_ranks(3, lambda exchange: prepares(exchange, scheme))
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, ArithmeticError if rank == 1 else PeerError)
        assert "a row is infinite" in str(outcome.error)


def test_a_scheme_with_more_servers_than_ranks_is_refused_on_all() -> None:
    many = replace(schemes.ZEN, servers=5)
    for outcome in run_ranks(2, lambda exchange: synchronized(exchange, rows_of(exchange.rank), many)):
        assert isinstance(outcome.error, (ValueError, PeerError))
        assert "5 servers" in str(outcome.error)


def test_hosts_that_were_given_stand_and_others_are_those_of_the_ranks() -> None:
    def run(exchange: LoopbackExchange) -> object:
        exchange.hosts = [0, 0, 1]
        channel = Channel(exchange, Subject("table", "hosts"), 0)
        given = TwoLevel(schemes.ZEN, ((0,), (1, 2)))
        return placed(given, channel) == given, placed(TwoLevel(schemes.ZEN), channel), placed(schemes.ZEN, channel)

    for outcome in run_ranks(3, run):
        assert outcome.get() == (True, TwoLevel(schemes.ZEN, ((0, 1), (2,))), schemes.ZEN)
