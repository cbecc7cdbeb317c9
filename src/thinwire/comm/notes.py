"""One truth about a failure: the notes that ranks leave in a store, and the sentence that all survivors raise.

A rank that fails knows why; its peers only see who hung up on them, and most of those are innocent. So each rank leaves
a note before it hangs up: that it failed by itself, or for whom it waited, and which connections it saw closed. Who
left no note although others waited for it is the one that was killed or hangs. The first rank that knows writes the
sentence, if there is none yet, and all others raise that one.

Notes are JSON of bounded length in the store of the process group. The store may be gone too: if the rank that hosts it
was killed, all others see its connections closed, which tells as much.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace

import torch.distributed as dist

from thinwire.errors import LostPeerError, logger

MAX_NOTE_BYTES, MAX_TEXT = 64 * 1024, 400
"""Bytes of a note (with the numbers of up to 8,000 ranks), and characters of each text in it."""
MOST_GUILTY, MAX_TRUTH = 64, 4096
"""Ranks, and characters, of the sentence that all survivors raise."""
LEAVE_SECONDS = 0.5
"""Seconds that a rank waits for the store before it hangs up."""
READ_SECONDS, MOST_SECONDS = 0.2, 1.0
"""Seconds for which survivors read notes: at least, and while more than one rank may have failed."""
READER_SECONDS = 0.6
"""Seconds that the rank which hosts the store waits until the others have read the sentence: it raises, and exits."""
POLL_SECONDS = 0.02
ATTACH = "attach"
"""What a rank does that has no step yet: it makes the connections of a lane."""
_NOTHING = ""


@dataclass(frozen=True)
class Note:
    """What one rank knows of a failure; all ranks are global ones.

    Args:
        rank: the rank that writes it.
        is_own: whether this rank failed by itself; else it lost a peer.
        reason: what failed.
        doing: the step and what the rank was doing.
        lost: ranks to which the connection is gone.
        waits: ranks for which it waited.
        seconds: for how long.
        is_late: whether the wait ended with its timeout.
        at: seconds since the epoch.
        is_told: whether it failed by what a peer sent, as zeros in place of a message that could not be made, or
            a report of what failed there.
    """

    rank: int
    is_own: bool
    reason: str = ""
    doing: str = ""
    lost: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()
    seconds: float = 0.0
    is_late: bool = False
    at: float = field(default_factory=time.time)
    is_told: bool = False

    def packed(self) -> str:
        return json.dumps(asdict(self) | {"reason": self.reason[:MAX_TEXT], "doing": self.doing[:MAX_TEXT]})


def unpacked(data: bytes) -> Note | None:
    """Return the note in what the store has, or None if that is none."""
    if len(data) > MAX_NOTE_BYTES:
        return None
    try:
        entries = json.loads(data)
        note = Note(**entries | {"lost": tuple(entries["lost"]), "waits": tuple(entries["waits"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    numbers = (note.rank, *note.lost, *note.waits)
    texts = note.reason, note.doing
    is_one = (
        all(type(number) is int for number in numbers)
        and all(isinstance(text, str) and len(text) <= MAX_TEXT for text in texts)
        and all(type(seconds) in (int, float) for seconds in (note.seconds, note.at))
        and all(type(flag) is bool for flag in (note.is_own, note.is_late, note.is_told))
    )
    return note if is_one else None


def verdict(data: bytes, ranks: Collection[int]) -> tuple[Sequence[int], str]:
    """Return the guilty ranks and the sentence in what the store has as truth; no rank and no text if it is none."""
    with suppress(ValueError, TypeError, RecursionError):
        guilty, text = json.loads(data) if len(data) <= MAX_NOTE_BYTES else ((), "")
        is_one = isinstance(guilty, list) and len(guilty) <= MOST_GUILTY and isinstance(text, str)
        if is_one and len(text) <= MAX_TRUTH and all(type(rank) is int and rank in ranks for rank in guilty):
            return guilty, text
    return (), ""


def culprits(notes: Mapping[int, Note], ranks: Collection[int]) -> list[int]:
    """Return the ranks that a failure began with, as far as the notes say.

    That is the first one that failed by itself, before those that failed by what a peer sent; else those without a
    note whose connections others saw closed, which were killed or exited; else those without a note for which others
    waited, which hang.
    """
    own = [note for note in notes.values() if note.is_own]
    if own:
        return [min(own, key=lambda note: (note.is_told, note.at, note.rank)).rank]
    silent = set(ranks) - notes.keys()
    gone = silent.intersection(*[set().union(*(note.lost for note in notes.values()))])
    return sorted(gone or silent & set().union(*(note.waits for note in notes.values())))


def sentence(guilty: Sequence[int], notes: Mapping[int, Note], hosts: Mapping[int, str]) -> str:
    """Return what all ranks raise, about the ranks that `culprits` returned."""
    waiting = [note for rank, note in sorted(notes.items()) if not note.is_own]
    if not guilty:
        lines = "; ".join(f"rank {note.rank} {_where(note)}".rstrip() for note in waiting[:4])
        return (
            f"ranks waited for each other ({lines}): a peer died, gave up or did not take part within the timeout, or"
            " several attached models ran backward in another order"
        )
    named = [f"{rank} (host {hosts[rank]})" if rank in hosts else str(rank) for rank in guilty[:8]]
    names = ", ".join(named) + (", ..." if len(guilty) > 8 else "")
    who = f"rank {names}" if len(guilty) == 1 else f"ranks {names}"
    witness = next((note for note in waiting if note.doing), waiting[0] if waiting else None)
    ours = notes.get(guilty[0])
    others = len(notes.keys() - set(guilty))
    waited = f"; {others} rank{'s' * (others != 1)} waited for it, directly or not" if others else ""
    if ours is not None and ours.is_own:
        return f"{who} failed{_where(ours)}: {ours.reason}{waited}"
    if witness is None:
        return f"{who} died or gave up"
    if any(rank in note.lost for note in waiting for rank in guilty):
        return f"{who} died or exited: its connections closed{_where(witness)}{waited}"
    if not any(note.is_late for note in waiting):
        return f"{who} died, exited or hung up{_where(witness)}{waited}"
    since = max(note.seconds for note in waiting)
    cure = (
        "; attach and the like must be called on all ranks"
        if witness.doing == ATTACH
        else ", or several attached models ran backward in another order"
    )
    return (
        f"{who} stopped answering {since:.1f} s ago{_where(witness)}: it hangs, is in other code, or did not take part"
        f" within the timeout{cure}{waited}"
    )


def _where(note: Note) -> str:
    return f" in {note.doing}" if note.doing else ""


class Notes:
    """The notes of the ranks of one lane.

    Whatever the store does, no call takes longer than it says: a thread asks, because a store whose host hangs answers
    nobody for ever.

    Args:
        store: a store of all ranks, under a prefix that nothing else uses; None if there is none.
        rank: this rank.
        ranks: all ranks of the lane.
    """

    def __init__(self, store: dist.Store | None, rank: int, ranks: Sequence[int]) -> None:
        self._store, self.rank, self.ranks = store, rank, tuple(ranks)
        self.store_rank: int | None = None  # the one whose process hosts the store, if any does
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self._host, self.port = (store.host, store.port) if isinstance(store, dist.TCPStore) else ("", None)
        if self.port is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self.store_rank = 0  # as torch has it, until the ranks know better
        self._is_begun = self.is_silent = False
        self.hosts: dict[int, str] = {}
        self._mine: Note | None = None
        self._left, self._done = threading.Event(), threading.Event()
        self._read_truth: tuple[Sequence[int], str] | None = None

    def without_store(self) -> Notes:
        """Return these notes for a store that did not answer, which tells that the rank failed that hosts it."""
        self._store, self.is_silent = None, True
        return self

    def begin(self, job: int) -> None:
        """Begin with a number that all ranks share: an earlier attempt of the job may have left notes in the store."""
        if self._store is not None and not self._is_begun:
            self._store, self._is_begun = dist.PrefixStore(str(job), self._store), True

    @contextmanager
    def listening(self) -> Iterator[threading.Event]:
        """Return a context with an event that is set once a rank left a note, or the store is gone.

        It is for waits that no connection ends.
        """
        heard, ended = threading.Event(), threading.Event()

        def listen() -> None:
            try:
                while self._store is not None and not (ended.wait(5 * POLL_SECONDS) or heard.is_set()):
                    if self._store.add("notes", 0) > 0:
                        heard.set()
                if self.is_silent and self.port is not None:  # its host may be slow, or is frozen: then it accepts
                    socket.create_connection((self._host, self.port)).close()
            except Exception:  # the store is gone, and so is the rank that hosts it
                heard.set()

        threading.Thread(target=listen, name="thinwire-notes", daemon=True).start()
        try:
            yield heard
        finally:
            ended.set()

    def leave(self, note: Note) -> None:
        """Leave the note of this rank, the first one; return when it can be read, or after `LEAVE_SECONDS`."""
        if self._mine is None:
            self._mine = note
            if self._store is None:
                self._done.set()
                return
            with suppress(RuntimeError):  # no thread starts while the process exits
                threading.Thread(target=self._run, args=(note,), name="thinwire-notes", daemon=True).start()
                self._left.wait(LEAVE_SECONDS)

    def truth(self) -> LostPeerError | None:
        """Return the error that all survivors raise; None if nothing is known, or this rank failed by itself.

        A store without an answer yet accuses its host only where a wait ended with its timeout: else it may be slow.
        """
        if (self._store is None and self.store_rank is None) or self._mine is None or self._mine.is_own:
            return None
        self._done.wait(MOST_SECONDS + LEAVE_SECONDS)
        mine = self._mine
        if self._read_truth is None and self._store is not None and not (mine.lost or mine.is_late):
            return None
        guilty, text = self._read_truth or self._without_store(mine)
        if not text:
            return None
        error = LostPeerError(text)
        error.rank = next(iter(guilty), None)
        return error

    def _run(self, note: Note) -> None:
        try:
            store = self._store
            assert store is not None
            store.set(f"note {store.add('notes', 1)}", note.packed())
            store.add("notes", 0)  # which is answered behind what was written
            self._left.set()
            if not note.is_own:
                self._read_truth = self._read(store, note)
                store.add("readers", 1)
                self._wait_for_readers(store, len(self.ranks) - len(self._read_truth[0]))
        except Exception as error:
            logger.info("rank %d: no notes, because the store is gone: %s", self.rank, error)
            host = self.store_rank
            if not note.lost and host is not None and host != self.rank:  # and so is the process of its host
                self._mine = replace(note, lost=(host,))
        finally:
            self._left.set()
            self._done.set()

    def _read(self, store: dist.Store, mine: Note) -> tuple[Sequence[int], str]:
        began, seen, notes = time.monotonic(), 0, {mine.rank: mine}
        while not store.check(["truth"]):
            count = store.add("notes", 0)
            while seen < min(count, 2 * len(self.ranks)) and store.check([f"note {seen + 1}"]):
                seen += 1
                if (note := unpacked(store.get(f"note {seen}"))) is not None and note.rank in self.ranks:
                    notes.setdefault(note.rank, note)
            guilty, spent = culprits(notes, self.ranks), time.monotonic() - began
            is_own = any(note.is_own and not note.is_told for note in notes.values())
            if is_own or spent > MOST_SECONDS or (spent > READ_SECONDS and len(guilty) == 1):
                text = sentence(guilty, notes, self.hosts)
                store.compare_set("truth", _NOTHING, json.dumps([guilty[:MOST_GUILTY], text[:MAX_TRUTH]]))
                break
            time.sleep(POLL_SECONDS)
        return verdict(store.get("truth"), self.ranks)

    def _wait_for_readers(self, store: dist.Store, readers: int) -> None:
        ends = time.monotonic() + READER_SECONDS
        while self.store_rank == self.rank and store.add("readers", 0) < readers and time.monotonic() < ends:
            time.sleep(POLL_SECONDS)

    def _without_store(self, mine: Note) -> tuple[Sequence[int], str]:
        """Return what this rank knows alone: whom it lost while the host of the store was there, or else the host."""
        host = self.store_rank
        is_innocent = host == mine.rank or (bool(mine.lost) and host not in mine.lost)
        guilty = list(mine.lost) if host is None or is_innocent else [host]
        return guilty, sentence(guilty, {mine.rank: mine}, self.hosts) if guilty else ""
