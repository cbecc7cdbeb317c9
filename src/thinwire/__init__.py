"""thinwire: PyTorch data-parallel training that is fast on the network you have.

Sparse gradients are summed exactly, in a fraction of the bytes of an all-reduce. The method is ZEN's (Wang et
al., "ZEN: Empowering Distributed Training with Sparsity-driven Data Synchronization", OSDI'25), on rows.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire import compress, schemes
from thinwire.all_reduce import sparse_all_reduce
from thinwire.attach import attach
from thinwire.errors import CorruptMessageError, MismatchError, PeerError, ThinwireError
from thinwire.sparse import SparseRows
from thinwire.sync.scheme import Scheme
from thinwire.synchronizer import Synchronizer

if TYPE_CHECKING:
    from thinwire import checkpoint, fuse, plan
    from thinwire.plan.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "CorruptMessageError",
    "MismatchError",
    "PeerError",
    "Plan",
    "Scheme",
    "SparseRows",
    "Synchronizer",
    "ThinwireError",
    "attach",
    "checkpoint",
    "compress",
    "fuse",
    "plan",
    "schemes",
    "sparse_all_reduce",
]


def __getattr__(name: str) -> Any:
    """Rooms that a training script may do without are imported on first use."""
    if name in ("checkpoint", "fuse", "plan"):
        return import_module(f"thinwire.{name}")
    if name == "Plan":
        return import_module("thinwire.plan.plan").Plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
