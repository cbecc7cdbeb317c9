"""So many groups of as many tensors each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.fuse.policy import NamedPolicy, groups_ending_at
from thinwire.plan.profile import Groups, Profile


@dataclass(frozen=True)
class EqualCount(NamedPolicy):
    """See `equal_count`."""

    constructor: ClassVar[str] = "equal_count"
    count: int = 2

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"{self.count} groups hold no tensor: use 1 or more")

    def groups(self, profile: Profile) -> Groups:
        count = min(self.count, profile.num_tensors)
        return groups_ending_at(profile.num_tensors * (place + 1) // count for place in range(count))


def equal_count(count: int = 2) -> EqualCount:
    """``count`` groups, whose numbers of tensors differ by one at most; fewer groups where there are fewer tensors.

    What the public code of Cupcake does, and with 2 the start of MergeComp (arXiv 2103.15195). Best where tensors are
    alike.

    Raises:
        ValueError: less than one group.
    """
    return EqualCount(count)
