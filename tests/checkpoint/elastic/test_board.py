"""Laws of the board of a run: places that stay, rounds that end when a member is lost, and what is refused."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.checkpoint.elastic.board import Board, BoardServer, Claim, assign_ranks
from thinwire.checkpoint.holder.replication import call
from thinwire.errors import CorruptMessageError, LostPeerError

PATIENCE = 3.0
SECRET = b"a secret of the tests, long enough"


def board(low: int, high: int) -> Board:
    return Board("run", (low, high), PATIENCE, (30.0, 3.0))


class Agents:
    """Agents of one board, on a clock of the test's own."""

    def __init__(self, low: int, high: int) -> None:
        self.board, self.now, self._hosts = board(low, high), 100.0, [low, high]
        self.claims: dict[str, Claim] = {}

    def say(self, name: str, want: str) -> dict[str, Any]:
        claim = self.claims.get(name)
        word = {"run": "run", "hosts": self._hosts, "want": want, "fresh": claim is None, "where": [name, 1, name]}
        return self.board.sync(name, {**word, "claim": None if claim is None else list(claim)}, self.now)

    def join(self, *names: str) -> dict[str, int]:
        """All of them stop their workers and join; the places of those that train now."""
        for name in names:
            self.say(name, "join")
        views = {name: self.say(name, "join") for name in names}
        found = {name: view["rank"] for name, view in views.items() if view["rank"] is not None}
        for name, place in found.items():
            self.claims[name] = Claim(views[name]["round"], views[name]["hosts"], place)
        return found

    def run(self, *names: str) -> list[bool]:
        """Whether the round is still on, for each of them."""
        views = [self.say(name, "run") for name in names]
        return [
            view["round"] == self.claims[name].round and view["rank"] is not None and not view["grow"]
            for name, view in zip(names, views, strict=True)
        ]


@given(
    st.dictionaries(
        st.text("abcdef", min_size=1, max_size=3),
        st.none() | st.builds(Claim, st.integers(1, 3), st.integers(1, 5), st.integers(0, 4)),
        min_size=1,
        max_size=6,
    )
)
def test_places_are_a_permutation_that_depends_on_nothing_but_the_claims(claims: dict[str, Claim | None]) -> None:
    places = assign_ranks(claims)
    assert sorted(places) == sorted(claims)
    assert assign_ranks(dict(sorted(claims.items(), reverse=True))) == places


@given(st.integers(1, 6), st.data())
def test_survivors_keep_their_places_and_new_hosts_take_the_free_ones(hosts: int, data: st.DataObject) -> None:
    stay = data.draw(st.sets(st.integers(0, hosts - 1)))
    claims: dict[str, Claim | None] = {f"old{place}": Claim(7, hosts, place) for place in stay}
    # a host that was lost before, and returns: its place may be taken meanwhile
    for number in range(hosts - len(stay)):
        claims[f"new{number}"] = data.draw(st.none() | st.builds(Claim, st.just(3), st.just(hosts), st.integers(0, 5)))
    places = assign_ranks(claims)
    for place in stay:
        assert places[place] == f"old{place}"


@given(st.integers(2, 8), st.data())
def test_a_smaller_job_keeps_the_order_of_its_hosts(hosts: int, data: st.DataObject) -> None:
    stay = sorted(data.draw(st.sets(st.integers(0, hosts - 1), min_size=1, max_size=hosts - 1)))
    assert assign_ranks({str(place): Claim(7, hosts, place) for place in stay}) == [str(place) for place in stay]


def test_a_standby_takes_the_place_of_a_host_that_falls_silent() -> None:
    agents = Agents(3, 3)
    assert agents.join("a", "b", "c", "spare") == {"a": 0, "b": 1, "c": 2}
    for _ in range(4):
        agents.now += 1
        agents.say("spare", "join")
        on = agents.run("a", "c")  # b says nothing any more
    assert on == [False, False]
    assert agents.join("spare", "a") == {}  # c still stops its workers
    assert agents.join("c", "a", "spare") == {"a": 0, "spare": 1, "c": 2}


def test_a_silence_shorter_than_the_patience_ends_nothing() -> None:
    agents = Agents(2, 2)
    agents.join("a", "b")
    agents.now += PATIENCE - 0.1
    assert agents.run("a", "b") == [True, True]


def test_a_closed_connection_is_noticed_sooner_but_forgiven_if_the_agent_returns() -> None:
    agents = Agents(2, 2)
    agents.join("a", "b")
    agents.board.disconnected({"b"}, agents.now)
    agents.now += 0.5
    assert agents.run("b", "a") == [True, True]
    agents.board.disconnected({"b"}, agents.now)
    agents.now += 1.6
    assert agents.run("a") == [False]


def test_workers_that_fail_on_one_host_end_the_round_for_all() -> None:
    agents = Agents(2, 2)
    agents.join("a", "b")
    assert agents.join("a") == {}
    assert agents.run("b") == [False]
    assert agents.join("b", "a") == {"a": 0, "b": 1}


def test_fewer_hosts_go_on_only_if_that_is_allowed_and_grow_again() -> None:
    agents = Agents(2, 3)
    assert agents.join("a", "b", "c") == {"a": 0, "b": 1, "c": 2}
    agents.now += PATIENCE + 1
    agents.say("a", "run"), agents.say("c", "run")
    assert agents.join("a", "c") == {}  # a last call for others
    agents.now += 2.5
    agents.join("a", "c")
    agents.now += 1.0
    assert agents.join("a", "c") == {"a": 0, "c": 1}
    assert agents.join("c") == {}
    assert agents.join("a") == {}  # both are there, and the last call begins again
    for _ in range(2):
        agents.now += 2.0
        agents.join("a", "c")
    assert agents.run("a", "c") == [True, True]
    agents.say("b", "join")  # the host is back
    assert agents.run("a", "c") == [False, False]
    assert agents.join("a", "c", "b") == {"a": 0, "c": 1, "b": 2}


