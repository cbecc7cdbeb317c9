"""Old checkpoints are warned of: after a minute and 20 of them, and at each doubling."""

from __future__ import annotations

import pytest

from thinwire.checkpoint.records import AgeAlarm


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def alarms(seconds_a_step: float, steps: int, every: int = 1, needed: float = 1.0, newest: int = 0) -> list[int]:
    clock = Clock()
    alarm, said = AgeAlarm(every, clock), []
    for step in range(1, steps + 1):
        clock.now += seconds_a_step
        text = alarm.check(step, newest if step >= newest else 0, needed)
        if text:
            said.append(step)
            assert f"is {step - (newest if step >= newest else 0)} steps and" in text
    return said


@pytest.mark.parametrize(
    ("seconds_a_step", "every", "needed", "first"),
    [
        (10.0, 1, 1.0, 21), (1.0, 1, 1.0, 62), (10.0, 5, 1.0, 101), (10.0, 1, 30.0, 121),
        (1.0, 1, float("inf"), 1001),
    ],
)  # fmt: skip
def test_the_limits_are_steps_and_time(seconds_a_step: float, every: int, needed: float, first: int) -> None:
    said = alarms(seconds_a_step, 10 * first, every, needed)
    assert [said[0], *(second // first for second in said[1:])] == [first, 1, 3, 7], "doubling"


def test_a_new_checkpoint_ends_the_alarm() -> None:
    assert alarms(10.0, 90, newest=30) == [21, 51, 71]
    assert alarms(0.1, 500) == [], "50 seconds"
