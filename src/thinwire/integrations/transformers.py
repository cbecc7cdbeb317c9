"""Hugging Face `Trainer`, and those built on it: sentence-transformers and TRL. One callback is all."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from thinwire.integrations.attachment import Attachment

logger = logging.getLogger("thinwire")

STATE = "thinwire.pt"
"""Name of the file beside ``optimizer.pt`` in a checkpoint. Rank 0 writes it, all ranks read it."""


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
        ValueError: when training starts; no trainer has this callback, or it trains with an engine that reduces
            gradients by itself; and as `thinwire.attach`.

    Example:
        >>> Trainer(model, args, train_dataset=data, callbacks=[ThinwireCallback()]).train()      # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.attachment: Attachment | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.attachment is not None:  # a training that ended with an error
            self.attachment.detach()
        trainer = _trainer_of(self)
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)  # before the loggers, which see what it adds
        options = {"grad_scaler": trainer.accelerator.scaler, **self.options}
        self.attachment = Attachment(trainer.model_wrapped, "the Trainer trains it by another engine", **options)
        if state.global_step > 0 and (saved := _saved(args, state)) is not None:
            self.attachment.load_state_dict(saved)

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
        if args.should_save:
            torch.save(states, _checkpoint(args, state) / STATE)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.attachment is not None:
            self.attachment.detach()
            self.attachment = None


def _trainer_of(callback: TrainerCallback) -> Trainer:
    """Return the trainer of a callback. Callbacks are handed the model without its wrapper, and no trainer."""
    for trainer in (value for value in gc.get_objects() if issubclass(type(value), Trainer)):
        handler = getattr(trainer, "callback_handler", None)  # None where the constructor failed
        if handler is not None and callback in handler.callbacks:
            return trainer
    raise ValueError("no Trainer has this ThinwireCallback: pass it as Trainer(..., callbacks=[ThinwireCallback()])")


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _saved(args: TrainingArguments, state: TrainerState) -> dict[str, Any] | None:
    """Return what is in the checkpoint that the trainer resumes from; None, and a warning, if it cannot be found.

    Its path is an argument of ``Trainer.train``, which callbacks do not see: the history of losses tells whether a
    checkpoint is the one.
    """
    for folder in (Path(str(args.resume_from_checkpoint)), _checkpoint(args, state)):
        history = folder / TRAINER_STATE_NAME
        is_there = (folder / STATE).is_file() and history.is_file()
        if is_there and TrainerState.load_from_json(str(history)).log_history == state.log_history:
            return torch.load(folder / STATE, weights_only=True)
    logger.warning(
        "the training resumes without the state of thinwire: no %s of it in %s. If that is another folder, pass"
        " TrainingArguments(resume_from_checkpoint=...) too", STATE, folder,
    )  # fmt: skip
    return None
