"""Every iteration's checkpoint in the memory of peers, recovered without a disk.

The method is GEMINI's (Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints", SOSP'23).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire.checkpoint.placement import placement, recovery_probability

if TYPE_CHECKING:
    from thinwire.checkpoint.checkpointer import Checkpointer
    from thinwire.checkpoint.dcp.memory import MemoryReader, MemoryWriter
    from thinwire.checkpoint.options import CheckpointPolicy, Disk, Storage

_MODULES = {
    "Checkpointer": "checkpointer", "CheckpointPolicy": "options", "Disk": "options", "Storage": "options",
    "MemoryReader": "dcp.memory", "MemoryWriter": "dcp.memory",
}  # fmt: skip

__all__ = [
    "CheckpointPolicy", "Checkpointer", "Disk", "MemoryReader", "MemoryWriter", "Storage",
    "placement", "recovery_probability",
]  # fmt: skip


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import a front end on first use: `placement` alone needs no torch."""
        if name in _MODULES:
            return getattr(import_module(f"thinwire.checkpoint.{_MODULES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
