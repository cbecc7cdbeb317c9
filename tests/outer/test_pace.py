"""When rounds in the background begin."""

from __future__ import annotations

import threading

import pytest

from thinwire.outer import pace as paces
from thinwire.outer.pace import RoundPace

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.used = 100.0
        monkeypatch.setattr(paces.time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(paces.time, "process_time", lambda: self.used)


def pauses_of(pace: RoundPace) -> list[float]:
    found: list[float] = []
    pace._hurry.wait = found.append  # type: ignore[method-assign, assignment]
    return found


def test_rounds_take_a_share_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = RoundPace(0.0, 1000.0)
    pauses = pauses_of(pace)
    for cost, wall, used in ((0.01, 1.0, 1.0), (0.01, 4.0, 1.0), (0.02, 1.0, 2.0), (10.0, 1.0, 1.0)):
        pace.end_round(cost)
        clock.wall, clock.used = clock.wall + wall, clock.used + used
        with pace.changed:
            pace.step()
        pace.wait()
        pace.seen = pace.steps
    share = 0.01 / paces.SHARE
    assert pauses == [share, 4 * share, 2 * share, 250.0]


def test_seconds_between_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = RoundPace(5.0, 1000.0)
    pauses = pauses_of(pace)
    with pace.changed:
        pace.step()
    pace.wait()
    clock.wall += 2.0
    clock.used += 2.0
    pace.wait()
    assert pauses == [5.0, 3.0]


def test_a_pause_ends_when_rounds_do() -> None:
    for end in (lambda pace: pace.hurry(True), lambda pace: pace.drop()):
        pace = RoundPace(1e6, 1e9)
        waiter = threading.Thread(target=pace.wait, daemon=True)
        waiter.start()
        end(pace)
        waiter.join(20)
        assert not waiter.is_alive()


def test_a_rank_without_steps_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paces, "LEAST_PATIENCE", 0.01)
    pace = RoundPace(0.0, 1000.0)
    waiter = threading.Thread(target=pace.wait, daemon=True)
    waiter.start()
    waiter.join(20)
    assert not waiter.is_alive()
