"""Which gradients travel together: the request to `thinwire.attach`, the groups in force, and new groups.

`regrouped` is pure: the same profile gives the same groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.gradients.compressed import FLUSH_STEPS, CompressedSync
from thinwire.gradients.compression import has_momentum
from thinwire.gradients.parameters import ParameterHooks, indices_of, plan_groups
from thinwire.gradients.steps.fit import Measured
from thinwire.observe.step import Load
from thinwire.plan.plan import WORTH
from thinwire.plan.policy import Policy, counts_bytes
from thinwire.plan.profile import Groups, Profile
from thinwire.plan.timeline import iteration_seconds


@dataclass(frozen=True)
class Pace:
    """The numbers of synchronized backward passes for measuring and judging.

    Args:
        skipped_steps: steps that do not count after anything has changed.
        measured_steps: steps for a profile; in the second half each gradient travels alone, which gives a job's cost.
        window_steps: steps for a judgement of the plan, and between two of them.
    """

    skipped_steps: int = 2
    measured_steps: int = 8
    window_steps: int = 50


DEFAULT_PACE = Pace()


@dataclass(frozen=True)
class Intent:
    """The request to `thinwire.attach`: what to follow, and how soon to judge it.

    Args:
        names: names of all parameters but embedding tables.
        policies: policies that may choose groups; none where groups cannot change.
        groups: groups of a plan, by name; None to measure first, and use the groups of the policy.
        predicted_seconds: seconds of the plan from the end of the model's forward until the last mean is known.
        dense_seconds: the same for stock DDP.
        fallback: whether a plan that turns out slower than exact synchronization is dropped.
        is_watched: whether steps can be timed by the processor's clock; if not, groups are followed but not judged.
    """

    names: tuple[str, ...]
    policies: tuple[Policy, ...] = ()
    groups: tuple[tuple[str, ...], ...] | None = None
    predicted_seconds: float | None = None
    dense_seconds: float | None = None
    fallback: bool = False
    is_watched: bool = True
    pace: Pace = field(default_factory=lambda: DEFAULT_PACE)

    def describe(self) -> list[str]:
        """Return lines on which all ranks must agree."""
        policies = ", ".join(policy.name for policy in self.policies)
        lines = [f"grouped by {policies or 'nobody'}; fallback={self.fallback}; {self.pace}"]
        lines += [f"group {number} of the plan: {', '.join(group)}" for number, group in enumerate(self.groups or ())]
        return [*lines, f"planned seconds: {self.predicted_seconds}, and {self.dense_seconds} of stock DDP"]


def regrouped(
    measured: Measured, profile: Profile, policies: Sequence[Policy], current: Groups | None
) -> tuple[Groups, str]:
    """Return the groups to follow, and the name of the policy that chose them.

    A single policy decides. Of several the fastest does, but the current groups stay unless a step with them lasts more
    than `thinwire.plan.plan.WORTH` times as long.

    Args:
        current: None if they are not contiguous in the order of the profile.
    """
    options = [
        (policy.groups(measured.in_bytes(profile) if counts_bytes(policy) else profile), policy.name)
        for policy in policies
    ]
    if len(options) == 1:
        return options[0]
    groups, name = min(options, key=lambda option: iteration_seconds(profile, option[0]))
    if current is None or iteration_seconds(profile, current) > WORTH * iteration_seconds(profile, groups):
        return groups, name
    return current, "what it was"


def contiguous(groups: Sequence[Sequence[int]], order: Sequence[int]) -> Groups | None:
    """Return groups of indices as groups of positions in an order, or None if they are not runs of it."""
    position = {index: number for number, index in enumerate(order)}
    result = tuple(tuple(sorted(position[index] for index in group)) for group in groups)
    together = [number for group in result for number in group]
    return result if together == list(range(len(order))) else None


Names = tuple[tuple[str, ...], ...]


class Following:
    """The groups and the compression in force, which it changes between two steps, on all ranks alike.

    Args:
        names: names of all parameters but embedding tables.
        groups: groups to follow; None for the default ones.
        hooks: hooks of a plain module, whose groups can change; None for DDP, whose buckets cannot.
        compressed: the compression, which can be paused and dropped; None without one.
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
        self.can_regroup, self.compresses = hooks is not None, compressed is not None

    @property
    def num_groups(self) -> int:
        """Number of groups, embedding tables included."""
        return len(self.groups or ()) if self._hooks is None else len(self._hooks.groups)

    def follow(self, groups: Names | None) -> None:
        self.groups = groups
        self._regroup(self._planned)

    def pause(self, paused: bool) -> None:
        """Synchronize without compression and in the default groups, or go back to the plan."""
        if self._compressed is not None:
            self._compressed.paused = paused
        self._regroup(None if paused else self._planned)

    def send_alone(self) -> None:
        """Send each gradient by itself until the next `follow`."""
        self._regroup(tuple((index,) for index in self._order()))

    def drop(self) -> str:
        """Synchronize exactly in the default groups from now on; return, for a message, what is left of compression."""
        self.follow(None)
        if self._compressed is None:
            return ""
        left = (
            f". What compression has not sent is added to the gradients of the next {FLUSH_STEPS} steps"
            if self._compressed.memories.drop()
            else ". What compression has not sent stays in state_dict(), because gradients carry a loss scale"
        )
        momentum = any(has_momentum(plan.compressor) for plan in self._compressed.plans.values())
        return left + ". The compressor kept the momentum: give the optimizer its own again" * momentum

    def current(self) -> Groups | None:
        """Return the groups to follow as positions in the order of readiness, or None if they are not runs of it."""
        assert self._hooks is not None
        order = self._order()
        known = set(order)
        default = plan_groups(self._hooks.trained, self._hooks.order)
        groups = ([index for index in group if index in known] for group in self._planned or default)
        return contiguous([group for group in groups if group], order)

    def gradients(self) -> list[Load]:
        """Return the load of each gradient, in the order in which they become ready."""
        assert self._hooks is not None
        takes = self._compressed.takes if self._compressed is not None else lambda name: False
        sizes = {one.name: one.local.nbytes for one in map(self._hooks.trained.__getitem__, self._order())}
        return [Load(name, 0, size, 1) if takes(name) else Load(name, size) for name, size in sizes.items()]

    @property
    def _planned(self) -> Groups | None:
        if self.groups is None or self._hooks is None:
            return None
        return indices_of(self._hooks.trained, self.groups)

    def _order(self) -> list[int]:
        assert self._hooks is not None
        return [index for index in self._hooks.order if self._hooks.trained[index].name in self._names]

    def _regroup(self, groups: Groups | None) -> None:
        if self._hooks is not None:
            self._hooks.regroup(groups)
