"""What of a synchronization survives a restart, see `thinwire.Synchronizer.state_dict`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from thinwire.hooks.compressed import CompressedSync
from thinwire.hooks.execution import Execution
from thinwire.hooks.gradients import GradientSync

VERSION = 3


def saved(
    steps: int,
    names: Iterable[str],
    gradients: GradientSync,
    compressed: CompressedSync | None,
    execution: Execution | None,
) -> dict[str, Any]:
    """``names``: of all parameters of the model."""
    return {
        "version": VERSION,
        "steps": steps,
        "parameters": sorted(names),
        "choices": dict(gradients.choices),
        "pauses": dict(gradients.pauses),
        "unions": dict(gradients.unions),
        "auto": gradients.learned(),
        "compress": None if compressed is None else compressed.memories.state_dict(),
        "plan": None if execution is None else execution.state_dict(),
    }


def check(
    state: Mapping[str, Any], names: Iterable[str], compressed: CompressedSync | None, execution: Execution | None
) -> None:
    """Raises ValueError if `restore` cannot take it."""
    if state.get("version") != VERSION:
        raise ValueError(f"a state of version {state.get('version')!r}; this thinwire reads {VERSION}")
    unknown = set(state["parameters"]) ^ set(names)
    if unknown:
        raise ValueError(f"the state belongs to a model with other parameters; {min(unknown)!r} is only in one of them")
    if (state["compress"] is None) != (compressed is None):
        before, here = ("without", "with") if state["compress"] is None else ("with", "without")
        raise ValueError(f"the state was saved {before} compression, and attach was called {here} it")
    if compressed is not None:
        compressed.memories.check_state(state["compress"])
    if execution is not None and state["plan"] is not None:
        execution.check_state(state["plan"])


def restore(
    state: Mapping[str, Any], gradients: GradientSync, compressed: CompressedSync | None, execution: Execution | None
) -> None:
    """What `saved` returned, after `check`."""
    if execution is not None and state["plan"] is not None:
        execution.load_state_dict(state["plan"])
    if compressed is not None:
        compressed.memories.load_state_dict(state["compress"])
    gradients.choices = {name: str(scheme) for name, scheme in state["choices"].items()}
    gradients.pauses = {name: int(steps) for name, steps in state["pauses"].items()}
    gradients.unions = {name: int(rows) for name, rows in state["unions"].items()}
    gradients.recall(state.get("auto"))
