"""torchtitan: keep every step in the memory of hosts, beside the trainer's own checkpoints."""

from typing import Any

from torch import nn

from thinwire.checkpoint import Checkpointer


class MemoryCheckpoints:
    """The checkpointer of a torchtitan ``Trainer``, with a `thinwire.checkpoint.Checkpointer` before it.

    ``load`` restores the newest step that the hosts keep, and only without one what the trainer's own has. ``save``,
    which the trainer calls after each step, makes a checkpoint in memory and calls that of the trainer's own. The
    position in the data is that of its loader.

    Args:
        trainer: the ``Trainer``, before ``train``.
        options: keyword arguments of `Checkpointer`: ``policy`` and ``storage``.

    Example:
        >>> trainer.checkpointer = MemoryCheckpoints(trainer)           # doctest: +SKIP
    """

    def __init__(self, trainer: Any, **options: Any) -> None:
        self._inner, parts = trainer.checkpointer, trainer.model_parts
        model = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
        optimizers, schedulers = list(trainer.optimizers), list(trainer.lr_schedulers.schedulers)
        data = [trainer, trainer.dataloader]
        self._memory = Checkpointer(model, optimizers, scheduler=schedulers, data=data, **options)

    def load(self, step: int = -1) -> bool:
        """Restore ``step``, or the newest one, and return whether there was one."""
        restored = self._memory.restore(step=step if step >= 0 else None) if step != 0 else None
        return restored is not None or self._inner.load(step)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        self._memory.step()
        return self._inner.save(curr_step, last_step)

    def close(self) -> None:
        self._memory.flush()
        self._memory.close()
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
