"""Merged-gradient wait-free backpropagation: wait for the next gradient if that takes less than a start-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.fuse.policy import NamedPolicy, groups_ending_at
from thinwire.plan.profile import Groups, Profile


@dataclass(frozen=True)
class MgWfbp(NamedPolicy):
    """See `mg_wfbp`."""

    constructor: ClassVar[str] = "mg_wfbp"

    def groups(self, profile: Profile) -> Groups:
        ready, ends_bytes, link = profile.ready_seconds, profile.end_bytes, profile.communicate
        first, channel, ends = 0, 0.0, []
        for tensor in range(1, profile.num_tensors):
            start = max(channel, ready[tensor])
            if ready[tensor + 1] >= start + link.alpha:
                ends.append(tensor)
                channel = start + link(ends_bytes[tensor] - ends_bytes[first])
                first = tensor
        return groups_ending_at([*ends, profile.num_tensors])


def mg_wfbp() -> MgWfbp:
    """The next tensor joins the group iff its gradient is ready before the group could start + alpha.

    Shi, Chu and Li, "MG-WFBP" (INFOCOM'19; arXiv 1912.09268, Theorem 1 and Algorithm 1): with l - 1 the tensor whose
    gradient comes after that of l, merge l into l - 1 iff ready(l - 1) < start of communication(l) + alpha. One pass,
    O(N).

    The paper knows no compression, so readiness is that of backward alone and only ``profile.communicate`` counts. Best
    for uncompressed gradients: it loses little there, and costs no search.
    """
    return MgWfbp()
