"""Hugging Face `Trainer`, and those built on it: sentence-transformers and TRL. One callback is all."""

import inspect
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState

from thinwire.gradients.synchronizer import Synchronizer
from thinwire.integrations.attachment import Attachment, one_of_its_kind
from thinwire.integrations.checkpoints import Kept, attached_before
from thinwire.outer import OuterLoop

_COUNTERS = ("global_step", "epoch", "total_flos", "num_input_tokens_seen", "best_metric", "best_global_step")


class ThinwireCallback(TrainerCallback):
    """Synchronize the gradients of a `Trainer` through thinwire while it trains, see `thinwire.attach`.

    It attaches to the model that the trainer has wrapped, logs the bytes and milliseconds of a step with each loss
    (so that TensorBoard, W&B and ``log_history`` have them), saves the state of each rank in the trainer's checkpoints
    (``thinwire-00003.pt``, as the trainer does with ``rng_state_3.pth``), resumes from it, and detaches at the end of
    the training. In one process it does nothing. With ``outer=`` ranks train apart; evaluation and the model of a
    checkpoint then have the parameters that all of them share.

    Args:
        options: keyword arguments of `thinwire.attach`, such as ``dense``; or ``outer``, a recipe of `thinwire.outer`,
            with those of `thinwire.outer.attach`.

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

    @property
    def synchronizer(self) -> Synchronizer | OuterLoop | None:
        """What is attached while the model is trained by several processes; None otherwise."""
        return None if self.attachment is None else self.attachment.synchronizer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.attachment is not None:  # of a training that ended with an error
            self.attachment.detach()
        trainer, resumed = _training_of(self, state)
        callbacks = trainer.callback_handler.callbacks
        one_of_its_kind(self, callbacks)
        callbacks.remove(self)
        callbacks.insert(0, self)  # before the loggers, which see what it adds
        options = {"grad_scaler": trainer.accelerator.scaler, **self.options}
        if "outer" in options:
            options.setdefault("optimizer", trainer.optimizer)
            options["total_steps"] = state.max_steps
        self.attachment = Attachment(trainer.model_wrapped, "the Trainer trains it by another engine", **options)
        self.attachment.replace(trainer, "_save_rng_state", self._save)
        for name in ("_evaluate", "_save_checkpoint"):
            self.attachment.share(trainer, name)
        if "outer" in options:
            self.attachment.replace(trainer, "_load_best_model", self._load_best_model)
        if state.global_step > 0 and self.synchronizer is not None:
            self.attachment.load(resumed)

    def _save(self, save_rng_state: Callable[[str], None], output_dir: str) -> None:
        """Save where the trainer writes the random state of each rank: ``on_save`` comes after a push to the Hub.

        In a hyperparameter search that is the folder of the trial. With ``save_only_model`` nothing is written.
        """
        save_rng_state(output_dir)
        if self.attachment is not None:
            self.attachment.save(output_dir)

    def _load_best_model(self, load: Callable[[], None]) -> None:
        """End an outer loop before: its rounds would take what is loaded for training."""
        self.on_train_end()
        load()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.attachment is not None and logs is not None and "loss" in logs:  # not the logs of an evaluation
            added = self.attachment.per_step()
            logs.update(added)
            state.log_history[-1].update(added)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self.attachment is not None:
            self.attachment.end()
            self.attachment = None


class CheckpointCallback(TrainerCallback):
    """Keep the state of a `Trainer` in the memory of hosts while it trains, see `thinwire.checkpoint.Checkpointer`.

    A training that starts again goes on after the newest step that is kept, in the middle of an epoch too, and with the
    batches that come next: the trainer skips the others, as when it resumes from a directory. Losses that were logged
    before are not in ``log_history``. Without anything kept, ``resume_from_checkpoint`` counts.

    Args:
        options: keyword arguments of `Checkpointer`: ``policy`` and ``storage``.

    Attributes:
        kept: while it trains, the `thinwire.integrations.checkpoints.Kept`.

    Example:
        >>> Trainer(model, args, train_dataset=data, callbacks=[CheckpointCallback()]).train()      # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.kept: Kept | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.on_train_end(args, state, control)  # of a training that ended with an error
        trainer, _ = _training_of(self, state)
        scaler, sync = trainer.accelerator.scaler, attached_before(self, trainer.callback_handler.callbacks)
        parts = {"scheduler": trainer.lr_scheduler, "scaler": scaler, "synchronizer": sync, **self.options}

        def read() -> dict[str, Any]:
            return {name: getattr(trainer.state, name) for name in _COUNTERS}

        self.kept = Kept(trainer.model_wrapped, trainer.optimizer, read, **parts)
        if self.kept.counters is not None:
            for name, value in self.kept.counters.items():
                setattr(state, name, value)
            trainer._globalstep_last_logged = trainer._initial_global_step = state.global_step
            _resume_from(self.kept, trainer, state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.kept is not None:
            self.kept.checkpointer.step()

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.kept is not None:
            self.kept.close()
            self.kept = None


def _resume_from(kept: Kept, trainer: Trainer, steps: int) -> None:
    """Have the trainer pass over whole epochs, and over the first batches of the next one, as when it resumes."""
    run_epoch, load_random = trainer._run_epoch, trainer._load_rng_state

    def run(**options: Any) -> None:
        first, done = divmod(steps, options["num_update_steps_per_epoch"])
        if options["epoch"] < first:
            return
        batches = done * trainer.args.gradient_accumulation_steps
        resumed = {"epochs_trained": first, "steps_trained_in_current_epoch": batches, "resume_from_checkpoint": ""}
        trainer._run_epoch, trainer._load_rng_state = run_epoch, kept.restore_random
        try:
            run_epoch(**{**options, **resumed})
        finally:
            trainer._load_rng_state = load_random

    trainer._run_epoch = run


def _training_of(callback: TrainerCallback, state: TrainerState) -> tuple[Trainer, str | None]:
    """Return the trainer that calls the callback, and the checkpoint that it resumes from.

    They are in the stack: no argument leads to the trainer, to the wrapped model, or to the argument of ``train``.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        is_training = isinstance(caller, Trainer) and getattr(caller, "state", None) is state
        if is_training and callback in caller.callback_handler.callbacks:
            return caller, frame.f_locals.get("resume_from_checkpoint")
        frame = frame.f_back
    name = type(callback).__name__
    raise ValueError(f"no Trainer has this {name}: pass it as Trainer(..., callbacks=[{name}()])")
