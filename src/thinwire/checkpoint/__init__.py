"""Every iteration's checkpoint in the memory of peers, recovered without a disk.

The method is GEMINI's (Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints", SOSP'23).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinwire.checkpoint.placement import placement, recovery_probability

if TYPE_CHECKING:
    from thinwire.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer", "placement", "recovery_probability"]


def __getattr__(name: str) -> Any:
    """The front end is imported on first use: a holder does without torch."""
    if name == "Checkpointer":
        from thinwire.checkpoint.checkpointer import Checkpointer

        return Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
