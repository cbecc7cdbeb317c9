"""Which gradients travel together: as asked, as followed, and from a new profile.

What `thinwire.attach` was asked to follow, and how soon it judges it.

New groups from a measured profile. Pure: the same profile, the same groups.

The groups that a model follows at the moment, and whether it compresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.follow.fit import Gradient, Measured
from thinwire.fuse.policy import Policy
from thinwire.fuse.profile import Groups, Profile
from thinwire.fuse.timeline import iteration_seconds
from thinwire.gradients.compressed import CompressedSync
from thinwire.gradients.parameters import ParameterHooks, places_of, plan_groups
from thinwire.plan.planner import WORTH, counts_bytes


@dataclass(frozen=True)
class Pace:
    """How many synchronized backward passes something takes.

    Args:
        skipped_steps: that do not count after anything has changed.
        measured_steps: for a profile; in the second half each gradient travels alone, which tells what a job costs.
        window_steps: for a judgement of the plan, and between two of them.
        probe_steps: without compression and in groups of the default, to see what these would take.
    """

    skipped_steps: int = 2
    measured_steps: int = 8
    window_steps: int = 50
    probe_steps: int = 5


DEFAULT_PACE = Pace()


@dataclass(frozen=True)
class Intent:
    """What `thinwire.attach` was asked to follow.

    Args:
        names: of all parameters but tables of embeddings.
        policies: that may say how to group; none where groups cannot change.
        groups: of a plan, by name; None to measure first, and take those of the policy.
        predicted_seconds: of the plan; from the end of the model's forward until the last mean is there.
        dense_seconds: the same, of stock DDP.
        fallback: whether a plan that turns out slower than exact synchronization is dropped.
        momentum: whether a compressor keeps the momentum of the optimizer.
        is_watched: whether steps can be timed by the processor's clock; else groups are followed, and that is all.
    """

    names: tuple[str, ...]
    policies: tuple[Policy, ...] = ()
    groups: tuple[tuple[str, ...], ...] | None = None
    predicted_seconds: float | None = None
    dense_seconds: float | None = None
    fallback: bool = False
    momentum: bool = False
    is_watched: bool = True
    pace: Pace = field(default_factory=lambda: DEFAULT_PACE)

    def describe(self) -> list[str]:
        """Lines on which all ranks must agree."""
        policies = ", ".join(policy.name for policy in self.policies)
        lines = [f"grouped by {policies or 'nobody'}; fallback={self.fallback}; {self.pace}"]
        lines += [f"group {number} of the plan: {', '.join(group)}" for number, group in enumerate(self.groups or ())]
        return [*lines, f"planned seconds: {self.predicted_seconds}, and {self.dense_seconds} of stock DDP"]


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


Names = tuple[tuple[str, ...], ...]


class Following:
    """Changes what the next step does; on all ranks alike, and between two steps.

    Args:
        names: of all parameters but tables of embeddings.
        groups: to follow; None for those of the default.
        hooks: of a plain module, whose groups can change; None for DDP, whose buckets cannot.
        compressed: what can be paused, and dropped.
    """

    def __init__(
        self,
        names: Sequence[str],
        groups: Names | None,
        hooks: ParameterHooks | None,
        compressed: CompressedSync | None,
    ) -> None:
        self.groups = groups
        self._names, self._hooks, self._compressed = frozenset(names), hooks, compressed

    @property
    def can_regroup(self) -> bool:
        return self._hooks is not None

    @property
    def can_be_dropped(self) -> bool:
        """Whether exact synchronization in the default groups would be anything else."""
        return self._hooks is not None or self._compressed is not None

    @property
    def compresses(self) -> bool:
        """Whether there is anything to drop memories of."""
        return self._compressed is not None

    @property
    def num_groups(self) -> int:
        """With those of tables."""
        return len(self.groups or ()) if self._hooks is None else len(self._hooks.groups)

    def follow(self, groups: Names | None) -> None:
        self.groups = groups
        self._regroup(self._planned)

    def pause(self, paused: bool) -> None:
        """Without compression and in the groups of the default, or back."""
        if self._compressed is not None:
            self._compressed.paused = paused
        self._regroup(None if paused else self._planned)

    def send_alone(self) -> None:
        """Each gradient for itself; until the next `follow`."""
        self._regroup(tuple((place,) for place in self._order()))

    def drop(self) -> bool:
        """Exact synchronization in the groups of the default, for good; whether memories are handed out."""
        self.follow(None)
        return self._compressed is not None and self._compressed.memories.drop()

    def current(self) -> Groups | None:
        """The groups to follow, as positions in the order in which gradients become ready; None if no runs of it."""
        assert self._hooks is not None
        order = self._order()
        known = set(order)
        default = plan_groups(self._hooks.trained, self._hooks.order)
        groups = ([place for place in group if place in known] for group in self._planned or default)
        return contiguous([group for group in groups if group], order)

    def gradients(self) -> list[Gradient]:
        """In the order in which they become ready."""
        assert self._hooks is not None
        found = []
        for place in self._order():
            entry = self._hooks.trained[place]
            compresses = self._compressed is not None and self._compressed.takes(entry.name)
            found.append(Gradient(entry.name, entry.num_bytes, compresses))
        return found

    @property
    def _planned(self) -> Groups | None:
        if self.groups is None or self._hooks is None:
            return None
        return places_of(self._hooks.trained, self.groups)

    def _order(self) -> list[int]:
        assert self._hooks is not None
        return [place for place in self._hooks.order if self._hooks.trained[place].name in self._names]

    def _regroup(self, groups: Groups | None) -> None:
        if self._hooks is not None:
            self._hooks.regroup(groups)
