"""Who takes part in an outer loop: ranks that die, are late, or come back.

Processes meet in *generations*, numbered sets of ranks. A `torch.distributed.Store` holds the last one, and only an
atomic compare-and-set replaces it, so ranks that cannot reach each other never go on as two sets. Each generation has a
Gloo group of its own, which no process group of torch knows of, so that its ranks may be processes of several jobs.

Ranks that lost a peer meet again without it; a process that is not in the last generation asks to be let in, which the
others see at their next round. A process has a *token*, so that one that was restarted is not taken for the lost one.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from thinwire.comm.c10d import default_store, set_timeout, timeout_of, unregistered_group
from thinwire.comm.channel import Draft, Subject
from thinwire.comm.connections import PrivateGroup
from thinwire.comm.groups import beside, cloned
from thinwire.comm.lane import EXIT_SECONDS, Lane
from thinwire.comm.process_group import Staging
from thinwire.errors import CorruptMessageError, LostPeerError, MismatchError, ThinwireError, logger, told
from thinwire.gradients.steps.state import packed, unpacked
from thinwire.outer.heart import FROZEN_SECONDS, GONE_SECONDS, SILENT_SECONDS, Heart
from thinwire.rows.formats import Format, Kind, aligned

T = TypeVar("T")

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0
"""How long ranks that meet wait for a sign of life of one whose connection is gone: it may have lost another rank."""
FORM_SECONDS = 30.0
"""Longest that the ranks of a generation wait for each other's connections: all have just agreed on it."""
READY_SECONDS = 5.0
"""Likewise if all of them were there a moment before."""
ATTEMPTS = 5
"""Number of generations that may fail in a row before their first round."""
_MAX_BYTES = 1 << 20
_GENERATION = "generation"
_ENDED = "ended"
_NOTHING = "nothing of thinwire"
_groups_seen: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


@dataclass(frozen=True)
class Generation:
    """The processes that take part.

    Args:
        number: counts from 1; 0 are the ranks of a process group of torch.
        members: token of the process of each rank.
        asks: how often processes had asked to be let in, so that a greater number is news.
        began: whether a rank had the parameters that all others take.
    """

    number: int
    members: Mapping[int, str]
    asks: int = 0
    began: bool = False

    @classmethod
    def parsed(cls, data: str, ranks: frozenset[int]) -> Generation:
        """Return what the store says, checked; raise ValueError if it makes no sense."""
        value = json.loads(data) if len(data) <= _MAX_BYTES else None
        if not isinstance(value, dict) or set(value) != {"number", "members", "asks", "began"}:
            raise ValueError("not a generation")
        members = {int(rank): str(token) for rank, token in dict(value["members"]).items()}
        numbers = value["number"], value["asks"]
        if not members or not ranks.issuperset(members) or not all(type(one) is int and one >= 0 for one in numbers):
            raise ValueError("a generation of ranks that are not planned")
        return cls(numbers[0], dict(sorted(members.items())), numbers[1], value["began"] is True)


NOBODY = Generation(0, {})


@dataclass(frozen=True)
class Roll:
    """What the ranks of a new generation know of each other; ranks are numbers in its lane.

    Args:
        source: the rank whose state others take.
        new: ranks that take it.
        done: number of rounds that every other rank has finished; who finished more takes them back.
        began: whether the source has trained, so that new ranks join it.
    """

    source: int
    new: frozenset[int]
    done: int
    began: bool = False


