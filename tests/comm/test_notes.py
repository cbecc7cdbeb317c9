"""The notes of a failure: who it began with, and the one sentence that all survivors raise, whatever the store does."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
import torch.distributed as dist

from clocks import PATIENCE
from thinwire.comm import notes as notes_module
from thinwire.comm.notes import MAX_NOTE_BYTES, MAX_TRUTH, Note, Notes, culprits, sentence, unpacked, verdict

RANKS = range(4)


def own(rank: int, at: float = 0.0) -> Note:
    return Note(rank, True, "ValueError: of the user", "step 3, in backward, bucket 1", at=at)


def waited(rank: int, *peers: int, lost: tuple[int, ...] = (), late: bool = False) -> Note:
    return Note(rank, False, "", "step 3, in backward, bucket 1", lost, peers, 15.0, late, 1.0)


@pytest.mark.parametrize(
    ("notes", "guilty"),
    [
        pytest.param([waited(0, 1, lost=(2,)), waited(1, 2, lost=(2,)), waited(3, 0)], [2], id="killed"),
        pytest.param([waited(0, 1), waited(1, 2), waited(3, 0)], [2], id="one after the other up to who hangs"),
        pytest.param([waited(0, 1, 2, 3, late=True), waited(1, 0, 2, 3), waited(2, 0, 1, 3)], [3], id="frozen"),
        pytest.param([own(1), waited(0, 1), waited(2, 0), waited(3, 1, lost=(1,))], [1], id="raised, and died of it"),
        pytest.param([replace(own(0, at=4.0), is_told=True), own(3, at=5.0)], [3], id="told by what it sent"),
        pytest.param([own(3, at=5.0), own(1, at=6.0), waited(0, 1, lost=(2,))], [3], id="the first of two"),
        pytest.param([waited(0, 1, lost=(2, 3)), waited(1, 2)], [2, 3], id="a host"),
        pytest.param([waited(rank, (rank + 1) % 4, late=True) for rank in RANKS], [], id="each other"),
    ],
)
def test_who_it_began_with(notes: list[Note], guilty: list[int]) -> None:
    known = {note.rank: note for note in notes}
    assert culprits(known, RANKS) == guilty
    text = sentence(guilty, known, {rank: f"b{rank}" for rank in RANKS})
    assert text.startswith(f"rank {guilty[0]} (host b{guilty[0]})" if len(guilty) == 1 else "ranks ")
    assert "step 3, in backward, bucket 1" in text


def test_the_sentence_says_what_is_known() -> None:
    hangs = {0: waited(0, 1, 2, 3, late=True), 1: waited(1, 0, 2, 3), 2: waited(2, 3)}
    assert sentence([3], hangs, {3: "b12"}) == (
        "rank 3 (host b12) stopped answering 15.0 s ago in step 3, in backward, bucket 1: it hangs, is in other code,"
        " or did not take part within the timeout, or several attached models ran backward in another order; 3 ranks"
        " waited for it, directly or not"
    )
    raised = sentence([1], {1: own(1), 0: waited(0, 1)}, {})
    assert raised == (
        "rank 1 failed in step 3, in backward, bucket 1: ValueError: of the user; 1 rank waited for it, directly or not"
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        json.dumps({**json.loads(waited(0).packed()), "rank": "0"}).encode(),
        json.dumps({**json.loads(waited(0).packed()), "lost": [True]}).encode(),
        json.dumps({**json.loads(waited(0).packed()), "doing": "x" * 10_000}).encode(),
        json.dumps({**json.loads(waited(0).packed()), "more": 1}).encode(),
        b" " * (MAX_NOTE_BYTES + 1),
    ],
)
def test_what_is_no_note_is_none(data: bytes) -> None:
    assert unpacked(data) is None


def test_a_note_is_read_as_it_was_left() -> None:
    note = waited(0, 1, 2, lost=(3,), late=True)
    assert unpacked(note.packed().encode()) == note
    assert len(Note(0, True, "x" * 10**6, "y" * 10**6).packed()) < 2000


def test_all_survivors_raise_the_sentence_that_one_of_them_found() -> None:
    store = dist.HashStore()
    store.set("note 1", "not a note")
    store.add("notes", 1)
    ranks = [Notes(store, rank, RANKS) for rank in (0, 1, 3)]

    def fails(notes: Notes) -> str:
        notes.leave(waited(notes.rank, (notes.rank + 1) % 4, lost=(2,) if notes.rank == 1 else ()))
        notes.leave(own(notes.rank))  # only the first note counts
        error = notes.truth()
        assert error is not None
        assert error.rank == 2
        return str(error)

    with ThreadPoolExecutor(3) as pool:
        (text,) = set(pool.map(fails, ranks))
    assert text.startswith("rank 2 died or exited")
    late = Notes(store, 2, RANKS)
    late.leave(waited(2, 0))
    assert str(late.truth()) == text


def test_notes_of_an_earlier_attempt_are_not_read() -> None:
    """torchrun may share one store between all attempts of a job."""
    store = dist.HashStore()
    for job, victim in ((1, 2), (2, 3)):
        notes = Notes(store, 0, RANKS)
        notes.begin(job)
        notes.leave(waited(0, 1, lost=(victim,)))
        error = notes.truth()
        assert error is not None
        assert error.rank == victim


@pytest.mark.parametrize(
    "truth",
    [
        "{",
        "7",
        "[1, 2, 3]",
        '[1, "rank 1 died"]',
        '[["1"], "rank 1 died"]',
        '[[true], "rank 1 died"]',
        '[[4], "rank 4 died"]',
        '[[1], ["rank 1 died"]]',
        json.dumps([[1] * 65, "rank 1 died"]),
        json.dumps([[1], "x" * (MAX_TRUTH + 1)]),
        "[" * 50_000,
        " " * (MAX_NOTE_BYTES + 1),
    ],
)
def test_what_is_no_truth_is_not_raised(truth: str) -> None:
    store = dist.HashStore()
    store.set("truth", truth)
    notes = Notes(store, 0, RANKS)
    notes.leave(waited(0, 1))
    assert notes.truth() is None
    assert verdict(truth.encode(), RANKS) == ((), "")
    assert verdict(b'[[1], "rank 1 died"]', RANKS) == ([1], "rank 1 died")


class _Hangs:
    """A store whose host is frozen."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: threading.Event().wait(60.0)


