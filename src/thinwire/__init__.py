"""thinwire: PyTorch data-parallel training that is fast on the network you have.

Sparse gradients are summed exactly, in a fraction of the bytes of an all-reduce. The method is ZEN's (Wang et
al., "ZEN: Empowering Distributed Training with Sparsity-driven Data Synchronization", OSDI'25), on rows.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire import (
        backend,
        checkpoint,
        compress,
        deltas,
        errors,
        fuse,
        integrations,
        outer,
        plan,
        reproducible,
        schemes,
    )
    from thinwire.all_reduce import sparse_all_reduce
    from thinwire.attach import attach
    from thinwire.errors import CorruptMessageError, LostPeerError, MismatchError, PeerError, ThinwireError
    from thinwire.gradients.sharded.layout import embedding_tables
    from thinwire.gradients.synchronizer import Synchronizer
    from thinwire.plan.plan import Plan
    from thinwire.rows.sparse import SparseRows
    from thinwire.sums.scheme import Scheme

__version__ = "0.1.0"

__all__ = [
    "CorruptMessageError", "LostPeerError", "MismatchError", "PeerError", "Plan", "Scheme", "SparseRows",
    "Synchronizer", "ThinwireError", "attach", "backend", "checkpoint", "compress", "deltas", "embedding_tables",
    "errors", "fuse", "integrations", "outer", "plan", "reproducible", "schemes", "sparse_all_reduce",
]  # fmt: skip

_MODULE_OF = {
    "CorruptMessageError": "errors", "LostPeerError": "errors", "MismatchError": "errors", "PeerError": "errors",
    "Plan": "plan.plan", "Scheme": "sums.scheme", "SparseRows": "rows.sparse",
    "Synchronizer": "gradients.synchronizer", "ThinwireError": "errors", "attach": "attach",
    "embedding_tables": "gradients.sharded.layout", "sparse_all_reduce": "all_reduce",
}  # fmt: skip


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import a public name on first use: the holder needs no torch, and most trainings need few of the rooms."""
        if name in _MODULE_OF:
            value = getattr(import_module(f"thinwire.{_MODULE_OF[name]}"), name)
            globals()[name] = value
            return value
        if name in __all__:
            return import_module(f"thinwire.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})


class _Package(ModuleType):
    """The class of this package. It keeps ``thinwire.attach`` the function when the module of that name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _MODULE_OF and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (self.__name__,)  # cloudpickle, by which Ray ships functions, knows plain modules only


sys.modules[__name__].__class__ = _Package
