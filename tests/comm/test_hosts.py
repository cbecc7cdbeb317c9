"""Hosts, discovered by all ranks."""

from __future__ import annotations

import pytest

from loopback import LoopbackExchange, run_ranks
from thinwire.comm.hosts import Hosts, discover, ranks_of_hosts
from thinwire.errors import LostPeerError


def test_hosts_are_discovered_by_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    places = ["a", "b", "a", "c", "b"]

    def work(exchange: LoopbackExchange) -> Hosts:
        # one thread runs at a time, and reads the identity before it waits
        monkeypatch.setenv("THINWIRE_HOST", places[exchange.rank])
        return ranks_of_hosts(discover(exchange))

    for outcome in run_ranks(5, work):
        assert outcome.get() == ((0, 2), (1, 4), (3,))


def test_processes_of_one_machine_are_on_one_host() -> None:
    def work(exchange: LoopbackExchange) -> Hosts:
        return ranks_of_hosts(discover(exchange))

    assert [outcome.get() for outcome in run_ranks(3, work)] == [((0, 1, 2),)] * 3


def test_discovery_that_fails_on_a_rank_fails_on_all() -> None:
    def work(exchange: LoopbackExchange) -> Hosts:
        if exchange.rank == 2:
            exchange.close()
            return ()
        return ranks_of_hosts(discover(exchange))

    assert all(isinstance(outcome.error, LostPeerError) for outcome in run_ranks(3, work)[:2])
