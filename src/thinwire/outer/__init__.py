"""Outer loops: each rank trains by itself, and parameters are averaged seldom or in the background.

`attach` starts an `OuterLoop` by a recipe (`local_sgd`, `diloco`, `shadow_sync`)::

    loop = thinwire.outer.attach(model, optimizer, thinwire.outer.diloco(every=64))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from thinwire.outer.recipe import OuterRecipe, diloco, local_sgd, shadow_sync

if TYPE_CHECKING:
    from thinwire.outer.attachment import attach
    from thinwire.outer.loop import OuterLoop
    from thinwire.outer.members import Members

__all__ = ["Members", "OuterLoop", "OuterRecipe", "attach", "diloco", "local_sgd", "shadow_sync"]

_MODULES = {"Members": "members", "OuterLoop": "loop", "attach": "attachment"}


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import what needs torch on first use: recipes alone need no torch."""
        if name in _MODULES:
            return getattr(import_module(f"thinwire.outer.{_MODULES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
