"""The communication lane: runs the jobs of a process off the training thread, in one order that all ranks share.

It also propagates a validation error of one rank to all ranks, which would otherwise wait until the timeout.
"""

from __future__ import annotations

import atexit
import os
import queue
import re
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.futures import Future

from thinwire.comm import groups
from thinwire.comm.agree import gather_records
from thinwire.comm.c10d import timeout_of
from thinwire.comm.channel import Channel, Subject
from thinwire.comm.connections import PrivateGroup, listens_at
from thinwire.comm.hosts import discover
from thinwire.comm.machine import Machine, measure
from thinwire.comm.notes import ATTACH, Note, Notes
from thinwire.comm.process_group import EVERYONE, Exchange, StagedExchange, Staging, Traffic, Waits, lost_peer
from thinwire.errors import (
    CorruptMessageError,
    LostPeerError,
    PeerError,
    ThinwireError,
    forget_locals,
    is_of_a_peer,
    logger,
    raising,
    ranks_told,
)

_NAME_BYTES = 63
T = TypeVar("T")

_running: WeakSet[Lane] = WeakSet()
EXIT_SECONDS = 5.0
"""Seconds that an exiting process waits for a lane: once for its job, and once more after breaking it off."""


@atexit.register
def _end_all() -> None:
    """End the threads of all lanes: one that comes back from C++ after Python has gone aborts the process."""
    lanes = list(_running)
    for lane in lanes:
        lane.abandon()
    for lane in lanes:
        lane.join(EXIT_SECONDS)
    wait([*groups.ending], EXIT_SECONDS)
    _leave_python_to_gloo()


FORKED = 'a forked process has no connections: start it by "spawn", or train copy.deepcopy(model), which has no hooks'
_of_parents: list[object] = []


def _leave_to_parent() -> None:
    """Break all lanes off in a process that was forked; connections and notes are the parent's, and left alone.

    A thread of the parent may have held the lock. Groups are kept for ever: their end would wait for their threads.
    """
    groups.ending.clear()
    for lane in list(_running):
        lane._breaking, lane._broken = threading.RLock(), ThinwireError(FORKED)
        lane.is_forked = lane.is_broken = lane.is_closed = True
        _of_parents.extend(lane._groups())
        lane._group, lane._own, lane._native, lane._adopted = None, None, None, []


os.register_at_fork(after_in_child=_leave_to_parent)
_RUN_LOOP = re.compile(r"Name:\tpt_gloo_runloop\n.*\nState:\t(\w).*\nvoluntary_ctxt_switches:\t(\d+)", re.DOTALL)


def _leave_python_to_gloo() -> None:
    """Sleep until no thread of Gloo wants Python: dropping its last work after Python has gone aborts the process.

    Two looks at the system's notes have to see each thread asleep, and never awake between them: then it waits for a
    work or for a peer. One that waits for Python wakes every 5 ms (`sys.getswitchinterval`). Where a system keeps no
    such notes, as macOS, this does nothing.
    """
    end, before = time.monotonic() + EXIT_SECONDS, list[object]()
    while (now := _sleeps()) != before and time.monotonic() < end:
        before = now
        time.sleep(0.02)


def _sleeps() -> list[object]:
    """Return how often each thread of Gloo has fallen asleep; for one that is awake, what equals nothing else."""
    texts = []
    for path in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError):  # the thread has ended
            texts.append(path.read_text())
    return [one[2] if one[1] == "S" else object() for one in map(_RUN_LOOP.match, texts) if one]


ENDING_SECONDS = 0.05
"""Seconds that the system has to close all connections of a process that ends: the first one may be that of a lane.

And that sums in flight have to end before their connections are shut down, which would leave peers waiting for ever.
"""
LOOK_SECONDS = 0.25
_watch: threading.Thread | None = None


def _keep_watching() -> None:
    """Start the thread that watches the lanes of this process, unless it runs; a forked process begins without one."""
    global _watch
    if _watch is None or not _watch.is_alive():
        _watch = threading.Thread(target=_watch_lanes, name="thinwire-watch", daemon=True)
        _watch.start()


def _watch_lanes() -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        _look_at_lanes()


