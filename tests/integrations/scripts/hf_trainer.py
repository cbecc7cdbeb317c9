"""Trains a small BERT with the Hugging Face Trainer on every rank of a torchrun, stock and with thinwire.

Writes ``result.json`` in the folder that is its argument: losses, hashes of the final parameters, what was logged.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ending import leave
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import HPSearchBackend

import thinwire
from thinwire.integrations.transformers import ThinwireCallback

FOLDER = Path(sys.argv[1])
VOCABULARY = 3000
STEPS = 8
TRAINERS: list[Trainer] = []
"""All of them, as a notebook keeps them."""


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Sentences of different lengths, so that every batch has another shape."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 24, (1,), generator=random))
        ids = torch.randint(1, VOCABULARY, (length,), generator=random)
        found.append({"input_ids": ids, "labels": int(ids[0] % 2)})
    return found


def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([example["input_ids"] for example in examples], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([example["labels"] for example in examples]),
    }


def bert() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64,
        )
    )  # fmt: skip


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()


def train(name: str, callbacks: list[Any], resume: str | bool | None = None, **options: Any) -> dict[str, Any]:
    """Train with evaluation, accumulation, clipping, checkpoints, and the best model loaded at the end."""
    set_seed(1)
    model = bert()
    args = TrainingArguments(
        output_dir=str(FOLDER / name), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=STEPS,
        learning_rate=1e-3, max_grad_norm=0.5, logging_steps=1, eval_strategy="steps", eval_steps=4, save_steps=4,
        load_best_model_at_end=True, metric_for_best_model="loss", report_to=["tensorboard"], use_cpu=True,
        disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(
        model, args, data_collator=padded, train_dataset=sentences(64, seed=2), eval_dataset=sentences(16, seed=3),
        callbacks=callbacks,
    )  # fmt: skip
    TRAINERS.append(trainer)
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "loss" in entry],
        "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "logged": [{key: entry[key] for key in entry if "/" in key} for entry in history],
        "parameters": digest(trainer.model),
    }


class Node(TrainerCallback):
    """Shows the trainer a rank that is the first of a node of its own, whose disk has a folder of its own."""

    def on_init_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        args.distributed_state.local_process_index = 0
        args.save_on_each_node, args.output_dir = True, f"{args.output_dir}/{dist.get_rank()}"
        args.load_best_model_at_end = False  # Transformers 5.23 writes weights on rank 0 only


class Watch(TrainerCallback):
    """Keeps what a user reads while the model is trained."""

    def __init__(self, callback: ThinwireCallback) -> None:
        self.callback, self.tables = callback, []

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.tables.append(self.callback.synchronizer.table())


class Trial(dict[str, Any]):
    """A trial as Optuna's are, which need not be installed."""

    number, params = 7, {}


class Pushing(Trainer):
    """Notes which states are in a checkpoint when it is pushed to the Hub."""

    pushed: tuple[str, ...] = ()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.pushed = states_in(Path(checkpoint_folder))


def states_in(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("thinwire*")))


def searched(name: str) -> dict[str, Any]:
    """Train a trial of a hyperparameter search; return where it saved the states, and which of them were pushed."""
    model = bert()
    args = TrainingArguments(
        output_dir=str(FOLDER / name), per_device_train_batch_size=4, max_steps=2, save_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Pushing(
        model, args, data_collator=padded, train_dataset=sentences(16, seed=2), callbacks=[ThinwireCallback()]
    )
    trainer.args.push_to_hub = True  # when the constructor has not called the Hub
    trainer.hp_search_backend, trainer.hp_space, trainer.hp_name = HPSearchBackend.OPTUNA, dict, None
    gc.freeze()  # hides objects from gc.get_objects()
    trainer.train(trial=Trial())
    gc.unfreeze()
    return {"saved": states_in(FOLDER / name), "pushed": trainer.pushed}


def refused(callbacks: list[Any]) -> str:
    try:
        train("refused", callbacks)
    except ValueError as error:
        return str(error)
    return ""


def scalars(name: str) -> list[str]:
    """What TensorBoard shows of a run."""
    folders = {path.parent for path in (FOLDER / name).rglob("events.out.tfevents*")}
    return sorted(tag for folder in folders for tag in EventAccumulator(str(folder)).Reload().Tags()["scalars"])


class Lines(logging.Handler):
    """Keeps the lines of thinwire's logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    heard = Lines()
    logging.getLogger("thinwire").addHandler(heard)
    logging.getLogger("thinwire").setLevel(logging.INFO)
    factors = thinwire.compress.power_sgd(2, values=thinwire.compress.mxfp4())
    low_rank = {"dense": thinwire.compress.ef21(factors)}
    callback = ThinwireCallback(rows="zen")  # "auto" may leave the table to DDP, where that is faster
    half = {name: str(FOLDER / name / "checkpoint-4") for name in ("stock", "exact", "low_rank", "lost")}
    result: dict[str, Any] = {
        "stock": train("stock", []),
        "exact": train("exact", [callback]),
        "again": train("again", [callback]),  # the same callback in a second trainer
        "exact_resumed": train("exact", [ThinwireCallback(rows="zen")], resume=half["exact"]),
        "auto": train("auto", [ThinwireCallback()]),
        "low_rank": train("low_rank", [ThinwireCallback(**low_rank)]),
    }
    if dist.get_rank() == 0:
        shutil.copytree(half["low_rank"], half["lost"], ignore=shutil.ignore_patterns("thinwire-*"))
    dist.barrier()
    result |= {
        "low_rank_resumed": train("low_rank", [ThinwireCallback(**low_rank)], resume=half["low_rank"]),
        "bf16": train("bf16", [], bf16=True),
        "bf16_exact": train("bf16_exact", [ThinwireCallback()], bf16=True),
    }
    heard.lines.clear()
    result["low_rank_lost"] = train("lost", [ThinwireCallback(**low_rank)], resume=half["lost"])
    result["lines"] = list(heard.lines)
    result["searched"] = searched("search")
    result["refused"] = refused([ThinwireCallback(), ThinwireCallback()])
    watch = Watch(ThinwireCallback(**low_rank))
    result["nodes"] = train("nodes", [Node(), watch.callback, watch])
    mine = FOLDER / "nodes" / str(dist.get_rank()) / "checkpoint-4"
    result["seen"] = {
        "wrote": states_in(mine),
        "tables": len(watch.tables),
        "table": watch.tables[-1][0],
        "after": watch.callback.synchronizer,
    }
    weights = "model.safetensors"
    dist.barrier()
    if not (mine / weights).exists():
        shutil.copy(FOLDER / "nodes" / "0" / "checkpoint-4" / weights, mine / weights)
    result["nodes_resumed"] = train("nodes", [Node(), ThinwireCallback(**low_rank)], resume=str(mine))
    ranks = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, result)
    if dist.get_rank() == 0:
        result["all_parameters"] = [
            {name: of[name]["parameters"] for name in of if "parameters" in of[name]} for of in ranks
        ]
        result["all_wrote"] = [of["seen"]["wrote"] for of in ranks]
        result["scalars"] = scalars("exact")
        (FOLDER / "result.json").write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
