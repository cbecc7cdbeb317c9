"""Play the arms of a trial in the steps of a training: time them, gather their seconds, and turn to the next arm."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import nan
from pathlib import Path
from threading import get_native_id
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
RUN_DELAY_VARIABLE = "THINWIRE_RUN_DELAY"
"""The variable that leaves delays out of account where it is 0."""


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
        self._delayed = run_delay()
        self._unready = 0
        self._playing = "", False
        self._answer: Numbers | None = None
        self.turn()

    def finish_step(self, waited: float = 0.0) -> None:
        """Decide what the next step plays.

        Args:
            waited: seconds for which this rank waited for the network, or for who waited for a processor.
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

    def _of_network(self, waited: float, seconds: float, _: float) -> list[float]:
        """Return the numbers of a watch without what threads were delayed: shorter messages would not save that.

        On 2 cores steps of 4 ranks on loopback waited 0.36 to 0.61 of their time, and threads were delayed for longer.
        Over links of 100 Mbit/s they waited 0.84, and threads were delayed for 0.14; 0.74 were due to the links.
        """
        before, self._delayed = self._delayed, run_delay()
        passed, delayed = (now - then for now, then in zip(self._delayed, before, strict=True))
        off = min(waited, max(0.0, seconds * delayed / max(passed, 1e-9)))  # 0 of nan
        return [waited - off, seconds, off]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the trial of another run, see `Trial.state_dict`."""
        self.trial.load_state_dict(state)
        self._answer = None
        self.forget()

    def forget(self) -> None:
        """Do not time the step that runs, and play what stands: there may be no more steps for a while."""
        self._since = None
        self.trial.interrupt()
        self.turn()


def answered(numbers: Numbers) -> list[list[float]]:
    """Return numbers, once they are there."""
    return numbers if isinstance(numbers, list) else numbers.wait()


def run_delay() -> tuple[float, float]:
    """Return a time, and for how long the threads that train and send have waited for a processor, nan if not known.

    These are the caller's and Gloo's. Others compute, beside a thread that is the caller's.
    """
    with suppress(OSError, ValueError, IndexError):
        if os.environ.get(RUN_DELAY_VARIABLE) != "0":
            mine, threads = str(get_native_id()), Path("/proc/self/task").iterdir()
            busy = [one for one in threads if one.name == mine or "gloo" in (one / "comm").read_text()]
            return monotonic(), sum(int((one / "schedstat").read_text().split()[1]) for one in busy) / 1e9
    return monotonic(), nan
