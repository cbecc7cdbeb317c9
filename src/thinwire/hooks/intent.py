"""What `thinwire.attach` was asked to follow, and how soon it judges it."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.fuse.policy import Policy


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
