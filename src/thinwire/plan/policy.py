"""Fusion policies: a profile in, groups of tensors out.

- `layerwise`: every tensor alone, as in wait-free backpropagation.
- `one_bucket`: all tensors together.
- `byte_cap`: buckets of a number of bytes, as in DDP and Horovod.
- `equal_count`: a number of groups with equal numbers of tensors.
- `mg_wfbp`: merge where waiting for the next gradient costs less than a start-up.
- `omgs`: merge where the start-up saved costs more than the waiting added.
- `cupcake`: the grouping with the shortest iteration of all.
- `safusion`: buffers closed at the same tensors on all ranks, and as long as the communication before them.

Each goes around what `thinwire.attach` takes as ``dense``: ``cupcake(top_k(0.01))``, ``byte_cap(8, dense="auto")``.
Without that, gradients are summed natively. By name, ``byte_cap:mb=8`` is ``byte_cap(mb=8)``, as plans and command
lines write it (`parse`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, Protocol

from thinwire.compress.assign import NATIVE, Dense
from thinwire.compress.named import made, split
from thinwire.plan.profile import Groups, Profile
from thinwire.plan.search import search
from thinwire.plan.timeline import iteration_seconds

__all__ = [
    "Policy", "byte_cap", "cupcake", "equal_count", "layerwise", "mg_wfbp", "omgs", "one_bucket", "parse", "safusion"
]  # fmt: skip
"""What `thinwire.fuse` offers."""


class Policy(Protocol):
    """A choice of gradients that travel together, by the profile alone: the same on ranks with the same profile."""

    @property
    def name(self) -> str:
        """Name of the policy, as `thinwire.fuse.parse` reads it."""

    def groups(self, profile: Profile) -> Groups:
        """Return contiguous groups in backward order, every tensor in one of them."""


class NamedPolicy:
    """A policy whose name is that of its constructor, with the settings that are not defaults.

    ``dense`` says how the grouped gradients travel, as `thinwire.attach` takes it: anything but a policy or a plan.
    """

    constructor: ClassVar[str]

    def __init_subclass__(cls, constructor: str) -> None:
        super().__init_subclass__()
        cls.constructor = constructor
        cls.__repr__ = NamedPolicy.__repr__  # before `dataclass` writes one with the name of the class

    def __repr__(self) -> str:
        return f"{self.constructor}({', '.join(self._settings())})"

    @property
    def name(self) -> str:
        """Name of the policy, as `thinwire.fuse.parse` reads it: ``byte_cap:mb=8``."""
        settings = self._settings()
        return ":".join([self.constructor, *(one for one in settings if not one.startswith("dense="))])

    def _settings(self) -> list[str]:
        items = fields(self)  # type: ignore[arg-type]  # of a subclass
        return [f"{one.name}={value!r}" for one in items if (value := getattr(self, one.name)) != one.default]


def groups_ending_at(ends: Iterable[int]) -> Groups:
    """Return groups that end before these tensors; the last end is the number of tensors.

    Example:
        >>> groups_ending_at([2, 3])
        ((0, 1), (2,))
    """
    return tuple(tuple(range(start, end)) for start, end in pairwise((0, *ends)))


@dataclass(frozen=True)
class Layerwise(NamedPolicy, constructor="layerwise"):
    """A policy that sends each tensor by itself, as soon as its gradient is ready.

    Wait-free backpropagation (Zhang et al., "Poseidon", ATC'17). Best where launches and messages cost nothing, for
    nothing overlaps more. At 0.4 ms a launch, 300 tensors cost 120 ms.

    Example:
        >>> from thinwire.plan import Linear
        >>> free = Linear(0, 0)
        >>> layerwise().groups(Profile([1, 1], [4, 4], free, free, free))
        ((0,), (1,))
    """

    dense: Dense = NATIVE

    def groups(self, profile: Profile) -> Groups:
        return groups_ending_at(range(1, profile.num_tensors + 1))


@dataclass(frozen=True)
class OneBucket(NamedPolicy, constructor="one_bucket"):
    """A policy that sends one group of everything, after backward.

    The other end of the scale from `thinwire.fuse.layerwise`: one launch, one message, and nothing overlaps. Best where
    launches and latency are all that communication costs. Ok-Topk (Li and Hoefler, PPoPP'22) does this.
    """

    dense: Dense = NATIVE

    def groups(self, profile: Profile) -> Groups:
        return groups_ending_at([profile.num_tensors])


MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class ByteCap(NamedPolicy, constructor="byte_cap"):
    """A policy whose buckets close at ``mb`` MiB, as DDP's do: each overshoots by up to one tensor.

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

    mb: float = 25.0
    first_mb: float | None = None
    dense: Dense = NATIVE

    def __post_init__(self) -> None:
        for name, cap in (("mb", self.mb), ("first_mb", self.first_mb)):
            if cap is not None and not (isinstance(cap, (int, float)) and math.isfinite(cap) and cap > 0):
                text = "a bucket needs a cap above 0 MiB. For one bucket use one_bucket(); what is sent is dense="
                raise ValueError(f"{name} is {cap!r}; {text}")

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


@dataclass(frozen=True)
class EqualCount(NamedPolicy, constructor="equal_count"):
    """A policy of ``count`` groups, or one per tensor if there are fewer; their lengths differ by at most 1.

    The public code of Cupcake does this, and with 2 groups MergeComp (arXiv 2103.15195) starts from it. Best where
    tensors are alike.

    Raises:
        ValueError: less than one group.
    """

    count: int = 2
    dense: Dense = NATIVE

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"count is {self.count!r}: use 1 or more; how groups travel is dense=")

    def groups(self, profile: Profile) -> Groups:
        count = min(self.count, profile.num_tensors)
        return groups_ending_at(profile.num_tensors * (index + 1) // count for index in range(count))


@dataclass(frozen=True)
class MgWfbp(NamedPolicy, constructor="mg_wfbp"):
    """A policy that merges the next tensor iff its gradient is ready before the group could start + alpha.

    Shi, Chu and Li, "MG-WFBP" (INFOCOM'19; arXiv 1912.09268, Theorem 1 and Algorithm 1): with l - 1 the tensor whose
    gradient comes after that of l, merge l into l - 1 iff ready(l - 1) < start of communication(l) + alpha. One pass,
    O(N).

    The paper knows no compression, so readiness is that of backward alone and only ``profile.communicate`` counts. Best
    for uncompressed gradients: it loses little there, and costs no search.
    """

    dense: Dense = NATIVE

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


@dataclass(frozen=True)
class Omgs(NamedPolicy, constructor="omgs"):
    """A policy that merges the next tensor iff the waiting added is less than the communication saved.

    Shi et al., "Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs"
    (INFOCOM'20), as its public code has it. With t_b, t_s and t_c the seconds of backward, sparsification and
    communication, p the bytes of the group, q the bytes of the next tensor:

        waiting = t_b(q) + t_s(p + q) - t_s(p) - t_s(q) - (start of communication(p) - end of sparsification(p))
        saving  = t_c(p) + t_c(q) - t_c(p + q)

    One pass, O(N). The costs are this profile's; the paper's are of one cluster. Best for sparsifiers whose
    launch is cheap, and whose decoding, which it does not see, is cheap too.
    """

    dense: Dense = NATIVE

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


@dataclass(frozen=True)
class SaFusion(NamedPolicy, constructor="safusion"):
    """A policy of buffers whose communication just covers backward and selection of the next one.

    Ming et al., "SAFusion" (HPDC'25): the intra-worker adaptive rule.
    1. The first group has the number of tensors with the shortest iteration, with the others by the next two rules. (In
       the published code it grows until waiting for it reaches one start-up of ``profile.communicate``, which is never
       faster. On the models of docs/guides/fusion.md this is within 0.4 % of the optimum.)
    2. Each following one grows as long as backward + compress of it <= communication of the group before it.
    3. Once communication of all groups so far exceeds backward + compress of everything, the rest is one group.

    The paper selects from each tensor before it fuses ("sparsification ahead"): pass `Profile.ahead`. O(N^2), 0.13 s
    for 314 tensors.

    Args:
        dense: how the grouped gradients travel.
        align: whether buffers close after the same number of tensors on all ranks. False closes them at ``mb`` of
            gradients, which is the paper's naive fixed buffer.
        adapt: whether to use the rule above. False is the paper's ablation: fixed buffers of ``mb`` of gradients
            (``align=False``), or the same number of buffers with equal numbers of tensors (``align=True``). Adaptive
            groups are aligned anyhow, for all ranks plan with one profile, so ``align`` has no effect on them.
        mb: MiB of a fixed buffer.

    Raises:
        ValueError: ``mb`` is not above 0.
    """

    dense: Dense = NATIVE
    align: bool = True
    adapt: bool = True
    mb: float = 25.0

    def __post_init__(self) -> None:
        if not (isinstance(self.align, bool) and isinstance(self.adapt, bool)):
            raise ValueError(f"safusion got align={self.align!r}, adapt={self.adapt!r}: both are True or False")
        byte_cap(self.mb)  # raises ValueError for an illegal cap

    def groups(self, profile: Profile) -> Groups:
        if self.adapt:
            tried = (_covering_groups(profile, first) for first in range(1, profile.num_tensors + 1))
            return min(tried, key=lambda groups: (iteration_seconds(profile, groups), len(groups)))
        by_bytes = byte_cap(self.mb).groups(profile)
        return equal_count(len(by_bytes)).groups(profile) if self.align else by_bytes


def _covering_groups(profile: Profile, first: int) -> Groups:
    """Return the groups by rules 2 and 3 after a group of the ``first`` tensors."""
    ready, end_bytes, count = profile.ready_seconds, profile.end_bytes, profile.num_tensors

    def seconds_of(start: int, end: int) -> tuple[float, float]:
        """Return seconds of backward + compress, and of communicate, of a group."""
        size = end_bytes[end] - end_bytes[start]
        return ready[end] - ready[start] + profile.compress(size), profile.communicate(size)

    ends = [first]
    computing, _ = seconds_of(0, count)
    communicated = covered = seconds_of(0, first)[1]
    while ends[-1] < count:
        start, end = ends[-1], ends[-1] + 1
        if communicated > computing:
            return groups_ending_at([*ends, count])
        while end < count and seconds_of(start, end + 1)[0] <= covered:
            end += 1
        ends.append(end)
        _, covered = seconds_of(start, end)
        communicated += covered
    return groups_ending_at(ends)


BEAM = 2
"""States for each number of tensors in a first, quick search, whose nearly best plan prunes the exact one."""


@dataclass(frozen=True)
class Cupcake(NamedPolicy, constructor="cupcake"):
    """A policy of the groups with the least `thinwire.plan.iteration_seconds` of all 2^(N - 1).

    Wang et al., "Cupcake: A Compression Scheduler for Scalable Communication-Efficient Distributed Training"
    (MLSys'23), state the problem, and search a tree of first groups with two pruning rules. Here it is a dynamic
    programme over undominated states, exact with decompression too (`thinwire.plan.search`): plans of the same
    tensors in the same number of groups have the same compute clock, and differ only in when the channel is free
    and when decompression is done. Without decompression that is O(N^3) at most; with the other policies' plans as
    upper bounds, and a lower bound for every state, it is far less.

    Best wherever the profile is right: no other policy is better. A plan for 314 tensors costs 0.1 s.

    Example:
        >>> from thinwire.plan import Linear
        >>> launch, free, link = Linear(1, 0), Linear(0, 0), Linear(alpha=1, beta=1)
        >>> cupcake().groups(Profile([1, 1, 9, 1], [1, 1, 1, 1], launch, free, link))
        ((0, 1), (2, 3))
    """

    dense: Dense = NATIVE

    def groups(self, profile: Profile) -> Groups:
        simple = [policy.groups(profile) for policy in (one_bucket(), layerwise(), mg_wfbp(), omgs())]
        best = min(simple, key=lambda groups: iteration_seconds(profile, groups))
        for width in (BEAM, None):
            ends = search(profile, iteration_seconds(profile, best), width)
            best = groups_ending_at(ends) if ends else best
        return best


layerwise, one_bucket, byte_cap, equal_count = Layerwise, OneBucket, ByteCap, EqualCount
mg_wfbp, omgs, cupcake, safusion = MgWfbp, Omgs, Cupcake, SaFusion

POLICIES: dict[str, Any] = {kind.constructor: kind for kind in NamedPolicy.__subclasses__()}
"""Constructors of policies by name."""


def parse(text: str) -> Policy:
    """Return the policy that ``NAME`` or ``NAME:key=value:...`` denotes; a policy's ``name`` gives an equal one.

    Raises:
        ValueError: an unknown name, or settings that the constructor does not take; the message says what is legal.

    Example:
        >>> parse("byte_cap:mb=8").name
        'byte_cap:mb=8'
    """
    return made("fusion policy", POLICIES, *split(text))


def default_policies() -> tuple[Policy, ...]:
    """Return the policies of `thinwire.fuse`, byte caps of 1 and 25 MB among them."""
    return layerwise(), one_bucket(), byte_cap(1), byte_cap(25), mg_wfbp(), omgs(), cupcake(), safusion()


def counts_bytes(policy: Policy) -> bool:
    """Return whether a policy closes groups at a number of bytes of gradients, and not by their cost."""
    return isinstance(policy, ByteCap) or (isinstance(policy, SaFusion) and not policy.adapt)
