"""Methods whose gradients travel in groups of a policy or a plan, as given by their texts.

``fuse=cupcake``, ``fuse=byte_cap(mb=4)``, ``fuse=safusion(align=False;adapt=False)``: a policy of `thinwire.fuse`.
``ahead=False`` compresses a group as one flat tensor. ``plan`` measures the job before its first step and uses the
best plan, which may be to do nothing; ``plan:plan.json`` (or ``plan:file=plan.json``) uses a saved one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thinwire.compress.named import colons
from thinwire.plan.plan import Plan

if TYPE_CHECKING:
    from thinwire.lab.planning.training import Training


@dataclass(frozen=True)
class Planning:
    """Settings of a plan.

    Args:
        file: a saved plan to use; empty to measure, on all ranks.
        compressors: texts of `thinwire.compress.named.parse` that may be in the plan; None for the usual ones.
        attach_settings: passed on to `thinwire.attach`.
    """

    file: str = ""
    compressors: tuple[str, ...] | None = None
    attach_settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: dict[str, Any], world_size: int) -> Planning:
        """Create from the settings of a method: ``file``, ``compressors`` (with "+" between them, or "none"),
        ``fallback``.

        Raises:
            ValueError: unknown settings; a file that is no plan, or one for another number of ranks; a compressor that
                cannot be planned with.
        """
        unknown = set(settings) - {"file", "compressors", "fallback"}
        if unknown:
            raise ValueError(f"plan has no setting {min(unknown)!r}; legal are file, compressors and fallback")
        file, text = str(settings.get("file", "")), settings.get("compressors")
        if file and (ranks := Plan.load(file).world_size) != world_size:
            raise ValueError(f"{file} is a plan for {ranks} ranks, and there are {world_size}: give --hosts {ranks}")
        compressors = None if text is None else () if text == "none" else tuple(map(colons, str(text).split("+")))
        _check(compressors or ())
        return cls(file, compressors, {"fallback": bool(settings.get("fallback", False))})

    def plan(self, make: Callable[[], Training]) -> Plan:
        """Return the plan for the training that ``make`` makes; a collective call.

        Raises:
            ValueError: the job cannot be measured: one rank.
        """
        if self.file:
            return Plan.load(self.file)
        from thinwire.lab.planning.planner import DEFAULTS, best_plan
        from thinwire.lab.planning.training import How, measure_training

        compressors = DEFAULTS if self.compressors is None else self.compressors
        return best_plan(measure_training(make(), How(compressors, fresh=True)), compressors)


def grouping(settings: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Remove ``fuse`` and ``ahead`` from the settings of a method and return their arguments for `thinwire.attach`.

    Returns:
        The arguments for `thinwire.attach`, and whether they need a plain module.

    Raises:
        ValueError: an unknown policy, or settings that it does not take.
    """
    found: dict[str, Any] = {}
    if "fuse" in settings:
        from thinwire import fuse

        found["fuse"] = fuse.parse(colons(str(settings.pop("fuse"))))
    if "ahead" in settings:
        found["ahead"] = bool(settings.pop("ahead"))
    return found, bool(found)


def _check(compressors: tuple[str, ...]) -> None:
    from thinwire.lab.planning.training import check

    check(compressors)