class _Gone:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize("kind", [_Hangs, _Gone])
def test_a_store_that_is_gone_costs_little_time_and_names_its_host(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes_module, "LEAVE_SECONDS", 0.05)
    monkeypatch.setattr(notes_module, "MOST_SECONDS", 0.05)
    notes = Notes(cast(Any, kind()), 1, RANKS)
    notes.store_rank = 0
    began = time.monotonic()
    notes.leave(waited(1, 2, lost=(0, 3)))  # rank 3 hung up because of rank 0
    error = notes.truth()
    assert time.monotonic() - began < 30.0, "half of what the store hangs for"
    assert error is not None
    assert error.rank == 0
    silent = Notes(cast(Any, kind()), 1, RANKS).without_store()  # not even a connection to it could be made
    silent.store_rank = 0
    silent.leave(waited(1, 2))
    assert str(silent.truth()).startswith("rank 0 died")
    with notes.listening() as heard:
        assert heard.wait(30.0 if kind is _Gone else 0.2) == (kind is _Gone)


@pytest.mark.parametrize("is_there", [True, False])
def test_who_got_no_connection_to_the_store_hears_whether_its_host_exited(is_there: bool) -> None:
    """Nobody can leave a note then: in a first attach ranks waited the whole timeout for others that had raised."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    notes = Notes(dist.TCPStore("127.0.0.1", host.port, wait_for_workers=False), 1, RANKS).without_store()
    if not is_there:
        del host
    with notes.listening() as heard:
        assert heard.wait(0.2 if is_there else 30.0) != is_there


@pytest.mark.parametrize(("late", "guilty"), [(False, None), (True, 0)])
def test_a_store_that_is_slow_accuses_its_host_only_behind_a_timeout(
    late: bool, guilty: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes_module, "LEAVE_SECONDS", 0.05)
    monkeypatch.setattr(notes_module, "MOST_SECONDS", 0.05)
    notes = Notes(cast(Any, _Hangs()), 1, RANKS)
    notes.store_rank = 0
    notes.leave(waited(1, 2, late=late))
    error = notes.truth()
    assert (error and error.rank) == guilty


def test_who_failed_by_itself_has_no_other_truth() -> None:
    notes = Notes(dist.HashStore(), 1, RANKS)
    notes.leave(own(1))
    assert notes.truth() is None


def test_waits_that_no_connection_ends_hear_of_a_note() -> None:
    store = dist.HashStore()
    mine, other = Notes(store, 0, RANKS), Notes(store, 1, RANKS)
    with mine.listening() as heard:
        assert not heard.is_set()
        other.leave(own(1))
        assert heard.wait(30.0)


def test_the_host_of_the_store_waits_for_the_others_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises the sentence, and exits: who comes a little later still reads what all others say."""
    monkeypatch.setattr(notes_module, "LEAVE_SECONDS", PATIENCE)
    monkeypatch.setattr(notes_module, "READER_SECONDS", PATIENCE)
    store = dist.HashStore()
    host, other = Notes(store, 0, RANKS), Notes(store, 1, RANKS)
    host.store_rank = other.store_rank = 0
    host.leave(waited(0, 1, lost=(2, 3)))
    later = threading.Timer(0.3, lambda: (other.leave(waited(1, 0, lost=(2, 3))), other.truth()))
    later.start()
    assert str(host.truth()).startswith("ranks 2, 3 died")
    assert store.add("readers", 0) == 2
    later.join()


@pytest.mark.parametrize(("lost", "guilty"), [((2,), 2), ((0, 2), 0), ((), 0)])
def test_who_was_lost_while_the_store_was_there_is_named(lost: tuple[int, ...], guilty: int) -> None:
    notes = Notes(None, 1, RANKS)
    notes.store_rank = 0
    notes.leave(waited(1, 2, lost=lost))
    error = notes.truth()
    assert error is not None
    assert error.rank == guilty
