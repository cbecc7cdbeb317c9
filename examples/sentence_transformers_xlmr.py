"""Fine-tune an embedding model of XLM-R's shape with sentence-transformers: one line more for thinwire.

    THINWIRE_ROUTE=rows torchrun --standalone --nproc-per-node 2 examples/sentence_transformers_xlmr.py
    torchrun --standalone --nproc-per-node 2 examples/sentence_transformers_xlmr.py --stock

THINWIRE_ROUTE=rows sends rows from the first step on. Without it training begins as stock DDP, and rows are tried once
steps have waited for the network for 3 s in all: on one machine hardly ever.

The model and its pairs of sentences are generated, so nothing is downloaded. Most of its parameters are the embedding
table, as in XLM-R, and a step touches few of its rows.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, TrainerCallback, XLMRobertaConfig, XLMRobertaModel, set_seed

from thinwire.integrations.transformers import ThinwireCallback

SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


def xlm_roberta(folder: Path, vocabulary: int, width: int, layers: int) -> SentenceTransformer:
    """Return a model of this shape, with a tokenizer that has a token for each word "w0", "w1", ..."""
    words = [*SPECIAL.values(), *(f"w{word}" for word in range(vocabulary - len(SPECIAL)))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **SPECIAL).save_pretrained(folder)
    shape = XLMRobertaConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(1, width // 32),
        intermediate_size=4 * width, max_position_embeddings=80, pad_token_id=1,
    )  # fmt: skip
    XLMRobertaModel(shape).save_pretrained(folder)
    transformer = models.Transformer(str(folder))
    return SentenceTransformer(modules=[transformer, models.Pooling(width)], device="cpu")


def pairs(count: int, vocabulary: int, length: int = 24, seed: int = 0) -> Dataset:
    """Return pairs of sentences that share half of their words. Frequent words are frequent, as in a text."""
    random = torch.Generator().manual_seed(seed)

    def sentence(start: str = "") -> str:
        size = int(torch.randint(length // 2, length, (1,), generator=random))
        words = (torch.rand(size, generator=random) ** 6 * (vocabulary - len(SPECIAL))).long()
        return " ".join([start, *(f"w{word}" for word in words)])

    anchors = [sentence() for _ in range(count)]
    return Dataset.from_dict(
        {"anchor": anchors, "positive": [sentence(anchor[: len(anchor) // 2].rsplit(" ", 1)[0]) for anchor in anchors]}
    )


def train(model: SentenceTransformer, data: Dataset, callbacks: list[TrainerCallback], **options: object) -> list[dict]:
    """Train, and return what was logged."""
    with tempfile.TemporaryDirectory() as folder:
        args = SentenceTransformerTrainingArguments(
            output_dir=folder, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
            **options,
        )  # fmt: skip
        trainer = SentenceTransformerTrainer(
            model, args, data, loss=losses.MultipleNegativesRankingLoss(model), callbacks=callbacks
        )
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="train without thinwire")
    stock = parser.parse_args().stock
    set_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        model = xlm_roberta(Path(folder), vocabulary=20_000, width=32, layers=2)
    callbacks = [] if stock else [ThinwireCallback()]  # the line more
    logged = train(model, pairs(96, 20_000), callbacks, per_device_train_batch_size=8, max_steps=6)
    for entry in logged if os.environ.get("RANK", "0") == "0" else []:
        sent, dense = (entry.get(f"comm/bytes_{of}_per_step", 0) for of in ("sent", "dense"))
        print(f"step {entry['step']} loss {entry['loss']:.6f} bytes {sent:,.0f} of {dense:,.0f}")


if __name__ == "__main__":
    main()
