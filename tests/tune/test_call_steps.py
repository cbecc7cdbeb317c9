"""Steps are found in any sequence that repeats itself, however its steps are built."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.tune.call_steps import LEAST_CALLS, MOST_CALLS, CallSteps, period


def begins(steps: CallSteps, calls: Sequence[str]) -> list[int]:
    return [number for number, call in enumerate(calls) if steps.note(call)]


@given(st.text("ab", min_size=1, max_size=12), st.integers(3, 6), st.integers(0, 11))
def test_the_shortest_period_is_found(step: str, times: int, rest: int) -> None:
    whole = step * times + step[: rest % len(step)]
    found = period(whole)
    assert found <= len(step)
    assert all(one == other for one, other in zip(whole, whole[found:], strict=False))
    shorter = range(1, found)
    assert not any(whole[least:] == whole[:-least] and 3 * least <= len(whole) for least in shorter)


@pytest.mark.parametrize(
    "step",
    ["a", "abc", "a" * 24 + "b" * 24, "a" * 80 + "ab" * 80, "abc" * 100 + "d", "a" * 900 + "b"],
    ids=["one", "buckets", "layers", "sharded layers", "accumulation", "many layers"],
)
def test_steps_begin_once_each(step: str) -> None:
    """Whatever came before, and though part of a step repeats itself."""
    steps = CallSteps()
    found = begins(steps, "xyxz" + step * 40 * max(1, MOST_CALLS // len(step) // 40))
    assert steps.length == len(step)
    last = found[-5:]
    assert [later - sooner for sooner, later in pairwise(last)] == [len(step)] * 4


def test_another_call_is_an_exception() -> None:
    """After an evaluation steps are found as soon as at first."""
    steps = CallSteps()
    begins(steps, "ab" * 500)
    assert begins(steps, "xxx") == []
    assert steps.length == 0
    assert len(begins(steps, "ab" * LEAST_CALLS)) > LEAST_CALLS / 4


def test_what_never_repeats_has_no_steps() -> None:
    steps = CallSteps()
    assert not any(steps.note(number) for number in range(3 * MOST_CALLS))
    assert steps.length == 0


@given(st.integers(0, 4), st.integers(0, 4))
def test_steps_begin_where_they_are_said_to(offset: int, later: int) -> None:
    steps = CallSteps()
    sequence = "abcde" * 30
    begins(steps, sequence[: 100 + later])
    index = (offset - steps.index) % 5
    expected = sequence[(100 + later + index) % 5]
    steps.begin_at((steps.index + index) % 5)
    found = begins(steps, sequence[100 + later :])
    assert {sequence[100 + later + number] for number in found} == {expected}
