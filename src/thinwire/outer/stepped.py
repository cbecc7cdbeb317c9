"""Rounds in step with training: fragments take turns, are launched after counted inner steps, and land later."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.futures import Future

from thinwire.comm.channel import Subject
from thinwire.comm.lane import Lane
from thinwire.errors import ThinwireError
from thinwire.outer.anchors import Anchors
from thinwire.outer.average import RoundReport, submit
from thinwire.outer.inner import InnerGroup
from thinwire.outer.rounds import ASKED, ENDING, Rounds

Buffers = Mapping[str, Tensor | None]


@dataclass(eq=False)
class Flight:
    """A fragment between its launch and its landing.

    Args:
        fragment, is_plain: its number, and whether its parameters are averaged without the outer optimizer.
        lands_at: inner step after which it lands.
        differences, buffers: by name; their means once it ``is_there``.
        steps: inner steps of this rank that it stands for.
        number: how many were launched before.
        flag: that of this rank.
    """

    fragment: int
    is_plain: bool
    lands_at: int
    differences: dict[str, Tensor]
    buffers: Buffers
    steps: int = 0
    number: int = 0
    flag: int = 0
    is_refused: bool = False  # because the parameters of this rank were not finite
    counts: bool = True  # any rank had a mean to give
    flags: tuple[int, ...] = ()  # of all ranks
    generation: int = 0  # of the members whose lane averages it
    means: tuple[dict[str, Tensor], Buffers] = field(default_factory=lambda: ({}, {}))  # written by its job
    report: tuple[RoundReport, list[str]] | None = None  # result of the job: with the buffers that were averaged
    is_committed: bool = False  # all ranks have the means
    future: Future[tuple[tuple[RoundReport, list[str]], Sequence[Tensor]]] | None = None

    @property
    def is_there(self) -> bool:
        return self.future is None


class SteppedRounds(Rounds):
    """Rounds in step with training.

    All ranks launch the same fragments in the same order, whatever steps they have made, so their jobs match.

    Args:
        inner: the ranks that train as one with this one, or None.
    """

    def __init__(self, *parts: Any, inner: InnerGroup | None = None) -> None:
        super().__init__(*parts)
        self._inner = inner
        self._flights: list[Flight] = []
        self._since = [0] * self._recipe.fragments  # inner steps since the last launch
        self._steps = self._position = 0  # inner steps, and steps of the schedule
        self._launched = 0
        self._joined_at: int | None = None  # inner step of the others at which this rank took their state

    @property
    def steps(self) -> int:
        return self._steps

    def after_step(self) -> None:
        self._steps += 1
        self._position += 1
        self._since = [count + 1 for count in self._since]
        for flight in list(self._flights) if self._inner is None else ():  # those wait together
            if flight.future is not None and flight.future.done():
                self._wait(flight)
        if self._members is not None and self.lane.is_broken:
            self._go_on(ThinwireError("another rank is gone"))
        self._land_due()
        while self._launched < self._recipe.launched(self._position):
            self._launch()
        self._land_due()

    def synchronize(self) -> None:
        """End all rounds now. Ranks that have none left go on with rounds, for which they have no steps, until all are
        here."""
        self.land_all()
        together = 0
        while together < self._recipe.fragments:
            flight = self._launch(ENDING)
            self._land(flight, 1.0)
            together = together + 1 if flight.flags and all(flag & ENDING for flag in flight.flags) else 0
        self._position = self._recipe.step_of(self._launched)

    def land_all(self) -> None:
        while self._flights:
            self._land(self._flights[0], self._recipe.mix)

    def swapped(self) -> AbstractContextManager[None]:
        return self.anchors.swapped()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the means of what is in flight, for which it waits."""
        for flight in self._flights:
            self._wait(flight)
        return self._passed_on(self._launched)

    def check_state(self, state: Mapping[str, Any]) -> None:
        if self._joined_at is not None and self._joined_at == self.steps:
            raise ValueError(
                "this rank joined others and has their state, which an older one must not replace: restore model and"
                " the optimizer before attach, and the outer loop where all ranks begin"
            )
        super().check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for flight in self._flights:
            self._wait(flight)
        self.anchors.load_state_dict(state)
        self._steps, self._position = int(state["steps"]), int(state["position"])
        self._launched = self._finished = int(state["launched"])
        self._since = list(state["since"])
        self._flights = [_restored(one, self.anchors) for one in state["flights"]]

    def _launch(self, flag: int = 0) -> Flight:
        """Send the differences of the next fragment, and with the first one buffers, on their way."""
        recipe = self._recipe
        fragment = self._launched % recipe.fragments
        is_plain = self._launched < recipe.start_step * recipe.fragments
        lands_at = self.steps + (0 if is_plain or flag & ENDING else recipe.delay)
        own = self.anchors.difference(fragment), self.anchors.buffer_difference() if fragment == 0 else {}
        flight = Flight(fragment, is_plain, lands_at, *own, self._since[fragment], self._launched, flag)
        self._since[fragment] = 0
        self._send(flight)
        self._flights.append(flight)
        self._launched += 1
        return flight

    def _send(self, flight: Flight) -> None:
        """Have the lane average a flight; copies of its tensors where it may have to be sent again."""
        differences, buffers = flight.differences, flight.buffers
        if self._members is not None:
            differences = {name: tensor.clone() for name, tensor in differences.items()}
            buffers = {name: None if tensor is None else tensor.clone() for name, tensor in buffers.items()}
            flight.generation = self._members.number
        flight.means = differences, buffers
        if self._inner is not None and not self._inner.speaks:
            flight.future = Future()
            return

        def run(lane: Lane) -> tuple[RoundReport, list[str]]:
            moved = self._moved(lane, buffers) if buffers else []

            def keep(report: RoundReport) -> None:
                flight.report, self._finished = (report, moved), flight.number + 1

            sent = [*_chosen(buffers, moved).values()]
            try:
                report = self._average(lane, differences, flight.steps, sent, flight.flag, keep, flight.is_plain)
            except Exception:
                if flight.report is None:
                    self.averager.finish_round(False)  # the differences are still in the parameters
                raise
            self.averager.finish_round(True)
            flight.is_committed = True
            return report, moved

        sent = [tensor for tensor in (*differences.values(), *buffers.values()) if tensor is not None]
        flight.future = submit(self.lane, self._staging, sent, run)

    def _moved(self, lane: Lane, buffers: Buffers) -> list[str]:
        """Return the buffers that a rank has changed, and that all ranks have as they were when they were anchored."""
        channel = lane.channel(Subject("buffers of a round", "\n".join(buffers)))
        mine = [-1.0 if entry is None else float(entry.ne(0).any()) for entry in buffers.values()]
        with self.averager.booking(lane, len(mine)):
            numbers = list(zip(*channel.gather_numbers(mine), strict=True))
        pairs = zip(buffers, numbers, strict=True)
        return [name for name, of_ranks in pairs if max(of_ranks) > 0 and min(of_ranks) >= 0]

    def _land_due(self) -> None:
        for flight in [flight for flight in self._flights if flight.lands_at <= self.steps]:
            self._land(flight, self._recipe.mix)

    def _land(self, flight: Flight, mix: float) -> None:
        """Step the anchors of a fragment by its means, and mix them in."""
        self._wait(flight)
        if flight not in self._flights:
            return  # this rank was left out, and has gone on from what others have
        self._flights.remove(flight)
        self.refusals += flight.is_refused  # counted here: until it lands, steps fill moments with NaN
        weight = 1.0 if flight.is_plain or flight.is_refused else mix
        if flight.counts:
            self.anchors.step(flight.fragment, flight.differences, flight.is_plain)
        self.anchors.land_buffers(_chosen(flight.buffers, flight.buffers), weight)
        names = self.anchors.trained(flight.fragment) if flight.is_refused else flight.differences  # of then
        self.anchors.mix(names, weight)
        self.landed += 1
        is_of_now = self._members is not None and flight.generation == self._members.number
        if is_of_now and any(flag & ASKED for flag in flight.flags) and not all(flag & ENDING for flag in flight.flags):
            self._go_on()

    def _wait(self, flight: Flight) -> None:
        """Wait for the means of a launched fragment."""
        try:
            with self._timed():
                while not flight.is_there and flight in self._flights:
                    try:
                        self._accept(flight, *self._report_of(flight))
                    except Exception as error:
                        self._go_on(error)
        except Exception:
            self._drop_failed()
            raise

    def _report_of(self, flight: Flight) -> tuple[RoundReport, list[str]]:
        """Return what all ranks know after a round, and which buffers were averaged; on all ranks that train as one."""

        def numbers() -> list[float]:
            assert flight.future is not None, "it is waited for once"
            (report, moved), _ = flight.future.wait()
            return [*report.numbers(), *(float(name not in moved) for name in flight.buffers)]

        count = 3 * self.lane.world_size
        known = numbers() if self._inner is None else self._inner.wait(numbers, count + len(flight.buffers))
        moved = [name for name, stays in zip(flight.buffers, known[count:], strict=True) if not stays]
        if self._inner is not None:
            self._inner.share([*flight.differences.values(), *_chosen(flight.buffers, moved).values()])
        return RoundReport.of(known[:count]), moved

    def _accept(self, flight: Flight, report: RoundReport, moved: Sequence[str]) -> None:
        """Record the means of a flight."""
        flight.future, flight.flags, flight.counts = None, report.flags, report.total > 0
        flight.is_refused = self.lane.rank in report.refused
        flight.differences, flight.buffers = flight.means[0], _chosen(flight.means[1], moved)
        self.ranks = report.ranks or self.ranks

    def _drop_failed(self) -> None:
        """Forget all launches that fail: later ones send what they were to send. The failure surfaces once."""
        for flight in [flight for flight in self._flights if not flight.is_there]:
            if self._inner is not None or _has_failed(flight.future):  # ranks that train as one forget the same
                self._flights.remove(flight)
                self._since[flight.fragment] += flight.steps

    def _go_on(self, error: Exception | None = None) -> None:
        super()._go_on(error)
        for flight in self._flights:
            if not flight.is_there:
                self._send(flight)

    def _settle(self, done: int) -> None:
        flights = [flight for flight in self._flights if not flight.is_there]
        middle = next((flight for flight in flights if not flight.is_committed), None)
        if middle is not None:
            self.averager.finish_round(middle.number < done)
        for flight in flights:
            if flight.number < done:
                assert flight.report is not None, "finished, so its result is known"
                self._accept(flight, *flight.report)

    def _passed_on(self, done: int) -> dict[str, Any]:
        flights = [
            {
                "fragment": flight.fragment,
                "lands_at": flight.lands_at,
                "plain": flight.is_plain,
                "means": flight.differences,
                "buffers": flight.buffers,
                "refused": flight.is_refused,
                "counts": flight.counts,
            }
            for flight in self._flights
            if flight.is_there
        ]
        return {
            "steps": self.steps,
            "position": self._position,
            "launched": done,
            "since": list(self._since),
            "flights": flights,
            **self.anchors.state_dict(),
        }

    def _take(self, state: Mapping[str, Any], began: bool) -> None:
        lost = list(self._since)
        for flight in self._flights:
            lost[flight.fragment] += flight.steps
        self.lost_steps += max(lost)
        self._flights = []
        self.load_state_dict(state)
        self._since = [0] * self._recipe.fragments
        for flight in self._flights:
            flight.is_refused = False
        self.anchors.replace()
        self._joined_at = self.steps if began else None


def _restored(saved: Mapping[str, Any], anchors: Anchors) -> Flight:
    """Return a flight whose means are there, with copies of them where the anchors are."""
    differences, buffers = (
        {name: mean.to(of[name].device, copy=True) for name, mean in saved[key].items()}
        for key, of in (("means", anchors.anchors), ("buffers", anchors.buffers))
    )
    flight = Flight(int(saved["fragment"]), bool(saved["plain"]), int(saved["lands_at"]), differences, buffers)
    flight.is_refused, flight.counts = bool(saved["refused"]), bool(saved["counts"])
    return flight


def _has_failed(future: Future[Any] | None) -> bool:
    try:
        if future is not None:
            future.wait()
    except Exception:
        return True
    return False


def _chosen(buffers: Buffers, names: Iterable[str]) -> dict[str, Tensor]:
    return {name: buffer for name in names if (buffer := buffers[name]) is not None}
