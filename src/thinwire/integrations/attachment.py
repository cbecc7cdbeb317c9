"""What each trainer needs of what is attached: nothing on one rank, statistics per step, states of all ranks."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.attach import attach
from thinwire.errors import logger
from thinwire.gradients.module import is_sharded
from thinwire.gradients.synchronizer import Synchronizer
from thinwire.outer import OuterLoop, OuterRecipe
from thinwire.outer import attach as attach_outer

_NO_STATE = "the checkpoint has no state of thinwire: it starts as in a new training"

PER_STEP = {
    "comm/bytes_sent_per_step": ("comm/bytes_sent", 1.0),
    "comm/bytes_dense_per_step": ("comm/bytes_dense", 1.0),
    "comm/ms_per_step": ("comm/seconds", 1e3),
    "comm/exposed_ms_per_step": ("comm/exposed_seconds", 1e3),
}
"""Statistics of an optimizer's step by the total that they are a difference of, and their unit."""


class Attachment:
    """A synchronizer or an outer loop of the model that a trainer has wrapped, or none where there is one process.

    Args:
        model: the model as the trainer calls it: a `DistributedDataParallel`, a sharded model, or its wrapper.
        instead: what to write if the model is neither; it ends the message of the error.
        outer: a recipe, with which the ranks train apart; None to average gradients in every step.
        options: keyword arguments of `thinwire.attach`, or of `thinwire.outer.attach`, and then ``total_steps``, the
            steps of the whole training if they are known, for a warning if it has few rounds.

    Attributes:
        synchronizer: the `thinwire.Synchronizer` or `thinwire.outer.OuterLoop`; None where there is one process.

    Raises:
        ValueError: there are several processes, and the trainer has not wrapped the model; and as `thinwire.attach`.
    """

    def __init__(self, model: nn.Module, instead: str, outer: OuterRecipe | None = None, **options: Any) -> None:
        self.synchronizer: Synchronizer | OuterLoop | None = None
        self._undo = ExitStack()
        if not dist.is_initialized() or dist.get_world_size() == 1:
            logger.info("one process has nothing to synchronize: thinwire does nothing")
        elif not any(isinstance(part, DistributedDataParallel) or is_sharded(part) for part in model.modules()):
            raise ValueError(f"{type(model).__name__} is not wrapped in DistributedDataParallel or FSDP2: {instead}")
        elif outer is None:
            self.synchronizer = attach(model, **options)
        else:
            options.pop("grad_scaler", None)  # an outer loop sees which steps the scaler skips
            warning = outer.few_rounds(options.pop("total_steps", 0))
            self.synchronizer = attach_outer(model, options.pop("optimizer", None), outer, **options)
            if warning and dist.get_rank() == 0:
                logger.warning(warning)
        self._last = self.stats()

    def stats(self) -> dict[str, float]:
        """Return `Synchronizer.stats`; nothing where there is one process."""
        return {} if self.synchronizer is None else self.synchronizer.stats()

    def per_step(self) -> dict[str, float]:
        """Return means of the optimizer's steps since the last result: bytes and milliseconds. Nothing without a step.

        A step has several backward passes where gradients are cached or accumulated in synchronized passes.
        """
        now, last = self.stats(), self._last
        steps = now.get("comm/optimizer_steps", 0.0) - last.get("comm/optimizer_steps", 0.0)
        if steps <= 0:
            return {}
        self._last = now
        return {name: (now[of] - last[of]) * unit / steps for name, (of, unit) in PER_STEP.items()}

    def replace(self, trainer: Any, name: str, method: Callable[..., Any]) -> None:
        """Call ``method`` with a method of a trainer and its arguments, in place of that, until `detach`."""
        stock = getattr(trainer, name)
        setattr(trainer, name, partial(method, stock))
        self._undo.callback(setattr, trainer, name, stock)

    def share(self, trainer: Any, name: str) -> None:
        """Have a method of a trainer see the parameters that the ranks of an outer loop share, until `detach`."""

        def shared(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.global_parameters():
                return method(*args, **kwargs)

        if isinstance(self.synchronizer, OuterLoop):
            self.replace(trainer, name, shared)

    def global_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the parameters that all ranks share, as `OuterLoop` has it."""
        return self.synchronizer.global_parameters() if isinstance(self.synchronizer, OuterLoop) else nullcontext()

    def synchronize(self) -> None:
        """End the rounds of an outer loop, so that all ranks have the same parameters; on all ranks."""
        if isinstance(self.synchronizer, OuterLoop):
            self.synchronizer.synchronize()

    def end(self) -> None:
        """Call `synchronize` and `detach` at the end of a training."""
        self.synchronize()
        self.detach()
        self.synchronizer = None

    def save(self, folder: str | Path) -> None:
        """Write the state of each rank to a file of its own, ``thinwire-00003.pt`` on rank 3. All ranks call it.

        The files of all ranks are complete when it returns.
        """
        if self.synchronizer is not None:
            self.synchronizer.gathered().save_files(folder)

    def load(self, folder: str | Path | None) -> None:
        """Restore what `save` wrote; all ranks call it. Each reads its own file.

        A checkpoint of one process, or one from before thinwire was attached, has no state, and a log line says so.

        Args:
            folder: that of the checkpoint, which ranks may have on disks of their own; None where there is none.

        Raises:
            ValueError: some ranks have no file, or cannot restore what is in it; on all ranks, and none has restored
                its state.
        """
        self._restore(lambda states: states.load_files(folder))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, which writes them, for trainers with a single file.

        All ranks call it.
        """
        return {} if self.synchronizer is None else self.synchronizer.gathered().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of all ranks from what rank 0 read, which sends each rank its own; all ranks call it.

        Other ranks may pass anything: the disk of another node may not have the file that rank 0 wrote.
        """
        self._restore(lambda states: states.load_of_rank_0(state))

    def _restore(self, load: Callable[[Any], bool]) -> None:
        if self.synchronizer is not None:
            if not load(self.synchronizer.gathered()):
                logger.warning(_NO_STATE)
            self._last = self.stats()

    def detach(self) -> None:
        """Remove all hooks, on all ranks: the model is as the trainer wrapped it."""
        self._undo.close()
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
