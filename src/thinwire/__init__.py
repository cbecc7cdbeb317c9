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
    from thinwire import checkpoint

__version__ = "0.1.0"

__all__ = [
    "CorruptMessageError",
    "MismatchError",
    "PeerError",
    "Scheme",
    "SparseRows",
    "Synchronizer",
    "ThinwireError",
    "attach",
    "checkpoint",
    "compress",
    "schemes",
    "sparse_all_reduce",
]


def __getattr__(name: str) -> Any:
    """``thinwire.checkpoint`` is imported on first use."""
    if name == "checkpoint":
        return import_module("thinwire.checkpoint")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
