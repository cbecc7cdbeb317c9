"""Cupcake's search as its authors describe it: the slow twin of `thinwire.fuse.cupcake`, for tests and for reading.

Wang et al., "Cupcake" (MLSys'23): choose the first group, then search the rest in the same way. Two rules prune.

1. A branch is left if no plan in it can end before the best one known.
2. While the channel is busy, fuse more: if it is still busy when the next tensor could be sent in the same group, the
   group is not closed before that tensor. Sending it earlier would not start earlier, and the start-up comes on top.

Rule 2 makes the group arrive later, by the bytes of that tensor. The paper has no decompression, which may have to wait
for it: here the rule is used only where the larger group arrives before computing ends, or decompression is free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.plan.policy import groups_ending_at
from thinwire.plan.profile import Groups, Profile


@dataclass(frozen=True)
class _Branch:
    """Groups that end before these tensors, and the clocks of the timeline after them."""

    ends: tuple[int, ...] = (0,)
    delay: float = 0.0  # compression so far
    channel: float = 0.0  # time from which it is free
    decoding: float = 0.0  # decompression so far
    decoded: float = 0.0  # when that would be done if it had not to wait for backward


def branch_and_bound(profile: Profile) -> Groups:
    """Return the groups with the least `thinwire.plan.iteration_seconds`, exhaustively: up to some 20 tensors."""
    best_seconds, best = math.inf, _Branch()

    def explore(branch: _Branch) -> None:
        nonlocal best_seconds, best
        for end in range(profile.num_tensors, branch.ends[-1], -1):  # one large group first, for an upper bound
            grown = _grown(profile, branch, end)
            seconds = _least_seconds(profile, grown)
            if seconds >= best_seconds:  # rule 1
                continue
            if end == profile.num_tensors:
                best_seconds, best = seconds, grown
            elif not _fuses_more(profile, branch, end):  # rule 2
                explore(grown)

    explore(_Branch())
    return groups_ending_at(best.ends[1:])


def _grown(profile: Profile, branch: _Branch, end: int) -> _Branch:
    """The branch with one more group, of all tensors before ``end``."""
    size = profile.end_bytes[end] - profile.end_bytes[branch.ends[-1]]
    delay = branch.delay + profile.compress(size)
    channel = max(branch.channel, profile.ready_seconds[end] + delay) + profile.communicate(size)
    decompress = profile.decompress(size)
    decoded = max(branch.decoded, channel) + decompress
    return _Branch((*branch.ends, end), delay, channel, branch.decoding + decompress, decoded)


def _least_seconds(profile: Profile, branch: _Branch) -> float:
    """Least seconds of an iteration that begins so; exact at the end. The rest is one group at least."""
    rest = profile.end_bytes[-1] - profile.end_bytes[branch.ends[-1]]
    backward = profile.ready_seconds[-1] + branch.delay + branch.decoding
    if branch.ends[-1] == profile.num_tensors:
        return max(backward, branch.decoded)
    last_decompress = profile.decompress(profile.size_bytes[-1])
    return max(
        backward + profile.compress(rest) + profile.decompress(rest),
        branch.decoded + profile.decompress(rest),
        branch.channel + profile.communicate(rest) + last_decompress,
    )


def _fuses_more(profile: Profile, branch: _Branch, end: int) -> bool:
    """Whether a group that ends before ``end`` is no better than one that includes that tensor too."""
    start = branch.ends[-1]
    size = profile.end_bytes[end + 1] - profile.end_bytes[start]
    if profile.ready_seconds[end + 1] + branch.delay + profile.compress(size) > branch.channel:
        return False
    rest = profile.end_bytes[-1] - profile.end_bytes[start]
    computed = profile.ready_seconds[-1] + branch.delay + profile.compress(rest)
    is_free = profile.decompress.alpha == profile.decompress.beta == 0
    return is_free or branch.channel + profile.communicate(size) <= computed
