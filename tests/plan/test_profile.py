"""Profiles of a step: any sequences of numbers make one, and what is no cost, no size or no group is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.plan.profiles import cases
from thinwire.plan import Groups, Linear, Profile, check_groups, iteration_seconds, simulate

FREE = Linear(0.0, 0.0)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((), "groups of 0 tensors for a profile of 3"),
        (((0, 1),), "groups of 2 tensors for a profile of 3"),
        (((0, 1), (2,), (3,)), "groups of 4 tensors for a profile of 3"),
        (((0,), (), (1, 2)), "group 1 is empty"),
        (((1,), (0,), (2,)), "group 0 has tensor 1 where tensor 0 belongs"),
        (((0, 2), (1,)), "tensor 2 where tensor 1"),
        (((0, 1), (1, 2)), "tensor 1 where tensor 2"),
    ],
)
def test_groups_that_are_none(groups: Groups, message: str) -> None:
    profile = Profile([1, 1, 1], [4, 4, 4], FREE, FREE, FREE)
    for refuse in (check_groups, iteration_seconds, simulate):
        with pytest.raises(ValueError, match=message):
            refuse(profile, groups)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backward_seconds": [], "size_bytes": []}, "at least one tensor"),
        ({"backward_seconds": [1.0]}, "1 backward times, 2 sizes"),
        ({"names": ["a"]}, "1 names"),
        ({"names": ["a", "a"]}, "same name"),
        ({"backward_seconds": [1.0, -1.0]}, r"backward_seconds\[1\] is -1.0"),
        ({"backward_seconds": [math.nan, 1.0], "names": ["a", "b"]}, r"backward_seconds\[0\] \(a\) is nan"),
        ({"size_bytes": [4, math.inf]}, r"size_bytes\[1\] is inf"),
        ({"size_bytes": [-4, 4]}, "measure again"),
        ({"other_seconds": -1.0}, "other_seconds is -1.0"),
        ({"communicate": 1e-9}, "give a Linear"),
    ],
)
def test_profiles_that_are_none(change: dict[str, Any], message: str) -> None:
    good = {"backward_seconds": [1.0, 1.0], "size_bytes": [4, 4], "names": []}
    costs = dict.fromkeys(("compress", "decompress", "communicate"), FREE)
    with pytest.raises(ValueError, match=message):
        Profile(**good | costs | change)


@pytest.mark.parametrize("numbers", [(-1e-9, 0), (0, -1.0), (math.inf, 0), (0, math.nan), ("1", 0), (None, 0)])
def test_a_cost_is_not_negative(numbers: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be 0 or more seconds"):
        Linear(*numbers)


def test_any_sequence_makes_a_profile() -> None:
    profile = Profile(np.array([1.0, 2.0], np.float32), np.array([4, 8]), FREE, FREE, Linear(np.float32(1), 0))
    assert profile == Profile((1.0, 2.0), (4, 8), FREE, FREE, Linear(1.0, 0.0))
    assert [type(size) for size in profile.size_bytes] == [int, int]
    assert (profile.ready_seconds, profile.end_bytes) == ((0.0, 1.0, 3.0), (0, 4, 12))
    assert hash(profile) == hash(Profile([1, 2], [4, 8], FREE, FREE, Linear(1, 0)))


@given(cases())
def test_sparsification_ahead_is_that_of_every_tensor_alone(case: tuple[Profile, Groups]) -> None:
    profile, groups = case
    alone = tuple((tensor,) for tensor in range(profile.num_tensors))
    ahead = profile.ahead()
    assert iteration_seconds(ahead, alone) == pytest.approx(iteration_seconds(profile, alone), rel=1e-12)
    selecting = sum(map(profile.compress, profile.size_bytes))
    assert sum(ahead.backward_seconds) == pytest.approx(sum(profile.backward_seconds) + selecting)
    assert simulate(ahead, groups).channel_busy_seconds == simulate(profile, groups).channel_busy_seconds
