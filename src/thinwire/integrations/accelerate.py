"""Hugging Face Accelerate: attach to a prepared model; state and trackers go through the `Accelerator`."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn

from thinwire.integrations.attachment import Attachment


class AcceleratorSync(Attachment):
    """What `attach` returns. It has all methods of `thinwire.Synchronizer` too, where there are several processes."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, **options: Any) -> None:
        self._accelerator = accelerator
        prepare = "call accelerator.prepare(model) first, and attach what it returns"
        super().__init__(model, prepare, **{"grad_scaler": accelerator.scaler, **options})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["synchronizer"], name)

    def log(self, values: dict[str, Any] | None = None, step: int | None = None) -> None:
        """Log values, and the statistics of the steps since the last call, to all trackers of the accelerator.

        Example:
            >>> sync.log({"loss": loss.item()}, step=step)           # doctest: +SKIP
        """
        self._accelerator.log({**(values or {}), **self.per_step()}, step=step)


def attach(accelerator: Accelerator, model: nn.Module, **options: Any) -> AcceleratorSync:
    """Synchronize the gradients of a prepared model through thinwire, see `thinwire.attach`.

    Its state is saved by ``accelerator.save_state`` and restored by ``load_state``, for all ranks. With fp16 the
    accelerator's scaler is passed on. ``accumulate`` and ``clip_grad_norm_`` work as before. In one process it does
    nothing. Call it on all ranks.

    Args:
        accelerator: the ``Accelerator``.
        model: what ``accelerator.prepare`` returned.
        options: keyword arguments of `thinwire.attach`, such as ``compress``.

    Raises:
        ValueError: a model that is not prepared; and as `thinwire.attach`.

    Example:
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)     # doctest: +SKIP
        >>> sync = thinwire.integrations.accelerate.attach(accelerator, model)           # doctest: +SKIP
    """
    sync = AcceleratorSync(accelerator, model, **options)
    accelerator.register_for_checkpointing(sync)
    return sync
