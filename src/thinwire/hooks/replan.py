"""New groups from a measured profile. Pure: the same profile, the same groups."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.fuse.policy import Policy
from thinwire.hooks.fit import Measured
from thinwire.plan.planner import WORTH, counts_bytes
from thinwire.plan.profile import Groups, Profile
from thinwire.plan.timeline import iteration_seconds


def regrouped(
    measured: Measured, profile: Profile, policies: Sequence[Policy], current: Groups | None
) -> tuple[Groups, str]:
    """The groups to follow, and the name of the policy that has them.

    What the one policy says; of several the fastest, but what is there already unless a step of it takes more than
    `thinwire.plan.planner.WORTH` times as long.

    Args:
        current: None if they are not contiguous in the order of the profile.
    """
    found = [
        (policy.groups(measured.in_bytes(profile) if counts_bytes(policy) else profile), policy.name)
        for policy in policies
    ]
    if len(found) == 1:
        return found[0]
    groups, name = min(found, key=lambda way: iteration_seconds(profile, way[0]))
    if current is None or iteration_seconds(profile, current) > WORTH * iteration_seconds(profile, groups):
        return groups, name
    return current, "what it was"


def contiguous(groups: Sequence[Sequence[int]], order: Sequence[int]) -> Groups | None:
    """Groups of places as groups of positions in an order; None if they are not runs of it."""
    position = {place: number for number, place in enumerate(order)}
    found = tuple(tuple(sorted(position[place] for place in group)) for group in groups)
    together = [number for group in found for number in group]
    return found if together == list(range(len(order))) else None
