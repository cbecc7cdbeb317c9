"""Trains with sentence-transformers' cached loss on every rank of a torchrun, stock and with thinwire.

Writes ``result.json`` in the folder that is its argument.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ending import leave
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses
from transformers import set_seed

from sentence_transformers_xlmr import pairs, xlm_roberta
from thinwire.integrations.transformers import ThinwireCallback

FOLDER = Path(sys.argv[1])
VOCABULARY = 20_000


def train(model: Any, start: dict[str, Any], callbacks: list[Any]) -> list[dict[str, Any]]:
    """Return what was logged of three steps, each of which has eight mini-batches."""
    set_seed(1)
    model.load_state_dict(start)
    args = SentenceTransformerTrainingArguments(
        output_dir=str(FOLDER), logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=8, max_steps=3,
    )  # fmt: skip
    loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
    trainer = SentenceTransformerTrainer(model, args, pairs(64, VOCABULARY), loss=loss, callbacks=callbacks)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    set_seed(1)
    model = xlm_roberta(FOLDER / os.environ["RANK"], VOCABULARY, 32, 1)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    exact = ThinwireCallback(rows="zen")
    result = {
        "stock": train(model, start, []),
        "exact": train(model, start, [exact]),
        "auto": train(model, start, [ThinwireCallback()]),
    }
    if dist.get_rank() == 0:
        (FOLDER / "result.json").write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