def test_the_first_start_waits_longer_for_hosts_than_a_restart() -> None:
    agents = Agents(1, 2)
    agents.join("a")
    agents.now += 2.0
    assert agents.join("a") == {}
    for _ in range(15):
        agents.now += 2.0
        found = agents.join("a")
    assert found == {"a": 0}
    assert agents.now >= 130.0


def test_too_few_hosts_never_start() -> None:
    agents = Agents(2, 3)
    for _ in range(100):
        agents.now += 1.0
        assert agents.join("a") == {}


def test_a_round_number_is_never_given_twice_even_by_another_board() -> None:
    agents = Agents(2, 2)
    agents.join("a", "b")
    first = agents.claims["a"].round
    agents.board = board(2, 2)  # that of the next endpoint, which knows nothing
    assert agents.run("a", "b") == [False, False]
    assert agents.join("a", "b") == {"a": 0, "b": 1}
    assert agents.claims["a"].round == first + 1


def test_a_place_from_an_earlier_start_attracts_nobody_but_is_given_again() -> None:
    """A host that was away since a longer run of that name must join the others, and not have them join it."""
    agents = Agents(2, 2)
    word = {"run": "run", "hosts": [2, 2], "want": "join", "fresh": True, "where": ["a", 1, "a"]}
    agents.board.sync("b", {**word, "claim": [50, 2, 0]}, agents.now)
    assert agents.board.look()["round"] == 0
    agents.board.sync("a", {**word, "claim": None}, agents.now)
    view = agents.board.sync("b", {**word, "claim": [50, 2, 0]}, agents.now)
    assert (view["round"], view["rank"]) == (51, 0)
    assert agents.board.look()["round"] == 51


def test_values_are_those_of_the_round() -> None:
    agents = Agents(2, 2)
    agents.join("a", "b")
    now = agents.board.round
    assert agents.board.store(now, {"key": "x", "value": "1"}) == {"value": "1"}
    assert agents.board.store(now, {"key": "n", "value": 2, "by": "a"}) == {"value": "2"}
    assert agents.board.store(now, {"key": "n", "value": 2, "by": "b"}) == {"value": "4"}
    assert agents.board.store(now, {"key": "n", "value": 2, "by": "a"}) == {"value": "2"}, "it is asked once more"
    agents.join("a")
    assert agents.board.store(now, {"key": "x"}) == {"value": "1"}, "one that has ended leaves it to the others"
    agents.join("a", "b")
    assert agents.board.store(now, {"key": "x"}) == {"value": None}
    assert agents.board.store(now + 1, {"key": "x"}) == {"value": None}


def test_agents_of_another_run_or_size_are_refused_with_both_commands() -> None:
    with pytest.raises(ValueError, match=r"--rdzv-id=run --nnodes=2:3, and this one --rdzv-id=run --nnodes=1:3"):
        board(2, 3).sync("a", {"run": "run", "hosts": [1, 3], "want": "join"}, 0.0)


def test_the_holders_of_hosts_that_stand_by_or_are_gone_are_named_last() -> None:
    it = board(2, 2)
    for name in ("a", "b", "spare"):
        word = {"run": "run", "hosts": [2, 2], "want": "join", "fresh": True, "where": [name, 1, f"{name}:7"]}
        it.sync(name, word, 0.0)
    assert it.holders() == {"holders": ["a:7", "b:7", "spare:7"]}
    it.sync("b", {"run": "run", "hosts": [2, 2], "want": "leave"}, 0.0)
    assert it.sync("a", {**word, "want": "run", "where": ["a", 1, "a:7"]}, 0.0)["holders"][-1] == "b:7"


@pytest.mark.parametrize("claim", [[1, 2], [1, 2, "0"], [1, 2, -1], "abc", [True, 1, 1]])
def test_a_word_that_is_no_claim_is_refused_and_changes_nothing(claim: Any) -> None:
    it = board(1, 1)
    word = {"run": "run", "hosts": [1, 1], "want": "join", "fresh": True, "where": ["a", 1, "a"], "claim": claim}
    with pytest.raises(CorruptMessageError):
        it.sync("a", word, 0.0)
    assert it.look() == {"run": "run", "round": 0, "closed": False}


def test_a_closed_run_starts_no_round() -> None:
    agents = Agents(1, 2)
    agents.join("a", "b")
    agents.say("a", "close")
    assert agents.say("b", "join")["closed"]
    assert agents.join("b", "spare") == {}


def test_a_board_that_gets_no_thread_for_an_agent_serves_those_who_call_later(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = threading.Thread.start, [RuntimeError("can't start new thread")]

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "agent" and failures:
            raise failures.pop()
        start(thread)

    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    with contextlib.closing(BoardServer(board(1, 2), endpoint, SECRET)) as server:
        monkeypatch.setattr(threading.Thread, "start", start_late)
        with contextlib.closing(call(endpoint, SECRET, PATIENCE)) as connection, pytest.raises(LostPeerError):
            connection.request("look", {})
        with contextlib.closing(call(endpoint, SECRET, PATIENCE)) as connection:
            assert connection.request("look", {}).json["run"] == "run"
            assert len(server._connections) == 1, "the thread that accepts this one has let go of the other before"
