"""Lightning: a callback of its `Trainer`, or a strategy that brings it."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError:  # the package has two names
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.strategies import DDPStrategy

from thinwire.integrations.attachment import Attachment, one_of_its_kind
from thinwire.synchronizer import Synchronizer


class LightningCallback(Callback):
    """Synchronize the gradients of a Lightning `Trainer` through thinwire while it fits, see `thinwire.attach`.

    It attaches to the model that the strategy has wrapped, logs the bytes and milliseconds of each step, saves the
    state of all ranks in the trainer's checkpoints, and detaches at the end. In one process it does nothing.

    Args:
        options: keyword arguments of `thinwire.attach`, such as ``compress``.

    Attributes:
        attachment: while it fits, the `thinwire.integrations.attachment.Attachment`.

    Raises:
        ValueError: when fitting starts; the trainer has a second one, or its strategy reduces gradients by itself; and
            as `thinwire.attach`.

    Example:
        >>> L.Trainer(strategy="ddp", callbacks=[ThinwireCallback()]).fit(module, data)        # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.attachment: Attachment | None = None
        self._to_restore: dict[str, Any] | None = None
        self._ended: dict[str, Any] = {}

    @property
    def synchronizer(self) -> Synchronizer | None:
        """The `thinwire.Synchronizer` while the model is trained by several processes; None otherwise."""
        return None if self.attachment is None else self.attachment.synchronizer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.attachment is not None:  # a training that ended with an error
            self.attachment.detach()
        one_of_its_kind(self, trainer.callbacks, "leave one out (ThinwireStrategy brings its own)")
        options = {"grad_scaler": getattr(trainer.precision_plugin, "scaler", None), **self.options}
        self.attachment = Attachment(trainer.strategy.model, 'use strategy="ddp"', **options)
        saved, self._to_restore = self._to_restore, None
        if saved is not None:
            self.attachment.load_state_dict(saved)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.attachment is not None:
            pl_module.log_dict(self.attachment.per_step())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.attachment is not None:
            self._ended = self.state_dict()  # for a checkpoint that is saved after the training
            self.attachment.detach()
            self.attachment = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0. Lightning calls it on all ranks."""
        if self.attachment is None:
            return self._ended if self._to_restore is None else self._to_restore
        return self.attachment.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states of a checkpoint until fitting starts."""
        self._to_restore = state_dict


ThinwireCallback = LightningCallback
"""What to write, as with `thinwire.integrations.transformers`; a class has a name of its own."""


class ThinwireStrategy(DDPStrategy):
    """Train with DDP and thinwire: ``L.Trainer(strategy=ThinwireStrategy())``.

    Args:
        attach: keyword arguments of `thinwire.attach`.
        options: those of Lightning's `DDPStrategy`, such as ``find_unused_parameters``.
    """

    def __init__(self, attach: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._callback = ThinwireCallback(**(attach or {}))

    @property
    def synchronizer(self) -> Synchronizer | None:
        """The `thinwire.Synchronizer` while the model is trained by several processes; None otherwise."""
        return self._callback.synchronizer

    def setup_environment(self) -> None:
        super().setup_environment()
        callbacks = self.lightning_module.trainer.callbacks  # not restored from a checkpoint yet
        if self._callback not in callbacks:
            callbacks.insert(0, self._callback)
