"""Hugging Face `Trainer`, and those built on it: sentence-transformers and TRL. One callback is all."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from thinwire.integrations.attachment import Attachment, one_of_its_kind
from thinwire.synchronizer import Synchronizer

logger = logging.getLogger("thinwire")

STATE = "thinwire.pt"
"""Name of the file beside ``optimizer.pt`` in a checkpoint. Rank 0 writes it, reads it, and sends it to the others."""


class ThinwireCallback(TrainerCallback):
    """Synchronize the gradients of a `Trainer` through thinwire while it trains, see `thinwire.attach`.

    It attaches to the model that the trainer has wrapped, logs the bytes and milliseconds of a step with each loss
    (so that TensorBoard, W&B and ``log_history`` have them), saves its state in the trainer's checkpoints, resumes
    from it, and detaches at the end of the training. In one process it does nothing.

    Args:
        options: keyword arguments of `thinwire.attach`, such as ``compress``.

    Attributes:
        attachment: while it trains, the `thinwire.integrations.attachment.Attachment`.

    Raises:
        ValueError: when training starts; no trainer has this callback, or a second one too, or it trains with an
            engine that reduces gradients by itself; and as `thinwire.attach`.

    Example:
        >>> Trainer(model, args, train_dataset=data, callbacks=[ThinwireCallback()]).train()      # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.attachment: Attachment | None = None
        self._folder = Path()

    @property
    def synchronizer(self) -> Synchronizer | None:
        """The `thinwire.Synchronizer` while the model is trained by several processes; None otherwise."""
        return None if self.attachment is None else self.attachment.synchronizer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.attachment is not None:  # a training that ended with an error
            self.attachment.detach()
        trainer = _trainer_of(self, state)
        callbacks = trainer.callback_handler.callbacks
        one_of_its_kind(self, callbacks)
        callbacks.remove(self)
        callbacks.insert(0, self)  # before the loggers, which see what it adds
        options = {"grad_scaler": trainer.accelerator.scaler, **self.options}
        self.attachment = Attachment(trainer.model_wrapped, "the Trainer trains it by another engine", **options)
        self._folder = Path(trainer._get_output_dir(trainer._trial))  # that of a trial in a hyperparameter search
        if state.global_step > 0 and self.synchronizer is not None:
            self.attachment.load_state_dict(_saved(args, state, self._folder) if args.process_index == 0 else {})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.attachment is not None and logs is not None and "loss" in logs:  # not those of an evaluation
            added = self.attachment.per_step()
            logs.update(added)
            state.log_history[-1].update(added)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.attachment is None or self.attachment.synchronizer is None or args.save_only_model:
            return
        states = self.attachment.state_dict()
        if args.process_index == 0:  # with save_on_each_node others save too, but have no states
            torch.save(states, _checkpoint(self._folder, state) / STATE)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.attachment is not None:
            self.attachment.detach()
            self.attachment = None


def _trainer_of(callback: TrainerCallback, state: TrainerState) -> Trainer:
    """Return the trainer that trains now. Callbacks are handed the model without its wrapper, and no trainer.

    Several trainers may have the same callback; a state belongs to one.
    """
    for trainer in (value for value in gc.get_objects() if issubclass(type(value), Trainer)):
        handler = getattr(trainer, "callback_handler", None)  # None where the constructor failed
        if handler is not None and callback in handler.callbacks and trainer.state is state:
            return trainer
    raise ValueError("no Trainer has this ThinwireCallback: pass it as Trainer(..., callbacks=[ThinwireCallback()])")


def _checkpoint(folder: Path, state: TrainerState) -> Path:
    return folder / f"checkpoint-{state.global_step}"


def _saved(args: TrainingArguments, state: TrainerState, output: Path) -> dict[str, Any]:
    """Return what is in the checkpoint that the trainer resumes from; nothing, and a warning, if it cannot be found.

    Its path is an argument of ``Trainer.train``, which callbacks do not see: the history of losses tells whether a
    checkpoint is the one.
    """
    for folder in (Path(str(args.resume_from_checkpoint)), _checkpoint(output, state)):
        history = folder / TRAINER_STATE_NAME
        is_there = (folder / STATE).is_file() and history.is_file()
        if is_there and TrainerState.load_from_json(str(history)).log_history == state.log_history:
            found: dict[str, Any] = torch.load(folder / STATE, weights_only=True)
            return found
    logger.warning(
        "the training resumes without the state of thinwire: no %s of it in %s. If that is another folder, pass"
        " TrainingArguments(resume_from_checkpoint=...) too", STATE, folder,
    )  # fmt: skip
    return {}
