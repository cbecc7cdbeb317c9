"""Methods whose gradients travel in groups of a policy or a plan, as given by their texts.

``fuse=cupcake``, ``fuse=byte_cap(mb=4)``, ``fuse=safusion(align=False;adapt=False)``: a policy of `thinwire.fuse`.
``plan`` measures the job before its first step and uses the
best plan, which may be to do nothing; ``plan:plan.json`` (or ``plan:file=plan.json``) uses a saved one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from thinwire.compress.assign import Dense
from thinwire.compress.named import colons
from thinwire.plan.plan import Plan
from thinwire.plan.policy import Policy

if TYPE_CHECKING:
    from thinwire.lab.planning.training import Training


@dataclass(frozen=True)
class Planning:
    """Settings of a plan.

    Args:
        file: a saved plan to use; empty to measure, on all ranks.
        compressors: texts of `thinwire.compress.named.parse` that may be in the plan; None for the usual ones.
        fallback: whether to drop a plan that turns out slower than exact synchronization.
    """

    file: str = ""
    compressors: tuple[str, ...] | None = None
    fallback: bool = False

    @classmethod
    def of(cls, settings: dict[str, Any], world_size: int) -> Planning:
        """Create from the settings of a method: ``file``, ``compressors`` (with "+" between them, or "none"),
        ``fallback``.

        Raises:
            ValueError: unknown settings; a file that is no plan, or one for another number of ranks; a compressor that
                cannot be planned with.
        """
        from thinwire.lab.planning.training import check

        unknown = set(settings) - {"file", "compressors", "fallback"}
        if unknown:
            raise ValueError(f"plan has no setting {min(unknown)!r}; legal are file, compressors and fallback")
        file, text = str(settings.get("file", "")), settings.get("compressors")
        if file and (ranks := Plan.load(file).world_size) != world_size:
            raise ValueError(f"{file} is a plan for {ranks} ranks, and there are {world_size}: give --hosts {ranks}")
        compressors = None if text is None else () if text == "none" else tuple(map(colons, str(text).split("+")))
        check(compressors or ())
        if not isinstance(fallback := settings.get("fallback", False), bool):
            raise ValueError(f"fallback of plan is {fallback!r}: pass True or False")
        return cls(file, compressors, fallback)

    def plan(self, make: Callable[[], Training]) -> Plan:
        """Return the plan for the training that ``make`` makes; a collective call.

        Raises:
            ValueError: the job cannot be measured: one rank.
        """
        from thinwire.lab.planning.planner import best_plan
        from thinwire.lab.planning.training import How, measure_training

        if self.file:
            plan = Plan.load(self.file)
        else:
            plan = best_plan(measure_training(make(), How(self.compressors, fresh=True)), self.compressors)
        return replace(plan, fallback=True) if self.fallback else plan


def grouping(policy_text: object, dense: Dense) -> tuple[Dense | Policy, bool]:
    """Return the policy of a ``fuse=`` around ``dense``, or that alone; and whether it needs a plain module.

    Args:
        policy_text: what stands behind ``fuse=``; None if a method has none.

    Raises:
        ValueError: an unknown policy, or settings that it does not take.
    """
    if policy_text is None:
        return dense, False
    from thinwire import fuse

    policy: Any = fuse.parse(colons(str(policy_text)))
    return replace(policy, dense=dense), True
