"""ShadowSync: rounds in the background, as often as the network allows, none of which blocks a step of training."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.comm.channel import Subject
from thinwire.comm.lane import Lane
from thinwire.comm.process_group import Staging
from thinwire.errors import ThinwireError
from thinwire.outer.anchors import Anchors
from thinwire.outer.average import Averager, Told
from thinwire.outer.members import Members, Roll, hand_over
from thinwire.outer.recipe import OuterRecipe

T = TypeVar("T")
ENDING, ASKED = 1, 2
"""Flags of a rank: it wants rounds to end, which they do once all ranks have it; a process waits to be let in."""
SHARE = 0.01
"""Part of the processor time of a process that its rounds take at most, unless the user says how often they begin: on a
fast link they would otherwise eat the cores that training needs."""
BYTE_SECONDS = 3e-9
"""Processor time of Gloo's threads and the kernel for a byte sent or received: 50 ms for the 16 MB of a round of the
gpt job on 8 emulated hosts, whose lane took 12 ms."""
LEAST_PATIENCE, STEPS_OF_PATIENCE = 1.0, 4
"""A rank that makes no step takes part in a round after so many of its last steps, and at least so many seconds."""

_paces: WeakSet[RoundPace]


class RoundPace:
    """When rounds begin. It knows no model, so that one can be freed while the lane waits here.

    A round begins once this rank has made a step since the last one; or after some seconds without a step, as in an
    evaluation, so that others need not wait for it.

    Args:
        every_seconds: least seconds between the beginnings of two rounds; 0 for as often as `SHARE` allows.
        timeout_seconds: how long the other ranks wait for this one.
    """

    def __init__(self, every_seconds: float, timeout_seconds: float) -> None:
        self.changed = threading.Condition()  # guards all that training and the background share
        self.steps = 0
        self.seen = 0  # steps at the last snapshot
        self.is_ending = False
        self._is_dropped = False
        self._hurry = threading.Event()
        self._every, self._longest = every_seconds, timeout_seconds / 4
        self._begun, self._used = time.perf_counter(), time.process_time()
        self._cost = 0.0
        self._stepped, self._step_seconds = self._begun, 0.0
        _paces.add(self)

    def step(self) -> None:
        """Count a step; inside of ``changed``."""
        now = time.perf_counter()
        self._stepped, self._step_seconds = now, now - self._stepped
        self.steps += 1
        self.changed.notify_all()

    def wait(self) -> None:
        """Wait until the next round begins; on the thread of the lane, before each job of a round."""
        now = time.perf_counter()
        elapsed, used = now - self._begun, time.process_time() - self._used
        starved = min(16.0, max(1.0, elapsed / max(used, 1e-9)))  # a process that gets half a core counts half
        pause = self._every - elapsed if self._every else min(self._longest, self._cost * starved / SHARE)
        self._hurry.wait(max(1e-3, pause))  # another thread may want the lock of a round
        patience = min(self._longest, max(LEAST_PATIENCE, STEPS_OF_PATIENCE * self._step_seconds))
        with self.changed:
            self.changed.wait_for(lambda: self.steps > self.seen or self._hurry.is_set(), patience)
        self._begun, self._used = time.perf_counter(), time.process_time()

    def end_round(self, cpu_seconds: float) -> None:
        """Record the processor time that a round took."""
        self._cost = cpu_seconds

    def hurry(self, is_ending: bool) -> None:
        """Begin rounds without a pause, to end them; or return to the usual pace."""
        with self.changed:
            self.is_ending = is_ending
            self._hurry.set() if is_ending or self._is_dropped else self._hurry.clear()
            self.changed.notify_all()

    def drop(self) -> None:
        """Let the lane go on: there will be no more rounds."""
        self._is_dropped = True
        self.hurry(self.is_ending)

    @property
    def is_dropped(self) -> bool:
        return self._is_dropped


_paces = WeakSet()


@atexit.register
def _drop_all() -> None:
    """Keep no lane waiting in a process that exits; registered later than the end of lanes, so called earlier."""
    for pace in list(_paces):
        pace.drop()


@dataclass(frozen=True)
class RoundResult:
    """What a round told this rank.

    Args:
        is_refused: whether its parameters were not finite.
        takes_part: whether it copied them for this round.
        seen: its steps at the copy before.
    """

    told: Told
    is_refused: bool
    takes_part: bool
    seen: int


class ShadowRounds:
    """Rounds in the background of training: the counterpart of `thinwire.outer.loop.Rounds`, with the same methods.

    Each round is a job of the lane, which submits the next one, so jobs match however many steps ranks make. It copies
    the parameters between two steps, averages and steps the anchor, and leaves ``mix * (anchor - copy)`` as a
    correction. The hook of the optimizer adds that to the parameters, on the thread of training: whatever steps were
    made since the copy stay. All methods but ``round`` belong to that thread.

    Args:
        recipe: settings with ``in_background``.
        buffers: returns the floating buffers by name, as they are now.
        staging: the way of differences to the lane, and back.
        tables: names of the parameters that travel as rows.
        text, untrained: as of `thinwire.outer.loop.Rounds`.

    Raises:
        ValueError: rounds are as seldom as the timeout or more so.
    """

    def __init__(
        self,
        recipe: OuterRecipe,
        anchors: Anchors,
        averager: Averager,
        lane: Lane,
        buffers: Callable[[], Mapping[str, Tensor]],
        staging: Staging,
        tables: Collection[str],
        text: str = "",
        untrained: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        if recipe.every_seconds >= lane.timeout_seconds:
            raise ValueError(
                f"every_seconds={recipe.every_seconds:g} is not less than the {lane.timeout_seconds:g} s for which"
                " ranks wait for each other: pass a longer timeout= to attach"
            )
        self._recipe, self.anchors, self.averager, self.lane = recipe, anchors, averager, lane
        self._buffers, self._staging, self._tables = buffers, staging, tables
        self._text, self._untrained = text, untrained
        self._members: Members | None = None  # those with whom rounds go on if a rank is lost
        self.landed = self.ranks = self.refusals = self.lost_steps = 0
        self._finished = 0  # rounds whose means this rank has
        self._middle: RoundResult | None = None  # of the round whose means not all ranks may have
        self._is_over = False  # whether all ranks have ended
        self.exposed_seconds = 0.0
        self._names = anchors.trained(0)
        there = self._anchored()
        self._copy, self._correction, self._difference = (
            {name: torch.zeros_like(anchor) for name, anchor in there.items()} for _ in range(3)
        )
        self._is_waiting = False  # whether there is a correction that is not applied yet
        self._replaces = False  # whether it takes the place of the parameters, which were not finite
        self._is_stepping = self._is_swapped = False
        self._anchors_lock = threading.Lock()  # held while anchors are stepped, or read by training
        self._round_lock = threading.Lock()  # held for a round
        self._trained = staging.hand_over(())  # behind the last step
        self._copied = self._landed = self._swapped = self._trained.event  # behind the last of each
        self.pace = RoundPace(recipe.every_seconds, lane.timeout_seconds)

    def meet_in(self, members: Members | None, lane: Lane, timeout: timedelta | None) -> None:
        """Begin rounds with the ranks of a lane; as `thinwire.outer.loop.Rounds.meet_in`."""
        self.lane = lane
        if members is not None and self._recipe.min_ranks is not None:
            self._members = members
            members.watch(lane, self.enter, self._recipe.min_ranks, timeout, self._staging)
        self._begin()

    @property
    def steps(self) -> int:
        """Inner steps of this rank."""
        return self.pace.steps

    def check_start(self, optimized: Iterable[Tensor]) -> None:
        """Raise ValueError before the first step if parameters are not those of attach."""
        with self._anchors_lock:
            if not self.landed:
                self.anchors.check_start(optimized)

    def before_step(self) -> None:
        """Keep copies from being taken while the optimizer writes.

        Raises:
            ValueError: a parameter is trained that was frozen when the rounds began.
        """
        self.anchors.adopt()
        if self.anchors.trained(0) != self._names:
            raise ValueError(
                "a parameter was frozen at attach and is trained now, at which ranks in the background cannot agree on"
                " a round: detach on all ranks, and attach again"
            )
        if self._is_swapped:
            raise ThinwireError("a step inside of global_parameters(), which would train the anchors: step outside")
        with self._timed(), self.pace.changed:
            self._is_stepping = True
            _wait(self._copied)

    def after_step(self) -> None:
        """Count an inner step, and apply the correction if there is one.

        Raises:
            ThinwireError: a round has failed; it surfaces once, and the next one is begun.
        """
        with self._timed(), self.pace.changed:
            self._apply()
            self._is_stepping = False
            self.pace.step()
        if self._future.done():
            with self._timed():
                self._go_on(self._future)

    def synchronize(self) -> None:
        """End rounds on all ranks; afterwards all have the anchors as their parameters. Then rounds go on."""
        with self.stopped(), torch.no_grad():
            self._take_anchors()

    def land_all(self) -> None:
        """End rounds on all ranks, and apply the last correction."""
        try:
            self._end()
            with torch.no_grad():
                self._apply()
        finally:
            self.pace.drop()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the model the anchors, and its own parameters back; rounds go on, to which this rank adds nothing."""
        with ExitStack() as stack:
            with self.pace.changed, self._anchors_lock:
                self._is_swapped = True
                _wait(self._landed)
                stack.enter_context(torch.no_grad())
                stack.enter_context(self.anchors.swapped(self._buffers()))
                self._swapped = self._staging.hand_over(()).event
            try:
                with torch.enable_grad():
                    yield
            finally:
                with self.pace.changed:
                    stack.close()
                    self._is_swapped = False
                    self._trained = self._staging.hand_over(())

    @contextmanager
    def still(self) -> Iterator[None]:
        """Keep the state of this rank as it is between two rounds. Each rank may do so at another round."""
        with self._timed():
            if not self._round_lock.acquire(timeout=self.lane.timeout_seconds):
                raise ThinwireError(f"a round did not end within {self.lane.timeout_seconds:g} s")
        try:
            _wait(self._landed)
            yield
        finally:
            self._trained = self._staging.hand_over(())
            self._round_lock.release()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """End rounds on all ranks, all of which call it, and go on afterwards."""
        self._end()
        try:
            yield
        finally:
            self._begin()

    def drop(self) -> None:
        """Begin no more rounds."""
        self.pace.drop()

    @property
    def rank(self) -> int:
        return self.lane.rank

    @property
    def world_size(self) -> int:
        return self.lane.world_size

    def submit(self, job: Callable[[Lane], T]) -> Future[T]:
        """Run a job of all ranks on the lane, between two rounds."""
        with self.stopped():
            return self.lane.submit(job)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the correction that is not applied; in `still`, after which it changes."""
        return {
            "steps": self.pace.steps,
            "seen": self.pace.seen,
            "rounds": self.landed,
            "correction": dict(self._correction) if self._is_waiting else {},
            "replaces": self._replaces,
            **self.anchors.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if `load_state_dict` cannot restore a state."""
        self.anchors.check_state(state)
        for name, correction in state["correction"].items():
            if name not in self._correction or correction.shape != self._correction[name].shape:
                raise ValueError(f"the state has a correction of {name!r}, which this model has not in that shape")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `check_state` has accepted; in `stopped`.

        Ranks save at rounds of their own, so all take the anchors of the one that was furthest.
        """
        _wait(self._landed)
        self.anchors.load_state_dict(state)
        self.pace.steps, self.pace.seen, self.landed = (int(state[key]) for key in ("steps", "seen", "rounds"))
        self._is_waiting, self._replaces = bool(state["correction"]), bool(state["replaces"])
        for name, correction in state["correction"].items():
            self._correction[name].copy_(correction)
        self._trained = self._staging.hand_over(())
        self.lane.submit(self._take_furthest).wait()

    def round(self, lane: Lane) -> None:
        """Make one round, and submit the next one unless all ranks end, or one wants to be let in."""
        lane.check("rounds in the background")  # a thread that is stuck in a broken lane may hold the lock
        started, traffic = time.thread_time(), lane.exchange.traffic
        moved = traffic.sent_bytes + traffic.received_bytes
        with self._round_lock, torch.no_grad(), ExitStack() as stack:
            with self.pace.changed:
                stack.enter_context(self._staging.taking(self._trained))
                flag, before = ENDING * self.pace.is_ending, self.pace.seen
                takes_part = not (self._is_stepping or self._is_swapped)
                steps = self._take_copy() if takes_part else 0
            self._subtract(takes_part)
            flag |= ASKED * (self._members is not None and self._members.asked(lane))
            parameters = {name: self._difference[name] for name in self._names}
            buffers = [self._difference[name] for name in self.anchors.buffers]
            try:
                told = self.averager.mean(lane, parameters, steps, buffers, flag)
                self._middle = RoundResult(told, lane.rank in told.refused, takes_part, before)
                self._finished += 1
                if self._members is not None:  # who passes this knows that all have the means
                    lane.channel(Subject("the end of a round", "")).open()
            except Exception:
                if self._middle is None:
                    self.averager.finish_round(False)
                    self.pace.seen = before
                raise
            self._commit()
        moved = traffic.sent_bytes + traffic.received_bytes - moved
        self.pace.end_round(time.thread_time() - started + BYTE_SECONDS * moved)
        self._is_over = all(flag & ENDING for flag in told.flags)
        if not (self._is_over or any(flag & ASKED for flag in told.flags)):
            self._begin()

    def enter(self, lane: Lane, roll: Roll) -> None:
        """Begin with the ranks of a lane, as a job of it, while the thread of training waits."""
        is_new = lane.rank in roll.new
        if self._middle is not None and self._finished <= roll.done and not is_new:
            self._commit()
        elif self._middle is not None:
            self.averager.finish_round(False)
            self.pace.seen, self._middle = self._middle.seen, None
        self._finished = roll.done
        self.averager.moved_to(lane)
        lane.channel(Subject("attach", "\n".join([self._text, *self.averager.describe()]))).open()
        mine = {**self.anchors.state_dict(), "rounds": self.landed, "untrained": self._untrained()}
        state = hand_over(lane, roll, mine if lane.rank == roll.source else {}) if roll.new else {}
        if is_new:
            self.anchors.check_state(state)
            self.anchors.load_state_dict(state)
            self.lost_steps += self.pace.steps - self.pace.seen
            self.pace.seen, self.landed = self.pace.steps, int(state["rounds"])
            for name, tensor in self._untrained().items():
                tensor.copy_(state["untrained"][name])
            self._take_anchors()

    def _commit(self) -> None:
        """Step the anchors by the means that all ranks have, and leave the correction."""
        assert self._middle is not None, "a round was made"
        told, is_refused, takes_part = self._middle.told, self._middle.is_refused, self._middle.takes_part
        self._middle = None
        self.averager.finish_round(True)
        if told.total:
            with self._anchors_lock:
                _wait(self._swapped)
                self.anchors.step(0, {name: self._difference[name] for name in self._names})
                for name, anchor in self.anchors.buffers.items():
                    anchor.sub_(self._difference[name])
                self.landed += 1
        if takes_part and (is_refused or told.total):
            self._correct(is_refused)
        with self.pace.changed:
            self._landed = self._staging.hand_over(()).event
        self.ranks = told.ranks or self.ranks

    def _begin(self) -> None:
        if not self.pace.is_dropped:
            self._is_over = False
            self._future = self.lane.submit(partial(_round, weakref.ref(self)), self.pace.wait)

    def _go_on(self, ended: Future[None]) -> None:
        """Go on after a round that did not begin the next one; raise its error unless other ranks are enough."""
        error: Exception | None = None
        try:
            ended.wait()
        except Exception as raised:
            error = raised
        try:
            if self._members is not None and error is not None:
                self.lane = self._members.regroup(self.lane, error, lambda: self._finished)
            elif self._members is not None:
                self.lane = self._members.admit(self.lane, lambda: self._finished)
            elif error is not None:
                raise error
        finally:
            self._begin()

    def _end(self) -> None:
        """Wait until all ranks have come here, and rounds have ended on all of them at once."""
        self._is_stepping = False  # of an optimizer that raised
        self.pace.hurry(True)
        try:
            with self._timed():
                while not (self._is_over or self.pace.is_dropped):
                    ended = self._future
                    with suppress(Exception):
                        ended.wait()
                    if ended is self._future and not self._is_over:  # a round begins the next one before it is done
                        self._go_on(ended)
        finally:
            self.pace.hurry(False)

    def _take_anchors(self) -> None:
        """Replace the parameters by the anchors; while no round is made."""
        _wait(self._landed)
        anchored = self._anchored()
        for name, local in self._locals().items():
            local.copy_(anchored[name])
        self._is_waiting = self._replaces = False
        self._trained = self._staging.hand_over(())

    def _locals(self) -> dict[str, Tensor]:
        """Return parameters and buffers, in the same memory; the anchor of a buffer that is gone."""
        found = {name: self.anchors.local(name) for name in self._names}
        there = self._buffers() if self.anchors.buffers else {}
        for name, anchor in self.anchors.buffers.items():
            buffer = there.get(name)
            found[name] = anchor if buffer is None or buffer.shape != anchor.shape else buffer.detach()
        return found

    def _anchored(self) -> dict[str, Tensor]:
        return {**{name: self.anchors.anchors[name].detach() for name in self._names}, **self.anchors.buffers}

    def _take_copy(self) -> int:
        """Copy what this rank has, with the correction that waits; return its steps since the last copy."""
        for name, local in self._locals().items():
            copy = self._copy[name].copy_(self._correction[name] if self._replaces else local)
            if self._is_waiting and not self._replaces:
                copy.add_(self._correction[name])
        self._copied = self._staging.hand_over(()).event
        steps, self.pace.seen = self.pace.steps - self.pace.seen, self.pace.steps
        return steps

    def _subtract(self, takes_part: bool) -> None:
        """Write the differences of the anchors and the copies, or zeros.

        In a table a difference of which ``mix`` rounds to nothing counts as none: it would never become zero, and every
        row that was ever touched would travel in every round.
        """
        locals_ = self._locals()
        for name, anchor in self._anchored().items():
            difference = self._difference[name]
            if not takes_part:
                difference.zero_()
                continue
            dtype = locals_[name].dtype
            torch.sub(anchor if dtype == anchor.dtype else anchor.to(dtype), self._copy[name], out=difference)
            if name in self._tables:
                least = torch.finfo(dtype).eps / self._recipe.mix
                difference.masked_fill_(difference.abs() <= anchor.abs() * least, 0.0)

    def _correct(self, is_refused: bool) -> None:
        """Have this rank go by ``mix`` from its copies to the anchors, or take the anchors."""
        for name, anchor in self._anchored().items():
            copy = self._copy[name]
            copy.copy_(anchor) if is_refused else torch.sub(anchor, copy, out=copy).mul_(self._recipe.mix)
        with self.pace.changed:
            if self._is_waiting and not is_refused:
                for name, correction in self._correction.items():
                    correction.add_(self._copy[name])
            else:
                self._correction, self._copy = self._copy, self._correction
            self._is_waiting, self._replaces = True, self._replaces or is_refused
            self._landed = self._staging.hand_over(()).event

    def _apply(self) -> None:
        """Add the correction to the parameters; on the thread of training."""
        if self._is_waiting:
            _wait(self._landed)
            self.refusals += self._replaces
            for name, local in self._locals().items():
                correction = self._correction[name]
                local.copy_(correction) if self._replaces else local.add_(correction)
            self._is_waiting = self._replaces = False
        self._trained = self._staging.hand_over(())

    def _take_furthest(self, lane: Lane) -> None:
        """Take the anchors of the rank with the most rounds, in a job of the lane."""
        channel = lane.channel(Subject("anchors of saved states", "rounds"))
        rounds = [int(one) for (one,) in channel.gather_numbers([self.landed])]
        done = max(rounds)
        behind = frozenset(rank for rank, count in enumerate(rounds) if count < done)
        if not behind:
            return
        with self._staging.taking(self._trained):
            state = hand_over(lane, Roll(rounds.index(done), behind, done), self.anchors.state_dict())
            if lane.rank in behind:
                self.anchors.check_state(state)
                self.anchors.load_state_dict(state)
                self.landed = done
            self._landed = self._staging.hand_over(()).event

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count what training waits for."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.exposed_seconds += time.perf_counter() - started


def _round(rounds: weakref.ref[ShadowRounds], lane: Lane) -> None:
    found = rounds()
    if found is not None and not found.pace.is_dropped:
        found.round(lane)


def _wait(event: Any) -> None:
    """Have the current stream wait for an event of another one; nothing on the CPU."""
    if event is not None:
        event.wait()
