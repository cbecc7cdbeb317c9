"""Arms are played as the trial says, on the seconds of the slowest rank."""

from __future__ import annotations

from typing import Any

import pytest
from torch.futures import Future

from thinwire.tune import playing
from thinwire.tune.playing import Playing
from thinwire.tune.trial import Trial


class Ranks:
    """The lane of rank 0 of two, whose peer takes twice its seconds."""

    def __init__(self) -> None:
        self.gathered: list[list[float]] = []
        self.late: list[tuple[Future[list[list[float]]], list[list[float]]]] = []

    def agree(self, what: str, numbers: list[float]) -> list[list[float]]:
        self.gathered.append(list(numbers))
        return [list(numbers), [2 * number for number in numbers]]

    def ask(self, what: str, numbers: list[float]) -> Future[list[list[float]]]:
        self.late.append((Future(), self.agree(what, numbers)))
        return self.late[-1][0]


@pytest.mark.parametrize("how", ["agree", "ask"])
@pytest.mark.parametrize("seconds", [{"stock": 1.0, "ours": 0.5}, {"stock": 1.0, "ours": 1.5}])
def test_the_faster_arm_stays(how: str, seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turned = [0.0], list[tuple[str, bool]]()
    monkeypatch.setattr(playing.time, "perf_counter", lambda: clock[0])
    lane: Any = Ranks()
    trial = Trial(["stock", "ours"])
    played = Playing(getattr(lane, how), "sums", trial, lambda arm, stands: turned.append((arm, stands)))
    assert turned[0][0] in seconds
    for _ in range(150):
        played.finish_step()
        for answer, numbers in lane.late:  # during the step after the question
            assert turned[-1] == (trial.arms[trial.standing], True)
            answer.set_result(numbers)
        lane.late.clear()
        clock[0] += seconds[turned[-1][0]]
    assert turned[-1] == (min(seconds, key=lambda arm: seconds[arm]), True)
    assert lane.gathered


def test_a_step_that_is_forgotten_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(playing.time, "perf_counter", lambda: clock[0])
    lane: Any = Ranks()
    played = Playing(lane.agree, "sums", Trial(["stock", "ours"]), lambda arm, stands: None)
    for _ in range(10):
        played.finish_step()
        clock[0] += 1000.0
        played.forget()
    assert not lane.gathered
    assert played.trial.steps == 0


def test_the_step_in_which_a_state_is_loaded_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes back to a checkpoint has restored models and optimizers in it."""
    clock, turned = [0.0], list[str]()
    monkeypatch.setattr(playing.time, "perf_counter", lambda: clock[0])
    lane: Any = Ranks()
    played = Playing(lane.agree, "sums", Trial(["stock", "ours"]), lambda arm, _: turned.append(arm))
    for _ in range(3):
        played.finish_step()
        clock[0] += 1.0
    state = {**played.trial.state_dict(), "standing": "ours", "left": 5}
    clock[0] += 1000.0
    played.load_state_dict(state)
    played.finish_step()
    assert turned[-1] == "ours"
    assert played.trial.state_dict() == state, "neither a step nor regret"
