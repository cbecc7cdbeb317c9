"""Play the arms of a trial in the steps of a training: time them, gather their seconds, and turn to the next arm."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from torch.futures import Future

from thinwire.kernels import dispatch
from thinwire.tune.trial import Trial

Numbers = list[list[float]] | Future[list[list[float]]]
Agree = Callable[[str, Sequence[float]], Numbers]
SETUP_SECONDS = 1.5
"""Seconds that the first sum of ours costs a rank: 1.2 s of processor and 150 MB for numba and its kernels, and 0.3 s
for the measurement of the link."""
PRESSURE = Path(os.environ.get("THINWIRE_PRESSURE", "/proc/pressure/cpu"))
"""Here Linux counts the microseconds for which work waited for a processor of this host, over its busy processors."""


class Playing:
    """Plays a trial. All ranks call `finish_step` after every counted step.

    Args:
        agree: returns the numbers of all ranks, as `Lane.agree` does, or the own ones only; of a future, as that of
            `Lane.ask`, they are wanted after one more step of the standing arm.
        what: what is decided, for messages of the lane.
        turn: has the next step play the arm of this name; also whether it stands, and not only for a pair.
    """

    def __init__(self, agree: Agree, what: str, trial: Trial, turn: Callable[[str, bool], None]) -> None:
        self.trial = trial
        self._agree, self._what, self._turn = agree, what, turn
        self._since: float | None = None
        self._stalled = stalled()
        self._unready = 0
        self._playing = "", False
        self._answer: Numbers | None = None
        self.turn()

    def finish_step(self, waited: float = 0.0) -> None:
        """Decide what the next step plays.

        Args:
            waited: seconds for which this rank waited for the network, or for a peer that waited for a processor.
        """
        answer, self._answer = self._answer, None
        if answer is None and self._since is not None:
            now, (_, stands) = time.perf_counter(), self._playing
            is_typical = stands or (dispatch.unready_calls() == self._unready and not dispatch.is_compiling())
            numbers = self.trial.note(now - self._since, waited, is_typical)
            if self.trial.is_idle:
                self._since = now
                return
            if numbers is not None:
                numbers = self._of_network(*numbers) if self.trial.is_watching else numbers
                answer = self._agree(f"seconds of steps, {self._what}", numbers)
                if not isinstance(answer, list):
                    self._answer, answer = answer, None
        if answer is not None:
            self.trial.learn(answered(answer))
        self.turn()
        self._unready = dispatch.unready_calls()
        self._since = time.perf_counter()

    def turn(self) -> None:
        """Have the next step play the arm of the trial."""
        playing = self.trial.arm, not self.trial.is_timed
        if playing != self._playing:
            self._playing = playing
            self._turn(*playing)

    def _of_network(self, waited: float, seconds: float) -> list[float]:
        """Return the numbers of a watch less what ranks waited for processors: a shorter message would not save that.

        On 2 cores steps of 4 ranks on loopback waited half of their time, and work for a core in 70 % of it; over links
        of 100 Mbit/s they waited 83 %, and work in 18 %, where 77 % were due to the links.
        """
        before, self._stalled = self._stalled, stalled()
        passed, short = (now - then for now, then in zip(self._stalled, before, strict=True))
        return [max(0.0, waited - seconds * max(0.0, short) / max(passed, 1e-9)), seconds]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the trial of another run, see `Trial.state_dict`."""
        self.trial.load_state_dict(state)
        self.forget()

    def forget(self) -> None:
        """Do not time the step that runs, and play what stands: there may be no more steps for a while."""
        self._since = None
        self.trial.interrupt()
        self.turn()


def answered(numbers: Numbers) -> list[list[float]]:
    """Return numbers, once they are there."""
    return numbers if isinstance(numbers, list) else numbers.wait()


def stalled() -> tuple[float, float]:
    """Return a time, and for how long work has waited for a processor by then: 0 s where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return monotonic(), int(PRESSURE.read_text().split("total=")[1].split()[0]) / 1e6
    return monotonic(), 0.0
