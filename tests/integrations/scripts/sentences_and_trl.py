"""Trains with sentence-transformers and with TRL's SFT and DPO on every rank of a torchrun, stock and with thinwire.

Writes ``result.json`` in the folder that is its argument.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from ending import leave
from transformers import GPT2Config, GPT2LMHeadModel, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import thinwire
from sentence_transformers_xlmr import pairs, train, xlm_roberta
from thinwire.integrations.transformers import ThinwireCallback

FOLDER = Path(sys.argv[1])
VOCABULARY = 20_000
set_seed(1)
MODEL = xlm_roberta(
    FOLDER / os.environ["RANK"], VOCABULARY, 32, 1
)  # before the process group: then rank 0 alone writes
START = {key: value.clone() for key, value in MODEL.state_dict().items()}
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1, "report_to": "none", "use_cpu": True,
    "disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-3, "bf16": False, "max_length": 32,
    "gradient_checkpointing": False,
}  # fmt: skip


def embedding(callbacks: list[Any], **options: Any) -> list[dict[str, Any]]:
    set_seed(1)
    MODEL.load_state_dict(START)
    return train(MODEL, pairs(64, VOCABULARY), callbacks, per_device_train_batch_size=4, max_steps=6, **options)


def language_model() -> GPT2LMHeadModel:
    """Untied, so that the gradient of the input table has few rows."""
    set_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64, tie_word_embeddings=False)
    )


def sft(callbacks: list[Any], tokenizer: Any) -> list[dict[str, Any]]:
    args = SFTConfig(output_dir=str(FOLDER / "sft"), **OPTIONS)
    data = Dataset.from_dict({"text": pairs(32, VOCABULARY)["anchor"]})
    return logged(
        SFTTrainer(language_model(), args, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)
    )


def dpo(callbacks: list[Any], tokenizer: Any) -> list[dict[str, Any]]:
    args = DPOConfig(output_dir=str(FOLDER / "dpo"), **OPTIONS)
    words = pairs(32, VOCABULARY)
    data = Dataset.from_dict(
        {"prompt": words["anchor"], "chosen": words["positive"], "rejected": words["anchor"][::-1]}
    )
    model = language_model()
    trainer = DPOTrainer(
        model, language_model(), args, train_dataset=data, processing_class=tokenizer, callbacks=callbacks
    )
    return logged(trainer)


def logged(trainer: Any) -> list[dict[str, Any]]:
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("thinwire").setLevel(logging.INFO)
    result = {
        "embedding": embedding([]),
        "embedding_exact": embedding([ThinwireCallback(rows="zen")]),
        "embedding_low_rank": embedding([ThinwireCallback(dense=thinwire.compress.power_sgd(4))]),
        "embedding_bf16": embedding([], bf16=True),
        "embedding_bf16_exact": embedding([ThinwireCallback(rows="zen")], bf16=True),
    }
    for name, training in (("sft", sft), ("dpo", dpo)):
        result[name] = training([], MODEL.tokenizer)
        result[f"{name}_exact"] = training([ThinwireCallback(rows="zen")], MODEL.tokenizer)
    if dist.get_rank() == 0:
        (FOLDER / "result.json").write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
