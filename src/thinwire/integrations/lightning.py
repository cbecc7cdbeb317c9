"""Lightning: a callback of its `Trainer`, or a strategy that brings it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError:  # the package has two names
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.strategies import DDPStrategy

from thinwire.gradients.module import is_sharded
from thinwire.gradients.synchronizer import Synchronizer
from thinwire.integrations.attachment import Attachment, one_of_its_kind
from thinwire.integrations.checkpoints import Kept, attached_before
from thinwire.outer import OuterLoop


class LightningCallback(Callback):
    """Synchronize the gradients of a Lightning `Trainer` through thinwire while it fits, see `thinwire.attach`.

    It attaches to the model that the strategy has wrapped, logs the bytes and milliseconds of each step, saves the
    state of all ranks in the trainer's checkpoints, and detaches at the end. In one process it does nothing. With
    ``outer=`` ranks train apart; validation and checkpoints then have the parameters that all of them share.

    Args:
        options: keyword arguments of `thinwire.attach`, such as ``dense``; or ``outer``, a recipe of `thinwire.outer`,
            with those of `thinwire.outer.attach`. Of several optimizers the last one counts steps.

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
        self._has_files = False

    @property
    def synchronizer(self) -> Synchronizer | OuterLoop | None:
        """What is attached while the model is trained by several processes; None otherwise."""
        return None if self.attachment is None else self.attachment.synchronizer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget what an evaluation has loaded: a checkpoint of this run is loaded after this."""
        self._to_restore = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.attachment is not None:  # a training that ended with an error
            self.attachment.detach()
        one_of_its_kind(self, trainer.callbacks, "leave one out (ThinwireStrategy brings its own)")
        options: dict[str, Any] = {"grad_scaler": getattr(trainer.precision_plugin, "scaler", None), **self.options}
        if "outer" in options:
            options.setdefault("optimizer", trainer.optimizers[-1])
            options["total_steps"] = trainer.estimated_stepping_batches
            self._has_files = any(map(is_sharded, trainer.strategy.model.modules()))
        self.attachment = Attachment(trainer.strategy.model, 'use strategy="ddp"', **options)
        self.attachment.share(trainer.fit_loop.epoch_loop.val_loop, "run")
        if self._has_files:
            self.attachment.replace(trainer, "save_checkpoint", partial(self._save_files, trainer))
        self.attachment.share(trainer, "save_checkpoint")
        saved, self._to_restore = self._to_restore, None
        if saved is not None and "files" in saved:
            self.attachment.load(trainer.ckpt_path)
        elif saved is not None:
            self.attachment.load_state_dict(saved)

    def _save_files(self, trainer: Trainer, save: Callable[..., None], path: str | Path, *args: Any, **kw: Any) -> None:
        """Save a distributed checkpoint, and in its folder the state of each rank."""
        save(path, *args, **kw)
        if self.attachment is not None:
            self.attachment.save(trainer.strategy.broadcast(path))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if self.attachment is not None:
            pl_module.log_dict(self.attachment.per_step())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.attachment is not None:
            self._ended = self.state_dict()  # for a checkpoint that is saved after the training
            self.attachment.end()
            self.attachment = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0. Lightning calls it on all ranks."""
        if self.attachment is None:
            return self._ended if self._to_restore is None else self._to_restore
        if self._has_files:
            return {"files": "thinwire-*.pt"}
        return self.attachment.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states of a checkpoint until fitting starts."""
        self._to_restore = state_dict


class LightningCheckpoints(Callback):
    """Keep the state of a Lightning `Trainer` in the memory of hosts, see `thinwire.checkpoint.Checkpointer`.

    A fit that starts again goes on after the newest step that is kept, in the middle of an epoch too, and with the
    batches that come next: the others are skipped, in the order of the sampler's epoch.

    Args:
        options: keyword arguments of `Checkpointer`: ``policy`` and ``storage``.

    Attributes:
        kept: while it fits, the `thinwire.integrations.checkpoints.Kept`.

    Example:
        >>> L.Trainer(strategy="ddp", callbacks=[CheckpointCallback()]).fit(module, data)        # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.kept: Kept | None = None
        self._steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_end(trainer, pl_module)  # of a training that ended with an error
        loop, schedulers = trainer.fit_loop, [config.scheduler for config in trainer.lr_scheduler_configs]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        sync = attached_before(self, trainer.callbacks)
        parts = {"scheduler": schedulers or None, "scaler": scaler, "synchronizer": sync, **self.options}
        self.kept = Kept(trainer.strategy.model, trainer.optimizers, loop.state_dict, **parts)
        if self.kept.counters is not None:
            loop.load_state_dict(self.kept.counters)
            loop.restarting = True
            loop.reset()
            loop.epoch_progress.current.completed = loop.epoch_progress.current.processed
            _resume_from(self.kept, loop.epoch_loop)
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.kept is not None and trainer.global_step > self._steps:  # not where gradients are accumulated
            self._steps = trainer.global_step
            self.kept.checkpointer.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.kept is not None:
            self.kept.close()
            self.kept = None


def _resume_from(kept: Kept, loop: Any) -> None:
    """Have the loop of an epoch skip the batches that were trained, once the sampler knows the epoch."""
    start = loop.on_run_start

    def on_run_start(fetcher: Any) -> None:
        loop.on_run_start = start
        batches = loop.batch_progress.current.ready
        iter(fetcher)
        for _ in range(batches):
            next(fetcher)
        fetcher.fetched -= batches  # it is added below
        kept.restore_random()
        start(fetcher)

    loop.on_run_start = on_run_start


ThinwireCallback = LightningCallback
CheckpointCallback = LightningCheckpoints
"""What to write, as with `thinwire.integrations.transformers`; classes have names of their own."""


class ThinwireStrategy(DDPStrategy):
    """Train with DDP and thinwire: ``L.Trainer(strategy=ThinwireStrategy())``.

    Args:
        attach: keyword arguments of `thinwire.attach`.
        options: options of Lightning's `DDPStrategy`, such as ``find_unused_parameters``.
    """

    def __init__(self, attach: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._callback = ThinwireCallback(**(attach or {}))

    @property
    def synchronizer(self) -> Synchronizer | OuterLoop | None:
        """What is attached while the model is trained by several processes; None otherwise."""
        return self._callback.synchronizer

    def setup_environment(self) -> None:
        super().setup_environment()
        callbacks = self.lightning_module.trainer.callbacks  # not restored from a checkpoint yet
        if self._callback not in callbacks:
            callbacks.insert(0, self._callback)
