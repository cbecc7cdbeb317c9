"""What each trainer needs of a `Checkpointer`: the trainer's counters are kept too, and so its position in the data."""

from collections.abc import Callable
from typing import Any

from torch import nn

from thinwire.checkpoint import Checkpointer
from thinwire.checkpoint.state.snapshot import random_states, set_random_states
from thinwire.errors import logger


def attached_before(callback: object, callbacks: list[Any]) -> Any:
    """Return what a ThinwireCallback has attached, whose state is kept with the rest; None if there is none.

    One that comes later in the list has not attached yet: what it has is of a training that failed.
    """
    for index, one in enumerate(callbacks):
        if hasattr(one, "attachment"):
            if index < callbacks.index(callback):
                return one.synchronizer
            logger.warning("name ThinwireCallback before CheckpointCallback, which else keeps no states of it")
    return None


class Kept:
    """A `Checkpointer` of a trainer, made when the trainer has a model and an optimizer, and restored at once.

    Args:
        model: the model as the trainer calls it.
        optimizer: its optimizers, as those of `Checkpointer`.
        read: returns the trainer's counters, as JSON would have them.
        options: keyword arguments of `Checkpointer`, such as ``scheduler`` and ``storage``.

    Attributes:
        counters: those that were restored; None if there was nothing of this run, so that training starts afresh.
    """

    def __init__(self, model: nn.Module, optimizer: Any, read: Callable[[], dict[str, Any]], **options: Any) -> None:
        self._read = read
        self.counters: dict[str, Any] | None = None
        self.checkpointer = Checkpointer(model, optimizer, data=[self, *options.pop("data", [])], **options)
        self.checkpointer.restore()
        self._random = random_states()

    def state_dict(self) -> dict[str, Any]:
        return self._read()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counters = state

    def close(self) -> None:
        """End the training: its last version is with all peers when this returns, or a minute has passed."""
        self.checkpointer.flush()
        self.checkpointer.close()

    def restore_random(self, *_: object) -> None:
        """Restore the random states of this host again, which skipped batches have changed."""
        set_random_states(self._random)
