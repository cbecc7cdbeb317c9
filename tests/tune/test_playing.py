"""Arms are played as the trial says, on the seconds of the slowest rank."""

from __future__ import annotations

from pathlib import Path
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


class Host:
    """Steps of a second that wait half of it, on a host whose work waits for processors for a share of the time."""

    def __init__(self, share: float, pressure: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share, self.pressure, self.now, self.lane = share, pressure, 0.0, Ranks()
        monkeypatch.setattr(playing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(playing, "monotonic", lambda: 100.0 + 3.0 * self.now)  # others train there by turns
        monkeypatch.setattr(playing, "PRESSURE", pressure)
        self.work(0.0)
        lane: Any = self.lane
        self.trial = Trial(["stock", "ours"], 1.5)
        self.playing = Playing(lane.agree, "sums", self.trial, lambda arm, stands: None)

    def work(self, seconds: float) -> None:
        self.now += seconds
        total = round(1e6 * (7.0 + 3.0 * self.share * self.now))
        self.pressure.write_text(f"some avg10=1.00 avg60=2.00 avg300=3.00 total={total}\nfull avg10=0.00 total=999\n")

    def watch(self, steps: int) -> None:
        for _ in range(steps):
            self.playing.finish_step(0.5)
            self.work(1.0)
            if not self.trial.is_watching:
                return


@pytest.mark.parametrize("share", [0.46, 0.5, 0.7, 1.0])
def test_who_waits_for_processors_does_not_wait_for_the_network(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(share, tmp_path / "cpu", monkeypatch)
    host.watch(600)
    assert host.trial.is_watching
    assert len(host.lane.gathered) > 5
    assert host.lane.gathered == [
        [pytest.approx(max(0.0, 0.5 - share) * seconds), seconds] for _, seconds in host.lane.gathered
    ]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_what_is_left_begins_a_test(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(share, tmp_path / "cpu", monkeypatch)
    host.watch(600)
    assert not host.trial.is_watching
    waited = sum(waited for waited, _ in host.lane.gathered)
    assert waited == pytest.approx((0.5 - share) * sum(seconds for _, seconds in host.lane.gathered))


@pytest.mark.parametrize("text", [None, "", "some avg10=0.00", "some total=", "some total=much", "some total=0"])
def test_a_system_that_does_not_say_it_changes_nothing(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it if it did so before, or counts from zero again."""
    host = Host(0.0, tmp_path / "cpu", monkeypatch)
    monkeypatch.setattr(playing, "PRESSURE", tmp_path / "other")
    if text is not None:
        (tmp_path / "other").write_text(text)
    host.watch(20)
    assert not host.trial.is_watching
    assert {waited / seconds for waited, seconds in host.lane.gathered} == {0.5}


def test_a_tests_pairs_are_not_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms share the processors, so what they lack slows all of them."""
    host = Host(0.0, tmp_path / "cpu", monkeypatch)
    host.watch(600)
    host.lane.gathered.clear()
    host.share = 1.0
    for _ in range(40):
        host.playing.finish_step(0.5)
        host.work(1.0)
    pairs = [numbers for numbers in host.lane.gathered if len(numbers) > 1]
    assert pairs
    assert all(abs(second) == 1.0 for numbers in pairs for second in numbers)
