"""Every kind of fault ends in a restore that is right to the bit, or in a refusal that says why."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from checkpoint_faults.campaign import KINDS, Result, run_kind
from checkpoint_faults.hosts import Hosts, wait_for
from checkpoint_faults.kind import Kind, Outcome, WrongRestore, restored
from checkpoint_faults.shards import Shards
from checkpoint_faults.training import STEPS, Job, restart, run
from namespaces import NEEDS_NAMESPACES
from thinwire.checkpoint.placement import placement

pytestmark = pytest.mark.ranks

EVERY_RUN = {
    "trainer, copying", "trainer and holder of a host", "host of a ring lost", "replica altered",
    "lying peer, consistent", "disk, payload altered", "budget too small", "flip 0, one host fewer",
}  # fmt: skip
"""A kill of a rank, one of it and its holder, a lost host, and what is altered in memory, on the way and on a disk."""


def parameter(kind: Kind) -> object:
    marks = [] if kind.name in EVERY_RUN else [pytest.mark.slow]
    return pytest.param(kind, marks=marks + NEEDS_NAMESPACES if kind.group == "network" else marks, id=kind.name)


FLIPS = [kind for kind in KINDS if kind.group == "silent corruption"]
WAYS = 4
OF_TESTS = [kind for kind in KINDS if kind not in FLIPS or kind.name in EVERY_RUN]
OF_TESTS += [kind for at, kind in enumerate(FLIPS) if at // WAYS % WAYS == at % WAYS and kind not in OF_TESTS]
"""All, but for bits that flip: each of them by turns goes one of the ways on, of which the campaign goes all."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [parameter(kind) for kind in OF_TESTS])
def test_it_ends_as_it_must(kind: Kind) -> None:
    result = run_kind(kind)
    assert result.as_expected, f"{kind.expected}, not {result.outcome}: {result.problem}"
    assert not result.wrong_restore
    wait_for(lambda: not left_behind(), "the end of all threads of the holders")


def left_behind() -> list[str]:
    names = ("replicator", "SIGKILL", "PeerSession", "TrainerSession")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]


def names(kinds: list[Kind]) -> set[str]:
    return {kind.name for kind in kinds}


def test_the_kinds_are_many_and_have_names_of_their_own() -> None:
    assert {kind.name for kind in OF_TESTS} >= EVERY_RUN
    assert {name.split(", ")[0] for name in names(FLIPS)} == {
        name.split(", ")[0] for name in names(OF_TESTS) & names(FLIPS)
    }
    assert len({name.split(", ")[1] for name in names(OF_TESTS) & names(FLIPS)}) == WAYS
    assert {kind.group for kind in KINDS if kind.name in EVERY_RUN} == {kind.group for kind in KINDS} - {"network"}
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 100
    assert sum(kind.expected.ended == "restored" for kind in KINDS) > len(KINDS) / 2
    sources = {source for kind in KINDS for source in kind.expected.source.split("|")}
    assert sources == {"", "memory", "peer", "disk"}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("hosts", range(2, 10))
def test_a_lost_host_is_restored_from_the_right_peer(tmp_path: Path, hosts: int, replicas: int) -> None:
    """On real holders, for any number of hosts: only the shard of the lost one is read, and redundancy is rebuilt."""
    if replicas > hosts:
        pytest.skip("more replicas than hosts")
    lost = (hosts * replicas) % hosts if hosts % 2 else hosts - 1
    with Shards(tmp_path, hosts, replicas, num_bytes=3001) as shards:
        shards.train([1, 2])
        shards.replace(lost)

        def served() -> list[int]:
            return [holder.status()["bytes_served"] for holder in shards.holders]

        before = served()
        assert shards.recover() == Outcome("restored", "peer", 2)
        while (after := served()) == before:  # a holder counts what it sent when that has arrived
            time.sleep(0.01)
        servers = [host for host in range(hosts) if after[host] > before[host]]
        assert len(servers) == 1
        assert servers[0] in placement(hosts, replicas)[lost][1:]
        shards.train([3])
        shards.replace(servers[0])
        assert shards.recover() == Outcome("restored", "peer", 3)


class TestTheCampaignItself:
    """That it would see a wrong restore."""

    def test_bytes_of_another_step(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with Shards(tmp_path, num_bytes=100) as shards:
            shards.train([1])
            monkeypatch.setattr("checkpoint_faults.shards.content", lambda *_: bytes(100))
            with pytest.raises(WrongRestore, match="bytes of owner 0"):
                shards.recover()

    @pytest.mark.slow
    def test_a_state_that_differs(self, tmp_path: Path) -> None:
        with Hosts(tmp_path) as hosts:
            hosts.start("ab")
            run(Job(hosts.sockets("ab"), steps=2))
            with pytest.raises(WrongRestore, match="in another state at step 2"):
                restart(Job(hosts.sockets("ab"), steps=2, seed=1))

    def test_a_result_that_was_not_expected(self, tmp_path: Path) -> None:
        for outcome in (Outcome("restored", "memory", STEPS), Outcome("restored", "peer", STEPS - 1), Outcome("fresh")):
            kind = Kind("k", "g", "w", lambda _, outcome=outcome: outcome, restored("peer", STEPS))
            assert not run_kind(kind).as_expected
            assert run_kind(kind).to_json()["as_expected"] is False

    def test_a_kind_that_fails(self) -> None:
        def wrong(_: Path) -> Outcome:
            raise WrongRestore("other bytes")

        result: Result = run_kind(Kind("k", "g", "w", wrong, restored("peer", 1)))
        assert (result.wrong_restore, result.as_expected) == (True, False)
        assert "other bytes" in result.to_json()["says"]
