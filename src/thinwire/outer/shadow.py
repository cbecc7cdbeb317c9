"""ShadowSync: rounds in the background, as often as the network allows, none of which blocks a step of training."""

import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.comm.channel import Subject
from thinwire.comm.lane import Lane
from thinwire.errors import ThinwireError
from thinwire.outer.average import RoundReport
from thinwire.outer.members import Members, Roll, hand_over
from thinwire.outer.pace import BYTE_SECONDS, RoundPace
from thinwire.outer.rounds import ASKED, ENDING, Rounds


class ShadowRounds(Rounds):
    """Rounds in the background of training.

    Each round is a job of the lane, which submits the next one, so jobs match however many steps ranks make. It copies
    the parameters between two steps, averages and steps the anchor, and leaves ``mix * (anchor - copy)`` as a
    correction. The hook of the optimizer adds that to the parameters, on the thread of training: whatever steps were
    made since the copy stay. A round that begins within a step has the hook take the copy: with a closure forward and
    backward are within it too.

    Raises:
        ValueError: rounds are as seldom as the timeout or more so.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        recipe, limit = self._recipe, self.lane.timeout_seconds
        if recipe.every_seconds >= limit:
            raise ValueError(
                f"every_seconds={recipe.every_seconds:g} is not less than the {limit:g} s for which ranks wait for each"
                " other: pass a longer timeout= to attach"
            )
        # Of the round whose means not all ranks may have: whether this rank was refused, and took part.
        self._middle: tuple[RoundReport, bool, bool] | None = None
        self._before: int | None = None  # steps of this rank at the copy before that of the round that is made
        self._is_over = False  # whether all ranks have ended
        self._names = self.anchors.trained(0)
        self._copy, self._correction, self._difference = (self._zeros() for _ in range(3))
        self._is_waiting = False  # whether there is a correction that is not applied yet
        self._replaces = False  # whether it replaces the parameters, which were not finite
        self._is_stepping = False
        self._is_copy_due = False  # whether the thread of training is to take it, at the end of its step
        self._anchors_lock = threading.Lock()  # held while anchors are stepped, or read by training
        self._round_lock = threading.Lock()  # held for a round
        self._entered = self.lane  # the one of whose rounds anything is kept
        self._turn = threading.Lock()  # held while a round begins, is kept or ends, or another lane takes over
        self._trained = self._staging.hand_over(())  # behind the last step
        self._copied = self._landed = self._swapped = self._trained.event  # behind the last of each
        self.pace = RoundPace(recipe.every_seconds, limit)

    def meet_in(self, lane: Lane, members: Members | None) -> None:
        super().meet_in(lane, members)
        self._begin()

    def enter(self, lane: Lane, roll: Roll) -> None:
        with self._turn:
            self._entered = lane
            if self._round_lock.locked():  # by a thread that waits in the lane before, and may come back at any time
                self._round_lock, self._difference = threading.Lock(), self._zeros()
        super().enter(lane, roll)

    @property
    def steps(self) -> int:
        return self.pace.steps

    def check_start(self, optimized: Iterable[Tensor], is_loaded: bool) -> None:
        with self._anchors_lock:
            if not self.landed:
                super().check_start(optimized, is_loaded)
                self._swapped = self._staging.hand_over(()).event  # a round that began before writes behind this

    def before_step(self) -> None:
        """Keep copies from being taken while the optimizer writes.

        Raises:
            ValueError: a parameter is trained that was frozen when the rounds began.
        """
        super().before_step()
        if self.anchors.trained(0) != self._names:
            raise ValueError(
                "a parameter was frozen at attach and is trained now, at which ranks in the background cannot agree on"
                " a round: detach on all ranks, and attach again"
            )
        with self._timed(), self.pace.changed:
            self._is_stepping = True
            _wait(self._copied)

    def after_step(self) -> None:
        with self._timed(), self.pace.changed:
            self._apply()
            self._is_stepping = False
            self.pace.step()
            if self._is_copy_due:
                self._take_copy()
        if (future := self._future).done() and future is self._future:  # a round begins the next one before it is done
            with self._timed():
                self._go_on_after(future)

    def synchronize(self) -> None:
        """End rounds on all ranks, which take the anchors. Then rounds go on."""
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
                _wait(self._landed)
                stack.enter_context(torch.no_grad())
                stack.enter_context(self.anchors.swapped())
                self._swapped = self._staging.hand_over(()).event
            try:
                with torch.enable_grad():
                    yield
            finally:
                with self.pace.changed:
                    stack.close()
                    self._trained = self._staging.hand_over(())

    @contextmanager
    def still(self) -> Iterator[None]:
        """Keep the state of this rank as it is between two rounds. Each rank may do so at another round."""
        lock = self._round_lock
        with self._timed():
            if not lock.acquire(timeout=self.lane.timeout_seconds):
                raise ThinwireError(f"a round did not end within {self.lane.timeout_seconds:g} s")
        try:
            _wait(self._landed)
            yield
        finally:
            self._trained = self._staging.hand_over(())
            lock.release()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """End rounds on all ranks, all of which call it, and go on afterwards."""
        self._end()
        try:
            yield
        finally:
            self._trained = self._staging.hand_over(())
            self._begin()

    def drop(self) -> None:
        self.pace.drop()

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
        super().check_state(state)
        for name, correction in state["correction"].items():
            if name not in self._correction or correction.shape != self._correction[name].shape:
                raise ValueError(f"the state has a correction of {name!r}, which this model has not in that shape")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Ranks save at rounds of their own, so all take the anchors of the one that was furthest."""
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
        lane.check("rounds in the background")
        started, traffic = time.thread_time(), lane.exchange.traffic
        moved = traffic.sent_bytes + traffic.received_bytes
        with self._round_lock, torch.no_grad(), ExitStack() as stack:
            with self.pace.changed:
                self._before, self._is_copy_due = self.pace.seen, True
                self.pace.changed.wait_for(self._may_go_on, self.pace.patience)
                stack.enter_context(self._staging.taking(self._trained))
                if self._is_copy_due and not (self._is_stepping or self.anchors.are_swapped):
                    self._take_copy()
                takes_part, self._is_copy_due = not self._is_copy_due, False
                flag, steps = ENDING * self.pace.is_ending, self.pace.seen - self._before
            self._subtract(takes_part)
            parameters = {name: self._difference[name] for name in self._names}
            buffers = [self._difference[name] for name in self.anchors.buffers]

            def keep(report: RoundReport) -> None:
                with self._in_turn(lane):
                    self._middle = report, lane.rank in report.refused, takes_part
                    self._finished += 1

            try:
                report = self._average(lane, parameters, steps, buffers, flag, keep)
            except Exception:
                with self._in_turn(lane):
                    if self._middle is None:
                        self._take_back()
                raise
            with self._in_turn(lane):
                self._commit()
        moved = traffic.sent_bytes + traffic.received_bytes - moved
        self.pace.end_round(time.thread_time() - started + BYTE_SECONDS * moved)
        self._is_over = all(flag & ENDING for flag in report.flags)
        if not (self._is_over or any(flag & ASKED for flag in report.flags)):
            self._begin()

    @contextmanager
    def _in_turn(self, lane: Lane) -> Iterator[None]:
        """Keep or end a round of a lane, unless another one has taken over, which settled what this one left."""
        with self._turn:
            if lane is not self._entered:
                raise ThinwireError("a round of a lane before came back")
            yield

    def _settle(self, done: int) -> None:
        if self._middle is not None and self._finished <= done:
            self._commit()
        else:
            self._take_back()

    def _take_back(self) -> None:
        """Leave a round that was not completed as if it had not begun."""
        if self._before is not None:
            self.averager.finish_round(False)
            self.pace.seen, self._before, self._middle = self._before, None, None

    def _passed_on(self, done: int) -> dict[str, Any]:
        return {**self.anchors.state_dict(), "rounds": self.landed}

    def _take(self, state: Mapping[str, Any], began: bool) -> None:
        self.anchors.load_state_dict(state)
        self.lost_steps += self.pace.steps - self.pace.seen
        self.pace.seen, self.landed = self.pace.steps, int(state["rounds"])
        self._take_anchors()

    def _commit(self) -> None:
        """Step the anchors by the means that all ranks have, and leave the correction."""
        assert self._middle is not None, "a round was made"
        report, is_refused, takes_part = self._middle
        self._middle = self._before = None
        self.averager.finish_round(True)
        if report.total:
            with self._anchors_lock:
                _wait(self._swapped)
                self.anchors.step(0, {name: self._difference[name] for name in self._names})
                for name, anchor in self.anchors.buffers.items():
                    anchor.sub_(self._difference[name])
                self._landed = self._staging.hand_over(()).event  # `swapped` may read the anchors before the correction
                self.landed += 1
        if takes_part and (is_refused or report.total):
            self._correct(is_refused)
        with self.pace.changed:
            self._landed = self._staging.hand_over(()).event
        self.ranks = report.ranks or self.ranks

    def _begin(self) -> None:
        if not self.pace.is_dropped:
            with self._turn:  # else this thread notes its round after the lane has made it, and noted the next one
                self._is_over = False
                self._future = self.lane.submit(partial(_round, weakref.ref(self)), self.pace.wait)

    def _go_on_after(self, ended: Future[None]) -> None:
        """Go on after a round that did not begin the next one; raise its error unless other ranks are enough."""
        error: Exception | None = None
        try:
            ended.wait()
        except Exception as raised:
            error = raised
        try:
            self._go_on(error)
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
                    if ended is self._future and not self._is_over:  # as in `after_step`
                        self._go_on_after(ended)
        finally:
            self.pace.hurry(False)

    def _take_anchors(self) -> None:
        """Replace the parameters by the anchors; while no round is made."""
        _wait(self._landed)
        self.anchors.replace()
        self._is_waiting = self._replaces = False
        self._trained = self._staging.hand_over(())

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(anchor) for name, (_, anchor) in self.anchors.pairs().items()}

    def _pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return what rounds average, with its anchors."""
        return {name: pair for name, pair in self.anchors.pairs().items() if name in self._copy}

    def _may_go_on(self) -> bool:
        """Return whether a round need not wait for the end of a step, in which an optimizer may call a closure."""
        return not (self._is_stepping and self._is_copy_due) or self.pace.is_dropped

    def _take_copy(self) -> None:
        """Copy what this rank has, with the correction that waits, and note that its steps are seen."""
        for name, (local, _) in self._pairs().items():
            copy = self._copy[name].copy_(self._correction[name] if self._replaces else local)
            if self._is_waiting and not self._replaces:
                copy.add_(self._correction[name])
        self._trained = self._staging.hand_over(())
        self._copied = self._trained.event
        self.pace.seen, self._is_copy_due = self.pace.steps, False

    def _subtract(self, takes_part: bool) -> None:
        """Write the differences of the anchors and the copies, or zeros.

        In a table a difference of which ``mix`` rounds to nothing counts as none: it would never become zero, and every
        row that was ever touched would travel in every round.
        """
        for name, (local, anchor) in self._pairs().items():
            difference = self._difference[name]
            if not takes_part:
                difference.zero_()
                continue
            dtype = local.dtype
            torch.sub(anchor if dtype == anchor.dtype else anchor.to(dtype), self._copy[name], out=difference)
            if self.averager.is_table(name):
                least = torch.finfo(dtype).eps / self._recipe.mix
                difference.masked_fill_(difference.abs() <= anchor.abs() * least, 0.0)

    def _correct(self, is_refused: bool) -> None:
        """Have this rank go by ``mix`` from its copies to the anchors, or take the anchors."""
        for name, (_, anchor) in self._pairs().items():
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
        _wait(self._landed)  # behind a round that had nothing to correct, too: the next copy overwrites what it reads
        if self._is_waiting:
            self.refusals += self._replaces
            for name, (local, anchor) in self._pairs().items():
                if local is not anchor:  # as for a buffer that is gone
                    local.copy_(self._correction[name]) if self._replaces else local.add_(self._correction[name])
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


def _round(rounds: weakref.ref[ShadowRounds], lane: Lane) -> None:
    running = rounds()
    if running is not None and not running.pace.is_dropped:
        running.round(lane)


def _wait(event: Any) -> None:
    """Have the current stream wait for an event of another one; nothing on the CPU."""
    if event is not None:
        event.wait()
