"""States that were stored, and are loaded in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from thinwire.checkpoint.state.decode import prepare
from thinwire.checkpoint.state.layout import StateLayout
from thinwire.checkpoint.state.sharding import fill_own


def load_into(state: Any, layout: StateLayout, tensors: Sequence[Tensor]) -> Any:
    """Copy a stored state into the tensors of ``state`` at the same keys, and return it."""
    loaded, targets = prepare(state, layout)
    fill_own(targets, layout, tensors)
    return loaded