class Members:
    """The planned ranks of an outer loop, for ``thinwire.outer.attach(..., process_group=...)``.

    Its processes need no process group in common: each may be a job of its own, which is how one that died comes back
    while the others go on. It starts the same script with the same rank, and takes parameters, outer optimizer and
    counts from the others at their next round.

    Args:
        store: a store that outlives every rank, such as a ``torch.distributed.TCPStore`` on another host. Each job, and
            each model in it, needs one of its own: ``PrefixStore(name, store)``.
        rank: number of this process among those planned.
        world_size: number of planned processes.
        timeout: longest wait to be let in, since the last sign of the others; it has to be longer than a round takes.
            It is also the timeout of exchanges, unless ``attach`` gets one.

    Raises:
        ValueError: a rank or world size out of range, or no store.
        LostPeerError: nobody answers where the store is.

    Example:
        >>> store = torch.distributed.TCPStore("store.example", 29400)             # doctest: +SKIP
        >>> members = thinwire.outer.Members(store, rank=host, world_size=8)       # doctest: +SKIP
        >>> recipe = thinwire.outer.diloco(every=64, min_ranks=4)                  # doctest: +SKIP
        >>> loop = thinwire.outer.attach(model, optimizer, recipe, process_group=members)   # doctest: +SKIP
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta = default_pg_timeout) -> None:
        if not isinstance(store, dist.Store):
            raise ValueError(f"store is {store!r}: pass a torch.distributed.Store, such as a TCPStore")
        if not isinstance(timeout, timedelta) or timeout <= timedelta():
            raise ValueError(f"timeout is {timeout!r}: pass a datetime.timedelta, such as timedelta(minutes=5)")
        if any(type(number) is not int for number in (rank, world_size)) or not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank!r} of {world_size!r}: pass a number from 0 to world_size - 1")
        self.rank, self.timeout = rank, timeout
        self._ranks = frozenset(range(world_size))
        self._begin(dist.PrefixStore("thinwire", _own(store)), secrets.token_hex(8), None)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup, timeout: timedelta | None = None) -> Members:
        """Return the ranks of a process group, as generation 0: they meet in the default store if one is lost.

        Ranks make the same calls in the same order.
        """
        members = cls.__new__(cls)
        ranks, name = dist.get_process_group_ranks(process_group), process_group.group_name
        members.rank, members._ranks = dist.get_rank(), frozenset(ranks)
        members.timeout = timeout or timeout_of(process_group) or default_pg_timeout
        default = _own(default_store())
        store = dist.PrefixStore(f"thinwire/{name}/{next(_groups_seen[name])}", default)
        members._begin(store, str(members.rank), Generation(0, {rank: str(rank) for rank in ranks}, began=True))
        return members

    def size(self) -> int:
        """Return the number of planned ranks."""
        return len(self._ranks)

    @property
    def number(self) -> int:
        """The number of the generation, which changes with its ranks."""
        return self._generation.number

    def _begin(self, store: dist.Store, token: str, generation: Generation | None) -> None:
        self._store, self._token, self._generation = store, token, generation or NOBODY
        self._is_new = generation is None
        self._is_store_lost = False
        self._signs: dict[str, tuple[int, float]] = {}  # the count of signs of life of a process, and when it changed
        self._store_turn = threading.Lock()  # held until the store has answered
        self._enter: Callable[[Lane, Roll], object] | None = None
        self._heart: Heart | None = None
        self._lane: weakref.ref[Lane] | None = None
        self.times_left_out = 0

    def prepare(
        self,
        enter: Callable[[Lane, Roll], object],
        min_ranks: int | None = None,
        timeout: timedelta | None = None,
        staging: Staging | None = None,
        has_heart: bool = False,
    ) -> None:
        """Set what lanes of these members are made of; once.

        Args:
            enter: a job of each new lane: checks that all ranks run the same, and hands over what new ranks need.
            min_ranks: how many ranks are enough; None for all.
            timeout: longest wait of an exchange; None for that of the members.
            has_heart: whether ranks give signs of life. Then one that is gone is missed within a second or, if its host
                froze, in 5, and one that only computes for long is waited for.

        Raises:
            ValueError: it was called before.
        """
        if self._enter is not None:
            raise ValueError("these Members are attached already: make others, with a PrefixStore of their own")
        self.min_ranks = len(self._ranks) if min_ranks is None else min_ranks
        self._enter, self._staging, self._exchange_timeout = enter, staging, timeout or self.timeout
        if has_heart:
            self._heart = Heart(_own(self._store), lambda: (self._token, self._generation.members), self._is_frozen)

    def watch(self, lane: Lane) -> None:
        """Have the heart break this lane off when a rank freezes; without one give signs of life when one is lost."""
        self._lane = weakref.ref(lane)
        if self._heart is None:
            lane.on_lost = partial(beside, "thinwire-alive", partial(_live, weakref.ref(self), self.number))

    def leave(self) -> None:
        """Give no more signs of life, at the end; who comes later need not wait."""
        if self._heart is not None:
            self._heart.stop()
        with suppress(LostPeerError):
            self._set(_ENDED, "")

    def _is_frozen(self, rank: int) -> None:
        lane = None if self._lane is None else self._lane()
        if lane is not None and rank in lane.exchange.global_ranks and not lane.is_broken:
            silence = f"rank {rank} gave no sign of life for {FROZEN_SECONDS:g} s"
            lane.break_off(silence, LostPeerError(silence))

    def _patience(self, rank: int, is_quick: bool, is_lost: bool, short: float, waited: float) -> float:
        """Return the seconds for which a rank is waited for that is not there yet, when others meet."""
        limit, token = self._exchange_timeout.total_seconds(), self._generation.members[rank]
        if self._heart is not None:
            is_gone = self._heart.silence(token) > (GONE_SECONDS if is_quick or is_lost else SILENT_SECONDS)
            return 0.0 if is_gone else limit
        if is_quick or not is_lost:
            return short if is_quick else limit
        count, (last, heard) = self._add(f"{self.number + 1}/{token}/alive", 0), self._signs.get(token, (0, 0.0))
        self._signs[token] = count, heard if count == last else waited
        return min(limit, self._signs[token][1] + short)

    def enter(self) -> Lane:
        """Return the lane of the ranks that take part, once this one is let in.

        At the start all planned ranks are waited for, for the timeout; then ``min_ranks`` are enough. A process that
        comes later waits for the next round of the others.

        Raises:
            LostPeerError: too few ranks came, nobody let this one in, or the store is gone.
            MismatchError: the others run another model or recipe.
        """
        return self._settle(self._ask(), lambda: 0)

    def asked(self, lane: Lane) -> bool:
        """Return whether a process waits to be let in; a job of each round calls it, and tells the others."""
        if self._is_store_lost and self._store_turn.locked():
            return False
        limit = min(GRACE_SECONDS, self._exchange_timeout.total_seconds() / 4)  # meanwhile the others wait
        try:
            if lane.rank == 0:
                self._add("rounds", 1, limit)  # a sign of life, for processes that wait
            asks, self._is_store_lost = self._add("asks", 0, limit), False
            return asks > self._generation.asks
        except LostPeerError as error:
            if not self._is_store_lost:
                logger.warning("%s; until then no rank that is lost can come back", error)
            self._is_store_lost = True
            return False

    def go_on(self, lane: Lane, done: Callable[[], int], error: BaseException | None = None) -> Lane:
        """Return the lane in place of ``lane``: with those that asked to be let in, or after an error with who is left.

        It is a collective call between rounds; after an error of those that are there.

        Args:
            done: returns the number of rounds that this rank has finished.
            error: how a job of ``lane`` failed on this rank; anything but the failure of a peer is raised again.

        Raises:
            LostPeerError: fewer than ``min_ranks`` are left, the store is gone, or another process took this rank.
        """
        if error is not None:
            if not lane.is_broken or not isinstance(error, ThinwireError):
                raise error
            logger.warning("rank %d: who is left goes on, because %s", self.rank, error)
        return self._settle(self._meet(lane, admits=error is None), done, lane)

    def _settle(self, generation: Generation, done: Callable[[], int], before: Lane | None = None) -> Lane:
        """Connect the ranks of a generation and let new ones in; after a failure, meet again without who is lost."""
        if before is not None:  # its thread must not go on with a round that is made again
            before.break_off("its ranks have met again")
            before.abandon()
            before.join(EXIT_SECONDS)
        for attempt in itertools.count(1):
            self._generation = generation
            lane, without = None, frozenset[int]()
            try:
                group = PrivateGroup(self._make_group)
                set_timeout(group.process_group, self._exchange_timeout)
                lane = Lane(group, self._exchange_timeout, self._staging)
                self.watch(lane)
                lane.submit(lambda lane: self._open(lane, done())).wait()
            except MismatchError:  # all know of it
                assert lane is not None
                if self._is_new or attempt == ATTEMPTS:
                    lane.close()
                    raise
                without = self._newcomers
            except RuntimeError as error:
                is_ours = lane is not None and not (lane.is_broken and isinstance(error, ThinwireError))
                if is_ours or attempt == ATTEMPTS:
                    raise
                logger.warning("rank %d: generation %d failed: %s", self.rank, generation.number, error)
            else:
                if before is not None:
                    lane.exchange.traffic, lane.setup = before.exchange.traffic, before.setup
                    lane.busy_seconds, lane.watcher = before.busy_seconds, before.watcher
                self._is_new, self._is_store_lost = False, False
                lane.is_watched = self.min_ranks < len(self._ranks)
                return lane
            generation = self._meet(lane, is_late=True, without=without)
            if lane is not None:
                lane.abandon()
        raise AssertionError("unreachable")

    def _make_group(self) -> dist.ProcessGroup:
        """Connect the ranks of the generation; torch does not register the group, which may end at any time."""
        ranks, number = list(self._generation.members), self._generation.number
        seconds = FORM_SECONDS if self._heart is None else READY_SECONDS
        index, limit = ranks.index(self.rank), min(self._exchange_timeout, timedelta(seconds=seconds))
        self._wait_until_ready(number)
        store = dist.PrefixStore(f"group {number}", self._store)
        return unregistered_group(store, ranks, index, limit)

    def _wait_until_ready(self, number: int) -> None:
        """Wait until all ranks are about to connect, if they give signs of life: Gloo would wait long for one that died
        since they have met."""
        generation, heart = self._generation, self._heart
        if heart is None:
            return
        ready, limit = self._add(f"ready {number}", 1), time.monotonic() + FORM_SECONDS
        while ready < len(generation.members):
            silent = [rank for rank, token in generation.members.items() if heart.silence(token) > GONE_SECONDS]
            if silent or time.monotonic() > limit:
                raise LostPeerError(f"rank {self.rank}: ranks {silent} did not come to generation {number}")
            time.sleep(POLL_SECONDS / 2)
            ready = self._add(f"ready {number}", 0)

    def _open(self, lane: Lane, done: int) -> None:
        """Agree on who needs what, and do what the loop wants done before the first round."""
        generation, enter = self._generation, self._enter
        assert enter is not None
        with lane.setting_up():
            answers = lane.channel(Subject("members", "rounds")).gather_numbers([float(self._is_new), float(done)])
            old = [rank for rank, (is_new, _) in enumerate(answers) if not is_new]
            if not old and generation.began:
                error = f"rank {self.rank}: all ranks that had the parameters are gone: restore them from a checkpoint,"
                raise told(LostPeerError(f"{error} and begin with another PrefixStore"), lane.world_size)
            new = frozenset(range(lane.world_size)) - set(old or (0,))
            self._newcomers = frozenset(lane.exchange.global_ranks[rank] for rank in new)
            least = min((answers[rank][1] for rank in old), default=0.0)
            enter(lane, Roll((old or [0])[0], new, int(least), bool(old)))
            lane.channel(Subject("members", "entered")).open()
        self._store_call(lambda: self._store.delete_key(f"group {generation.number}/0/{lane.rank}"))

    def _ask(self) -> Generation:
        """Return the first generation of which this process is a member, by asking to be let in."""
        self._is_new, self._token = True, secrets.token_hex(8)
        key, first, heard, is_asked = f"ask/{self.rank}", self._last(), None, False
        beats: dict[str, int] = {}
        began = heard_at = time.monotonic()
        while True:
            now, waited, asks = self._last(), time.monotonic(), self._add("asks", 0)
            holder = None if now is None else now.members.get(self.rank)
            if now is not None and holder == self._token:
                return now
            if self._peek(_ENDED) is not None:
                raise LostPeerError(f"rank {self.rank}: the others have ended: begin with another PrefixStore")
            asked = self._peek(key)
            is_other = is_asked and asked not in (None, self._token)
            if now is not None and first is not None and holder is not None:
                is_other |= holder != first.members.get(self.rank) or now.number > first.number + 1
            if is_other:
                raise LostPeerError(f"rank {self.rank}: another process takes part as this rank: end one of them")
            if asked != self._token:
                self._set(key, self._token)
                self._add("asks", 1)
                is_asked = True
            self._add(f"beat/{self._token}", 1)
            if now is None:
                askers = self._askers(beats) | {self.rank: self._token}
                is_late = waited - began > self._exchange_timeout.total_seconds()
                if len(askers) == len(self._ranks) or (is_late and len(askers) >= self.min_ranks):
                    self._propose(NOBODY, askers, asks, beats)
                elif is_late:
                    raise self._too_few(len(askers), "came")
            else:
                first = first or now
                sign = now.number, self._add("rounds", 0)
                heard, heard_at = sign, heard_at if sign == heard else waited
                if waited - heard_at > self.timeout.total_seconds():
                    raise LostPeerError(
                        f"rank {self.rank}: generation {now.number} of {len(now.members)} ranks let nobody in for"
                        f" {self.timeout.total_seconds():g} s: pass Members a timeout longer than a round takes; after"
                        " all ranks have ended, begin with another PrefixStore"
                    )
            time.sleep(POLL_SECONDS)

    def _meet(
        self, lane: Lane | None, admits: bool = False, is_late: bool = False, without: frozenset[int] = frozenset()
    ) -> Generation:
        """Return the next generation that has this process.

        Args:
            lane: the lane of the last one.
            admits: whether processes that asked are let in.
            is_late: whether all others come now, if at all.
            without: ranks that are left out.
        """
        last = self._generation
        present, askers = {self.rank}, dict[int, str]()
        beats: dict[str, int] = {}
        self._signs.clear()
        began, limit, asks = time.monotonic(), self._exchange_timeout.total_seconds(), last.asks
        short = min(FORM_SECONDS if is_late else GRACE_SECONDS, limit)
        while (now := self._last() or last).number <= last.number:
            self._add(f"{last.number + 1}/{self._token}", 1)
            away = [rank for rank in last.members if rank not in present and rank not in without]
            present |= {rank for rank in away if self._add(f"{last.number + 1}/{last.members[rank]}", 0)}
            lost = set() if lane is None else {lane.exchange.global_ranks[rank] for rank in lane.lost}
            is_quick = is_late or (lane is not None and lane.is_broken and not lost)  # it timed out, and so do all
            waited = time.monotonic() - began
            late = (rank for rank in away if rank not in present)
            patience = [self._patience(rank, is_quick, rank in lost, short, waited) for rank in late]
            if admits:
                asks = self._add("asks", 0)
                askers = {rank: token for rank, token in self._askers(beats).items() if rank not in present}
            is_settled = not admits or waited > short or len(askers) == len(beats)
            if is_settled and waited > max(patience, default=-1.0):
                members = {rank: last.members[rank] for rank in present} | askers
                if len(members) < self.min_ranks:
                    raise self._too_few(len(members), "are left")
                self._propose(last, members, asks, beats)
            else:
                time.sleep(POLL_SECONDS)
        if now.members.get(self.rank) == self._token:
            return now
        if self.rank in now.members:
            raise LostPeerError(f"rank {self.rank}: another process has replaced this one: end this one")
        logger.warning("rank %d: generation %d is without this rank, which asks to be let in", self.rank, now.number)
        self.times_left_out += 1
        return self._ask()

    def _propose(self, last: Generation, members: Mapping[int, str], asks: int, beats: Iterable[str]) -> None:
        """Make these the next generation, unless another rank was quicker; then forget what led to it.

        Args:
            asks: how often processes had asked before it was looked who did.
            beats: tokens of all that did.
        """
        number, began = last.number, not self._is_new or last.began
        proposed = _written(Generation(number + 1, dict(sorted(members.items())), asks, began))
        expected = _written(last) if number else ""
        if self._store_call(lambda: self._store.compare_set(_GENERATION, expected, proposed)).decode() != proposed:
            return
        done = [f"{number}/{token}{end}" for token in last.members.values() for end in ("", "/alive")]
        done += [f"ready {number}", *(f"beat/{token}" for token in beats)]
        done += [key for key in (f"ask/{rank}" for rank in self._ranks) if beats and (self._peek(key) or "") in beats]
        for key in done:
            self._store_call(lambda key=key: self._store.delete_key(key))

    def _askers(self, beats: dict[str, int]) -> dict[int, str]:
        """Return the processes that wait to be let in and are alive: their counts move.

        Args:
            beats: the first count of each token, kept from call to call.
        """
        askers = {}
        for rank in self._ranks:
            token = self._peek(f"ask/{rank}")
            if token is not None and re.fullmatch("[0-9a-f]{16}", token):
                count = self._add(f"beat/{token}", 0)
                if count > beats.setdefault(token, count):
                    askers[rank] = token
        return askers

    def _too_few(self, there: int, verb: str) -> LostPeerError:
        return LostPeerError(
            f"rank {self.rank}: {there} of {len(self._ranks)} ranks {verb}, and min_ranks={self.min_ranks} are needed"
        )

    def _last(self) -> Generation | None:
        data = self._peek(_GENERATION)
        if data is None:
            return None
        try:
            return Generation.parsed(data, self._ranks)
        except (ValueError, TypeError, AttributeError) as error:
            raise CorruptMessageError(
                f"rank {self.rank}: the store has something else where Members keep their ranks ({error}): give each"
                " job and each model a PrefixStore of its own"
            ) from error

    def _peek(self, key: str) -> str | None:
        """Return the value of a key, or None; ``Store.get`` would wait for it."""
        value = self._store_call(lambda: self._store.compare_set(key, _NOTHING, _NOTHING))
        text = value.decode(errors="replace")
        return None if text == _NOTHING else text

    def _set(self, key: str, value: str) -> None:
        self._store_call(lambda: self._store.set(key, value))

    def _add(self, key: str, number: int, seconds: float | None = None) -> int:
        return self._store_call(lambda: self._store.add(key, number), seconds)

    def _store_call(self, call: Callable[[], T], seconds: float | None = None) -> T:
        """Return what the store answers, on a thread of its own: torch would wait for ever for a host that hangs."""
        seconds = self.timeout.total_seconds() if seconds is None else seconds
        try:
            if not self._store_turn.acquire(timeout=seconds):
                raise TimeoutError
            answer = beside("thinwire-store", call)
            answer.add_done_callback(lambda _: self._store_turn.release())
            return answer.result(seconds)
        except (RuntimeError, TimeoutError) as error:
            reason = str(error).partition("\n")[0] or f"no answer for {seconds:g} s"
            raise LostPeerError(
                f"rank {self.rank}: the store in which ranks meet cannot be reached ({reason}): it"
                " has to outlive them, as that of torchrun's agent does, or one on another host passed to Members"
            ) from error


def _live(members: weakref.ref[Members], number: int) -> None:
    """Give signs of life to those that a generation has left, until this rank meets them: it may be in a long step."""
    with suppress(LostPeerError):
        while (mine := members()) is not None and mine.number == number:
            mine._add(f"{number + 1}/{mine._token}/alive", 1)
            del mine
            time.sleep(GRACE_SECONDS / 5)


def _own(store: dist.Store) -> dist.Store:
    """Return a connection of our own: a wait on the user's would block what is asked meanwhile."""
    if (clone := cloned(store)) is None:
        raise LostPeerError("the store in which ranks meet cannot be reached: it has to outlive them")
    return clone


def _written(generation: Generation) -> str:
    return json.dumps(asdict(generation), sort_keys=True)


def hand_over(lane: Lane, roll: Roll, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that the source passes on new ranks, and nothing on others; a job of the lane.

    Raises:
        MismatchError, PeerError, CorruptMessageError: see `thinwire.comm.channel.Channel.swap`.
    """
    is_source, is_new = lane.rank == roll.source, lane.rank in roll.new
    mine = packed(dict(state)) if is_source else torch.empty(0, dtype=torch.uint8)
    sizes = lane.channel(Subject("bytes of the state", "1 number")).gather_numbers([mine.numel()])
    (size,) = sizes[roll.source]
    channel = lane.channel(Subject("state of new ranks", f"{size:.0f} bytes"))

    def drafts() -> list[Draft]:
        whole = torch.nn.functional.pad(mine, (0, aligned(mine.numel()) - mine.numel()))
        return [Draft(Format.COO, 0, whole if rank in roll.new else whole[:0]) for rank in range(lane.world_size)]

    message = channel.swap(Kind.GATHER, drafts, aligned(int(size)) if is_new else 0)[roll.source]
    with channel.reading(message):
        return unpacked(message.payload[: int(size)]) if is_new else {}
