"""What each trainer needs of a `Synchronizer`: nothing on one rank, statistics per step, one state of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.attach import attach
from thinwire.gradients.model import is_sharded
from thinwire.synchronizer import Synchronizer

logger = logging.getLogger("thinwire")

PER_STEP = {
    "comm/bytes_sent_per_step": ("comm/bytes_sent", 1.0),
    "comm/bytes_dense_per_step": ("comm/bytes_dense", 1.0),
    "comm/ms_per_step": ("comm/seconds", 1e3),
    "comm/exposed_ms_per_step": ("comm/exposed_seconds", 1e3),
}
"""Statistics of a step by the total that they are a difference of, and their unit."""


class Attachment:
    """A synchronizer of the model that a trainer has wrapped, or none where there is one process.

    Args:
        model: the model as the trainer calls it: a `DistributedDataParallel`, a sharded model, or a wrapper of one.
        instead: what to write if the model is neither; it ends the message of the error.
        options: keyword arguments of `thinwire.attach`.

    Attributes:
        synchronizer: the `thinwire.Synchronizer`; None where there is one process.

    Raises:
        ValueError: there are several processes, and the trainer has not wrapped the model; ``outer``, which takes ranks
            that train alone; and as `thinwire.attach`.
    """

    def __init__(self, model: nn.Module, instead: str, **options: Any) -> None:
        self.synchronizer: Synchronizer | None = None
        if options.get("outer") is not None:
            raise ValueError("outer= is for ranks that train alone, and trainers average gradients over all ranks")
        if not dist.is_initialized() or dist.get_world_size() == 1:
            logger.info("one process has nothing to synchronize: thinwire does nothing")
        elif not any(isinstance(part, DistributedDataParallel) or is_sharded(part) for part in model.modules()):
            raise ValueError(f"{type(model).__name__} is not wrapped in DistributedDataParallel or FSDP2: {instead}")
        else:
            self.synchronizer = attach(model, **options)
        self._last = self.stats()

    def stats(self) -> dict[str, float]:
        """Return `Synchronizer.stats`; nothing where there is one process."""
        return {} if self.synchronizer is None else self.synchronizer.stats()

    def per_step(self) -> dict[str, float]:
        """Return means of the steps since the last call: bytes and milliseconds. Nothing if there were no steps."""
        last, self._last = self._last, self.stats()
        steps = self._last.get("comm/steps", 0.0) - last.get("comm/steps", 0.0)
        if steps <= 0:
            return {}
        return {name: (self._last[of] - last[of]) * unit / steps for name, (of, unit) in PER_STEP.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, which writes them. All ranks call it."""
        return {} if self.synchronizer is None else self.synchronizer.gathered().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of all ranks from what rank 0 read; all ranks call it.

        Other ranks may pass anything: the disk of another node may not have the file that rank 0 wrote. A checkpoint of
        one process, or one from before thinwire was attached, has no state, and a log line says so.
        """
        if self.synchronizer is None:
            return
        gathered = self.synchronizer.gathered()
        state = gathered.of_rank_0(state)
        if state:
            gathered.load_state_dict(state)
        else:
            logger.warning("the checkpoint has no state of thinwire: it starts as in a new training")
        self._last = self.stats()

    def detach(self) -> None:
        """Remove all hooks, on all ranks: the model is as the trainer wrapped it."""
        if self.synchronizer is not None:
            self.synchronizer.detach()


def one_of_its_kind(callback: object, callbacks: Iterable[object], remedy: str = "leave one out") -> None:
    """Check that a trainer has one callback of a class, so that its model is attached to once.

    Raises:
        ValueError: it has several.
    """
    several = sum(isinstance(other, type(callback)) for other in callbacks)
    if several > 1:
        raise ValueError(f"this Trainer has {several} ThinwireCallbacks: {remedy}")
