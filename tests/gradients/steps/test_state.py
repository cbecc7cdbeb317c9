"""States of all ranks: each gets its own back, from one file or many, and what cannot be restored changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loopback import LoopbackExchange, run_ranks
from thinwire.errors import ThinwireError
from thinwire.gradients.exact import GradientSync
from thinwire.gradients.steps.state import VERSION, Gathered, check, file_name, packed, restore, saved, unpacked
from threaded import LoopbackLane

NAMES = ("fc.weight", "fc.bias")


class Kept:
    """A rank with a state that is loaded and saved."""

    def __init__(self, network: LoopbackExchange, number: int = 0) -> None:
        self.state: dict[str, Any] = {
            "rank": network.rank,
            "memory": torch.arange(3.0) + network.rank,
            "compress": None,
        }
        lane: Any = LoopbackLane(network)
        self.gathered = Gathered(lane, lambda: dict(self.state), self.load, number)

    def load(self, state: dict[str, Any]) -> None:
        if state.get("rank") == "refused":
            raise ValueError("this rank cannot")
        self.state = state


def raised(world_size: int, run: Any) -> list[str]:
    """What all ranks raise."""
    outcomes = run_ranks(world_size, run)
    return [str(outcome.error) for outcome in outcomes]


def test_a_state_survives_its_bytes() -> None:
    state = {"a": torch.randn(3), "b": {"c": [1, 2.5, "d", None]}, "e": torch.zeros(0, dtype=torch.int64)}
    arrived = unpacked(packed(state))
    assert arrived["b"] == state["b"]
    assert torch.equal(arrived["a"], state["a"])
    assert arrived["e"].dtype == torch.int64


@pytest.mark.parametrize("has_disk", [False, True])
def test_each_rank_gets_its_own_state_back(has_disk: bool) -> None:
    """Of what rank 0 wrote: from a disk of all, or sent by rank 0 to those that have none."""

    def run(network: LoopbackExchange) -> Any:
        rank = Kept(network)
        written = rank.gathered.state_dict()
        assert bool(written["ranks"]) == (network.rank == 0), "rank 0 writes it"
        if has_disk:
            entries = rank.gathered._lane.submit(lambda lane: lane.exchange._meet(written["ranks"])).wait()[0]
            written = {"ranks": entries}
        before, rank.state = rank.state, {}
        if has_disk:
            rank.gathered.load_state_dict(written)
        else:
            assert rank.gathered.load_of_rank_0(written if network.rank == 0 else {})
        torch.testing.assert_close(rank.state, before, rtol=0, atol=0)
        return (True,)

    assert all(outcome.get() for outcome in run_ranks(3, run))


def test_where_rank_0_has_nothing_nobody_loads() -> None:
    def run(network: LoopbackExchange) -> Any:
        rank = Kept(network)
        assert not rank.gathered.load_of_rank_0({} if network.rank == 0 else {"ranks": [1]})
        assert rank.state["rank"] == network.rank
        return (True,)

    assert all(outcome.get() for outcome in run_ranks(2, run))


def test_files_of_ranks_are_read_by_their_ranks(tmp_path: Path) -> None:
    assert [file_name(3), file_name(3, 2)] == ["thinwire-00003.pt", "thinwire-00003-2.pt"]

    def run(network: LoopbackExchange) -> Any:
        rank, nobody = Kept(network, number=1), Kept(network)
        rank.gathered.save_files(tmp_path / "checkpoint")
        before, rank.state = rank.state, {}
        assert rank.gathered.load_files(tmp_path / "checkpoint")
        torch.testing.assert_close(rank.state, before, rtol=0, atol=0)
        assert not nobody.gathered.load_files(tmp_path / "checkpoint"), "files of another number"
        assert not rank.gathered.load_files(None)
        return (True,)

    assert all(outcome.get() for outcome in run_ranks(3, run))
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [
        file_name(rank, 1) for rank in range(3)
    ]


def test_a_file_that_is_missing_or_of_another_checkpoint_is_named_on_all_ranks(tmp_path: Path) -> None:
    mine, away = tmp_path / file_name(1), tmp_path / "away"

    def loaded_after(change: Callable[[], object], network: LoopbackExchange) -> None:
        Kept(network).gathered.save_files(tmp_path)
        if network.rank == 1:
            change()
        Kept(network).gathered.load_files(tmp_path)

    for text in raised(3, partial(loaded_after, lambda: mine.rename(away))):
        assert text.startswith(
            f"rank 1: no thinwire-00001.pt in {tmp_path}, and 2 of 3 ranks have theirs: copy it from"
        )

    for text in raised(3, partial(loaded_after, lambda: away.rename(mine))):
        assert text.startswith(
            f"rank 1: thinwire-00001.pt in {tmp_path} is of another checkpoint than the file of rank 0: copy it from"
        )

    for text in raised(2, partial(loaded_after, lambda: (tmp_path / file_name(0)).replace(mine))):
        assert "cannot read thinwire-00001.pt" in text
        assert "the state of rank 0" in text


def test_a_rank_that_cannot_save_or_load_fails_all_and_none_has_loaded(tmp_path: Path) -> None:
    def cannot_save(network: LoopbackExchange) -> None:
        rank = Kept(network)
        if network.rank:
            rank.gathered._save = lambda: {}["gone"]
        rank.gathered.save_files(tmp_path)

    texts = raised(3, cannot_save)
    assert texts == [f"rank 1: cannot write {tmp_path / file_name(1)}: 'gone' (and 1 more ranks)"] * 3
    assert not list(tmp_path.glob("*.part"))
    assert all(isinstance(outcome.error, ThinwireError) for outcome in run_ranks(2, cannot_save))

    kept: dict[int, Kept] = {}

    def cannot_load(network: LoopbackExchange) -> None:
        rank = kept[network.rank] = Kept(network)
        if network.rank == 2:
            rank.state["rank"] = "refused"
        rank.gathered.save_files(tmp_path)
        rank.state = {"rank": f"before {network.rank}"}
        rank.gathered.load_files(tmp_path)

    assert raised(3, cannot_load) == ["rank 2: this rank cannot"] * 3
    assert [kept[rank].state for rank in range(3)] == [{"rank": f"before {rank}"} for rank in range(3)]


def test_what_one_rank_has_for_itself_is_no_state_of_all() -> None:
    def run(network: LoopbackExchange) -> None:
        Kept(network).gathered.load_state_dict({"ranks": []})

    assert all("rank 0 writes them, and this is what one rank has for itself" in text for text in raised(2, run))


def test_a_synchronization_goes_on_with_what_it_knew() -> None:
    before, after = GradientSync("auto"), GradientSync("auto")
    before.choices, before.pauses, before.unions = {"a": "zen"}, {"b": 3}, {"a": 17}
    state = saved(12, NAMES, before, None, None)
    assert (state["version"], state["steps"], state["parameters"]) == (VERSION, 12, ["fc.bias", "fc.weight"])
    check(state, NAMES, None, None)
    restore(state, after, None, None)
    assert (after.choices, after.pauses, after.unions) == ({"a": "zen"}, {"b": 3}, {"a": 17})
    before.choices["a"] = "dense"
    assert state["choices"] == {"a": "zen"}, "a state is a copy"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, f"a state of version 2; this thinwire reads {VERSION}"),
        ({"parameters": ["fc.bias", "fc.weight", "head"]}, "other parameters; 'head' is only in one of them"),
        ({"parameters": ["fc.bias"]}, "'fc.weight' is only in one"),
        ({"compress": {"states": {}}}, "was saved with compression, and attach was called without it"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    state = saved(1, NAMES, GradientSync("auto"), None, None)
    with pytest.raises(ValueError, match=message):
        check({**state, **change}, NAMES, None, None)
