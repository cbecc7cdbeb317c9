"""Hugging Face Accelerate: attach to a prepared model; state and trackers go through the `Accelerator`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from thinwire.checkpoint import Checkpointer
from thinwire.gradients.synchronizer import Synchronizer
from thinwire.integrations.attachment import Attachment


class AcceleratorSync(Attachment):
    """What `attach` returns. It has all methods of what is attached too, where there are several processes."""

    is_attached = True

    def __init__(self, accelerator: Accelerator, model: nn.Module, **options: Any) -> None:
        self._accelerator = accelerator
        prepare = "call accelerator.prepare(model) first, and attach what it returns"
        super().__init__(model, prepare, **{"grad_scaler": accelerator.scaler, **options})

    def __getattr__(self, name: str) -> Any:
        synchronizer = self.__dict__.get("synchronizer")
        if synchronizer is None and hasattr(Synchronizer, name) and not name.startswith("_"):
            raise AttributeError(f"one process has nothing to synchronize, so there is no Synchronizer and no {name}")
        return getattr(synchronizer, name) if synchronizer is not None else self.__getattribute__(name)

    def log(self, values: dict[str, Any] | None = None, step: int | None = None) -> None:
        """Log values, and the statistics of the steps since the last call, to all trackers of the accelerator.

        Example:
            >>> sync.log({"loss": loss.item()}, step=step)           # doctest: +SKIP
        """
        self._accelerator.log({**(values or {}), **self.per_step()}, step=step)

    def detach(self) -> None:
        """Remove all hooks, on all ranks; ``save_state`` and ``load_state`` are then for what the accelerator has."""
        super().detach()
        self.is_attached = False


class _Files:
    """What is registered for checkpointing: hooks know the folder, to which each rank writes its state.

    The custom checkpoint of rank 0 is a note. Earlier versions wrote the states of all ranks there. It stays registered
    after a `detach`, as a checkpoint is loaded with as many objects as it was saved with, and serves the next `attach`.

    Args:
        number: of models that are attached beside this one. Each has files of its own.
    """

    def __init__(self, accelerator: Accelerator, sync: AcceleratorSync, number: int) -> None:
        self.sync, self._name, self._folder = sync, f"thinwire_{number}" if number else "", Path()
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._note)

    def _save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        if self.sync.is_attached:
            self.sync.save(Path(folder, self._name))

    def _note(self, models: list[nn.Module], folder: str) -> None:
        self._folder = Path(folder, self._name)

    def state_dict(self) -> dict[str, Any]:
        return {"files": "thinwire-*.pt"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "ranks" in state and self.sync.is_attached:
            self.sync.load_state_dict(state)
        elif self.sync.is_attached:
            self.sync.load(self._folder)


def checkpointer(accelerator: Accelerator, **options: Any) -> Checkpointer:
    """Return a `thinwire.checkpoint.Checkpointer` of all that the accelerator has prepared or registered.

    That is the model, optimizers, schedulers, the scaler, what ``register_for_checkpointing`` got, and the position in
    the data of loaders that have a ``state_dict``: ``DataLoaderConfiguration(use_stateful_dataloader=True)``. Call it
    on all ranks, then ``restore`` before training, and ``step`` after each optimizer step.

    Args:
        accelerator: the ``Accelerator``, after ``prepare``.
        options: keyword arguments of `Checkpointer`: ``policy`` and ``storage``.

    Raises:
        ValueError: there is no prepared model, or more than one; and as `Checkpointer`.

    Example:
        >>> checkpointer = thinwire.integrations.accelerate.checkpointer(accelerator)           # doctest: +SKIP
        >>> first = checkpointer.restore() or 0                                                 # doctest: +SKIP
    """
    if len(accelerator._models) != 1:
        raise ValueError(f"{len(accelerator._models)} models are prepared: call accelerator.prepare with one")
    loaders = [loader for loader in accelerator._dataloaders if getattr(loader, "use_stateful_dataloader", False)]
    own = [each for each in accelerator._custom_objects if not isinstance(each, _Files)]
    attached = (each.sync for each in _files(accelerator) if each.sync.is_attached)
    return Checkpointer(
        accelerator._models[0],
        list(accelerator._optimizers),
        scheduler=list(accelerator._schedulers),
        scaler=accelerator.scaler,
        synchronizer=next((sync.synchronizer for sync in attached), None),
        data=[*loaders, *own],
        **options,
    )


def attach(accelerator: Accelerator, model: nn.Module, **options: Any) -> AcceleratorSync:
    """Synchronize the gradients of a prepared model through thinwire, see `thinwire.attach`.

    Its state is saved by ``accelerator.save_state`` and restored by ``load_state``, in a file a rank. With fp16 the
    accelerator's scaler is passed on. ``accumulate`` and ``clip_grad_norm_`` work as before. In one process it does
    nothing. Call it on all ranks. With ``outer=`` and ``optimizer=`` ranks train apart: then evaluate and save inside
    of ``sync.global_parameters()``, and call ``sync.synchronize()`` at the end.

    Args:
        accelerator: the ``Accelerator``.
        model: what ``accelerator.prepare`` returned.
        options: keyword arguments of `thinwire.attach`, such as ``dense``; or ``outer``, a recipe of `thinwire.outer`,
            with those of `thinwire.outer.attach`.

    Raises:
        ValueError: a model that is not prepared; and as `thinwire.attach`.

    Example:
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)     # doctest: +SKIP
        >>> sync = thinwire.integrations.accelerate.attach(accelerator, model)           # doctest: +SKIP
    """
    sync, files = AcceleratorSync(accelerator, model, **options), _files(accelerator)
    free = next((each for each in files if not each.sync.is_attached), None)
    if free is None:
        accelerator.register_for_checkpointing(_Files(accelerator, sync, len(files)))
    else:
        free.sync = sync
    return sync


def _files(accelerator: Accelerator) -> list[_Files]:
    return [each for each in accelerator._custom_objects if isinstance(each, _Files)]
