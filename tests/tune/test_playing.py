"""Arms are played as the trial says, on the seconds of the slowest rank."""

from __future__ import annotations

import threading
import time
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
from torch.futures import Future

from thinwire.tune import playing
from thinwire.tune.playing import Playing, run_delay
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


def test_an_answer_that_is_under_way_is_not_learned_over_a_loaded_state(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(playing.time, "perf_counter", lambda: clock[0])
    lane: Any = Ranks()
    played = Playing(lane.ask, "sums", Trial(["stock", "ours"]), lambda arm, stands: None)
    while not lane.late:
        played.finish_step()
        clock[0] += 1.0
    state = {**played.trial.state_dict(), "standing": "ours", "left": 5}
    played.load_state_dict(state)
    answer, numbers = lane.late[-1]
    answer.set_result(numbers)
    played.finish_step()
    assert played.trial.state_dict() == state


class Host:
    """Steps of a second that wait half of it, where threads are delayed for a share of the time."""

    def __init__(self, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share, self.now, self.delayed, self.lane = share, 0.0, 7.0, Ranks()
        monkeypatch.setattr(playing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(playing, "run_delay", lambda: (100.0 + 3.0 * self.now, self.delayed))  # others train, too
        lane: Any = self.lane
        self.trial = Trial(["stock", "ours"], 1.5)
        self.playing = Playing(lane.agree, "sums", self.trial, lambda arm, stands: None)

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.delayed += 3.0 * self.share * seconds

    def watch(self, steps: int) -> None:
        for _ in range(steps):
            self.playing.finish_step(0.5)
            self.work(1.0)
            if not self.trial.is_watching:
                return


@pytest.mark.parametrize("share", [0.46, 0.5, 0.7, 4.0])
def test_who_waits_for_processors_does_not_wait_for_the_network(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(share, monkeypatch)
    host.watch(600)
    assert host.trial.is_watching
    assert len(host.lane.gathered) > 5
    off = min(share, 0.5)
    for numbers in host.lane.gathered:
        assert numbers == pytest.approx([(0.5 - off) * numbers[1], numbers[1], off * numbers[1]])
    said = f"steps wait {0.5 - off:.1%} of their time for the network, and {2 * off:.1%} for processors"
    assert host.trial.explain() == f"stock: {said}", "of the rank that waited least, and of that which was delayed most"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_what_is_left_begins_a_test(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(share, monkeypatch)
    host.watch(600)
    assert not host.trial.is_watching
    assert sum(one[0] for one in host.lane.gathered) == pytest.approx(
        (0.5 - share) * sum(one[1] for one in host.lane.gathered)
    )


@pytest.mark.parametrize("delayed", [nan, 0.0])
@pytest.mark.parametrize("later", [nan, 0.0])
def test_delays_that_are_not_known_change_nothing(
    delayed: float, later: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do those that are known from some step on, or up to it, or count from zero again."""
    host = Host(0.0, monkeypatch)
    host.delayed = delayed
    host.watch(1)
    host.delayed = later
    host.watch(20)
    assert not host.trial.is_watching
    assert all(numbers == [0.5 * numbers[1], numbers[1], 0.0] for numbers in host.lane.gathered)
    assert "processors" not in host.trial.explain()


def test_pairs_of_a_test_are_not_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms share the processors, so what they lack slows all of them."""
    host = Host(0.0, monkeypatch)
    host.watch(600)
    host.lane.gathered.clear()
    host.share = 1.0
    for _ in range(40):
        host.playing.finish_step(0.5)
        host.work(1.0)
    pairs = [numbers for numbers in host.lane.gathered if len(numbers) > 1]
    assert pairs
    assert all(abs(second) == 1.0 for numbers in pairs for second in numbers)


def seconds_of(threads: list[int]) -> float:
    delays = [Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1] for thread in threads]
    return sum(map(int, delays)) / 1e9


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="not Linux, or built without it")
def test_delays_are_those_of_the_caller_and_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(playing.RUN_DELAY_VARIABLE, raising=False)
    over, named = threading.Event(), threading.Event()

    def sends() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("gloo_tcp_loop")
        named.set()
        over.wait()

    other, sender = threading.Thread(target=over.wait), threading.Thread(target=sends)
    other.start()
    sender.start()
    named.wait()
    gloo = [
        int(one.name) for one in Path("/proc/self/task").iterdir() if "gloo" in (one / "comm").read_text()
    ]  # other tests may have left some
    assert sender.native_id in gloo
    mine = [threading.get_native_id(), *gloo]
    before = seconds_of(mine)
    _, delayed = run_delay()
    assert before <= delayed <= seconds_of(mine), "these counters never fall"
    over.set()
    other.join()
    sender.join()


@pytest.mark.parametrize("lacking", ["the system's numbers", "the user's consent"])
def test_delays_may_be_unknown(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking == "the system's numbers":
        monkeypatch.delenv(playing.RUN_DELAY_VARIABLE, raising=False)
        monkeypatch.setattr(playing, "Path", lambda path: Path("/nowhere") / path.lstrip("/"))
    else:
        monkeypatch.setenv(playing.RUN_DELAY_VARIABLE, "0")
    now, delayed = run_delay()
    assert isnan(delayed)
    assert now <= time.monotonic()
