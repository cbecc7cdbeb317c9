"""What of a model is trained, by whom: the module inside DDP, and what DDP leaves alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def module_of(model: nn.Module) -> nn.Module:
    """The module that a model trains: that inside DDP, or itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def synchronized_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by name, without those that DDP was told to ignore: ranks may have others there, of other shapes.

    DDP ignores a name only below the root, and a parameter that has several names only by all of them.
    """
    ignored = model.parameters_to_ignore if isinstance(model, DistributedDataParallel) else ()
    known: set[int] = set()
    for name, parameter in module_of(model).named_parameters(remove_duplicate=False):
        is_ignored = (name if "." in name else f".{name}") in ignored
        if not is_ignored and id(parameter) not in known:
            known.add(id(parameter))
            yield name, parameter


def is_replicated(module: nn.Module) -> bool:
    """Whether ``torch.distributed._composable.replicate`` was called on it, which is DDP without a wrapper."""
    loaded = sys.modules.get("torch.distributed._composable.replicate")
    return loaded is not None and isinstance(module, loaded.DDP)
