"""All tensors together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.fuse.policy import NamedPolicy, groups_ending_at
from thinwire.plan.profile import Groups, Profile


@dataclass(frozen=True)
class OneBucket(NamedPolicy):
    """See `one_bucket`."""

    constructor: ClassVar[str] = "one_bucket"

    def groups(self, profile: Profile) -> Groups:
        return groups_ending_at([profile.num_tensors])


def one_bucket() -> OneBucket:
    """One group of everything, sent after backward.

    The other end of the scale from `thinwire.fuse.layerwise`: one launch, one message, and nothing overlaps. Best where
    launches and latency are all that communication costs. Ok-Topk (Li and Hoefler, PPoPP'22) sends its gradient so.
    """
    return OneBucket()
