"""Groups by name and by position: the runs of an order, lines that ranks agree on, and new groups where they pay."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from thinwire.fuse import byte_cap
from thinwire.gradients.steps.fit import Measured
from thinwire.gradients.steps.grouping import contiguous, regrouped
from thinwire.observe.step import Load
from thinwire.plan.plan import WORTH
from thinwire.plan.policy import counts_bytes
from thinwire.plan.profile import Groups, Linear, Profile
from thinwire.plan.timeline import iteration_seconds


def test_groups_that_are_no_runs_of_an_order_are_none_of_it() -> None:
    assert contiguous([(4, 2), (1,)], [2, 4, 1]) == ((0, 1), (2,))
    assert contiguous([(4, 1), (2,)], [2, 4, 1]) is None


PROFILE = Profile([0.01] * 4, [1000] * 4, Linear(0, 0), Linear(0, 0), Linear(1e-3, 0.0))
"""A job costs a millisecond, whatever it sends, and a gradient takes ten."""


@dataclass(frozen=True)
class Fixed:
    """A policy whose groups are known, and that remembers the sizes which it was shown."""

    name: str
    chosen: Groups
    seen: list[tuple[float, ...]] = field(default_factory=list, hash=False, compare=False)

    def groups(self, profile: Profile) -> Groups:
        self.seen.append(profile.size_bytes)
        return self.chosen


ALONE, PAIRS, ONE = ((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)
MEASURED = Measured(tuple(Load(name, 77) for name in "dcba"), (), ())


def test_one_policy_decides_and_of_several_the_fastest() -> None:
    slow, fast = Fixed("slow", ALONE), Fixed("fast", ONE)
    dear = replace(PROFILE, backward_seconds=(0.0,) * 4)  # only the jobs take time
    assert regrouped(MEASURED, dear, [slow], ONE) == (ALONE, "slow")
    assert regrouped(MEASURED, dear, [slow, fast], None) == (ONE, "fast")
    assert regrouped(MEASURED, dear, [slow, fast], ALONE) == (ONE, "fast")
    assert slow.seen == [dear.size_bytes] * 3, "by seconds, not by bytes"


def test_groups_stay_unless_a_step_is_much_longer_with_them() -> None:
    """Backward hides all but the last job: 41 ms in any groups but one."""
    candidates = [Fixed("alone", ALONE), Fixed("one", ONE)]
    assert iteration_seconds(PROFILE, PAIRS) == iteration_seconds(PROFILE, ALONE)
    assert regrouped(MEASURED, PROFILE, candidates, PAIRS) == (PAIRS, "what it was")
    little = replace(PROFILE, communicate=Linear(1e-3, 1e-7))  # 0.1 ms a gradient
    assert iteration_seconds(little, ALONE) < iteration_seconds(little, ONE) < WORTH * iteration_seconds(little, ALONE)
    assert regrouped(MEASURED, little, candidates[:1] * 2, ONE) == (ONE, "what it was")
    slower = replace(PROFILE, communicate=Linear(1e-3, 1e-5))  # 10 ms a gradient
    assert iteration_seconds(slower, ONE) > WORTH * iteration_seconds(slower, ALONE)
    assert regrouped(MEASURED, slower, candidates, ONE) == (ALONE, "alone")


def test_policies_that_count_bytes_are_shown_bytes() -> None:
    policy = byte_cap(150 / 2**20)
    assert counts_bytes(policy)
    groups, _ = regrouped(MEASURED, PROFILE, [policy], None)
    assert groups == policy.groups(MEASURED.in_bytes(PROFILE)) != policy.groups(PROFILE)