def _look_at_lanes() -> None:
    """Look at each lane once; a separate function, so that no lane is referenced between two looks."""
    for lane in list(_running):
        try:
            lane.look()
        except Exception:
            logger.exception("a lane could not be watched: rank %d may wait for a peer that is gone", lane.global_rank)


class Lane:
    """A queue of jobs that run one after the other on a thread and a process group of their own.

    All ranks submit the same jobs in the same order; nothing else uses the group, so ranks can never
    interleave differently, and the training thread goes on meanwhile.

    Args:
        process_group: the ranks to communicate with, over a private group that the lane creates in a collective call;
            or a private group, which the lane then owns.
        timeout: longest wait of an exchange for a peer; None uses that of ``process_group``.
        staging: copies tensors that jobs all-reduce to the host and back; None if they are on the host. The group of
            the lane is Gloo's whatever ``process_group`` is.
        notes: where ranks leave notes of a failure, as those of a lane of more ranks; None leaves them where only the
            ranks of ``process_group`` do, or none for a private group.
    """

    is_forked = False
    """Whether this process was forked from the one that has its thread, connections and notes."""

    def __init__(
        self,
        process_group: groups.Group | PrivateGroup = None,
        timeout: timedelta | None = None,
        staging: Staging | None = None,
        notes: Notes | None = None,
    ) -> None:
        staging = staging or Staging()
        self._own: PrivateGroup | None
        self._adopted: list[PrivateGroup] = []
        self._parent: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._breaking = threading.RLock()
        self._waits = Waits()
        self._subject = ""  # of the last conversation of the job that runs
        self.doing: Callable[[], str] = str  # what this rank does now, for messages
        if isinstance(process_group, PrivateGroup):
            self._own, self._timeout = process_group, timeout
            self.notes = notes or Notes(None, 0, ())
        else:
            parent = groups.resolve_group(process_group)
            self._parent = weakref.ref(parent)  # a lane must not keep alive a group that its owner has destroyed
            self._timeout = timeout or timeout_of(parent)
            number = groups.next_number(parent)
            self.notes = notes or groups.notes_of(parent, number)
            with staging.selected():  # a collective of NCCL takes the current device
                self._own = groups.take_group(parent, (self._timeout, False), self.notes)
            if self.notes.is_silent and notes is None:  # all ranks are here, so the store was slow
                self.notes = groups.notes_of(parent, number)
        self._native: PrivateGroup | None = None
        group = self._own.process_group
        self._group: dist.ProcessGroup | None = group
        self.exchange = self._hanging_up(StagedExchange(group, staging))
        self.rank, self.world_size = self.exchange.rank, self.exchange.world_size
        self.setup = Traffic()  # bytes that belong to no gradient: of discovering hosts, measuring, and agreeing
        self.busy_seconds = 0.0
        self.watcher: Callable[[float, float], None] | None = None  # called with the start and end of each job
        self.lost: frozenset[int] = frozenset()  # ranks whose connections were gone when the lane broke off
        self.on_lost: Callable[[], object] = str  # called when it breaks off because of a peer
        self.is_watched = False  # whether it also breaks off when a peer is lost between two jobs
        self._sequence = 0
        self.codes_values = False  # whether values of rows travel as their code where it pays; alike on all ranks
        self._broken: Exception | None = None
        self.is_broken = False  # whether it broke off, so that jobs fail
        self.is_closed = False  # whether its thread ends, so that later jobs would not begin
        self._measured: list[Machine | None] = []
        self._claim = threading.Lock()
        self._current: tuple[Future[Any], Callable[[], None]] | None = None  # the running job, and what ends it
        self._beginning = threading.RLock()
        self._unbegun: deque[Callable[[], None] | None] = deque()  # of each job that has not begun, what begins it
        self._num_begun = 0  # jobs that have begun, and not ended
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        _running.add(self)
        _keep_watching()
        self._start_thread()
        self.submit(Lane._find_hosts)

    @property
    def global_rank(self) -> int:
        """This rank in the default process group, for messages."""
        return self.exchange.global_ranks[self.rank]

    @property
    def timeout_seconds(self) -> float:
        """How long ranks wait for each other."""
        return (self._timeout or default_pg_timeout).total_seconds()

    def native_group(self, for_sparse: bool = False) -> dist.ProcessGroup:
        """Return a second Gloo group of the same ranks, for all-reduces that need not wait for jobs.

        The first call makes it, in a collective call of all ranks outside of jobs; later calls return the same one. It
        is hung up with the lane, and left for the next lane when this one is closed.

        Args:
            for_sparse: whether it is a `sparse_group`.
        """
        if self._native is None:
            parent = self._parent()
            assert parent is not None, "the process group of this lane was destroyed"
            self._native = groups.take_group(parent, (self._timeout, for_sparse), self.notes)
            self.agree("who has the group of native sums", [1.0])  # else one could hang up before another has it
        return self._native.process_group

    def adopt(self, group: PrivateGroup) -> None:
        """Take over a group beside the jobs, of some of the ranks: it is hung up, and destroyed, with the lane."""
        self._adopted.append(group)

    def submit(
        self,
        job: Callable[..., T],
        pause: Callable[[], None] | None = None,
        begin: Callable[[Lane], object] | None = None,
    ) -> Future[T]:
        """Queue a job, called with this lane; the future holds its result or its exception.

        The job opens a `channel` for each tensor that it synchronizes. The tensors that it reads belong to the
        lane until the future is done. Before the job the lane calls ``pause``, which waits for its time.

        ``begin`` is the part of a job that needs no answer of a peer, in which it opens all its channels. The job gets
        its result. It is called before the job, or while the one before runs, if that has such a part too.
        """
        future: Future[T] = Future()
        if self.is_closed:
            future.set_exception(self.refusal())  # type: ignore[arg-type]  # torch annotates it as a result
            return future
        begun: list[Callable[[], object]] = []
        subject = ""

        def begin_once() -> None:
            nonlocal subject
            assert begin is not None, "a job that begins by itself"
            self._num_begun += 1
            running = self._subject
            try:
                result = begin(self)
            except BaseException as error:
                begun.append(raising(error))  # peers may wait for this job, so it fails in its turn
                if not isinstance(error, Exception):
                    raise
            else:
                begun.append(lambda: result)
            finally:
                subject, self._subject = self._subject, running

        def run() -> None:
            if pause is not None:
                pause()
            started = time.perf_counter()
            self._current = future, end
            with self._beginning:
                self._begin_next()
            self._subject = subject
            try:
                result = self._attempt(job if begin is None else lambda lane: job(lane, begun[0]()))
            except Exception as error:
                if is_ours := self._claims(future):
                    future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it as a result
            else:
                if is_ours := self._claims(future):
                    future.set_result(result)
            if is_ours:
                end()
            self.note_busy(started, time.perf_counter())

        def end() -> None:
            with self._beginning:
                self._num_begun -= len(begun)
                if not begun:
                    self._unbegun.popleft()
                begun.clear()  # an error that is kept would keep what it refers to

        with self._beginning:
            self._unbegun.append(None if begin is None else begin_once)
            self._jobs.put(run)  # which waits for the lock, and comes even if what begins here is interrupted
            if self._num_begun:
                self._begin_next()
        return future

    def _begin_next(self) -> None:
        """Begin jobs until two have begun and not ended, or the next one begins by itself."""
        while self._num_begun < 2 and self._unbegun and (begin := self._unbegun[0]) is not None:
            self._unbegun.popleft()
            begin()

    def agree(self, what: str, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of each rank, in rank order, so that all ranks decide by the same ones: see `ask`."""
        return self.ask(what, numbers).wait()

    def ask(self, what: str, numbers: Sequence[float]) -> Future[list[list[float]]]:
        """Begin to gather the numbers of each rank, in rank order, after the jobs before it.

        All ranks call it, with equally many numbers, outside of jobs.

        Args:
            what: name of the numbers, for messages.
        """

        def job(lane: Lane) -> list[list[float]]:
            with lane.setting_up():
                return lane.channel(Subject(what, f"{len(numbers)} numbers")).gather_numbers(numbers)

        return self.submit(job)

    def note_busy(self, started: float, ended: float) -> None:
        """Record that the network was busy, by a job, or by the native group while no job runs."""
        self.busy_seconds += ended - started
        if self.watcher is None:
            return
        try:
            self.watcher(started, ended)
        except Exception:
            self.watcher = None
            logger.exception("a watcher of the lane raised, and is not called any more")

    def close(self) -> None:
        """Finish the queued jobs and release the thread and the group. Nothing can be submitted afterwards.

        The group is left for the next lane, or hung up if an interrupt comes: peers take one that they have as idle.
        """
        self.is_closed = True
        try:
            self._jobs.put(None)
            while (thread := self._thread).is_alive():  # another one takes over where this one waits for a lost peer
                thread.join(LOOK_SECONDS)
            if (parent := self._parent()) is not None and self._group is not None and self._broken is None:
                groups.leave_idle(parent, filter(None, (self._own, self._native)))
                self._own = self._native = None
        except BaseException as error:
            self.break_off(f"the end of a lane ended by {error!r}", error)
            raise
        self._release()

    def abandon(self) -> None:
        """Let the thread and the group end after the queued jobs, without waiting for them.

        The group is not kept for a next lane: ranks that abandon at different times would disagree on that.
        """
        self.is_closed = True
        self._jobs.put(self._release)
        self._jobs.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, after `abandon`; if its job needs longer, break it off and wait once more."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.break_off(f"the process of rank {self.global_rank} exits")
            self._thread.join(seconds)

    def break_off(self, reason: str, error: BaseException | None = None) -> None:
        """Stop for good, because this rank cannot do its part in what peers wait for; callable from any thread.

        Pending operations fail at once on all ranks, and later jobs are refused with the reason. Before that the rank
        leaves a note, which says whether it failed by itself, or lost a peer, if ``error`` comes from that.
        """
        with self._breaking:
            if self._broken is None:
                own, is_of_peer = self._own, is_of_a_peer(error)
                if own is not None and not groups.timed_out(error):  # then Gloo closes all of them
                    self.lost = frozenset(own.lost())
                self._broken = ThinwireError(reason)  # a new one, without a traceback: its frames would hold the group
                self.is_broken = True
                ended = own.dead() if own is not None and is_of_peer else set()
                if own is not None and self.lost and not ended and is_of_peer:
                    time.sleep(ENDING_SECONDS)
                    ended = own.dead()
                if not is_of_peer and self._native is not None:  # so that sums end that peers take part in
                    time.sleep(ENDING_SECONDS)
                self.notes.leave(self._note(reason, error, [self.exchange.global_ranks[rank] for rank in ended]))
                with suppress(RuntimeError):  # no thread starts while the process exits
                    self.on_lost() if is_of_peer else None
            for group in self._groups():
                group.shut_down()
        self._jobs.put(self._release)

    def fail(self, error: BaseException) -> None:
        """End because of an error of this rank, broken off unless all ranks raise it; an interrupt waits for no job."""
        if ranks_told(error) < self.world_size and self.world_size > 1:
            self.break_off(f"{type(error).__name__}: {error}", error)
        self.close() if isinstance(error, Exception) else self.abandon()

    def lost_to(self, error: BaseException) -> LostPeerError:
        """Break off after an exchange beside the jobs of this lane failed; return the error that all ranks raise."""
        lost = lost_peer(error, self.global_rank, self.world_size)
        self.break_off(str(lost), lost)
        return self._truth() or lost

    def _truth(self) -> LostPeerError | None:
        """Return the error that all ranks raise, once this one broke off because of a peer."""
        if (truth := self.notes.truth()) is not None:
            self._broken = self.notes.truth()  # another one, without a traceback
        return truth

    def _note(self, reason: str, error: BaseException | None, ended: Iterable[int]) -> Note:
        ranks = [rank for rank in self.exchange.global_ranks if rank != self.notes.rank]
        is_late = groups.timed_out(error)
        peer, seconds = self._waits.failed or (EVERYONE, self.timeout_seconds if is_late else 0.0)
        waits = ranks if peer == EVERYONE else [self.exchange.global_ranks[peer]]
        doing = ", ".join(filter(None, (self.doing(), self._current and self._subject))) or ATTACH
        if is_late:  # Gloo closes all connections of the group itself
            ended = ()
        is_own, is_told = not is_of_a_peer(error), isinstance(error, (CorruptMessageError, PeerError))
        parts = reason, doing, tuple(ended), tuple(waits), seconds, is_late
        return Note(self.notes.rank, is_own, *parts, is_told=is_told)

    def look(self) -> None:
        """Check whether a thread waits for a lost peer; if so, fail its job, and go on without that thread."""
        ranks = self._waits.look()
        own = self._own
        is_idle = self.is_watched and self._current is None and self._broken is None
        if own is None or not (ranks or is_idle):
            return
        lost = own.lost()
        if is_idle:
            if lost:
                self.lost_to(RuntimeError(f"rank {self._names(lost)} is gone"))
            return
        if self._broken is None and lost.isdisjoint(ranks) and not (lost and EVERYONE in ranks):
            return
        cause = f"the connection to rank {self._names(lost)} is gone" if lost else "this rank hung up"
        future, end = self._current or (None, None)
        error = self.lost_to(RuntimeError(cause))
        if future is not None and self._claims(future):
            self._start_thread(end)
            future.set_exception(error)  # type: ignore[arg-type]

    def refusal(self) -> ThinwireError:
        """Return the error to raise where something is to be sent after `close`, or in a forked process."""
        why = FORKED if self.is_forked else "ranks exchange nothing after detach(): attach again"
        return ThinwireError(f"rank {self.global_rank}: {why}")

    def check(self, what: str, cure: str = "") -> None:
        """Raise ThinwireError if the lane was broken off, so that ``what`` cannot be synchronized; by whom if known."""
        if self._broken is None:
            return
        if self.is_forked:
            raise ThinwireError(f"rank {self.global_rank}, {what}: {self._broken}")
        if not isinstance(self._broken, LostPeerError):
            with self._breaking:
                pass  # who breaks off has left its note then
            self._truth()
        where = f"rank {self.global_rank}, {what}: not synchronized, because the lane stopped after an earlier failure"
        if not isinstance(self._broken, LostPeerError):
            raise ThinwireError(f"{where}: {self._broken}{cure}")
        error = LostPeerError(f"{self._broken}. {where}{cure}")
        error.rank = self._broken.rank
        raise error

    def channel(self, subject: Subject) -> Channel:
        """Return the channel of the next conversation; only a running job may call it, or what begins one.

        Raises:
            ThinwireError: an earlier failure left this rank out of step with its peers.
        """
        self.check(subject.name)
        self._subject = subject.name
        channel = Channel(self.exchange, subject, self._sequence, self.machine)
        channel.codes_values = self.codes_values
        self._sequence += 1
        return channel

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Count what is sent inside this context as `setup`, not as traffic of gradients."""
        traffic, self.exchange.traffic = self.exchange.traffic, self.setup
        try:
            yield
        finally:
            self.exchange.traffic = traffic

    def machine(self) -> Machine | None:
        """Return what messages, bytes and rows cost on these ranks, or None if that cannot be measured.

        Only a running job may call it. The first call measures, on all ranks together, for a few tenths of a second.
        """
        if not self._measured:
            self._measured.append(measure(self._setup_exchange()))
        return self._measured[0]

    def _find_hosts(self) -> None:
        """Discover the hosts before the first job, on a separate exchange: a lane counts only bytes of its jobs.

        Their names are for messages about a rank that cannot tell its own any more, and so is who hosts the store.
        """
        exchange = self._setup_exchange()
        self.exchange.hosts = discover(exchange)
        is_host = self.notes.port is not None and listens_at(self.notes.port)
        record = bytes([is_host]) + socket.gethostname().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        records = gather_records(exchange, "name of the host", record)
        answers = dict(zip(exchange.global_ranks, records, strict=True))
        self.notes.hosts |= {rank: one[1:].rstrip(b"\0").decode(errors="replace") for rank, one in answers.items()}
        host = next((rank for rank, one in answers.items() if one[0]), None)  # another such port is not the store's
        if host is not None or len(answers) == len(self.notes.ranks):
            self.notes.store_rank = host

    def _setup_exchange(self) -> Exchange:
        assert self._group is not None, "a lane without connections runs no jobs"
        return self._hanging_up(Exchange(self._group, traffic=self.setup))

    def _hanging_up(self, exchange: Exchange) -> Exchange:
        exchange.hang_up, exchange.waits = self.break_off, self._waits
        return exchange

    def _attempt(self, job: Callable[[Lane], T]) -> T:
        """Return what the job returns; a failure that not all ranks raise at the same point breaks the lane off."""
        was_broken = self.is_broken
        try:
            return job(self)
        except Exception as error:
            if ranks_told(error) >= self.world_size:
                raise
            self._give_up(error)
            is_named = was_broken and getattr(error, "rank", None) is not None  # as by `check`, which says more
            truth = self._truth() if is_of_a_peer(error) and not is_named else None
            if truth is None:
                raise
            raise truth from error
        except BaseException as error:
            self._give_up(error)
            raise ThinwireError(f"rank {self.global_rank}: a job of the lane ended by {error!r}") from error

    def _give_up(self, error: BaseException) -> None:
        self.break_off(str(error) if isinstance(error, ThinwireError) else f"{type(error).__name__}: {error}", error)
        forget_locals(error)
        self._release()

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(str(self.exchange.global_ranks[rank]) for rank in sorted(ranks))

    def _groups(self) -> list[PrivateGroup]:
        return [group for group in (self._own, self._native, *self._adopted) if group is not None]

    def _release(self) -> None:
        """Drop all references of the lane to its groups.

        Those of a broken lane end on another thread: Gloo waits for works then that may never fail (see `Waits`).
        """
        self.exchange.close()
        own = self._groups()
        _ = [group.destroy() for group in own]  # no variable holds one of them afterwards
        self._group = self._own = self._native = None
        self._adopted.clear()
        if own and self._broken:
            groups.end_beside(own)

    def _claims(self, future: Future[Any]) -> bool:
        """Claim the future of the running job; return whether the caller, and no other thread, is to complete it."""
        with self._claim:
            is_ours = self._current is not None and self._current[0] is future
            if is_ours:  # else it belongs to the thread that runs now
                self._current = None
        return is_ours

    def _start_thread(self, end: Callable[[], None] | None = None) -> None:
        """Start the thread that runs jobs; an earlier one, whose job it ends by ``end``, runs no more jobs."""
        self._thread = threading.Thread(target=self._run, args=(end,), name="thinwire-lane", daemon=True)
        self._thread.start()

    def _run(self, end: Callable[[], None] | None) -> None:
        if end is not None:
            end()
        while self._run_next() and self._thread is threading.current_thread():
            pass

    def _run_next(self) -> bool:
        """Run the next job; a separate function, so that no job and its gradients are referenced while waiting."""
        if (job := self._jobs.get()) is not None:
            job()
        return job is not None


def lane_stats(lanes: Sequence[Lane]) -> dict[str, float]:
    """Return the bytes and seconds of lanes, with the names of `thinwire.Synchronizer.stats`."""
    traffic = [lane.exchange.traffic for lane in lanes]
    return {
        "comm/bytes_sent": float(sum(one.sent_bytes for one in traffic)),
        "comm/setup_bytes": float(sum(lane.setup.sent_bytes for lane in lanes)),
        "comm/bytes_received": float(sum(one.received_bytes for one in traffic)),
        "comm/bytes_sent_between_hosts": float(sum(one.sent_between_hosts_bytes for one in traffic)),
        "comm/seconds": sum(lane.busy_seconds for lane in lanes),
    }


@contextmanager
def telling_peers(process_group: groups.Group, timeout: timedelta | None) -> Iterator[None]:
    """Propagate one rank's ValueError to all ranks.

    It wraps checks of what ranks read for themselves, before they agree on a configuration: where this rank raises
    ValueError, the others raise MismatchError with the reason when they open their conversation.
    """
    try:
        yield
    except ValueError as error:
        limit = timeout if isinstance(timeout, timedelta) and timeout > timedelta() else None
        with suppress(ThinwireError):
            agree_before(process_group, limit, f"refused: {error}")
        raise


def agree_before(
    process_group: groups.Group, timeout: timedelta | None, description: str, staging: Staging | None = None
) -> None:
    """Agree on a description before anything is made together that only some ranks may come to.

    Raises:
        MismatchError: ranks differ, or one of them refuses its arguments; on every rank.
    """
    lane = Lane(process_group, timeout, staging)
    try:
        lane.submit(lambda lane: lane.channel(Subject("attach", description)).open()).wait()
    finally:
        lane.close()
