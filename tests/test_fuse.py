"""What `thinwire.fuse` offers: every policy by its constructor, by its text, and nothing that is not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from thinwire import fuse
from thinwire.plan import Linear, Profile, check_groups
from thinwire.plan.policy import POLICIES, Policy

SETTINGS = {"byte_cap": {"mb": 1}}
CONSTRUCTORS = sorted(set(fuse.__all__) - {"Policy", "parse"})
LINK = Linear(1e-3, 8e-9)
PROFILE = Profile([0.01, 0.02, 0.0, 0.04], [700_000, 20, 600_000, 900_000], LINK, LINK, LINK)


def test_a_star_import_brings_all_policies_and_nothing_else() -> None:
    namespace: dict[str, object] = {}
    exec("from thinwire.fuse import *", namespace)
    del namespace["__builtins__"]
    assert set(namespace) == set(fuse.__all__) == {*POLICIES, "Policy", "parse"}
    assert all(namespace[name] is getattr(fuse, name) for name in fuse.__all__)
    assert fuse.Policy is Policy


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_constructor_makes_a_policy_that_its_text_makes_again(name: str) -> None:
    constructor: Callable[..., Policy] = getattr(fuse, name)
    policy = constructor(**SETTINGS.get(name, {}))
    assert policy.name.partition(":")[0] == name
    assert fuse.parse(policy.name) == policy
    check_groups(PROFILE, policy.groups(PROFILE))
