"""A BERT classifier with the Hugging Face `Trainer`, from its config: one line more for thinwire.

    THINWIRE_ROUTE=rows torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --stock

THINWIRE_ROUTE=rows sends rows from the first step on. Without it training begins as stock DDP, and rows are tried once
steps have waited for the network for 3 s in all: on one machine hardly ever.

A model that ties its input and output embeddings, as most language models do, has a dense gradient for the table, and
thinwire leaves that to DDP.
"""

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from thinwire.integrations.transformers import ThinwireCallback

VOCABULARY, WIDTH = 10_000, 32


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    """Return texts in which frequent words are frequent; the label says whether the first word is odd."""
    random = torch.Generator().manual_seed(0)
    ids = (torch.rand(count, 32, generator=random) ** 4 * VOCABULARY).long()
    return [{"input_ids": text, "labels": text[0] % 2} for text in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="train without thinwire")
    callbacks = [] if parser.parse_args().stock else [ThinwireCallback()]  # the line more
    set_seed(1)
    shape = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=6, logging_steps=1, report_to="none", use_cpu=True,
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(BertForSequenceClassification(shape), args, train_dataset=texts(64), callbacks=callbacks)
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry and trainer.is_world_process_zero():
            sent, dense = (entry.get(f"comm/bytes_{of}_per_step", 0) for of in ("sent", "dense"))
            print(f"step {entry['step']} loss {entry['loss']:.6f} bytes {sent:,.0f} of {dense:,.0f}")


if __name__ == "__main__":
    main()
