"""BERT-base on SQuAD, 1024 tokens: 12 layers of width 768 (Devlin et al., NAACL 2019)."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.lab.espresso.models.model import ModelParameter, PublishedModel, backward_order
from thinwire.lab.espresso.models.transformer import affine, embedding, layer_norm

_LAYERS, _WIDTH, _INNER, _TOKENS = 12, 768, 3072, 1024
_VOCABULARY = 30528  # 30522, padded to a multiple of 8


def bert() -> PublishedModel:
    """Return BERT-base: 199 tensors, 415.41 MiB; published are 207 and 420 (1.1 % more).

    The model that answers questions is the encoder and one small layer: 199 tensors, which are also those of the public
    simulator. The paper's 420 MB are those of the model with its pretraining heads.
    """
    return PublishedModel(
        name="bert",
        parameters=backward_order(_forward()),
        backward_total_seconds=0.0663,
        published_tensors=207,
        published_mebibytes=420,
        algorithm="random_k",
        cpu_gbit=40.0,
        source="Espresso (EuroSys'23), tables 4 and 5; backward 66.3 ms, processors 40 Gbit/s: its public simulator",
    )


def _forward() -> Iterator[ModelParameter]:
    for name, rows in (("word", _VOCABULARY), ("position", 512), ("token_type", 2)):
        yield from embedding(f"bert.embeddings.{name}_embeddings", rows, _WIDTH, _TOKENS)
    yield from layer_norm("bert.embeddings.LayerNorm", _WIDTH, _TOKENS)
    for layer in range(_LAYERS):
        yield from _layer(f"bert.encoder.layer.{layer}")
    yield from affine("qa_outputs", _WIDTH, 2, _TOKENS)


def _layer(name: str) -> Iterator[ModelParameter]:
    for projection in ("query", "key", "value"):
        yield from affine(f"{name}.attention.self.{projection}", _WIDTH, _WIDTH, _TOKENS)
    yield from affine(f"{name}.attention.output.dense", _WIDTH, _WIDTH, _TOKENS)
    yield from layer_norm(f"{name}.attention.output.LayerNorm", _WIDTH, _TOKENS)
    yield from affine(f"{name}.intermediate.dense_act", _WIDTH, _INNER, _TOKENS)
    yield from affine(f"{name}.output.dense", _INNER, _WIDTH, _TOKENS)
    yield from layer_norm(f"{name}.output.LayerNorm", _WIDTH, _TOKENS)
