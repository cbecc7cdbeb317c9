"""Outer loops: each rank trains by itself, and parameters are averaged seldom or in the background.

A recipe (`local_sgd`, `diloco`, `shadow_sync`) is passed to `thinwire.attach`, which returns an object like
a `Synchronizer`::

    sync = thinwire.attach(model, outer=thinwire.outer.diloco(every=64), optimizer=optimizer)
"""

from __future__ import annotations

from thinwire.outer.recipe import OuterRecipe, diloco, local_sgd, shadow_sync

__all__ = ["OuterRecipe", "diloco", "local_sgd", "shadow_sync"]
