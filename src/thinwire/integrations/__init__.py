"""Trainers and engines: one module for each framework, which is imported on first use.

The extra ``integrations`` has the frameworks that they are tested with.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.integrations import accelerate, deepspeed, lightning, ray, torchrec, torchtitan, transformers

__all__ = ["accelerate", "deepspeed", "lightning", "ray", "torchrec", "torchtitan", "transformers"]

if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
