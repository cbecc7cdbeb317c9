"""Plans: what to send together, what to compress and how, predicted before anything is trained.

Profiles and prices of groups, which are in `thinwire.fuse`, and measuring, choosing and statistics of the timeline,
which are in `thinwire.lab.planning`, are offered here too. What compresses or measures is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire.plan.profile import Groups, Linear, Profile, check_groups
from thinwire.plan.timeline import iteration_seconds

if TYPE_CHECKING:
    from thinwire.plan.plan import Candidate, Group, Plan

    How = Measurement = Timeline = Training = Any  # of the laboratory, which no room imports
    best_plan: Any
    measure_training: Any
    simulate: Any

__all__ = [
    "Candidate", "Group", "Groups", "How", "Linear", "Measurement", "Plan", "Profile", "Timeline", "Training",
    "best_plan", "check_groups", "iteration_seconds", "measure_training", "simulate",
]  # fmt: skip

_HOMES = {
    "lab.planning.training": ("How", "Training", "measure_training"),
    "lab.planning.measurement": ("Measurement",),
    "plan.plan": ("Candidate", "Group", "Plan"),
    "lab.planning.planner": ("best_plan",),
    "lab.planning.timeline": ("Timeline", "simulate"),
}


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import a name that compresses or measures on first use."""
        for module, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f"thinwire.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
