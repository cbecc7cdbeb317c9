"""Optimal merged gradient sparsification: merge where the start-up saved is more than the waiting added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.fuse.policy import NamedPolicy, groups_ending_at
from thinwire.plan.profile import Groups, Profile


@dataclass(frozen=True)
class Omgs(NamedPolicy):
    """See `omgs`."""

    constructor: ClassVar[str] = "omgs"

    def groups(self, profile: Profile) -> Groups:
        sizes, compress, communicate = profile.size_bytes, profile.compress, profile.communicate
        channel = 0.0  # when it is free
        gradient, size, ends = profile.backward_seconds[0], sizes[0], []  # of the open group: last gradient, bytes
        for tensor in range(1, profile.num_tensors):
            backward, added = profile.backward_seconds[tensor], sizes[tensor]
            ready = gradient + compress(size)
            start = max(channel, ready)
            waiting = backward + compress(size + added) - compress(size) - compress(added) - (start - ready)
            saving = communicate(size) + communicate(added) - communicate(size + added)
            if waiting < saving:
                gradient, size = gradient + backward, size + added
            else:
                ends.append(tensor)
                channel = start + communicate(size)
                gradient, size = ready + backward, added
        return groups_ending_at([*ends, profile.num_tensors])


def omgs() -> Omgs:
    """The next tensor joins the group iff the waiting this adds is less than the communication it saves.

    Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs"
    (INFOCOM'20), as its public code has it. With t_b, t_s and t_c the seconds of backward, sparsification and
    communication, p the bytes of the group, q those of the next tensor:

        waiting = t_b(q) + t_s(p + q) - t_s(p) - t_s(q) - (start of communication(p) - end of sparsification(p))
        saving  = t_c(p) + t_c(q) - t_c(p + q)

    One pass, O(N). The costs are this profile's; the paper's tables are of one cluster. Best for sparsifiers whose
    launch is cheap and where decoding, which it does not see, is too.
    """
    return Omgs()
