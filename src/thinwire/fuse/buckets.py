"""Fusion policies by rule.

- `layerwise`: every tensor alone, as in wait-free backpropagation.
- `one_bucket`: all tensors together.
- `byte_cap`: buckets of a number of bytes, as in DDP and Horovod.
- `equal_count`: a number of groups with equal numbers of tensors.
- `mg_wfbp`: merge where waiting for the next gradient costs less than a start-up.
- `omgs`: merge where the start-up saved costs more than the waiting added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.fuse.policy import NamedPolicy, groups_ending_at
from thinwire.fuse.profile import Groups, Profile


@dataclass(frozen=True)
class Layerwise(NamedPolicy, constructor="layerwise"):
    """The policy of `layerwise`."""

    def groups(self, profile: Profile) -> Groups:
        return groups_ending_at(range(1, profile.num_tensors + 1))


def layerwise() -> Layerwise:
    """Return the policy that sends each tensor by itself, as soon as its gradient is ready.

    Wait-free backpropagation (Zhang et al., "Poseidon", ATC'17). Best where launches and messages cost nothing, for
    nothing overlaps more. At 0.4 ms a launch, 300 tensors cost 120 ms.

    Example:
        >>> from thinwire.plan import Linear
        >>> free = Linear(0, 0)
        >>> layerwise().groups(Profile([1, 1], [4, 4], free, free, free))
        ((0,), (1,))
    """
    return Layerwise()


@dataclass(frozen=True)
class OneBucket(NamedPolicy, constructor="one_bucket"):
    """The policy of `one_bucket`."""

    def groups(self, profile: Profile) -> Groups:
        return groups_ending_at([profile.num_tensors])


def one_bucket() -> OneBucket:
    """Return the policy that sends one group of everything, after backward.

    The other end of the scale from `thinwire.fuse.layerwise`: one launch, one message, and nothing overlaps. Best where
    launches and latency are all that communication costs. Ok-Topk (Li and Hoefler, PPoPP'22) does this.
    """
    return OneBucket()


MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class ByteCap(NamedPolicy, constructor="byte_cap"):
    """The policy of `byte_cap`."""

    mb: float = 25.0
    first_mb: float | None = None

    def __post_init__(self) -> None:
        for name, cap in (("mb", self.mb), ("first_mb", self.first_mb)):
            if cap is not None and not (math.isfinite(cap) and cap > 0):
                raise ValueError(f"{name} is {cap}; a bucket needs a cap above 0 MiB. For one bucket use one_bucket()")

    def groups(self, profile: Profile) -> Groups:
        cap = MEBIBYTE * (self.mb if self.first_mb is None else self.first_mb)
        filled, ends = 0.0, []
        for tensor, size in enumerate(profile.size_bytes):
            filled += size
            if filled >= cap:
                ends.append(tensor + 1)
                filled, cap = 0.0, MEBIBYTE * self.mb
        if not ends or ends[-1] < profile.num_tensors:
            ends.append(profile.num_tensors)
        return groups_ending_at(ends)


def byte_cap(mb: float = 25.0, first_mb: float | None = None) -> ByteCap:
    """Return the policy whose buckets close at ``mb`` MiB, as DDP's do: each overshoots by up to one tensor.

    Args:
        mb: MiB of a bucket; DDP's ``bucket_cap_mb``, 25 by default. Horovod's buffer has 64.
        first_mb: MiB of the first bucket; DDP has 1 MiB, so that communication begins early. None means ``mb``.

    Raises:
        ValueError: a cap that is not above 0.

    Best without measurements: it knows neither the link nor the compressor, and rarely costs more than twice the best.

    Example:
        >>> byte_cap(mb=8, first_mb=1).name
        'byte_cap:mb=8:first_mb=1'
    """
    return ByteCap(mb, first_mb)


@dataclass(frozen=True)
class EqualCount(NamedPolicy, constructor="equal_count"):
    """The policy of `equal_count`."""

    count: int = 2

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"{self.count} groups hold no tensor: use 1 or more")

    def groups(self, profile: Profile) -> Groups:
        count = min(self.count, profile.num_tensors)
        return groups_ending_at(profile.num_tensors * (place + 1) // count for place in range(count))


def equal_count(count: int = 2) -> EqualCount:
    """Return the policy of ``count`` groups, or one per tensor if there are fewer; their lengths differ by at most 1.

    The public code of Cupcake does this, and with 2 groups MergeComp (arXiv 2103.15195) starts from it. Best where
    tensors are alike.

    Raises:
        ValueError: less than one group.
    """
    return EqualCount(count)


@dataclass(frozen=True)
class MgWfbp(NamedPolicy, constructor="mg_wfbp"):
    """The policy of `mg_wfbp`."""

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
    """Return the policy that merges the next tensor iff its gradient is ready before the group could start + alpha.

    Shi, Chu and Li, "MG-WFBP" (INFOCOM'19; arXiv 1912.09268, Theorem 1 and Algorithm 1): with l - 1 the tensor whose
    gradient comes after that of l, merge l into l - 1 iff ready(l - 1) < start of communication(l) + alpha. One pass,
    O(N).

    The paper knows no compression, so readiness is that of backward alone and only ``profile.communicate`` counts. Best
    for uncompressed gradients: it loses little there, and costs no search.
    """
    return MgWfbp()


@dataclass(frozen=True)
class Omgs(NamedPolicy, constructor="omgs"):
    """The policy of `omgs`."""

    def groups(self, profile: Profile) -> Groups:
        sizes, compress, communicate = profile.size_bytes, profile.compress, profile.communicate
        channel = 0.0  # the time when it is free
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
    """Return the policy that merges the next tensor iff the waiting added is less than the communication saved.

    Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs"
    (INFOCOM'20), as its public code has it. With t_b, t_s and t_c the seconds of backward, sparsification and
    communication, p the bytes of the group, q those of the next tensor:

        waiting = t_b(q) + t_s(p + q) - t_s(p) - t_s(q) - (start of communication(p) - end of sparsification(p))
        saving  = t_c(p) + t_c(q) - t_c(p + q)

    One pass, O(N). The costs are this profile's; those of the paper are of one cluster. Best for sparsifiers whose
    launch is cheap, and whose decoding, which it does not see, is cheap too.
    """
    return Omgs()
