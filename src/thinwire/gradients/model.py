"""The trained parameters of a model: of the module inside DDP, without those that DDP ignores."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def module_of(model: nn.Module) -> nn.Module:
    """Return the module that a model trains: that inside DDP, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def synchronized_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters by name, without those that DDP ignores: ranks may have others there, of other shapes.

    DDP ignores a name only below the root, and a parameter that has several names only by all of them.
    """
    ignored = model.parameters_to_ignore if isinstance(model, DistributedDataParallel) else ()
    known: set[int] = set()
    for name, parameter in nn.Module.named_parameters(module_of(model), remove_duplicate=False):  # TorchRec overrides it
        is_ignored = (name if "." in name else f".{name}") in ignored
        if not is_ignored and id(parameter) not in known:
            known.add(id(parameter))
            yield name, parameter


def is_replicated(module: nn.Module) -> bool:
    """Return whether ``torch.distributed._composable.replicate``, DDP without a wrapper, was called on a module."""
    loaded = sys.modules.get("torch.distributed._composable.replicate")
    return loaded is not None and isinstance(module, loaded.DDP)
