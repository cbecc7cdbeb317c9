"""Accelerate's nlp example, with a BERT and sentence pairs that are generated: one line more for thinwire.

THINWIRE_ROUTE=rows torchrun --standalone --nproc-per-node 2 examples/accelerate_nlp.py
torchrun --standalone --nproc-per-node 2 examples/accelerate_nlp.py --stock

THINWIRE_ROUTE=rows sends rows from the first step on. Without it training begins as stock DDP, and rows are tried once
steps have waited for the network for 3 s in all: on one machine hardly ever.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import thinwire.integrations.accelerate

VOCABULARY, BATCH, EPOCHS = 5_000, 8, 2


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return sentences of different lengths; the label says whether the first word is odd."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 24, (count,), generator=random).tolist()
    words = [torch.randint(1, VOCABULARY, (length,), generator=random) for length in lengths]
    return [{"input_ids": ids, "labels": ids[0] % 2} for ids in words]


def padded(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([example["input_ids"] for example in examples], batch_first=True)
    labels = torch.stack([example["labels"] for example in examples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="train without thinwire")
    stock = parser.parse_args().stock
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    set_seed(1)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = DataLoader(sentences(96, seed=1), BATCH, shuffle=True, collate_fn=padded)
    evaluation = DataLoader(sentences(32, seed=2), BATCH, collate_fn=padded)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, EPOCHS * len(training))
    model, optimizer, training, evaluation, scheduler = accelerator.prepare(
        model, optimizer, training, evaluation, scheduler
    )
    if not stock:
        sync = thinwire.integrations.accelerate.attach(accelerator, model)  # the line more
    for epoch in range(EPOCHS):
        model.train()
        for batch in training:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right, seen = 0, 0
        for batch in evaluation:
            with torch.no_grad():
                predicted = model(**batch).logits.argmax(dim=-1)
            predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
            right, seen = right + int((predicted == labels).sum()), seen + len(labels)
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"epoch {epoch} loss {mean:.6f} accuracy {right / seen:.3f}")
    if not stock:
        logged = sync.per_step()
        accelerator.print(
            f"bytes {logged.get('comm/bytes_sent_per_step', 0):,.0f}"
            f" of {logged.get('comm/bytes_dense_per_step', 0):,.0f}"
        )
        sync.detach()
    accelerator.end_training()


if __name__ == "__main__":
    main()
