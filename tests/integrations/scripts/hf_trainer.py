"""Trains a small BERT with the Hugging Face Trainer on every rank of a torchrun, stock and with thinwire.

Writes ``result.json`` in the folder that is its argument: losses, hashes of the final parameters, what was logged.
"""

from __future__ import annotations

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
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

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


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()


def train(name: str, callbacks: list[Any], resume: str | bool | None = None, **options: Any) -> dict[str, Any]:
    """Train with evaluation, accumulation, clipping, checkpoints, and the best model loaded at the end."""
    set_seed(1)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64,
        )
    )  # fmt: skip
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
    low_rank = {"compress": thinwire.compress.power_sgd(2)}
    callback = ThinwireCallback(scheme="zen")  # "auto" may leave the table to DDP, where that is faster
    half = {name: str(FOLDER / name / "checkpoint-4") for name in ("stock", "exact", "low_rank", "lost")}
    result: dict[str, Any] = {
        "stock": train("stock", []),
        "exact": train("exact", [callback]),
        "again": train("again", [callback]),  # the same callback in a second trainer
        "exact_resumed": train("exact", [ThinwireCallback(scheme="zen")], resume=half["exact"]),
        "auto": train("auto", [ThinwireCallback()]),
        "low_rank": train("low_rank", [ThinwireCallback(**low_rank)]),
    }
    if dist.get_rank() == 0:
        shutil.copytree(half["low_rank"], half["lost"], ignore=shutil.ignore_patterns("thinwire.pt"))
    dist.barrier()
    result |= {
        "low_rank_resumed": train("low_rank", [ThinwireCallback(**low_rank)], resume=half["low_rank"]),
        "bf16": train("bf16", [], bf16=True),
        "bf16_exact": train("bf16_exact", [ThinwireCallback()], bf16=True),
    }
    heard.lines.clear()
    result["low_rank_lost"] = train("lost", [ThinwireCallback(**low_rank)], resume=half["lost"])
    result["lines"] = list(heard.lines)
    ranks = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, result)
    if dist.get_rank() == 0:
        result["all_parameters"] = [
            {name: of[name]["parameters"] for name in of if "parameters" in of[name]} for of in ranks
        ]
        result["scalars"] = scalars("exact")
        (FOLDER / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
